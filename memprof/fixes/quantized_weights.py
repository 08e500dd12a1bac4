"""Fixes 8-bit-weights, 4-bit-weights and qlora: linear layers with bitsandbytes' quantized weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError, first_line, not_installed
from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import FOUR_BITS, LORA, ON_THE_GPU, VALUE, WEIGHTS, Fix, Numerics, Tier
from memprof.fixes.chunked_loss import find_output_head
from memprof.fixes.optimizers import refuse_gradients
from memprof.fixes.trainable import DEFAULT_RANK, install_lora
from memprof.workload.quantization import import_quietly

# Activations from this magnitude on stay in half precision: the default of LLM.int8 and of transformers.
OUTLIER_THRESHOLD = 6.0
_QUANT_TYPES = ("nf4", "fp4")


@Fix(
    name="8-bit-weights", order=80, numerics=Numerics.APPROXIMATE, saves=WEIGHTS,
    changes="convert linear layers but the head to bitsandbytes' LLM.int8: one byte a weight, frozen",
    cost="rounded weights and activations; the quantized layers do not learn",
    packages=("bitsandbytes",), trains_another=True, bench="quantized weights",
    conflicts={
        "4-bit-weights": "weights are quantized once",
        "qlora": "its weights are in 4 bits",
        **ON_THE_GPU,
    },
    edits={"quantize": "int8"}, catalog_only=True,
    detect=lambda spec: spec.adapter is None and spec.quantize == "int8",
)  # fmt: skip
def install_8_bit(model: nn.Module, changes: Changes) -> None:
    """Quantize linear layers to LLM.int8; raise UsageError without bitsandbytes, or without layers to quantize."""
    bnb = _import_bitsandbytes(changes.fix)

    def make_layer(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Module:
        outputs, inputs = weight.shape
        layer = bnb.nn.Linear8bitLt(
            inputs, outputs, bias is not None, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD, device="meta"
        )
        # bitsandbytes quantizes weights only when they leave host memory (transformers, integrations/bitsandbytes.py).
        quantized = bnb.nn.Int8Params(weight.to("cpu"), requires_grad=False, has_fp16_weights=False)
        layer.weight = quantized.to(weight.device)
        return layer  # type: ignore[no-any-return]

    _replace_linear_layers(model, changes, make_layer)


@Fix(
    name="4-bit-weights", order=90, numerics=Numerics.APPROXIMATE, saves=WEIGHTS,
    changes="convert linear layers but the head to bitsandbytes' 4-bit format: half a byte a weight, frozen",
    cost="16 values a weight; each is unpacked for its product; the quantized layers do not learn",
    options=FOUR_BITS,
    packages=("bitsandbytes",), trains_another=True, bench="quantized weights",
    conflicts={"qlora": "it quantizes the weights itself", **ON_THE_GPU},
    edits={"quantize": "nf4"}, catalog_only=True,
    detect=lambda spec: spec.adapter is None and spec.quantize in ("nf4", "fp4"),
    helps={"doctor: weights": 20, "doctor: spilled": 10},
)  # fmt: skip
def install_4_bit(model: nn.Module, changes: Changes, *, quant_type: str = "nf4", double_quant: bool = True) -> None:
    """Quantize linear layers to 4 bits; matrix products use the weights' original dtype. Raises UsageError if
    bitsandbytes is not installed, `quant_type` is unknown, or there is no linear layer to quantize."""
    if quant_type not in _QUANT_TYPES:
        raise UsageError("unknown quant_type", value=repr(quant_type), hint=f"one of {', '.join(_QUANT_TYPES)}")
    bnb = _import_bitsandbytes(changes.fix)

    def make_layer(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Module:
        outputs, inputs = weight.shape
        layer = bnb.nn.Linear4bit(
            inputs, outputs, bias is not None, weight.dtype, compress_statistics=double_quant, quant_type=quant_type,
            device="meta",
        )  # fmt: skip
        layer.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=double_quant, quant_type=quant_type, module=layer
        ).to(weight.device)
        return layer  # type: ignore[no-any-return]

    _replace_linear_layers(model, changes, make_layer)


@Fix(
    name="qlora", order=100, numerics=Numerics.APPROXIMATE, saves=WEIGHTS,
    changes="convert weights to 4 bits, and train PEFT's matrices beside them",
    cost="16 values a weight; only the adapter learns",
    options={**FOUR_BITS, **LORA},
    main_option="lora_rank", packages=("bitsandbytes", "peft"), training_only=True, trains_another=True,
    conflicts={
        "lora": "it attaches LoRA itself",
        "freeze": "LoRA freezes the whole model itself",
        **ON_THE_GPU,
    },
    edits={"quantize": "nf4", "adapter": "lora", "lora_rank": VALUE}, catalog_only=True,
    detect=lambda spec: spec.adapter == "lora" and spec.quantize is not None,
    ladder_order=150, search_order=110, tiers=(Tier.QUANTIZED_ADAPTER,), helps={"doctor: parameters": 30},
)  # fmt: skip
def install_qlora(
    model: nn.Module,
    changes: Changes,
    *,
    quant_type: str = "nf4",
    double_quant: bool = True,
    lora_rank: int = DEFAULT_RANK,
    lora_targets: str | None = None,
) -> None:
    """Quantize the linear layers to 4 bits, then add LoRA with PEFT; norms, embedding and head keep their dtype."""
    install_4_bit(model, changes, quant_type=quant_type, double_quant=double_quant)
    install_lora(model, changes, lora_rank=lora_rank, lora_targets=lora_targets)


def _replace_linear_layers(
    model: nn.Module, changes: Changes, make_layer: Callable[[torch.Tensor, nn.Parameter | None], nn.Module]
) -> None:
    """Replace each linear layer by `make_layer(weight, bias)`, except the head and layers with a shared weight."""
    head = _find_head_or_none(model)
    num_owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers = [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent.named_children()
        if _is_linear(module) and module is not head and num_owners[id(module.weight)] == 1
    ]
    if not layers:
        hint = "quantized layers are not quantized again"
        raise changes.does_not_apply("no linear layer beside the head", model, hint)
    would_freeze = [parameter for *_, module in layers for parameter in module.parameters()]
    refuse_gradients(would_freeze, changes.fix, type(model).__name__, "of layers that would be frozen")
    old_bytes = new_bytes = 0
    for parent, name, module in layers:
        weight: Any = module.weight
        bias: Any = module.bias
        matrix = weight.detach()
        # transformers' Conv1D, a linear layer too, keeps its weight transposed.
        layer = make_layer(matrix if type(module) is nn.Linear else matrix.t(), bias)
        if bias is not None:
            layer.register_parameter("bias", nn.Parameter(bias.detach(), requires_grad=False))
        layer.train(module.training)
        old_bytes += weight.nbytes
        quantized: Any = layer.weight
        new_bytes += quantized.nbytes
        changes.set_module(parent, name, layer)
    changes.note(
        f"{len(layers)} linear layers: weights of {old_bytes:,} bytes became {new_bytes:,} and their scales; frozen"
    )


def _find_head_or_none(model: nn.Module) -> nn.Module | None:
    try:
        return find_output_head(model)[1]
    except UsageError:  # it has none
        return None


def _is_linear(module: nn.Module) -> bool:
    conv = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    return type(module) in (nn.Linear, conv)


def _import_bitsandbytes(fix: str) -> Any:
    try:
        return import_quietly("bitsandbytes")
    except ImportError as error:
        raise not_installed(f"{fix} needs bitsandbytes", first_line(error), "bitsandbytes") from None
