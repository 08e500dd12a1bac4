"""`memprof estimate`: the memory of a model by formulas, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.cli.options import reuse_option
from memprof.cli.output import ExplainOptions, print_json
from memprof.cli.progress import show_progress
from memprof.cli.streams import echo
from memprof.errors import UsageError
from memprof.estimate.options import EstimateOptions

if TYPE_CHECKING:
    from memprof.estimate.table import Estimate, SimulatedRun

EXAMPLES = """
memprof estimate --params 1.2B --dtype float16
memprof estimate --model llama-3.1-8b --context-length 8192 --gpu rtx-4090
memprof estimate --model-size 70B --gpus 8 --parallel tp=8
"""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ExplainOptions):
    """Options that name the model (one of --params, --model and --model-size) and the GPU."""

    params: str | None = reuse_option("params")
    model: str | None = reuse_option("model", default=None, note="Here no code: its sizes alone are read.")
    model_is_size: bool = reuse_option("model_is_size")
    gpu: str | None = reuse_option("gpu", default=None, unset="each of the catalog")
    gpu_vram_bytes: int | None = reuse_option("gpu_vram_bytes")


@dataclass(frozen=True, kw_only=True)
class EstimateCommandOptions(EstimateOptions, ModelOptions):
    """Options of `memprof estimate`."""

    exact: bool = reuse_option("exact", note="Both are shown, term by term.")


def estimate(request: EstimateCommandOptions) -> None:
    """Say at once what a model takes: weights, inference, LoRA, full training, in every dtype.

    A closed form; each figure has the band that published ones were off by.
    """
    from memprof.device.catalog import custom_gpu, find_gpu, list_suggested_gpus
    from memprof.estimate.geometry import build_from_model, build_from_params, build_from_size
    from memprof.estimate.table import build_estimate
    from memprof.report.documents.estimate import build_estimate_document
    from memprof.report.terminal.estimate import render_estimate

    if (request.params is None) == (request.model is None):
        hint = "for instance: memprof estimate --params 1.2B --dtype float16"
        raise UsageError("give one of --params, --model and --model-size", hint=hint)
    if request.quantize is not None and request.dtype not in (None, "bfloat16"):
        raise UsageError(
            "quantized weights are estimated analytically beside bfloat16",
            value=f"--quantize {request.quantize} --dtype {request.dtype}",
            hint="leave out --dtype",
        )
    if request.parallel is not None and request.gpus == 1:
        raise UsageError("a plan is over several GPUs", value=f"--parallel {request.parallel}", hint="add --gpus 8")
    if request.parallel is not None and request.quantize is not None:
        problem = "quantized weights are not spread over GPUs here"
        raise UsageError(problem, value=f"--quantize {request.quantize}", hint="leave out --parallel, or --quantize")
    if request.params is not None:
        geometry = build_from_params(request.params)
    else:
        geometry = (build_from_size if request.model_is_size else build_from_model)(str(request.model))
    result = build_estimate(geometry, request)
    gpus = list_suggested_gpus() if request.gpu is None else (find_gpu(request.gpu),)
    if request.gpu_vram_bytes is not None:
        gpus = (custom_gpu(request.gpu_vram_bytes),)
    simulated = _simulate(result, quiet=request.quiet) if request.exact else None
    if request.as_json:
        print_json(build_estimate_document(result, gpus, simulated, explain=request.explain).to_json())
        return
    echo(render_estimate(result, gpus, simulated, explain=request.explain, quiet=request.quiet), nl=False)


def _simulate(result: Estimate, *, quiet: bool) -> dict[str, SimulatedRun]:
    """Return a run on the virtual GPU for each training or inference method of an estimate, by the method's key."""
    from memprof.flows.estimate import simulate

    runs = {}
    with show_progress(quiet=quiet) as progress:
        for plan in result.list_plans():
            key = plan.method.key

            def report(work: str, key: str = key) -> None:
                progress(f"{key}: {work}")

            runs[key] = simulate(
                result.subject, plan, result.batch_size, result.context_length, report, lengths=result.lengths
            )
    return runs
