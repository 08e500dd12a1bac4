"""Memory that does not depend on tokens (weights, gradients, optimizer state), and the settings of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memprof.estimate.geometry import DecoderGeometry, EstimatedModel
from memprof.estimate.methods import CHECKPOINT_FORMATS, MethodPlan
from memprof.estimate.projections import LayerSettings
from memprof.estimate.tape import FLOAT32
from memprof.units import KIB

CUBLAS_WORKSPACE = (4096 * 2 + 16 * 8) * KIB
# cuBLAS' workspace per thread (aten/src/ATen/cuda/CublasHandlePool.cpp), larger on compute capability 9.0. A training
# step has two threads, the program's and autograd's.
CUBLAS_WORKSPACE_HOPPER = 4096 * 8 * KIB
ALLOCATOR_BLOCK = 512  # Unit of allocation (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
NF4_BLOCK = 64
NF4_SCALE_BLOCK = 256  # Weights per scale, and scales per scale of theirs (bitsandbytes/functional.py, quantize_4bit).
STATE_BLOCK = 256
# 8-bit AdamW: elements per scale, and below how many a tensor's state stays float32 (bitsandbytes/optim).
MIN_8BIT_ELEMENTS = 4096
# Rows per scale of GPTQ's and AWQ's weights, and the side of a block of float8 ones (checkpoints' quantization_config).
FORMAT_GROUP = 128
# Elements of state that an optimizer has per parameter, and of temporaries in its step over all at once
# (torch/optim/*.py, the _multi_tensor functions).
OPTIMIZER_STATES = {
    "adamw": (2, 1), "adam": (2, 1), "sgd": (0, 0), "sgd-momentum": (1, 0), "adagrad": (1, 2), "rmsprop": (1, 1),
    "none": (0, 0),
}  # fmt: skip
# Bytes of state per parameter, scales included; paged state is in managed memory, which torch does not count.
QUANTIZED_STATES = {
    "adamw-8bit": 2 + 2 * FLOAT32 / STATE_BLOCK, "torchao-adamw-8bit": 2 + 2 * FLOAT32 / STATE_BLOCK,
    "torchao-adamw-4bit": 1 + 2 * FLOAT32 / 128, "paged-adamw-8bit": 0.0,
}  # fmt: skip

Terms = dict[str, int]


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """A moment that may be the peak, with its live bytes by term."""

    name: str
    terms: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Return the sum of the terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes of weights, gradients, optimizer state and its temporaries."""

    parameters: int
    trained: int  # Number of trained elements.
    gradients: int
    optimizer: int
    temporaries: int  # Temporaries of the optimizer step.


def compute_static_memory(subject: EstimatedModel, plan: MethodPlan) -> StaticMemory:
    """Return the bytes of weights, gradients and optimizer state; quantized weights require a geometry."""
    g = subject.geometry
    count = subject.num_parameters
    # A derived shape has approximately the given number of parameters.
    parameters = count * plan.itemsize if g is None else round(_weight_bytes(g, plan) * count / g.num_parameters)
    kind = plan.method.kind
    if not plan.method.trains:
        return StaticMemory(parameters, 0, 0, 0, 0)
    if kind == "lora":
        adapted = (
            [] if g is None else [g.list_matrices()[name][:2] for name in g.resolve_lora_targets(plan.lora_targets)]
        )
        trained = 0 if g is None else g.layers * plan.lora_rank * sum(map(sum, adapted))
        return _memory_with_optimizer(plan, parameters + FLOAT32 * trained, trained, FLOAT32)
    itemsize = plan.itemsize
    if kind == "adamw-8bit":
        optimizer = 2 * count + 2 * FLOAT32 * count // STATE_BLOCK
        if g is not None:  # small tensors keep float32 states
            small = g.norm_parameters if max(g.hidden, g.head_dim) < MIN_8BIT_ELEMENTS else 0
            optimizer += (2 * FLOAT32 - 2) * small
        return StaticMemory(parameters, count, itemsize * count, optimizer, 0)
    return _memory_with_optimizer(plan, parameters, count, itemsize)


def _memory_with_optimizer(plan: MethodPlan, parameters: int, trained: int, itemsize: int) -> StaticMemory:
    each = itemsize * trained
    if plan.optimizer in QUANTIZED_STATES:
        return StaticMemory(parameters, trained, each, round(QUANTIZED_STATES[plan.optimizer] * trained), 0)
    elements, temporaries = OPTIMIZER_STATES[plan.optimizer]
    return StaticMemory(parameters, trained, each, elements * each, 0 if plan.fused else temporaries * each)


def _weight_bytes(g: DecoderGeometry, plan: MethodPlan) -> int:
    if not plan.quantized:
        return g.num_parameters * plan.itemsize
    matrices = [(rows * columns, columns) for rows, columns, _ in g.list_matrices().values()]
    quantized = g.layers * sum(size for size, _ in matrices)
    rest = (g.num_parameters - quantized) * plan.itemsize
    if plan.quantized == "fp8":
        return rest + quantized + FLOAT32 * quantized // FORMAT_GROUP**2
    if plan.quantized in CHECKPOINT_FORMATS:
        # Packed integers; per group and column a scale in half precision and a zero; GPTQ's group of each row.
        bits = 8 if plan.quantized.endswith("8") else 4
        packed = quantized * bits // 8 + quantized // FORMAT_GROUP * (16 + bits) // 8
        rows = sum(rows for rows, _, _ in g.list_matrices().values()) if plan.quantized.startswith("gptq") else 0
        return rest + packed + FLOAT32 * g.layers * rows
    if plan.quantized == "int8":
        # A byte each, and a float32 scale per row.
        return rest + quantized + g.layers * FLOAT32 * sum(columns for _, columns in matrices)
    scales = (size // NF4_BLOCK + FLOAT32 * size // NF4_BLOCK // NF4_SCALE_BLOCK for size, _ in matrices)
    each = sum(size // 2 for size, _ in matrices) + sum(scales)
    # Two tables and an offset for each matrix.
    return rest + g.layers * (each + len(matrices) * 4 * ALLOCATOR_BLOCK)


def build_settings(g: DecoderGeometry, plan: MethodPlan, batch_size: int, context_length: int) -> LayerSettings:
    """Return the settings of the layers for a plan, batch size and context length."""
    lora = plan.method.kind == "lora"
    return LayerSettings(
        g, batch_size, context_length, plan.itemsize, training=plan.method.trains,
        trains_weights=plan.method.trains and not lora, amp=plan.amp, quantize=plan.quantized,
        lora_rank=plan.lora_rank if lora else 0, lora_targets=g.resolve_lora_targets(plan.lora_targets) if lora else (),
        padded=plan.padded, cache=plan.method.kind == "inference",
    )  # fmt: skip


def sum_position_bytes(setting: LayerSettings) -> int:
    """Return the bytes of the cosines and sines of rotary positions, and of the attention mask if there is one."""
    g = setting.geometry
    rotary_fraction = 2 * setting.context_length * int(g.head_dim * g.rotary_fraction) * setting.stream_itemsize
    both = 2 if g.family == "gemma3_text" else 1  # one for each kind of layer
    masks = (2 if g.family.startswith("gemma") else 1) * (setting.batch_size if setting.padded else 1)
    return both * rotary_fraction + masks * setting.context_length**2 * setting.has_mask
