"""The configuration over several GPUs (`memprof recommend --gpus N`): how to shard, micro-batch, checkpointing.

Ways are put in order by the closed form, the quickest that should fit are run, a rank of each, and ranked by
what these runs say of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memprof.errors import MemprofError, UsageError
from memprof.estimate.geometry import Subject
from memprof.flows.gpus import GPUS_PER_MACHINE, find_gpu_of
from memprof.flows.profile import at_once
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

FITTING = 3  # ways that fit are compared
MOST_RUNS = 5  # of one kind; those of the largest models take twenty seconds each
MOST_LEANEST = 2  # runs of what needs least, where what is quickest fits, with allocator retries
SLACK = 1.03  # what by the closed form is over the GPU by less is run: its bands are in docs/accuracy-tables.md
MOST_GPUS = 1024
MOST_FEWEST = 3  # runs that the least number of GPUs may take


class OverGpus:
    """Searches the ways to run a goal over GPUs."""

    def __init__(self, spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> None:
        self.gpus = spec.gpus
        self.runs = Simulator(find_gpu_of(spec), progress, seeks_room=True)
        self.question = question
        # Each process makes the whole model in host memory before its shards; whether it has room there is not judged
        # unless it is asked.
        is_judged = spec.host_memory_bytes not in (None, HOST_BYTES)
        base = spec if is_judged else spec.edit(host_memory_bytes=None)
        self.base = base_spec(question.goal, base.edit(gpus=1))
        if question.micro_batch is None and question.effective_batch is None:
            self.batch = -(-question.batch // self.gpus) * self.gpus
        else:
            self.batch = question.effective_batch or (question.micro_batch or 1) * self.gpus
        kinds = tiers(question.goal, self.runs.gpu, question.precision, question.half)
        self.tiers = [tier for tier in kinds if tier.optimizer == "adamw"]
        self.subject: Subject | None = subject_of(spec)
        self.at_once = at_once(spec)
        self.tried: dict[Way, Tried] = {}

    def ways(self, tier: Plan, gpus: int, batch: int | None = None) -> list[Way]:
        """Return every way, the quickest first."""
        found = ways_of(tier, self.base, self.subject, self.runs.gpu, gpus, batch or self.batch)
        size = self.question.micro_batch
        return [way for way in found if size is None or way.micro_batch == size]

    def might_fit(self, way: Way) -> bool:
        """Say whether it may fit by the closed form; what that does not know may."""
        return way.estimated_bytes is None or way.estimated_bytes <= SLACK * self.runs.gpu.total_bytes

    def run(self, way: Way) -> Tried | None:
        """Run a way; None if it cannot be."""
        if way not in self.tried:
            outcome = self.runs.try_run(way.spec(self.base), way.label(), way.accumulation)
            if outcome is None:
                return None
            self.tried[way] = Tried(way.plan, way.micro_batch, way.accumulation, outcome)
        return self.tried[way]

    def search(self) -> tuple[Way, Tried] | None:
        """Find the quickest way that fits, of the kinds of runs that give up least."""
        for tier in self.tiers:
            ways = self.ways(tier, self.gpus)
            likely = [way for way in ways if self.might_fit(way)]
            found = self._fitting(self._worth_running(likely), FITTING)
            if found and not self._count_with_room(found):
                leanest = sorted(likely, key=lambda way: way.estimated_bytes or 0)[:MOST_LEANEST]
                found += [pair for pair in self._fitting(leanest, 1) if pair not in found]
            if not likely and ways:
                least = min(ways, key=lambda way: way.estimated_bytes or 0)
                needed = format_bytes(least.estimated_bytes or 0)
                self.runs.failures[tier.label()] = (
                    f"needs {needed} of each GPU by the closed form, with {least.label()}"
                )
            if found:
                return min(found, key=lambda pair: self.runs.rank(pair[1].outcome))
        return None

    def _fitting(self, ways: Sequence[Way], enough: int) -> list[tuple[Way, Tried]]:
        """Run these ways until so many have room; return those that fit, with their runs."""
        found: list[tuple[Way, Tried]] = []
        for place, way in enumerate(ways):
            if place % self.at_once == 0:
                self._make(ways[place : place + self.at_once])
            tried = self.run(way)
            if tried is not None and tried.outcome.fits:
                found.append((way, tried))
                if self._count_with_room(found) == enough:
                    break
        return found

    def _count_with_room(self, found: Iterable[tuple[Way, Tried]]) -> int:
        return sum(self.runs.has_room(tried.outcome) for _, tried in found)

    def _make(self, ways: Sequence[Way]) -> None:
        left = [way for way in ways if way not in self.tried]
        self.runs.make((way.spec(self.base), way.accumulation) for way in left)

    def _worth_running(self, likely: list[Way]) -> list[Way]:
        """Return the quickest, at most two of each plan, one of plain shards, which every library knows."""
        found: list[Way] = []
        for way in likely:
            if sum(other.parallel == way.parallel for other in found) < 2:
                found.append(way)
        found, rest = found[:MOST_RUNS], found[MOST_RUNS:]
        if not any(way.parallel == "fsdp" for way in found):
            found[-1:] = [way for way in rest if way.parallel == "fsdp"][:1] or found[-1:]
        return found

    def fewest(self, tier: Plan, what: str) -> Alternative | None:
        """Find the least number of GPUs on which this kind fits, with one sequence at a time on each: the first that
        should by the closed form and does, run."""
        failed, number = 0, 1
        while number <= MOST_GPUS and failed < MOST_FEWEST:
            way = self._least_needed(tier, number)
            if way is not None and self.might_fit(way):
                tried = self.run(way)
                if tried is not None and tried.outcome.fits:
                    name = f"{number} x {self.runs.gpu.name}, {way.label()}"
                    return Alternative(what, name, tried.outcome.needed_bytes, estimate=False)
                failed += 1
            # Beyond two machines whole ones are counted.
            number += 1 if number < 2 * GPUS_PER_MACHINE else GPUS_PER_MACHINE
        return None

    def _least_needed(self, tier: Plan, gpus: int) -> Way | None:
        ways = [way for way in self.ways(tier, gpus, gpus) if way.micro_batch == 1]
        return min(ways, key=lambda way: way.estimated_bytes or way.estimated_seconds, default=None)


def recommend_over_gpus(spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> Recommendation:
    """Find the configuration for `spec`'s model over `spec.gpus` GPUs, with what else was run, and code to paste.
    Raises UsageError: the goal is not spread over GPUs, or no plan divides the batch; MemprofError: no way applies to
    it."""
    if question.goal is Goal.QLORA:
        problem = "quantized weights are not spread over GPUs here"
        raise UsageError(problem, value=f"--gpus {spec.gpus} --quantize nf4", hint="leave out --quantize, or --gpus")
    spec = with_context(spec)
    search = OverGpus(spec, question, progress)
    runs = search.runs
    runs.warm(spec.edit(parallel="fsdp"))
    if not any(search.ways(tier, search.gpus) for tier in search.tiers):
        problem = f"no plan over {search.gpus} GPUs divides the sequences of a step"
        raise UsageError(problem, value=search.batch, hint=f"--effective-batch {search.gpus}")
    found = search.search()
    if not search.tried and runs.refusal is not None:
        raise runs.refusal
    rows = rows_of(runs, [(way.parallel, tried) for way, tried in _ordered(search, found)])
    kind = found[0].plan if found is not None else search.tiers[-1]
    alternatives = [search.fewest(kind, "the least number of these GPUs")]
    first = search.tiers[0]
    if kind.given_up and not first.given_up:
        alternatives.append(search.fewest(first, "the least number that gives up no precision"))
    example = next(iter(search.tried.values()), None)
    if example is None:
        raise MemprofError("nothing could be run", value=spec.model, hint="; ".join(runs.failures.values()))
    fitting = [pair for pair in _ordered(search, found) if pair[1].outcome.fits]
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
        reason=_reason(search, found),
        alternatives=tuple(one for one in alternatives if one is not None),
        snippets=scripts.texts,
        launch=scripts.launch,
        written_for=scripts.written_for,
        assumptions=_assumptions(search),
    )


def _ordered(search: OverGpus, found: tuple[Way, Tried] | None) -> list[tuple[Way, Tried]]:
    """Return what was run on the GPUs that were requested, what was found first, then by the time of a step."""
    ways = [(way, tried) for way, tried in search.tried.items() if way.spread.size == search.gpus]
    return sorted(ways, key=lambda pair: (pair != found, *search.runs.rank(pair[1].outcome)))


def _reason(search: OverGpus, found: tuple[Way, Tried] | None) -> str:
    if found is None:
        return "no way to spread it over these GPUs fits"
    plan = found[0].plan
    ran = [tried for way, tried in search.tried.items() if way.spread.size == search.gpus and tried.outcome.fits]
    roomy = sum(search.runs.has_room(tried.outcome) for tried in ran)
    fitting, how = (roomy, "fit with room to spare") if 0 < roomy < len(ran) else (len(ran), "fit")
    what = "gives up no precision" if not plan.given_up else f"gives up: {plan.given_up}"
    only = f"the only one that was run and {how.replace('fit', 'fits', 1)}"
    quickest = only if fitting == 1 else f"the quickest of {fitting} that were run and {how}"
    return f"{quickest}; it {what}"


def nccl_assumption() -> str:
    """Return what is not known of GPUs that communicate."""
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
