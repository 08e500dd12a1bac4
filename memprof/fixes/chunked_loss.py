"""Fix chunked-loss: in a forward with labels, the head returns lazy logits, and the loss is computed chunk by chunk.

The fix replaces the forwards of the model, to detect labels, and of its head. Calls without labels are unchanged.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.fixes.applied import Changes, ReplacedForward, check_at_least
from memprof.fixes.catalog.fix import ALL_TIERS, Fix, Numerics
from memprof.fixes.head_loss import ChunkRows
from memprof.fixes.lazy_logits import LazyLogits, LogitsPolicy
from memprof.units import GIB, parse_gib

# With a vocabulary of 152k a chunk has 1,177 rows: enough for the product to be limited by arithmetic and not by memory
# bandwidth (the sum of weight gradients is read and written once per chunk).
CHUNK_BYTES = GIB
# threshold="auto" chunks full logits above this size, or above an eighth of the GPU's memory if that is smaller.
THRESHOLD_BYTES = 10 * GIB
_LABELS = ("labels", "label", "targets", "target", "lm_labels")
_HEADS = ("lm_head", "embed_out", "output_projection", "unembed", "output", "head")


@Fix(
    name="chunked-loss", order=150, numerics=Numerics.EXACT, saves=("logits and loss",),
    changes="compute the loss in chunks of tokens: the full logits never exist",
    cost="one more product with the head's weight: a third of the head's time",
    options={
        "chunk_size": "tokens whose logits exist at a time; chosen from chunk_bytes if not given",
        "chunk_bytes": "bytes that a chunk of logits may take; 1 GiB if not given",
        "threshold": "bytes of full logits below which nothing is chunked, or 'auto'; 0 if not given",
        "head": "name of the head, where the model does not tell",
    },
    main_option="chunk_size", named_values={"auto": {"threshold": "auto"}}, training_only=True,
    ladder_order=60, script_order=10, search_order=50, tiers=ALL_TIERS, ladder_against=("temporaries",),
    helps={"doctor: logits": 10},
    doctor_texts={"doctor: logits": "compute the loss in chunks: the full logits never exist"},
)  # fmt: skip
def install(
    model: nn.Module,
    changes: Changes,
    *,
    chunk_size: int | None = None,
    chunk_bytes: int | str | None = None,
    threshold: int | str = 0,
    head: str | None = None,
) -> None:
    """Replace the forwards of the model and of its head; the parameters are the options of the fix. Raises UsageError
    if an option is out of range, the model has no linear head, its forward takes no labels, or the head has hooks or a
    replaced forward, which would get lazy logits."""
    if chunk_size is not None:
        check_at_least(1, "chunk_size", chunk_size, " token", "such as chunk_size=4096")
    rows = ChunkRows(chunk_size, _parse_bytes("chunk_bytes", CHUNK_BYTES if chunk_bytes is None else chunk_bytes, 1))
    limit = None if threshold == "auto" else _parse_bytes("threshold", threshold, 0)
    name, module = find_output_head(model, head)
    _check_head(name, module, changes)
    assert isinstance(module, nn.Linear)
    label_argument = _find_label_argument(model, changes)
    state = _State(rows, limit)
    changes.set_attribute(module, "forward", _HeadForward(module, state))
    changes.set_attribute(model, "forward", _ModelForward(model, label_argument, state))
    size = f"{chunk_size:,} tokens" if chunk_size is not None else f"{rows.budget_bytes:,} bytes"
    changes.note(f"{name} ({module.in_features} x {module.out_features}): loss in chunks of {size}")


@dataclass
class _State:
    """State that the replaced forwards of a model and of its head share."""

    rows: ChunkRows
    threshold: int | None
    label_flags: list[bool] = field(default_factory=list)  # one entry per forward of the model that is under way

    @property
    def policy(self) -> LogitsPolicy:
        """Return the policy for new `LazyLogits`."""
        return LogitsPolicy(self.rows, self._note_full_logits)

    def _note_full_logits(self, reason: str) -> None:
        """Warn that the operator `reason` needs the full logits, if it is called inside the model's forward."""
        if self.label_flags:
            warnings.warn(f"chunked-loss: the model's {reason} needs the full logits: they were made", stacklevel=2)

    def is_chunked(self, hidden: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether the running forward has labels, and full logits of at least `threshold` bytes."""
        if not (self.label_flags and self.label_flags[-1]) or not hidden.is_floating_point():
            return False
        threshold = self.threshold
        if threshold is None:
            threshold = THRESHOLD_BYTES
            if hidden.is_cuda:
                threshold = min(threshold, torch.cuda.get_device_properties(hidden.device).total_memory // 8)
        return hidden.numel() // hidden.shape[-1] * weight.shape[0] * hidden.element_size() >= threshold


class _HeadForward(ReplacedForward):
    """Replaced forward of the head, which returns `LazyLogits` where the loss is to be chunked."""

    def __init__(self, head: nn.Linear, state: _State) -> None:
        super().__init__(head)
        self._state = state

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        head = self._module
        weight: torch.Tensor = head.weight
        bias: torch.Tensor | None = head.bias
        if not self._state.is_chunked(input, weight):
            return self._forward(input)
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type) and input.dtype != torch.float64:
            # Autocast would cast the operands of the product.
            dtype = torch.get_autocast_dtype(device_type)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return LazyLogits(input, weight, bias, self._state.policy)


class _ModelForward(ReplacedForward):
    """Replaced forward of the model, which records whether labels are given."""

    def __init__(self, model: nn.Module, label_argument: str | None, state: _State) -> None:
        super().__init__(model)
        self._labels = label_argument
        self._state = state
        self._parameter_names = list(inspect.signature(model.forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self._parameter_names, args, strict=False)) | kwargs
        names = _LABELS if self._labels is None else (self._labels,)
        self._state.label_flags.append(any(arguments.get(name) is not None for name in names))
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._state.label_flags.pop()


def find_output_head(model: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Return (name, module) of the output head: module `name`, `get_output_embeddings()`, or a linear layer with a
    usual name such as lm_head. Raises UsageError if there is none."""
    modules = dict(model.named_modules())
    if name is not None:
        if name not in modules:
            raise UsageError(
                "the model has no such module", value=repr(name), hint="head= is a name of named_modules()"
            )
        return name, modules[name]
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is None:
        head = next((modules[usual] for usual in _HEADS if isinstance(modules.get(usual), nn.Linear)), None)
    if head is None:
        hint = "it is for models whose last linear layer makes logits; head='name' names that layer"
        raise UsageError("chunked-loss does not apply: the model has no lm_head", value=type(model).__name__, hint=hint)
    return next((module_name for module_name, module in modules.items() if module is head), "head"), head


def _check_head(name: str, head: nn.Module, changes: Changes) -> None:
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        class_name = f"{name}: {type(head).__module__}.{type(head).__qualname__}"
        hint = "apply it before the head is wrapped, or leave the head out (quantization, adapters)"
        raise changes.does_not_apply("the head is no plain torch.nn.Linear", class_name, hint)
    hook_kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = [class_name for class_name in hook_kinds if getattr(head, f"_{class_name}", None)]
    if hooks or "forward" in vars(head):
        description = f"{name}: {', '.join(hooks) or 'a forward of its own'}"
        hint = "remove them, or apply it before they are registered"
        raise changes.does_not_apply("the head has hooks, which expect the full logits", description, hint)


def _find_label_argument(model: nn.Module, changes: Changes) -> str | None:
    """Return the name of the label parameter of the model's forward; None if the forward takes any keyword argument."""
    parameters = inspect.signature(model.forward).parameters
    for name in _LABELS:
        if name in parameters:
            return name
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    signature = f"{type(model).__name__}.forward({', '.join(parameters)})"
    hint = f"its forward must take one of {', '.join(_LABELS)} and call torch's cross_entropy"
    raise changes.does_not_apply("the model computes no loss", signature, hint)


def _parse_bytes(name: str, value: int | str, minimum: int) -> int:
    num_bytes = parse_gib(value) if isinstance(value, str) else value
    check_at_least(minimum, name, num_bytes, " bytes", "bytes, or text like '2GiB'")
    return num_bytes
