"""The closed form's estimate of a run that is about to begin, for the first line of its progress. Needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memprof.device.catalog import Gpu
from memprof.errors import UsageError
from memprof.estimate.geometry import EstimatedModel
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.options import CLOSED_FORM_OPTIMIZERS
from memprof.estimate.table import (
    ALLOCATED,
    BORDERLINE,
    DEVICE_USED,
    FITS,
    NO,
    Cell,
    find_column,
    find_highest_cell,
    resolve_context_length,
)
from memprof.flows.gpus import find_spec_gpu, resolve_settings
from memprof.flows.recommend.closed_form import find_estimated_model, make_method_plan
from memprof.flows.recommend.plans import CHUNKED_LOSS, Goal, list_tiers
from memprof.flows.recommend.search import SearchRequest
from memprof.spec import MANY_STEPS, STEADY_STEPS, Mode, TargetSpec
from memprof.units import format_rounded_gib
from memprof.workload.models import choose_dtype
from memprof.workload.plan import DEVICE_MAP

# Options that a plan of the closed form does not have, and that are arguments beside it, or change no byte of the GPU.
_OTHER_FIELDS = (
    "model", "model_is_size", "trust_remote_code", "context_length", "batch_size", "lengths", "gradient_accumulation",
    "steps", "device", "gpu", "gpu_vram_bytes", "gpus", "parallel", "alloc_conf", "detail",
)  # fmt: skip
# The first GPUs with a fused attention for bfloat16: before, a run may keep scores, which the closed form does not.
_MIN_CAPABILITY = (8, 0)
# On GPUs before these transformers dequantizes weights in fp8 (quantizers/quantizer_finegrained_fp8.py).
_MIN_FP8_CAPABILITY = (8, 9)
# No run of the 579 in docs/performance.md allocates less than 95.6% of the estimate.
_MIN_SHARE = 0.93
_TEXT_BY_VERDICT = {FITS: "fits", BORDERLINE: "close to the limit of", NO: "does not fit"}


@dataclass(frozen=True, slots=True)
class FirstEstimate:
    """The closed form's memory of a run in bytes of the GPU, with the CUDA context: about, at least and at most."""

    num_bytes: int
    low_bytes: int
    high_bytes: int
    gpu: Gpu

    @property
    def verdict(self) -> str:
        """Return FITS or NO if the band around the estimate leaves no doubt, else BORDERLINE."""
        if self.high_bytes <= self.gpu.total_bytes:
            return FITS
        return NO if self.low_bytes > self.gpu.total_bytes else BORDERLINE

    def describe(self, condition: str = "") -> str:
        """Return such as "about 1,050 GiB, does not fit the h100-80gb"; `condition` follows the size."""
        size = f"about {format_rounded_gib(self.num_bytes)}{condition and ' '}{condition}"
        gpu = self.gpu.name if self.gpu.capacity_kind == "given" else self.gpu.key
        return f"{size}, {_TEXT_BY_VERDICT[self.verdict]} the {gpu}"


def estimate_spec(spec: TargetSpec) -> FirstEstimate | None:
    """Return the estimate of `spec`; None if the closed form does not know the model, an option, or the GPU's kernels.

    An option that the closed form does not know is one with which the spec differs from that of its plan.
    """
    try:
        gpu, model = find_spec_gpu(spec), find_estimated_model(spec)
        min_capability = _MIN_FP8_CAPABILITY if spec.quantize == "fp8" else _MIN_CAPABILITY
        if model is None or gpu.compute_capability < min_capability or not _is_known_layout(spec):
            return None
        plan = _make_plan(spec, model)
        if plan is None or resolve_settings(spec.alloc_conf).alloc_conf:
            return None
        context_length = resolve_context_length(model, spec.context_length, spec.batch_size, spec.lengths)
        cell = find_highest_cell(model, plan, spec.batch_size, context_length, spec.parallel or "", spec.gpus)
    except (UsageError, ImportError):  # the run says what is wrong
        return None
    return bound_cell(cell, gpu, accumulates=spec.gradient_accumulation > 1)


