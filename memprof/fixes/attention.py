"""sdpa-attention: torch's scaled_dot_product_attention in a Hugging Face model that computes its scores eagerly."""

from __future__ import annotations

from torch import nn

from memprof.errors import UsageError
from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import ALL_TIERS, Fix, Numerics
from memprof.spec import OWN_ATTENTIONS

_FUSED = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@Fix(
    name="sdpa-attention", order=140, numerics=Numerics.EXACT, saves=("activations",),
    changes="use scaled_dot_product_attention, which keeps no scores in memory",
    cost="none: it is faster; no attention weights can be returned",
    ladder_order=50, script_order=50, search_order=30, tiers=ALL_TIERS,
    helps={"doctor: attention": 10},
    doctor_texts={"doctor: attention": "attention that keeps no scores: attn_implementation='sdpa'"},
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Switch the model to sdpa attention; raise UsageError if it is on already, or the model does not support it."""
    config = getattr(model, "config", None)
    switch = getattr(model, "set_attn_implementation", None)
    if config is None or switch is None:
        hint = "call torch.nn.functional.scaled_dot_product_attention in its attention"
        raise changes.does_not_apply("the model cannot switch its attention", model, hint)
    previous = config._attn_implementation
    if previous in OWN_ATTENTIONS:
        raise changes.does_not_apply("it is attention to all keys", f"--attention {previous}")
    if previous in _FUSED:
        raise changes.already_on(f"attn_implementation={previous!r}")
    changes.on_undo(lambda: switch(previous))
    try:
        switch("sdpa")
    except (ValueError, ImportError) as error:
        reason = str(error).partition(" yet")[0].splitlines()[0]
        raise UsageError("the model has no sdpa attention", value=reason) from None
    if config._attn_implementation != "sdpa":
        raise UsageError("the model has no sdpa attention", value=type(model).__name__)
    changes.note(f"attention: {previous} became sdpa")
