"""Cross-entropy of a linear head without full logits: the loss of every row, computed a few rows at a time.

The forward saves one number per row (the logarithm of the softmax's denominator) and the head's input. The backward
recomputes each chunk of logits and turns the chunk into its gradient in place. No tensor of rows x vocabulary exists.

torch's `F.linear_cross_entropy` and Liger compute the gradients in the forward instead. Here the backward recomputes
the logits: it knows the gradient of the loss, so that values are rounded as in the model's own loss, which decides with
float16 and a loss scale whether small gradients survive. Gradients of weight and input need no memory between forward
and backward, and backward's retain_graph works. The cost is one more product with the head's weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LogitsStep:
    """Elementwise operation between head and loss, whose derivative needs at most the operation's result.

    Args:
        kind: "cast" (to `value`), "mul", "div", "add" (by `value`) or "tanh".
        value: a dtype, a number, or a tensor of one element without gradient.
    """

    kind: str
    value: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the operation's result for logits `x`, as a new tensor."""
        if self.kind == "cast":
            return x.to(self.value)
        if self.kind == "tanh":
            return x.tanh()
        if self.kind == "add":
            return x + self.value
        return x * self.value if self.kind == "mul" else x / self.value

    def backward(self, grad: torch.Tensor, result: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the operand's gradient in `dtype`; `grad` is the gradient of `result`, which only "tanh" needs."""
        if self.kind == "cast":
            return grad.to(dtype)
        if self.kind == "tanh":
            assert result is not None
            return torch.ops.aten.tanh_backward(grad, result)
        if self.kind == "add":
            return grad
        return grad.mul_(self.value) if self.kind == "mul" else grad.div_(self.value)


@dataclass(frozen=True)
class ChunkRows:
    """Size of a chunk of logits: `chunk_size` rows, or, if None, as many rows as fit into `budget_bytes`."""

    chunk_size: int | None
    budget_bytes: int

    def count(self, rows: int, row_bytes: int) -> int:
        """Return the number of rows per chunk, at most `rows`, where one row takes `row_bytes` bytes."""
        limit = self.chunk_size if self.chunk_size is not None else self.budget_bytes // max(row_bytes, 1)
        return max(1, min(limit, rows))


def row_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    steps: Sequence[LogitsStep] = (),
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: ChunkRows,
) -> torch.Tensor:
    """Return the cross-entropy of each row, 0 where ignored, as `F.cross_entropy(..., reduction="none")` does.

    Args:
        hidden: rows x hidden size.
        weight: vocabulary x hidden size.
        bias: vocabulary, or None.
        target: rows, int64; each in [0, vocabulary) or `ignore_index`.
        steps: the operations on the logits before the loss.
        ignore_index: the label of rows that the loss leaves out.
        label_smoothing: as in `F.cross_entropy`.
        rows: the number of rows in a chunk.

    Returns:
        losses: rows, in float32 (float64 for float64 logits).
    """
    result: torch.Tensor = _RowLosses.apply(
        hidden, weight, bias, target, tuple(steps), ignore_index, label_smoothing, rows
    )
    return result