def estimate_search(spec: TargetSpec, request: SearchRequest) -> tuple[FirstEstimate, str] | None:
    """Return the estimate of the first plan that a search on one GPU runs, and its savings; None as `estimate_spec`.

    It is the plan that gives up no precision, at the smallest micro-batch, with the exact fixes that cost least.
    """
    try:
        gpu, model = find_spec_gpu(spec), find_estimated_model(spec)
        if model is None or gpu.compute_capability < _MIN_CAPABILITY or resolve_settings(None).alloc_conf:
            return None
        plan = list_tiers(request.goal, gpu, request.precision, request.half)[0].minimize_memory()
        is_inference = request.goal is Goal.INFER
        micro_batch = request.micro_batch or (request.batch_size if is_inference else 1)
        context_length = resolve_context_length(model, spec.context_length, micro_batch, None)
        cell = find_highest_cell(model, make_method_plan(plan, spec), micro_batch, context_length, "", 1)
    except UsageError:
        return None
    condition = f"with {plan.format_label()}" if is_inference else "with checkpointing and a chunked loss"
    return bound_cell(cell, gpu, accumulates=not is_inference and request.batch_size > micro_batch), condition


def bound_cell(cell: Cell, gpu: Gpu, *, accumulates: bool) -> FirstEstimate:
    """Return the estimate of a cell: at least a share of what is allocated, at most the band of published used memory.

    `accumulates`: later micro-batches of a step find the gradients of earlier ones.
    """
    if accumulates:
        all_gradients = next(moment.terms["gradients"] for moment in cell.moments if moment.name == "optimizer step")
        gradients = [max(moment.terms["gradients"], all_gradients) for moment in cell.moments]
        moments = (
            dataclasses.replace(moment, terms={**moment.terms, "gradients": num_bytes})
            for moment, num_bytes in zip(cell.moments, gradients, strict=True)
        )
        cell = dataclasses.replace(cell, moments=tuple(moments))
    ranges = cell.compute_ranges(gpu)
    num_bytes, _, high_bytes = ranges[DEVICE_USED]
    return FirstEstimate(num_bytes, round(_MIN_SHARE * ranges[ALLOCATED][0]) + gpu.context_bytes, high_bytes, gpu)


def _is_known_layout(spec: TargetSpec) -> bool:
    """Return whether the closed form has the parallel plan and the number of steps of `spec`."""
    is_spread = spec.parallel is not None and spec.mode is Mode.TRAIN and spec.parallel != DEVICE_MAP
    if spec.lengths is not None:  # the longest batch is that of so many
        has_steady_step = spec.steps == MANY_STEPS
    else:
        has_steady_step = spec.mode is Mode.INFERENCE or spec.steps >= STEADY_STEPS
    return has_steady_step and (is_spread or (spec.parallel is None and spec.gpus == 1))


def _make_plan(spec: TargetSpec, model: EstimatedModel) -> MethodPlan | None:
    """Return the plan of `spec` in the terms of the closed form; None if `spec` has more than a plan says."""
    if "quantization_config" in model.config or spec.optimizer not in CLOSED_FORM_OPTIMIZERS:
        return None
    dtype = None if spec.amp is not None else choose_dtype(model.checkpoint_dtype, spec)[0]
    if spec.mode is Mode.INFERENCE:
        kind = "inference"
    elif spec.adapter is not None:
        kind = "lora"
    elif spec.amp is not None:
        kind = "mixed"
    else:
        kind = "adamw-8bit" if spec.optimizer == "adamw-8bit" else "full"
    plan = MethodPlan(
        METHOD_BY_KEY[f"{kind}-checkpointing" if spec.activation_checkpointing else kind],
        find_column(spec.quantize or spec.amp or dtype or ""),
        lora_rank=spec.lora_rank or 0,
        lora_targets=spec.lora_targets,
        optimizer=spec.optimizer,
        fused=spec.optimizer_impl == "fused",
        new_tokens=spec.new_tokens or 1,
        padded=spec.lengths is not None,
        chunked_loss=CHUNKED_LOSS in spec.fixes,
    )
    others = {name: getattr(spec, name) for name in _OTHER_FIELDS}
    is_complete = TargetSpec(**{**others, **plan.build_spec_fields()}) == spec.edit(dtype=dtype)
    return plan if is_complete and plan.method.supports(plan.column) else None
