"""Text of `memprof estimate --explain`: formulas of the terms, constants with their sources, and assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.device.context import CONTEXT_BYTES, get_context_bytes
from memprof.estimate.layers import record_layer
from memprof.estimate.methods import CHECKPOINT_FORMATS
from memprof.estimate.state import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER, FORMAT_GROUP, build_settings
from memprof.estimate.table import Cell, Estimate
from memprof.spec import MANY_STEPS
from memprof.units import format_bytes


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the analytical estimate, as it is printed, with its source."""

    name: str
    value: str
    source: str


CONSTANTS = (
    Constant(
        "CUDA context",
        f"{format_bytes(CONTEXT_BYTES)}, on compute capability 9.0 {format_bytes(get_context_bytes((9, 0)))}",
        "RTX 6000 Ada, torch 2.10: unslothai/unsloth-zoo, pull request 1053; an H100 in training, torch 2.11; "
        "the band: up to 1.31 GiB (older drivers)",
    ),
    Constant(
        "cuBLAS workspace",
        f"{format_bytes(CUBLAS_WORKSPACE)}, on compute capability 9.0 {format_bytes(CUBLAS_WORKSPACE_HOPPER)}",
        "aten/src/ATen/cuda/CublasHandlePool.cpp; one per thread that multiplies: two in training",
    ),
    Constant("AdamW's state", "2 elements per parameter", "torch/optim/adamw.py: exp_avg and exp_avg_sq, in its dtype"),
    Constant(
        "AdamW's temporaries", "1 element per parameter", "torch/optim/adam.py, _multi_tensor_adam: sqrt of exp_avg_sq"
    ),
    Constant(
        "8-bit AdamW's state",
        "2 bytes per parameter and 2 float32 per 256",
        "bitsandbytes/optim; float32 below 4,096 elements",
    ),
    Constant(
        "other optimizers' state",
        "momentum 1 element, RMSprop 1 and 1 of temporaries, Adagrad 1 and 2; torchao's 4 bits 1 byte and 1/16",
        "torch/optim, torchao/optim; paged state is not on the GPU",
    ),
    Constant("int8 weights", "1 byte, a float32 per row", "bitsandbytes/nn/modules.py, Int8Params"),
    Constant(
        "int4 weights",
        "1/2 byte, a byte per 64, a float32 per 16,384, 2 KiB of tables per matrix",
        "bitsandbytes/functional.py, quantize_4bit with nested statistics",
    ),
    Constant(
        "loss in float32",
        "3 x 4 x vocabulary bytes per token beside the logits",
        "transformers/loss/loss_utils.py; log-softmax and two gradients (native/SoftMax, LossNLL)",
    ),
    Constant("KV cache", "2 x layers x key heads x head size elements per token", "transformers/cache_utils.py"),
)

_FORMULAS = {
    ("parameters", "plain"): "{count:,} parameters x {item} bytes",
    ("parameters", "int8"): "linear layers: 1 byte and a float32 per row; embedding, head and norms: {item} bytes",
    ("parameters", "int4"): "linear layers: 1/2 byte + 1/64 + 1/4,096; embedding, head and norms: {item} bytes",
    ("optimizer state", "plain"): "2 x {item} bytes per trained parameter",
    ("optimizer state", "adamw-8bit"): "2 x (1 + 4/256) bytes per parameter",
    ("gradients", "plain"): "{item} bytes per trained parameter, as far as there are any at this moment",
    ("temporaries", "plain"): "sqrt of the second moment: {item} bytes per trained parameter",
    ("KV cache", "plain"): "2 x {layers} layers x {kv_width:,} elements x {tokens:,} tokens x {compute} bytes",
    ("library workspace", "plain"): "cuBLAS, one per thread",
    ("communication", "plain"): (
        "by strategy: buckets of gradients (DDP); layers that are fetched or reduced; states sent"
    ),
}
_LOGITS_FORMULAS = {
    "loss, backward": "(logits {compute} + log-softmax 4 + its gradients 2 x 4) x {vocab:,} x {tokens:,} tokens",
    "loss, forward": "(logits {compute} + their float32 copy 4 + log-softmax 4) x {vocab:,} x {tokens:,} tokens",
}


def format_formula(estimate: Estimate, cell: Cell, term: str) -> str:
    """Return the formula of `term` ("parameters", "activations", ...) at the cell's peak, with values inserted."""
    g = estimate.subject.geometry
    plan = cell.plan
    values = {
        "count": estimate.subject.num_parameters,
        "item": 4 if plan.method.kind == "lora" and term != "parameters" else plan.itemsize,
        "tokens": estimate.batch_size * estimate.context_length,
        "compute": 2 if plan.amp else plan.itemsize,
    }
    if g is not None:
        values |= {"layers": g.layers, "kv_width": g.kv_width, "vocab": g.vocab}
    if term == "activations":
        if not plan.method.trains:
            return "tensors of one layer, its input, the embedding's output"
        if cell.peak.name == "embedding, backward":
            return "the gradient of the embedding's output, positions"
        if cell.method.checkpointing:
            return "each layer's input, what one layer keeps while it is computed again, positions"
        return "what the layers keep for the backward (below), the final norm, positions"
    if term == "logits and loss":
        default = "logits {compute} x {vocab:,} x {tokens:,} tokens, with what is made of them"
        return _LOGITS_FORMULAS.get(cell.peak.name, default).format(**values)
    kind = plan.quantized or plan.method.kind
    formula = _FORMULAS.get((term, kind)) or _FORMULAS.get((term, "plain"), "")
    return formula.format(**values)


def list_saved_tensors(estimate: Estimate, cell: Cell) -> list[tuple[str, float]]:
    """Return the tensors that a layer saves for the backward, largest first, with their bytes per token."""
    g = estimate.subject.geometry
    if g is None:
        return []
    setting = build_settings(g, cell.plan, estimate.batch_size, estimate.context_length)
    tape, _ = record_layer(setting)
    bytes_by_name = tape.sum_saved_by_name().items()
    return sorted(((name, num_bytes / setting.tokens) for name, num_bytes in bytes_by_name), key=lambda pair: -pair[1])


def list_assumptions(estimate: Estimate) -> list[str]:
    """Return the assumptions of an estimate as sentences."""
    assumptions = [
        "A training step in its steady state: optimizer state is there, gradients were set to None.",
        "Transformers' own code in eager mode, attention by scaled_dot_product_attention, the loss on all positions.",
        "Inference is a prompt of the context length through the KV cache, logits of its last token alone.",
        f"LoRA of rank {estimate.lora_rank}, in float32; QLoRA (int8, int4) as transformers' Trainer runs it with "
        "bf16=True: what is not quantized is float32, under autocast.",
        "int8 finds no outliers in the activations.",
        "Reserved is what is allocated and the median of what simulated runs kept cached beside it: bands.json.",
    ]
    if estimate.lengths is not None:
        assumptions.append(f"The longest of {MANY_STEPS} batches, padded to its longest sample; the others take less.")
    if estimate.dtype in CHECKPOINT_FORMATS:
        assumptions.append(f"Scales for each {FORMAT_GROUP} weights; embedding, head and norms in half precision.")
    if estimate.subject.rule:
        assumptions.insert(0, estimate.subject.rule)
    if estimate.gpus > 1:
        assumptions.append(
            "Several GPUs: each rank has a micro-batch of its own, or a part of one (cp, ulysses). Plans of "
            "--parallel were compared with simulated ranks (memprof help accuracy); ZeRO-1 and ZeRO-2 were not."
        )
    return assumptions
