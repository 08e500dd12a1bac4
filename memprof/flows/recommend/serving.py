"""Inference over several GPUs (`memprof recommend --gpus N --mode inference`): tensor parallelism with one rank
per GPU, or one process with some layers on each GPU (`device_map`). Each way is run.
"""

from __future__ import annotations

from collections.abc import Callable

from memprof.errors import MemprofError, UsageError
from memprof.flows.gpus import find_gpu_of
from memprof.flows.recommend.answer import build_answer, rows_of
from memprof.flows.recommend.multi_gpu_scripts import serving_scripts
from memprof.flows.recommend.over_gpus import nccl_assumption
from memprof.flows.recommend.plans import Goal, base_spec, tiers, with_context
from memprof.flows.recommend.search import Question, Tried
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import Alternative, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.models import find_source
from memprof.workload.plan import DEVICE_MAP, check_plan, parse_plan

MOST_GPUS = 64  # the largest number of GPUs tried
_FLOAT = frozenset({"half", "float32"})  # precisions of weights that can be spread: quantized weights cannot


class Serving:
    """The search over ways to run inference on several GPUs."""

    def __init__(self, spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> None:
        gpu = find_gpu_of(spec)
        self.runs = Simulator(gpu, progress, seeks_room=True)
        self.base = base_spec(Goal.INFER, spec.edit(gpus=1, batch_size=question.batch))
        self.source = find_source(spec)
        if self.source.task != "causal-lm":
            self.base = self.base.edit(new_tokens=None)  # the model does not decode: only its forward is run
        kinds = [tier for tier in tiers(Goal.INFER, gpu, question.precision, question.half) if tier.precision in _FLOAT]
        if not kinds:
            problem = "quantized weights are not spread over GPUs here"
            raise UsageError(problem, value=f"--quantize {question.precision}", hint="leave out --quantize, or --gpus")
        self.kind = kinds[0]
        self.batch = question.batch

    def ways(self, gpus: int) -> list[tuple[str, Tried]]:
        """Return the runs of the model over `gpus` GPUs, best first, as pairs of a `--parallel` name and a run."""
        found = []
        for plan in (f"tp={gpus}", DEVICE_MAP) if gpus > 1 else ("",):
            spec = self.kind.spec(self.base, self.batch).edit(parallel=plan or None, gpus=gpus)
            name = f"{plan}: {self.kind.label()}" if plan else self.kind.label()
            try:
                if plan:
                    check_plan(parse_plan(plan, gpus), spec, self.source.task, self.source.config)
            except UsageError as error:
                self.runs.failures[name] = error.line
                continue
            outcome = self.runs.try_run(spec, f"{name} over {gpus}" if gpus > 1 else name)
            if outcome is not None:
                found.append((plan, Tried(self.kind, self.batch, 1, outcome)))
        return sorted(found, key=lambda way: self.runs.rank(way[1].outcome))

    def find_fewest(self) -> Alternative | None:
        """Return the least power of two of GPUs on which the model fits; None if none up to MOST_GPUS does."""
        gpus = 1
        while gpus <= MOST_GPUS:
            for plan, tried in self.ways(gpus):
                if tried.outcome.fits:
                    how = f", {plan}" if plan else ""
                    name = f"{gpus} x {self.runs.gpu.name}{how}: {self.kind.label(self.batch)}"
                    return Alternative("the least number of these GPUs", name, tried.outcome.needed_bytes, False)
            gpus *= 2
        return None


def recommend_serving(spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> Recommendation:
    """Return the recommendation for inference of `spec`'s model over `spec.gpus` GPUs, with code to paste.
    Raises UsageError: quantized weights are requested; MemprofError: no way to spread the model applies."""
    search = Serving(with_context(spec), question, progress)
    runs, ways = search.runs, search.ways(spec.gpus)
    if not ways:
        if runs.refusal is not None:
            raise runs.refusal
        raise MemprofError("no way to spread it applies", value=spec.model, hint="; ".join(runs.failures.values()))
    fitting = [(plan, tried) for plan, tried in ways if tried.outcome.fits]
    fewest = search.find_fewest()
    scripts = serving_scripts(fitting, spec)
    return build_answer(
        runs,
        search.base.host_memory_bytes,
        ways[0][1].outcome.target,
        rows_of(runs, ways),
        fits=bool(fitting),
        goal=Goal.INFER.value,
        effective_batch=search.batch,
        gpus=spec.gpus,
        reason=_explain_choice([plan for plan, _ in fitting]),
        alternatives=() if fewest is None else (fewest,),
        snippets=scripts.texts,
        launch=scripts.launch,
        assumptions=(*_ASSUMPTIONS, nccl_assumption()),
    )


def _explain_choice(fitting: list[str]) -> str:
    if not fitting:
        return "no way to spread it over these GPUs fits"
    use = "all GPUs are at work at once" if fitting[0] != DEVICE_MAP else "one GPU is at work after another"
    others = f"the quicker of {len(fitting)} that fit" if len(fitting) > 1 else "the only way that fits"
    return f"{others}: {use}; it gives up no precision"


_ASSUMPTIONS = (
    "Times are lower bounds at published rates: compute, then what is sent between GPUs, over NVLink where the board "
    "has it, else over the host's link. With device-map one GPU works after another, and what goes between them is "
    "not counted.",
    "A prompt and two tokens after it, with the model's own KV cache; a server's batching is not simulated.",
    "With tp each process makes the model in host memory first; whether the host has room for all of them is not "
    "judged.",
    "The least number of GPUs is looked for among powers of two.",
)
