"""Fix micro-batch: forward and backward process some rows of a batch at a time; the gradients do not change.

The loss of the full batch is a mean over labels, or over rows if there are no labels. So the loss of each micro-batch
is weighted with its share of the labels or rows. A model that compares each position with the next label has one label
fewer than positions in its loss; the targets of the first micro-batch's call to cross-entropy show this shift.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from memprof.errors import UsageError
from memprof.fixes.applied import Changes, check_at_least
from memprof.fixes.catalog.fix import ALL_TIERS, Fix, Numerics
from memprof.torch_private import kernels, tensors
from memprof.torch_private.pytree import tree_flatten, tree_unflatten

_CROSS_ENTROPY = (
    functional.cross_entropy,
    functional.nll_loss,
    kernels.cross_entropy_loss,
    kernels.nll_loss_nd,
)
_LABELS = ("labels", "targets", "target", "y")


@Fix(
    name="micro-batch", order=200, numerics=Numerics.EXACT, saves=("activations", "logits and loss", "inputs"),
    changes="run forward and backward on some rows of a batch at a time, and accumulate the gradients",
    in_code="run forward and backward on micro-batches of {value}, and one optimizer step for the whole batch",
    cost="kernels work on fewer rows: slower where these do not fill the GPU",
    options={
        "micro_batch_size": "rows at a time; 1 if not given",
        "shift_labels": "whether the model's loss compares each position with the next label; found out if not "
        "given",
        "ignore_index": "label that the loss leaves out; -100 if not given",
        "loss": "a function from the model's outputs and the batch to the loss; the outputs' own if not given",
    },
    main_option="micro_batch_size",
    conflicts={"optimizer-in-backward": "it steps after each micro-batch, and not after the last"},
    edit="memprof.fixes.spec_edits:split_batch",
    useless_if={"batch_size": (1, "there is one sequence in a micro-batch already")},
    ladder_order=90, search_order=80, tiers=ALL_TIERS, ladder_against=("temporaries", "KV cache"),
    helps={"doctor: smaller": 20},
    doctor_texts={"doctor: smaller": "fewer rows at a time, gradients added up: the same step"},
)  # fmt: skip
def install(
    model: nn.Module,
    changes: Changes,
    *,
    micro_batch_size: int = 1,
    shift_labels: bool | None = None,
    ignore_index: int = -100,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> None:
    """Create a `MicroBatches` as the fix's result. Raises UsageError if the model has batch normalization, `loss` is
    not callable, or `micro_batch_size` is below 1."""
    check_at_least(1, "micro_batch_size", micro_batch_size)
    if loss is not None and not callable(loss):
        raise UsageError("loss must be a function from outputs and batch to the loss", value=type(loss).__name__)
    for name, module in model.named_modules():
        if isinstance(module, tensors.BatchNorm):
            reason, class_name = "a module's result depends on all rows of a batch", type(module).__name__
            hint = "torch.nn.GroupNorm, or other normalisation of single rows, has no such statistics"
            raise changes.does_not_apply(reason, f"{name} ({class_name})", hint)
    changes.result(MicroBatches(model, micro_batch_size, shift_labels, ignore_index, loss))
    changes.note(
        f"{micro_batch_size} rows at a time: loss = applied.results['micro-batch'](**batch) is forward and backward"
    )


@dataclass(eq=False)
class MicroBatches:
    """Forward and backward of a full batch, `micro_batch_size` rows at a time.

        step = applied.results["micro-batch"]
        loss = step(**batch)  # instead of: loss = model(**batch).loss; loss.backward()
        optimizer.step()

    Gradients accumulate, as in any backward. Rows must be independent of each other, and the loss must be a mean over
    labels other than `ignore_index`, or over rows. A further term, such as a router's load balance, becomes the mean
    over the micro-batches. With `num_items_in_batch` in the batch, the micro-batches' losses are added. Tensors with as
    many rows as the labels (or as the first tensor) are split; all other arguments are passed to every micro-batch.
    `scaler` may be set to a `torch.amp.GradScaler`.
    """

    model: nn.Module = field(repr=False)
    micro_batch_size: int
    shift_labels: bool | None
    ignore_index: int
    loss: Callable[[Any, Any], torch.Tensor] | None
    scaler: torch.amp.GradScaler | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of each micro-batch; return the detached loss of the full batch. Raises UsageError
        if the batch has no rows, the model returns no loss, or it is unclear which labels the loss counts."""
        leaves, tree = tree_flatten((args, kwargs))
        labels = self._find_labels(args, kwargs)
        row_tensor = labels if labels is not None else next((t for t in leaves if _has_rows(t)), None)
        if row_tensor is None or not row_tensor.shape[0]:
            raise UsageError("micro-batch needs a batch with rows", value=f"{len(leaves)} arguments")
        rows = row_tensor.shape[0]
        is_split = [_has_rows(leaf) and leaf.shape[0] == rows for leaf in leaves]
        counts: Any = None
        total: torch.Tensor | None = None
        for start in range(0, rows, self.micro_batch_size):
            rows_slice = slice(start, start + self.micro_batch_size)
            inputs, named_inputs = tree_unflatten(
                [leaf[rows_slice] if split else leaf for leaf, split in zip(leaves, is_split, strict=True)], tree
            )
            if start == 0:
                with _TargetRecorder() as recorder:
                    loss = self._forward(inputs, named_inputs)
                counts = self._count_per_row(labels, kwargs, row_tensor, recorder.targets)
                recorder.targets.clear()
            else:
                loss = self._forward(inputs, named_inputs)
            loss = self._weigh_loss(loss, counts, rows_slice)
            if loss.requires_grad:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            loss_value = loss.detach()
            total = loss_value if total is None else total + loss_value
            del loss
        assert total is not None
        return total

    def _forward(self, args: Any, kwargs: Any) -> torch.Tensor:
        outputs = self.model(*args, **kwargs)
        if self.loss is not None:
            return self.loss(outputs, kwargs or args)
        loss = _find_loss(outputs)
        if loss is None:
            hint = "give the labels to the model, or loss=a function from outputs and batch to the loss"
            raise UsageError("micro-batch: the model's outputs have no loss", value=type(outputs).__name__, hint=hint)
        return loss

    def _weigh_loss(self, loss: torch.Tensor, counts: Any, rows_slice: slice) -> torch.Tensor:
        if counts is None:  # sums
            return loss
        count, total = counts[rows_slice].sum(), counts.sum()
        fraction = torch.where(total > 0, count.to(torch.promote_types(loss.dtype, torch.float32)) / total, 1.0)
        # A mean over no labels is nan. If all labels are ignored, the loss of the whole batch is nan too.
        return torch.where((count > 0) | (total == 0), loss * fraction, 0.0)

    def _find_labels(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        arguments = kwargs
        if args:
            with contextlib.suppress(TypeError, ValueError):  # no signature, or arguments that the model will reject
                arguments = inspect.signature(self.model.forward).bind_partial(*args, **kwargs).arguments
        return next((arguments[name] for name in _LABELS if isinstance(arguments.get(name), torch.Tensor)), None)

    def _count_per_row(
        self,
        labels: torch.Tensor | None,
        batch: Mapping[str, Any],
        row_tensor: torch.Tensor,
        targets: list[torch.Tensor],
    ) -> torch.Tensor | None:
        """Return the number of labels that the loss counts in each row, [rows]; None if losses are to be summed."""
        if batch.get("num_items_in_batch") is not None:
            return None
        if labels is None or labels.is_floating_point():
            return torch.ones(row_tensor.shape[0], dtype=torch.int64, device=row_tensor.device)
        if labels.dim() > 1 and self._has_shifted_labels(labels[: self.micro_batch_size], targets):
            labels = labels[..., 1:]
        is_counted = labels != self.ignore_index
        return is_counted.flatten(1).sum(1) if is_counted.dim() > 1 else is_counted.long()

    def _has_shifted_labels(self, labels: torch.Tensor, targets: list[torch.Tensor]) -> bool:
        if self.shift_labels is not None:
            return self.shift_labels
        for target in targets:
            if target.numel() == labels[..., 1:].numel():
                return True
            if target.numel() == labels.numel():
                flat = target.reshape(labels.shape).to(labels.device)
                return torch.equal(flat[..., :-1], labels[..., 1:]) and not torch.equal(flat, labels)
        raise UsageError(
            "micro-batch cannot tell which labels the loss counts",
            value=f"labels {list(labels.shape)}",
            hint="shift_labels=True if each position is compared with the next label, else False",
        )


class _TargetRecorder(TorchFunctionMode):
    """Torch function mode that records the targets passed to cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CROSS_ENTROPY:
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(target, torch.Tensor) and not target.is_floating_point():
                self.targets.append(target)
        return func(*args, **kwargs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _find_loss(outputs: Any) -> torch.Tensor | None:
    if isinstance(outputs, torch.Tensor):
        return outputs if not outputs.dim() else None
    if isinstance(outputs, Mapping):
        outputs = [outputs["loss"]] if isinstance(outputs.get("loss"), torch.Tensor) else []
    elif isinstance(getattr(outputs, "loss", None), torch.Tensor):
        outputs = [outputs.loss]
    elif not isinstance(outputs, (tuple, list)):
        return None
    return next((item for item in outputs if isinstance(item, torch.Tensor) and not item.dim()), None)
