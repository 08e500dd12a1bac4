"""Fixes freeze and lora, which reduce the number of trained parameters."""

from __future__ import annotations

from torch import nn

from memprof.errors import UsageError, first_line, not_installed
from memprof.fixes.applied import Changes, check_at_least
from memprof.fixes.catalog.fix import LORA, VALUE, Fix, Numerics, Tier
from memprof.workload.adapters import match_parameters, parse_target_modules, translate_peft_errors
from memprof.workload.quantization import import_quietly

DEFAULT_RANK = 8


@Fix(
    name="freeze", order=110, numerics=Numerics.DIFFERENT, saves=("gradients", "optimizer state"),
    changes="freeze parameters",
    cost="what is frozen does not learn",
    options={"frozen": "patterns of parameter names, such as 'model.embed*'; * stands for anything"},
    main_option="frozen", main_type=str, required=("frozen",), training_only=True, trains_another=True,
    edits={"freeze": VALUE}, detect=lambda spec: spec.freeze is not None,
)  # fmt: skip
def install_freeze(model: nn.Module, changes: Changes, *, frozen: str) -> None:
    """Freeze the parameters that match the patterns `frozen` (with commas).
    Raises UsageError if a pattern matches no parameter."""
    parameters = match_parameters(model, frozen, "freeze: a pattern names no parameter")
    _restore_flags_on_undo(model, changes)
    for parameter in parameters:
        parameter.requires_grad_(False)
    changes.note(f"{len(parameters)} of {len(list(model.parameters()))} parameters are frozen")


@Fix(
    name="lora", order=120, numerics=Numerics.DIFFERENT, saves=("gradients", "optimizer state"),
    changes="train small matrices of PEFT beside a frozen model",
    cost="only the adapter learns",
    options=LORA,
    main_option="lora_rank", packages=("peft",), training_only=True, trains_another=True,
    conflicts={"freeze": "LoRA freezes the whole model itself"}, edits={"adapter": "lora", "lora_rank": VALUE},
    detect=lambda spec: spec.adapter == "lora" and spec.quantize is None,
    ladder_order=140, search_order=110, tiers=(Tier.ADAPTER,),
    helps={"doctor: smaller": 50},
)  # fmt: skip
def install_lora(
    model: nn.Module, changes: Changes, *, lora_rank: int = DEFAULT_RANK, lora_targets: str | None = None
) -> None:
    """Freeze the model, and add LoRA matrices to its linear layers with PEFT. Raises UsageError if PEFT is missing or
    finds no module to adapt, `lora_rank` is below 1, or the model has LoRA already."""
    try:
        peft = import_quietly("peft")
    except ImportError as error:
        raise not_installed("lora needs PEFT", first_line(error), "peft") from None
    check_at_least(1, "lora_rank", lora_rank)
    if any(hasattr(module, "lora_A") for module in model.modules()):
        raise UsageError("lora is already on", value=type(model).__name__)
    _restore_flags_on_undo(model, changes)
    _restore_modules_on_undo(model, changes)
    config = peft.LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=parse_target_modules(lora_targets))
    with translate_peft_errors("lora_targets='q_proj,v_proj', or 'all-linear'"):
        # LoraModel and not get_peft_model, so that the caller's model is adapted and not wrapped.
        peft.LoraModel(model, config, "default")
    trained = [p for p in model.parameters() if p.requires_grad]
    changes.note(f"LoRA of rank {lora_rank}: {sum(p.numel() for p in trained):,} numbers are trained")


def _restore_flags_on_undo(model: nn.Module, changes: Changes) -> None:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)

    changes.on_undo(restore)


def _restore_modules_on_undo(model: nn.Module, changes: Changes) -> None:
    """Save the children, attributes and hooks of each module of `model` now, for the fix's undo to restore."""
    saved = [
        (
            module,
            dict(module._modules),
            dict(vars(module)),
            {k: dict(v) for k, v in vars(module).items() if k.endswith("_hooks")},
        )
        for module in model.modules()
    ]

    def restore() -> None:
        for module, children, attributes, hooks in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)
            for name, saved_hooks in hooks.items():
                vars(module)[name].clear()
                vars(module)[name].update(saved_hooks)

    changes.on_undo(restore)
