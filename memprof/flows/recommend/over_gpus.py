"""The configuration over several GPUs (`memprof recommend --gpus N`): sharding, micro-batch and checkpointing.

The closed form sorts all candidates by time. One rank of each of the quickest that should fit is run, and the runs'
step times decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memprof.errors import MemprofError, UsageError
from memprof.estimate.geometry import EstimatedModel
from memprof.flows.gpus import GPUS_PER_MACHINE, find_gpu_of
from memprof.flows.profile import count_parallel_runs
from memprof.flows.recommend.answer import build_answer, rows_of
from memprof.flows.recommend.closed_form import subject_of
from memprof.flows.recommend.multi_gpu_scripts import Scripts, training_scripts
from memprof.flows.recommend.parallel_plans import Way, plans_over, ways_of
from memprof.flows.recommend.plans import Goal, Plan, base_spec, tiers, with_context
from memprof.flows.recommend.search import Question, Tried
from memprof.flows.recommend.simulator import Simulator
from memprof.ledger.bridge import NCCL_GROUP_BYTES
from memprof.report.documents.recommendation import Alternative, Recommendation
from memprof.spec import HOST_BYTES, TargetSpec
from memprof.units import format_bytes

FITTING = 3  # number of fitting candidates that are compared
MOST_RUNS = 5  # per tier; a run of the largest models takes twenty seconds
MOST_LEANEST = 2  # runs of the candidates with least memory, if the quickest fit only with allocator retries
SLACK = 1.03  # share of capacity up to which the closed form may be exceeded: docs/accuracy-tables.md
MOST_GPUS = 1024
MOST_FEWEST = 3  # runs to find the least number of GPUs


class OverGpus:
    """Search over the ways to run a goal on several GPUs."""

    def __init__(self, spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> None:
        self.gpus = spec.gpus
        self.runs = Simulator(find_gpu_of(spec), progress, seeks_room=True)
        self.question = question
        # Each process builds the whole model in host memory before its shards. Host memory is judged only with
        # --host-memory.
        is_judged = spec.host_memory_bytes not in (None, HOST_BYTES)
        base = spec if is_judged else spec.edit(host_memory_bytes=None)
        self.base = base_spec(question.goal, base.edit(gpus=1))
        if question.micro_batch is None and question.effective_batch is None:
            self.batch = -(-question.batch // self.gpus) * self.gpus
        else:
            self.batch = question.effective_batch or (question.micro_batch or 1) * self.gpus
        kinds = tiers(question.goal, self.runs.gpu, question.precision, question.half)
        self.tiers = [tier for tier in kinds if tier.optimizer == "adamw"]
        self.subject: EstimatedModel | None = subject_of(spec)
        self.num_parallel = count_parallel_runs(spec)
        self.tried: dict[Way, Tried] = {}

    def ways(self, tier: Plan, gpus: int, batch: int | None = None) -> list[Way]:
        """Return all ways to run `tier` over `gpus` GPUs, the quickest first."""
        found = ways_of(tier, self.base, self.subject, self.runs.gpu, gpus, batch or self.batch)
        size = self.question.micro_batch
        return [way for way in found if size is None or way.micro_batch == size]

    def might_fit(self, way: Way) -> bool:
        """Return whether `way` may fit by the closed form; True if the closed form does not know the model."""
        return way.estimated_bytes is None or way.estimated_bytes <= SLACK * self.runs.gpu.total_bytes

    def run(self, way: Way) -> Tried | None:
        """Return the run of `way`, made once; None if the run fails."""
        if way not in self.tried:
            outcome = self.runs.try_run(way.spec(self.base), way.label(), way.accumulation)
            if outcome is None:
                return None
            self.tried[way] = Tried(way.plan, way.micro_batch, way.accumulation, outcome)
        return self.tried[way]

    def search(self) -> tuple[Way, Tried] | None:
        """Return the quickest way that fits in the first tier with a fit, and its run; None if nothing fits."""
        for tier in self.tiers:
            ways = self.ways(tier, self.gpus)
            likely = [way for way in ways if self.might_fit(way)]
            found = self._find_fitting(self._select_candidates(likely), FITTING)
            if found and not self._count_with_room(found):
                leanest = sorted(likely, key=lambda way: way.estimated_bytes or 0)[:MOST_LEANEST]
                found += [pair for pair in self._find_fitting(leanest, 1) if pair not in found]
            if not likely and ways:
                least = min(ways, key=lambda way: way.estimated_bytes or 0)
                needed = format_bytes(least.estimated_bytes or 0)
                self.runs.failures[tier.label()] = (
                    f"needs {needed} of each GPU by the closed form, with {least.label()}"
                )
            if found:
                return min(found, key=lambda pair: self.runs.rank(pair[1].outcome))
        return None

    def _find_fitting(self, ways: Sequence[Way], enough: int) -> list[tuple[Way, Tried]]:
        """Run `ways` in order until `enough` have headroom; return the ways that fit, with their runs."""
        found: list[tuple[Way, Tried]] = []
        for place, way in enumerate(ways):
            if place % self.num_parallel == 0:
                self._run_parallel(ways[place : place + self.num_parallel])
            tried = self.run(way)
            if tried is not None and tried.outcome.fits:
                found.append((way, tried))
                if self._count_with_room(found) == enough:
                    break
        return found

    def _count_with_room(self, found: Iterable[tuple[Way, Tried]]) -> int:
        return sum(self.runs.has_room(tried.outcome) for _, tried in found)

    def _run_parallel(self, ways: Sequence[Way]) -> None:
        left = [way for way in ways if way not in self.tried]
        self.runs.make((way.spec(self.base), way.accumulation) for way in left)

    def _select_candidates(self, likely: list[Way]) -> list[Way]:
        """Return the quickest ways, at most two per plan, with at least one of plain fsdp, which all libraries have."""
        found: list[Way] = []
        for way in likely:
            if sum(other.parallel == way.parallel for other in found) < 2:
                found.append(way)
        found, rest = found[:MOST_RUNS], found[MOST_RUNS:]
        if not any(way.parallel == "fsdp" for way in found):
            found[-1:] = [way for way in rest if way.parallel == "fsdp"][:1] or found[-1:]
        return found

    def find_fewest(self, tier: Plan, what: str) -> Alternative | None:
        """Return the least number of GPUs on which `tier` fits at micro-batch 1, named `what`: the first number that
        should fit by the closed form and fits in a run."""
        failed, number = 0, 1
        while number <= MOST_GPUS and failed < MOST_FEWEST:
            way = self._find_leanest(tier, number)
            if way is not None and self.might_fit(way):
                tried = self.run(way)
                if tried is not None and tried.outcome.fits:
                    name = f"{number} x {self.runs.gpu.name}, {way.label()}"
                    return Alternative(what, name, tried.outcome.needed_bytes, estimate=False)
                failed += 1
            # Above two machines, whole machines are counted.
            number += 1 if number < 2 * GPUS_PER_MACHINE else GPUS_PER_MACHINE
        return None

    def _find_leanest(self, tier: Plan, gpus: int) -> Way | None:
        ways = [way for way in self.ways(tier, gpus, gpus) if way.micro_batch == 1]
        return min(ways, key=lambda way: way.estimated_bytes or way.estimated_seconds, default=None)


def recommend_over_gpus(spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> Recommendation:
    """Return the recommendation for `spec`'s model over `spec.gpus` GPUs: configuration, other runs and code to paste.
    Raises UsageError: the goal is not spread over GPUs, or no plan divides the batch; MemprofError: no plan applies to
    the model."""
    if question.goal is Goal.QLORA:
        problem = "quantized weights are not spread over GPUs here"
        raise UsageError(problem, value=f"--gpus {spec.gpus} --quantize nf4", hint="leave out --quantize, or --gpus")
    spec = with_context(spec)
    search = OverGpus(spec, question, progress)
    runs = search.runs
    runs.warm_up(spec.edit(parallel="fsdp"))
    if not any(search.ways(tier, search.gpus) for tier in search.tiers):
        problem = f"no plan over {search.gpus} GPUs divides the sequences of a step"
        raise UsageError(problem, value=search.batch, hint=f"--effective-batch {search.gpus}")
    found = search.search()
    if not search.tried and runs.refusal is not None:
        raise runs.refusal
    rows = rows_of(runs, [(way.parallel, tried) for way, tried in _sort_runs(search, found)])
    kind = found[0].plan if found is not None else search.tiers[-1]
    alternatives = [search.find_fewest(kind, "the least number of these GPUs")]
    first = search.tiers[0]
    if kind.given_up and not first.given_up:
        alternatives.append(search.find_fewest(first, "the least number that gives up no precision"))
    example = next(iter(search.tried.values()), None)
    if example is None:
        raise MemprofError("nothing could be run", value=spec.model, hint="; ".join(runs.failures.values()))
    fitting = [pair for pair in _sort_runs(search, found) if pair[1].outcome.fits]
    scripts = training_scripts(fitting, runs, spec) if found is not None else Scripts()
    return build_answer(
        runs,
        search.base.host_memory_bytes,
        example.outcome.target,
        rows,
        fits=found is not None,
        goal=question.goal.value,
        effective_batch=search.batch,
        gpus=search.gpus,
        reason=_explain_choice(search, found),
        alternatives=tuple(one for one in alternatives if one is not None),
        snippets=scripts.texts,
        launch=scripts.launch,
        written_for=scripts.written_for,
        assumptions=_assumptions(search),
    )


def _sort_runs(search: OverGpus, found: tuple[Way, Tried] | None) -> list[tuple[Way, Tried]]:
    """Return the runs on the requested number of GPUs: `found` first, then by headroom and time of a step."""
    ways = [(way, tried) for way, tried in search.tried.items() if way.spread.size == search.gpus]
    return sorted(ways, key=lambda pair: (pair != found, *search.runs.rank(pair[1].outcome)))


def _explain_choice(search: OverGpus, found: tuple[Way, Tried] | None) -> str:
    if found is None:
        return "no way to spread it over these GPUs fits"
    plan = found[0].plan
    runs = [tried for way, tried in search.tried.items() if way.spread.size == search.gpus and tried.outcome.fits]
    with_headroom = sum(search.runs.has_room(tried.outcome) for tried in runs)
    fitting, how = (with_headroom, "fit with room to spare") if 0 < with_headroom < len(runs) else (len(runs), "fit")
    what = "gives up no precision" if not plan.given_up else f"gives up: {plan.given_up}"
    only = f"the only one that was run and {how.replace('fit', 'fits', 1)}"
    quickest = only if fitting == 1 else f"the quickest of {fitting} that were run and {how}"
    return f"{quickest}; it {what}"


def nccl_assumption() -> str:
    """Return the assumption on NCCL's memory."""
    least, most = map(format_bytes, NCCL_GROUP_BYTES)
    return f"What NCCL takes of a GPU is not known and not counted: {least} to {most} a group where others measured it."


def _assumptions(search: OverGpus) -> tuple[str, ...]:
    return (
        "Times are lower bounds at published rates: compute, then what is sent between GPUs, over NVLink where the "
        "board has it, else over the host's link. They rank configurations; real kernels reach a part of these rates.",
        "Which ways are run says the closed form (memprof estimate --parallel); one rank of each kind is run.",
        f"Plans that were looked at: {', '.join(plans_over(search.gpus))}. For very long contexts see cp and ulysses.",
        "Each process makes the model in host memory before it is sharded; whether the host has room for all of them "
        "is not judged unless --host-memory says how much each may have.",
        f"{search.batch} sequences in an optimizer step of all GPUs.",
        nccl_assumption(),
    )
