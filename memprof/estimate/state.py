"""Memory that does not depend on tokens (weights, gradients, optimizer state), and the settings of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memprof.estimate.geometry import DecoderGeometry, EstimatedModel
from memprof.estimate.methods import CHECKPOINT_FORMATS, MethodPlan
from memprof.estimate.projections import LayerSettings
from memprof.estimate.tape import FLOAT32
from memprof.units import KIB
from memprof.workload.optimizer_states import OPTIMIZER_STATES

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
# Bytes of state per parameter, scales included; paged state is in managed memory, which torch does not count.
QUANTIZED_STATES = {
    "adamw-8bit": 2 + 2 * FLOAT32 / STATE_BLOCK, "torchao-adamw-8bit": 2 + 2 * FLOAT32 / STATE_BLOCK,
    "torchao-adamw-4bit": 1 + 2 * FLOAT32 / 128, "paged-adamw-8bit": 0.0,
}  # fmt: skip

TermBytes = dict[str, int]


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """A moment of a run that may be its peak, with the live bytes of each term (parameters, activations, ...)."""

    name: str
    terms: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Return the live bytes at the moment: the sum of its terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """The bytes of weights, gradients, optimizer state and the optimizer step's temporaries."""

    parameters: int
    num_trained: int  # Number of trained elements.
    gradients: int
    optimizer: int
    temporaries: int  # Temporaries of the optimizer step.


def compute_static_memory(subject: EstimatedModel, plan: MethodPlan) -> StaticMemory:
    """Return the bytes of weights, gradients and optimizer state; quantized weights need `subject.geometry`."""
    g = subject.geometry
    count = subject.num_parameters
    # A derived shape has approximately the given number of parameters.
    parameters = count * plan.itemsize if g is None else round(_sum_weight_bytes(g, plan) * count / g.num_parameters)
    kind = plan.method.kind
    if not plan.method.trains:
        return StaticMemory(parameters, 0, 0, 0, 0)
    if kind == "lora":
        shapes = (
            [] if g is None else [g.list_matrices()[name][:2] for name in g.resolve_lora_targets(plan.lora_targets)]
        )
        num_trained = 0 if g is None else g.layers * plan.lora_rank * sum(map(sum, shapes))
        return _add_optimizer_state(plan, parameters + FLOAT32 * num_trained, num_trained, FLOAT32)
    itemsize = plan.itemsize
    if kind == "adamw-8bit":
        state_bytes = 2 * count + 2 * FLOAT32 * count // STATE_BLOCK
        if g is not None:  # small tensors keep float32 states
            num_small = g.norm_parameters if max(g.hidden, g.head_dim) < MIN_8BIT_ELEMENTS else 0
            state_bytes += (2 * FLOAT32 - 2) * num_small
        return StaticMemory(parameters, count, itemsize * count, state_bytes, 0)
    return _add_optimizer_state(plan, parameters, count, itemsize)


def _add_optimizer_state(plan: MethodPlan, parameters: int, num_trained: int, itemsize: int) -> StaticMemory:
    grad_bytes = itemsize * num_trained
    if plan.optimizer in QUANTIZED_STATES:
        state_bytes = round(QUANTIZED_STATES[plan.optimizer] * num_trained)
        return StaticMemory(parameters, num_trained, grad_bytes, state_bytes, 0)
    states, temporaries = OPTIMIZER_STATES[plan.optimizer]
    temp_bytes = 0 if plan.fused else temporaries * grad_bytes
    return StaticMemory(parameters, num_trained, grad_bytes, states * grad_bytes, temp_bytes)


def _sum_weight_bytes(g: DecoderGeometry, plan: MethodPlan) -> int:
    if not plan.quantized:
        return g.num_parameters * plan.itemsize
    matrices = [(rows * columns, columns) for rows, columns, _ in g.list_matrices().values()]
    num_quantized = g.layers * sum(size for size, _ in matrices)
    plain_bytes = (g.num_parameters - num_quantized) * plan.itemsize
    if plan.quantized == "fp8":
        return plain_bytes + num_quantized + FLOAT32 * num_quantized // FORMAT_GROUP**2
    if plan.quantized in CHECKPOINT_FORMATS:
        # Packed integers; per group and column a scale in half precision and a zero; GPTQ's group of each row.
        bits = 8 if plan.quantized.endswith("8") else 4
        packed_bytes = num_quantized * bits // 8 + num_quantized // FORMAT_GROUP * (16 + bits) // 8
        rows = sum(rows for rows, _, _ in g.list_matrices().values()) if plan.quantized.startswith("gptq") else 0
        return plain_bytes + packed_bytes + FLOAT32 * g.layers * rows
    if plan.quantized == "int8":
        # A byte each, and a float32 scale per row.
        return plain_bytes + num_quantized + g.layers * FLOAT32 * sum(columns for _, columns in matrices)
    scale_bytes = (size // NF4_BLOCK + FLOAT32 * size // NF4_BLOCK // NF4_SCALE_BLOCK for size, _ in matrices)
    int4_bytes = sum(size // 2 for size, _ in matrices) + sum(scale_bytes)
    # Two tables and an offset for each matrix.
    return plain_bytes + g.layers * (int4_bytes + len(matrices) * 4 * ALLOCATOR_BLOCK)


def build_settings(g: DecoderGeometry, plan: MethodPlan, batch_size: int, context_length: int) -> LayerSettings:
    """Return the settings of a decoder layer for a plan, batch size and context length."""
    lora = plan.method.kind == "lora"
    return LayerSettings(
        g, batch_size, context_length, plan.itemsize, training=plan.method.trains,
        trains_weights=plan.method.trains and not lora, amp=plan.amp, quantize=plan.quantized,
        lora_rank=plan.lora_rank if lora else 0, lora_targets=g.resolve_lora_targets(plan.lora_targets) if lora else (),
        padded=plan.padded, cache=plan.method.kind == "inference",
    )  # fmt: skip


def sum_position_bytes(setting: LayerSettings) -> int:
    """Return the bytes of the rotary embedding's cosines and sines, and of the attention mask if there is one."""
    g = setting.geometry
    rotary_bytes = 2 * setting.context_length * int(g.head_dim * g.rotary_fraction) * setting.stream_itemsize
    num_rotary = 2 if g.family == "gemma3_text" else 1  # one for each kind of layer
    num_masks = (2 if g.family.startswith("gemma") else 1) * (setting.batch_size if setting.padded else 1)
    return num_rotary * rotary_bytes + num_masks * setting.context_length**2 * setting.has_mask
