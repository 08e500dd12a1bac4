"""Fused optimizers of apex, and deepspeed's copies of them: one kernel over lists of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

CHUNK_SIZE = 2048 * 32  # elements


class MultiTensorApply:
    """A callable that calls a kernel over lists of tensors with its chunk size."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


class FusedOptimizer(Optimizer):
    """The base of optimizers that update all parameters of a dtype in one kernel."""

    set_grad_none: bool
    sparse_error = "Apex's optimizers do not support sparse gradients"
    dtype_error = "this optimizer of Apex does not support {}"

    def zero_grad(self) -> None:  # type: ignore[override]
        """Set gradients to None if `set_grad_none`, else to zeros."""
        super().zero_grad(set_to_none=self.set_grad_none)

    def _iter_parameters(self, group: dict[str, Any], dtypes: tuple[torch.dtype, ...] = ()) -> Iterable[torch.Tensor]:
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    raise RuntimeError(self.sparse_error)
                if dtypes and parameter.dtype not in dtypes:
                    raise RuntimeError(self.dtype_error.format(parameter.dtype))
                yield parameter

    def _group_by_dtype(self, rows: Iterable[tuple[Any, ...]], dtypes: tuple[torch.dtype, ...]) -> list[list[Any]]:
        """Return, for each dtype of parameters, the rows (gradient, parameter, states ...) as one list per column."""
        rows_by_dtype: dict[torch.dtype, list[Any]] = {}
        for row in rows:
            if row[1].dtype not in dtypes:
                raise RuntimeError(self.dtype_error.format(row[1].dtype))
            rows_by_dtype.setdefault(row[1].dtype, []).append(row)
        return [list(map(list, zip(*rows_by_dtype[dtype], strict=True))) for dtype in dtypes if dtype in rows_by_dtype]

    def _refuse_arguments(self, *arguments: Any) -> None:
        """Raise RuntimeError if one of Apex's old arguments of `step` is not None."""
        if any(argument is not None for argument in arguments):
            raise RuntimeError("FusedAdam has been updated: call step() with no arguments.")
