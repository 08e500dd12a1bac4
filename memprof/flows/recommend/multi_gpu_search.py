"""The configuration over several GPUs (`memprof recommend --gpus N`): sharding, micro-batch and checkpointing.

The analytical estimate sorts all candidates by time. Of the fastest ones that should fit, one rank each is simulated,
and the step times of these runs decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memprof.errors import MemprofError, UsageError
from memprof.estimate.geometry import EstimatedModel
from memprof.flows.gpus import GPUS_PER_MACHINE, find_spec_gpu
from memprof.flows.profile import count_parallel_runs
from memprof.flows.recommend.closed_form import find_subject
from memprof.flows.recommend.multi_gpu_scripts import Scripts, build_training_scripts
from memprof.flows.recommend.parallel_plans import Candidate, list_candidates, list_parallel_plans
from memprof.flows.recommend.plans import Goal, Plan, list_tiers, make_base_spec, set_context_length
from memprof.flows.recommend.recommendation import build_recommendation, build_rows
from memprof.flows.recommend.search import PlanRun, SearchRequest
from memprof.flows.recommend.simulator import Simulator
from memprof.ledger.bridge import NCCL_GROUP_BYTES
from memprof.report.documents.recommendation import Alternative, Recommendation
from memprof.spec import HOST_BYTES, TargetSpec
from memprof.units import format_bytes

NUM_FITTING = 3  # number of fitting candidates that are compared
MAX_RUNS_PER_TIER = 5  # a run of the largest models takes twenty seconds
MAX_LEANEST_RUNS = 2  # runs of the candidates with least memory, if the quickest fit only with allocator retries
MAX_ESTIMATE_SHARE = 1.03  # share of capacity up to which the closed form may be exceeded: docs/accuracy-tables.md
MAX_GPUS = 1024
MAX_FAILED_RUNS = 3  # runs without a fit, after which the search for the least number of GPUs ends


class MultiGpuSearch:
    """Search over the candidates that run a goal on several GPUs."""

    def __init__(self, spec: TargetSpec, request: SearchRequest, progress: Callable[[str], None]) -> None:
        self.gpus = spec.gpus
        self.simulator = Simulator(find_spec_gpu(spec), progress, avoids_retries=True)
        self.request = request
        # Each process builds the whole model in host memory before its shards. Host memory is judged only with
        # --host-memory.
        is_judged = spec.host_memory_bytes not in (None, HOST_BYTES)
        base = spec if is_judged else spec.edit(host_memory_bytes=None)
        self.base_spec = make_base_spec(request.goal, base.edit(gpus=1))
        if request.micro_batch is None and request.effective_batch is None:
            self.batch = -(-request.batch_size // self.gpus) * self.gpus
        else:
            self.batch = request.effective_batch or (request.micro_batch or 1) * self.gpus
        kinds = list_tiers(request.goal, self.simulator.gpu, request.precision, request.half)
        self.tiers = [tier for tier in kinds if tier.optimizer == "adamw"]
        self.subject: EstimatedModel | None = find_subject(spec)
        self.num_parallel = count_parallel_runs(spec)
        self.run_by_candidate: dict[Candidate, PlanRun] = {}

    def list_candidates(self, tier: Plan, gpus: int, batch: int | None = None) -> list[Candidate]:
        """Return all ways to run `tier` over `gpus` GPUs, the quickest first."""
        found = list_candidates(tier, self.base_spec, self.subject, self.simulator.gpu, gpus, batch or self.batch)
        size = self.request.micro_batch
        return [candidate for candidate in found if size is None or candidate.micro_batch == size]

    def might_fit(self, candidate: Candidate) -> bool:
        """Return whether `candidate` may fit by the closed form; True if the closed form does not know the model."""
        return (
            candidate.estimated_bytes is None
            or candidate.estimated_bytes <= MAX_ESTIMATE_SHARE * self.simulator.gpu.total_bytes
        )

    def run(self, candidate: Candidate) -> PlanRun | None:
        """Return the run of `candidate`, made once; None if the run fails."""
        if candidate not in self.run_by_candidate:
            outcome = self.simulator.try_run(
                candidate.make_spec(self.base_spec), candidate.format_label(), candidate.accumulation
            )
            if outcome is None:
                return None
            self.run_by_candidate[candidate] = PlanRun(
                candidate.plan, candidate.micro_batch, candidate.accumulation, outcome
            )
        return self.run_by_candidate[candidate]

    def search(self) -> tuple[Candidate, PlanRun] | None:
        """Return the quickest way that fits in the first tier with a fit, and its run; None if nothing fits."""
        for tier in self.tiers:
            candidates = self.list_candidates(tier, self.gpus)
            likely = [candidate for candidate in candidates if self.might_fit(candidate)]
            found = self._find_fitting(self._select_candidates(likely), NUM_FITTING)
            if found and not self._count_without_retries(found):
                leanest = sorted(likely, key=lambda candidate: candidate.estimated_bytes or 0)[:MAX_LEANEST_RUNS]
                found += [pair for pair in self._find_fitting(leanest, 1) if pair not in found]
            if not likely and candidates:
                least = min(candidates, key=lambda candidate: candidate.estimated_bytes or 0)
                needed = format_bytes(least.estimated_bytes or 0)
                self.simulator.error_by_label[tier.format_label()] = (
                    f"needs {needed} of each GPU by the closed form, with {least.format_label()}"
                )
            if found:
                return min(found, key=lambda pair: self.simulator.make_sort_key(pair[1].outcome))
        return None

    def _find_fitting(self, candidates: Sequence[Candidate], num_needed: int) -> list[tuple[Candidate, PlanRun]]:
        """Run `candidates` in order until `num_needed` have headroom; return the ways that fit, with their runs."""
        found: list[tuple[Candidate, PlanRun]] = []
        for place, candidate in enumerate(candidates):
            if place % self.num_parallel == 0:
                self._run_parallel(candidates[place : place + self.num_parallel])
            run = self.run(candidate)
            if run is not None and run.outcome.fits:
                found.append((candidate, run))
                if self._count_without_retries(found) == num_needed:
                    break
        return found

    def _count_without_retries(self, found: Iterable[tuple[Candidate, PlanRun]]) -> int:
        return sum(self.simulator.fits_without_retries(run.outcome) for _, run in found)

    def _run_parallel(self, candidates: Sequence[Candidate]) -> None:
        left = [candidate for candidate in candidates if candidate not in self.run_by_candidate]
        self.simulator.run_in_parallel(
            (candidate.make_spec(self.base_spec), candidate.accumulation) for candidate in left
        )

    def _select_candidates(self, likely: list[Candidate]) -> list[Candidate]:
        """Return the quickest ways, at most two per plan, with at least one of plain fsdp, which all libraries have."""
        found: list[Candidate] = []
        for candidate in likely:
            if sum(other.parallel == candidate.parallel for other in found) < 2:
                found.append(candidate)
        found, rest = found[:MAX_RUNS_PER_TIER], found[MAX_RUNS_PER_TIER:]
        if not any(candidate.parallel == "fsdp" for candidate in found):
            found[-1:] = [candidate for candidate in rest if candidate.parallel == "fsdp"][:1] or found[-1:]
        return found

    def find_min_gpus(self, tier: Plan, description: str) -> Alternative | None:
        """Return the least number of GPUs on which `tier` fits at micro-batch 1, as an alternative with `description`.

        The result is the first number that should fit by the closed form, and fits in a run.
        """
        failed, number = 0, 1
        while number <= MAX_GPUS and failed < MAX_FAILED_RUNS:
            candidate = self._find_leanest(tier, number)
            if candidate is not None and self.might_fit(candidate):
                run = self.run(candidate)
                if run is not None and run.outcome.fits:
                    name = f"{number} x {self.simulator.gpu.name}, {candidate.format_label()}"
                    return Alternative(description, name, run.outcome.needed_bytes, estimate=False)
                failed += 1
            # Above two machines, whole machines are counted.
            number += 1 if number < 2 * GPUS_PER_MACHINE else GPUS_PER_MACHINE
        return None

    def _find_leanest(self, tier: Plan, gpus: int) -> Candidate | None:
        candidates = [candidate for candidate in self.list_candidates(tier, gpus, gpus) if candidate.micro_batch == 1]
        return min(
            candidates, key=lambda candidate: candidate.estimated_bytes or candidate.estimated_seconds, default=None
        )


def recommend_multi_gpu(spec: TargetSpec, request: SearchRequest, progress: Callable[[str], None]) -> Recommendation:
    """Return the recommendation for `spec`'s model over `spec.gpus` GPUs: configuration, other runs and code to paste.
    Raises UsageError: the goal is not spread over GPUs, or no plan divides the batch; MemprofError: no plan applies to
    the model."""
    if request.goal is Goal.QLORA:
        problem = "quantized weights are not spread over GPUs here"
        raise UsageError(problem, value=f"--gpus {spec.gpus} --quantize nf4", hint="leave out --quantize, or --gpus")
    spec = set_context_length(spec)
    search = MultiGpuSearch(spec, request, progress)
    simulator = search.simulator
    simulator.preload_imports(spec.edit(parallel="fsdp"))
    if not any(search.list_candidates(tier, search.gpus) for tier in search.tiers):
        problem = f"no plan over {search.gpus} GPUs divides the sequences of a step"
        raise UsageError(problem, value=search.batch, hint=f"--effective-batch {search.gpus}")
    found = search.search()
    if not search.run_by_candidate and simulator.last_error is not None:
        raise simulator.last_error
    rows = build_rows(simulator, [(candidate.parallel, run) for candidate, run in _sort_runs(search, found)])
    kind = found[0].plan if found is not None else search.tiers[-1]
    alternatives = [search.find_min_gpus(kind, "the least number of these GPUs")]
    first = search.tiers[0]
    if kind.precision_loss and not first.precision_loss:
        alternatives.append(search.find_min_gpus(first, "the least number that gives up no precision"))
    example = next(iter(search.run_by_candidate.values()), None)
    if example is None:
        raise MemprofError("nothing could be run", value=spec.model, hint="; ".join(simulator.error_by_label.values()))
    fitting = [pair for pair in _sort_runs(search, found) if pair[1].outcome.fits]
    scripts = build_training_scripts(fitting, simulator, spec) if found is not None else Scripts()
    return build_recommendation(
        simulator,
        search.base_spec.host_memory_bytes,
        example.outcome.target,
        rows,
        fits=found is not None,
        goal=request.goal.value,
        effective_batch=search.batch,
        gpus=search.gpus,
        reason=_explain_choice(search, found),
        alternatives=tuple(one for one in alternatives if one is not None),
        snippets=scripts.text_by_kind,
        launch=scripts.launch_by_kind,
        written_for=scripts.configuration_by_kind,
        assumptions=_list_assumptions(search),
    )


def _sort_runs(search: MultiGpuSearch, found: tuple[Candidate, PlanRun] | None) -> list[tuple[Candidate, PlanRun]]:
    """Return the runs on the requested number of GPUs: `found` first, then by headroom and time of a step."""
    candidates = [
        (candidate, run)
        for candidate, run in search.run_by_candidate.items()
        if candidate.parallel_plan.size == search.gpus
    ]
    return sorted(candidates, key=lambda pair: (pair != found, *search.simulator.make_sort_key(pair[1].outcome)))


def _explain_choice(search: MultiGpuSearch, found: tuple[Candidate, PlanRun] | None) -> str:
    if found is None:
        return "no way to spread it over these GPUs fits"
    plan = found[0].plan
    runs = [
        run
        for candidate, run in search.run_by_candidate.items()
        if candidate.parallel_plan.size == search.gpus and run.outcome.fits
    ]
    with_headroom = sum(search.simulator.fits_without_retries(run.outcome) for run in runs)
    fitting, how = (with_headroom, "fit with room to spare") if 0 < with_headroom < len(runs) else (len(runs), "fit")
    what = "gives up no precision" if not plan.precision_loss else f"gives up: {plan.precision_loss}"
    only = f"the only one that was run and {how.replace('fit', 'fits', 1)}"
    quickest = only if fitting == 1 else f"the quickest of {fitting} that were run and {how}"
    return f"{quickest}; it {what}"


def nccl_assumption() -> str:
    """Return the assumption on NCCL's memory."""
    least, most = map(format_bytes, NCCL_GROUP_BYTES)
    return f"What NCCL takes of a GPU is not known and not counted: {least} to {most} a group where others measured it."


def _list_assumptions(search: MultiGpuSearch) -> tuple[str, ...]:
    return (
        "Times are lower bounds at published rates: compute, then what is sent between GPUs, over NVLink where the "
        "board has it, else over the host's link. They rank configurations; real kernels reach a part of these rates.",
        "Which ways are run says the closed form (memprof estimate --parallel); one rank of each kind is run.",
        f"Plans that were looked at: {', '.join(list_parallel_plans(search.gpus))}. "
        "For very long contexts see cp and ulysses.",
        "Each process makes the model in host memory before it is sharded; whether the host has room for all of them "
        "is not judged unless --host-memory says how much each may have.",
        f"{search.batch} sequences in an optimizer step of all GPUs.",
        nccl_assumption(),
    )
