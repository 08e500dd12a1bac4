"""What an active dispatch mode changes in the autograd engine, put right.

The engine adds up gradients that meet at one tensor. Where it holds the only reference to the first one, it adds the
second in place (torch/csrc/autograd/input_buffer.cpp, `accumulate`), but not while a dispatch mode is active: then it
calls `add` and allocates. The mode sees that call and does what a plain eager run does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_use_count = torch.Tensor._use_count
_storage_use_count = torch._C._storage_Use_Count
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class _Probe(TorchDispatchMode):
    """Sees one accumulation whose first gradient the engine alone holds, and notes the reference counts."""

    counts = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            self.counts = _counts(args[0])
        return func(*args, **(kwargs or {}))


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage, as seen from inside a dispatch mode."""
    return _use_count(tensor), _storage_use_count(tensor.untyped_storage()._cdata)


class Accumulation:
    """Recognises the engine's accumulations and tells which of them are in place on a run without modes."""

    def __init__(self) -> None:
        leaf = torch.empty(2, device="meta", requires_grad=True)
        probe = _Probe()
        with torch.enable_grad():
            loss = (leaf.sin() * leaf.cos()).sum()
            with probe:
                torch.autograd.grad(loss, leaf)
        self._sole_owner = probe.counts

    def is_in_place(self, args: Any, kwargs: Any) -> bool:
        """Whether `add(*args)` is the engine adding to a gradient that nobody else holds."""
        if kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        first, second = args
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        # Called by the engine itself: no Python of a hook, a custom backward or a recomputation in between.
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN_DIR):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or frame.f_code is not _ENGINE:
            return False
        references, storage_references = _counts(first)
        sole, storage_sole = self._sole_owner
        return references <= sole and storage_references <= storage_sole and _is_dense(first)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


_OWN_DIR = __file__.rsplit("/", 1)[0]
