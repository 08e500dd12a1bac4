"""Fix activation-checkpointing: layers or modules save only their inputs, and run again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from memprof.errors import unknown_name
from memprof.fixes.applied import Changes, ReplacedForward, check_in_range, has_forward
from memprof.fixes.catalog.fix import NOT_STREAMED_TIERS, Fix, Numerics
from memprof.watch.model_settings import is_checkpointing
from memprof.workload.layers import drop_caches, find_layers, find_modules

_aten = torch.ops.aten
# The operators whose recomputation costs most.
_SAVED_OPERATORS = [
    getattr(_aten, name).default
    for name in (
        "mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)  # releases differ
]  # fmt: skip


_POLICIES: dict[str, Callable[[], Any]] = {
    "full": noop_context_fn,
    "selective": partial(create_selective_checkpoint_contexts, _SAVED_OPERATORS),
}


@Fix(
    name="activation-checkpointing", order=160, numerics=Numerics.EXACT, saves=("activations",),
    changes="keep only the inputs of layers, and run these again in the backward",
    cost="one more forward of what is checkpointed",
    options={
        "every": "checkpoint every n-th layer; 1 if not given",
        "modules": "checkpoint the modules of these names instead; * stands for anything",
        "policy": "'selective' keeps the results of matrix products and attention, and runs the rest again; "
        "'full' keeps nothing; full if not given",
    },
    main_option="every", training_only=True, is_checkpointing=True, detect=lambda spec: spec.activation_checkpointing,
    ladder_order=100, script_order=20, search_order=90, tiers=NOT_STREAMED_TIERS,
    helps={"doctor: activations": 10, "doctor: smaller": 30},
)  # fmt: skip
def install(
    model: nn.Module, changes: Changes, *, every: int = 1, modules: str | None = None, policy: str = "full"
) -> None:
    """Checkpoint every `every`-th layer, or the named `modules`. Raises UsageError if checkpointing is on already, the
    model has no layers or no such module, `every` is out of range, or `policy` is unknown."""
    if policy not in _POLICIES:
        raise unknown_name("policy", policy, _POLICIES)
    if is_checkpointing(model):
        raise changes.already_on(model, "gradient_checkpointing_disable()")
    if modules is not None:
        targets = find_modules(model, modules, "activation-checkpointing")
    else:
        layers = find_layers(model, "activation-checkpointing")
        check_in_range("every", every, len(layers), ", the model's layers")
        targets = layers[every - 1 :: every]
    for name, module in targets:
        if has_forward(module, _CheckpointedForward):
            raise changes.already_on(name)
        changes.set_attribute(module, "forward", _CheckpointedForward(module, _POLICIES[policy]))
    exception = "" if policy == "full" else ", but for matrix products and attention, whose results are kept"
    changes.note(f"{len(targets)} modules run again in the backward: {targets[0][0]} to {targets[-1][0]}{exception}")


class _CheckpointedForward(ReplacedForward):
    """Replaced forward of a layer, checkpointed in training, without the KV cache, which it would fill twice."""

    def __init__(self, module: nn.Module, contexts: Callable[[], Any]) -> None:
        super().__init__(module)
        self._contexts = contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        args, kwargs = drop_caches(args, kwargs)
        if self._contexts is not noop_context_fn:
            # torch.compile cannot trace a context function that it does not know.
            kwargs["context_fn"] = self._contexts
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