class _RowLosses(torch.autograd.Function):
    """Autograd function of the cross-entropy of each row, [rows]; `row_losses` documents the arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        steps: tuple[LogitsStep, ...],
        ignore_index: int,
        smoothing: float,
        rows: ChunkRows,
    ) -> torch.Tensor:
        loss_dtype = _get_accumulation_dtype(hidden.dtype, steps)
        size = rows.count(len(hidden), _compute_max_row_bytes(weight, steps, loss_dtype))
        ignored = target == ignore_index
        safe_target = target.masked_fill(ignored, 0)
        losses = torch.empty(len(hidden), dtype=loss_dtype, device=hidden.device)
        normalizers = torch.empty_like(losses)
        with _disable_autocast():
            for chunk in _make_chunk_slices(len(hidden), size):
                x = functional.linear(hidden[chunk], weight, bias)
                for step in steps:
                    x = step.forward(x)
                x = x.to(loss_dtype)
                target_logits = x.gather(1, safe_target[chunk].unsqueeze(1)).squeeze(1)
                mean = x.mean(1) if smoothing else None
                row_max = x.amax(1, keepdim=True)
                normalizer = x.sub_(row_max).exp_().sum(1).log_()
                # Shifted logits are subtracted, so that the logarithm is not rounded at the size of the logits.
                row_max = row_max.squeeze(1)
                loss = normalizer - (target_logits - row_max)
                if mean is not None:
                    loss = loss.mul_(1 - smoothing).add_((normalizer - (mean - row_max)).mul_(smoothing))
                losses[chunk] = loss
                normalizers[chunk] = normalizer.add_(row_max)
                del x
            losses.masked_fill_(ignored, 0)
        ctx.save_for_backward(hidden, weight, bias, safe_target, ignored, normalizers)
        ctx.steps, ctx.smoothing, ctx.size = steps, smoothing, size
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight, bias, safe_target, ignored, normalizers = ctx.saved_tensors
        # Masked and not multiplied by 0: if all rows are ignored, the mean's gradient is infinite.
        scale = grads[0].to(normalizers.dtype).masked_fill(ignored, 0).unsqueeze(1)
        normalizers = normalizers.unsqueeze(1)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with _disable_autocast():
            grad_hidden = torch.empty_like(hidden) if needs_hidden else None
            grad_weight = _WeightGradient(weight, len(hidden) <= ctx.size) if needs_weight else None
            grad_bias = torch.zeros_like(bias, dtype=normalizers.dtype) if needs_bias and bias is not None else None
            for chunk in _make_chunk_slices(len(hidden), ctx.size):
                grad = _compute_logits_gradient(
                    ctx, hidden[chunk], weight, bias, safe_target[chunk], normalizers[chunk], scale[chunk]
                )
                if grad_bias is not None:
                    grad_bias.add_(grad.sum(0, dtype=grad_bias.dtype))
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[chunk])
                if grad_weight is not None:
                    grad_weight.add_product(grad, hidden[chunk])
                del grad
            weight_gradient = None if grad_weight is None else grad_weight.result()
            return grad_hidden, weight_gradient, None if grad_bias is None else grad_bias.to(bias.dtype), *(None,) * 5


def _compute_logits_gradient(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    normalizers: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the head's output for one chunk, [rows x vocabulary].

    The logits are not a parameter, because torch.compile's frame evaluation, which stays on after an error in a
    program, would keep the caller's argument alive.
    """
    x = functional.linear(hidden, weight, bias)
    records: list[tuple[LogitsStep, torch.Tensor | None, torch.dtype]] = []
    for step in ctx.steps:
        input_dtype = x.dtype
        x = step.forward(x)
        records.append((step, x if step.kind == "tanh" else None, input_dtype))
    logits_dtype = x.dtype
    probabilities = x.to(normalizers.dtype)
    if any(saved is probabilities for _, saved, _ in records):
        probabilities = probabilities.clone()
    del x
    probabilities.sub_(normalizers).exp_()
    if ctx.smoothing:
        probabilities.sub_(ctx.smoothing / probabilities.shape[1])
    probabilities.scatter_add_(1, target.unsqueeze(1), torch.full_like(normalizers, ctx.smoothing - 1))
    grad = probabilities.mul_(scale)
    del probabilities
    grad = grad.to(logits_dtype)
    while records:
        step, result, input_dtype = records.pop()
        grad = step.backward(grad, result, input_dtype)
        del result
    return grad


class _WeightGradient:
    """Gradient of the weight, summed over chunks in float32, so that it is rounded once, as in a single product."""

    def __init__(self, weight: torch.Tensor, is_single_chunk: bool) -> None:
        self._weight = weight
        self._accumulates = weight.dtype in _HALF_DTYPES and not is_single_chunk
        self._total: torch.Tensor | None = None
        if not is_single_chunk:
            dtype = torch.float32 if self._accumulates else weight.dtype
            self._total = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)

    def add_product(self, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        if self._total is None:
            self._total = grad.t().mm(hidden)
        elif not self._accumulates:
            self._total.addmm_(grad.t(), hidden)
        elif grad.is_cuda and _MIXED_PRODUCT:
            torch.addmm(self._total, grad.t(), hidden, out_dtype=torch.float32, out=self._total)  # type: ignore[call-overload]
        else:
            self._total.addmm_(grad.t().to(torch.float32), hidden.to(torch.float32))

    def result(self) -> torch.Tensor:
        """Return the summed gradient in the dtype of the weight; zeros without rows."""
        if self._total is None:
            return torch.zeros_like(self._weight)
        return self._total.to(self._weight.dtype)


# Products of half precision into float32, on CUDA alone (torch >= 2.8).
_MIXED_PRODUCT = "dtype_out" in torch.ops.aten.addmm.overloads()


@contextlib.contextmanager
def _disable_autocast() -> Iterator[None]:
    """Context manager: switch autocast off, because all operands have the right dtype already."""
    with contextlib.ExitStack() as stack:
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _get_accumulation_dtype(dtype: torch.dtype, steps: Sequence[LogitsStep]) -> torch.dtype:
    for step in steps:
        if step.kind == "cast":
            dtype = step.value
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compute_max_row_bytes(weight: torch.Tensor, steps: Sequence[LogitsStep], loss_dtype: torch.dtype) -> int:
    """Return the bytes of one row of logits: the head's output, the result of each step, and the cast for the loss."""
    width, total = weight.element_size(), weight.element_size()
    for step in steps:
        width = step.value.itemsize if step.kind == "cast" else width
        total += width
    return weight.shape[0] * (total + loss_dtype.itemsize)


def _make_chunk_slices(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
