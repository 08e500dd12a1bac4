"""Inference over several GPUs (`memprof recommend --gpus N --mode inference`): tensor parallelism with one rank
per GPU, or one process with some layers on each GPU (`device_map`). Each way is run.
"""

from __future__ import annotations

from collections.abc import Callable

from memprof.errors import MemprofError, UsageError
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.recommend.multi_gpu_scripts import build_serving_scripts
from memprof.flows.recommend.multi_gpu_search import describe_nccl_assumption
from memprof.flows.recommend.plans import Goal, list_tiers, make_base_spec, set_context_length
from memprof.flows.recommend.recommendation import build_recommendation, build_rows
from memprof.flows.recommend.search import PlanRun, SearchRequest
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import Alternative, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.models import find_source
from memprof.workload.plan import DEVICE_MAP, check_plan, parse_plan

MAX_GPUS = 64  # the largest number of GPUs tried
_UNQUANTIZED_PRECISIONS = frozenset(
    {"half", "float32"}
)  # precisions of weights that can be spread: quantized weights cannot


class ServingSearch:
    """The search over ways to run inference on several GPUs."""

    def __init__(self, spec: TargetSpec, request: SearchRequest, progress: Callable[[str], None]) -> None:
        gpu = find_spec_gpu(spec)
        self.simulator = Simulator(gpu, progress, avoids_retries=True)
        self.base_spec = make_base_spec(Goal.INFER, spec.edit(gpus=1, batch_size=request.batch_size))
        self.source = find_source(spec)
        if self.source.task != "causal-lm":
            self.base_spec = self.base_spec.edit(new_tokens=None)  # the model does not decode: only its forward is run
        tiers = [
            tier
            for tier in list_tiers(Goal.INFER, gpu, request.precision, request.half)
            if tier.precision in _UNQUANTIZED_PRECISIONS
        ]
        if not tiers:
            problem = "quantized weights are not spread over GPUs here"
            raise UsageError(problem, value=f"--quantize {request.precision}", hint="leave out --quantize, or --gpus")
        self.tier = tiers[0]
        self.batch = request.batch_size

    def run_parallel_plans(self, gpus: int) -> list[tuple[str, PlanRun]]:
        """Return pairs of an argument of `--parallel` and its run on `gpus` GPUs, best first."""
        plan_runs = []
        for plan in (f"tp={gpus}", DEVICE_MAP) if gpus > 1 else ("",):
            spec = self.tier.make_spec(self.base_spec, self.batch).edit(parallel=plan or None, gpus=gpus)
            label = f"{plan}: {self.tier.format_label()}" if plan else self.tier.format_label()
            try:
                if plan:
                    check_plan(parse_plan(plan, gpus), spec, self.source.task, self.source.config)
            except UsageError as error:
                self.simulator.error_by_label[label] = error.line
                continue
            outcome = self.simulator.try_run(spec, f"{label} over {gpus}" if gpus > 1 else label)
            if outcome is not None:
                plan_runs.append((plan, PlanRun(self.tier, self.batch, 1, outcome)))
        return sorted(plan_runs, key=lambda plan_run: self.simulator.make_sort_key(plan_run[1].outcome))

    def find_min_gpus(self) -> Alternative | None:
        """Return the least number of GPUs (a power of two, up to MAX_GPUS) that fit the model; None: not found."""
        gpus = 1
        while gpus <= MAX_GPUS:
            for plan, run in self.run_parallel_plans(gpus):
                if run.outcome.fits:
                    suffix = f", {plan}" if plan else ""
                    name = f"{gpus} x {self.simulator.gpu.name}{suffix}: {self.tier.format_label(self.batch)}"
                    return Alternative("the least number of these GPUs", name, run.outcome.needed_bytes, False)
            gpus *= 2
        return None


def recommend_serving(spec: TargetSpec, request: SearchRequest, progress: Callable[[str], None]) -> Recommendation:
    """Return the recommendation for inference of the model of `spec` on `spec.gpus` GPUs, with code to paste.
    Raises UsageError: quantized weights are requested; MemprofError: no parallel plan applies to the model."""
    search = ServingSearch(set_context_length(spec), request, progress)
    simulator, runs = search.simulator, search.run_parallel_plans(spec.gpus)
    if not runs:
        if simulator.last_error is not None:
            raise simulator.last_error
        raise MemprofError(
            "no way to spread it applies", value=spec.model, hint="; ".join(simulator.error_by_label.values())
        )
    fitting_runs = [(plan, run) for plan, run in runs if run.outcome.fits]
    min_gpus_alternative = search.find_min_gpus()
    scripts = build_serving_scripts(fitting_runs, spec)
    return build_recommendation(
        simulator,
        search.base_spec.host_memory_bytes,
        runs[0][1].outcome.target,
        build_rows(simulator, runs),
        fits=bool(fitting_runs),
        goal=Goal.INFER.value,
        effective_batch=search.batch,
        gpus=spec.gpus,
        reason=_explain_choice([plan for plan, _ in fitting_runs]),
        alternatives=() if min_gpus_alternative is None else (min_gpus_alternative,),
        snippets=scripts.text_by_kind,
        launch=scripts.launch_by_kind,
        assumptions=(*_ASSUMPTIONS, describe_nccl_assumption()),
    )


def _explain_choice(fitting_plans: list[str]) -> str:
    if not fitting_plans:
        return "no way to spread it over these GPUs fits"
    use = "all GPUs are at work at once" if fitting_plans[0] != DEVICE_MAP else "one GPU is at work after another"
    ranking = f"the quicker of {len(fitting_plans)} that fit" if len(fitting_plans) > 1 else "the only way that fits"
    return f"{ranking}: {use}; it gives up no precision"


_ASSUMPTIONS = (
    "Times are lower bounds at published rates: compute, then what is sent between GPUs, over NVLink where the board "
    "has it, else over the host's link. With device-map one GPU works after another, and what goes between them is "
    "not counted.",
    "A prompt and two tokens after it, with the model's own KV cache; a server's batching is not simulated.",
    "With tp each process makes the model in host memory first; whether the host has room for all of them is not "
    "judged.",
    "The least number of GPUs is looked for among powers of two.",
)
