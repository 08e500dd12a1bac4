"""Corrections of what an active dispatch mode changes in the autograd engine.

The engine adds up gradients that meet at one tensor. Where it holds the only reference to the first one, it adds the
second in place (torch/csrc/autograd/input_buffer.cpp, `accumulate`), but not while a dispatch mode is active: then it
calls `add` and allocates. Several backward formulas do likewise (torch/csrc/autograd/FunctionsManual.cpp, wherever it
asks `areAnyTensorSubclassLike`): they fill a new tensor of zeros in place, or out of place under a mode. The allocation
tracker sees those calls and does what a plain eager run does.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch

from memprof.torch_private import autograd, tensors
from memprof.torch_private.dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Out-of-place operator of a backward formula -> what a plain run calls on the zeros that it has just made.
FILLS_ZEROS: dict[Any, Any] = {
    _aten.index_put.default: _aten.index_put_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.put.default: _aten.put_.default,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
}
_ENGINE = autograd.engine_run_backward_of_graph.get().__code__


class _Probe(TorchDispatchMode):
    """Sees one accumulation whose first gradient the engine alone holds, and notes the reference counts."""

    counts = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and autograd.current_graph_task_id() != -1:
            self.counts = _counts(args[0])
        return func(*args, **(kwargs or {}))


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage, as seen from inside a dispatch mode."""
    return tensors.use_count(tensor), tensors.storage_use_count(tensor.untyped_storage()._cdata)


@functools.cache
def _sole_owner() -> tuple[int, int]:
    """References to a gradient that the engine alone holds, as this torch has them."""
    leaf = torch.empty(2, device="meta", requires_grad=True)
    probe = _Probe()
    with torch.enable_grad():
        loss = (leaf.sin() * leaf.cos()).sum()
        with probe:
            torch.autograd.grad(loss, leaf)
    return probe.counts


class Accumulation:
    """Recognises the engine's accumulations and tells which of them are in place on a run without modes."""

    def __init__(self) -> None:
        self._sole_owner = _sole_owner()

    def is_in_place(self, args: Any, kwargs: Any, made_by_node: bool) -> bool:
        """Return whether `add(*args)` is the engine adding to a gradient that nobody else holds.

        A backward formula may add to a temporary of its own as well, and does so out of place; such a temporary was
        made by the node that is running (`made_by_node`). The engine adds to what that node made only if the node has
        several gradients for one and the same input.
        """
        if kwargs or not in_backward() or torch.is_grad_enabled():
            return False
        first, second = args
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        return self.is_sole_owner(first) and called_by_engine() and not (made_by_node and _feeds_distinct_inputs())

    def is_sole_owner(self, tensor: torch.Tensor) -> bool:
        """Return whether C++ code that now calls an operator on `tensor` alone refers to it and its memory."""
        references, storage_references = _counts(tensor)
        sole, storage_sole = self._sole_owner
        is_dense = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return references <= sole and storage_references <= storage_sole and is_dense


def _feeds_distinct_inputs() -> bool:
    """Return whether the autograd node that is running has at most one gradient for each input of another."""
    node = autograd.current_autograd_node()
    targets = [] if node is None else [target for target in node.next_functions if target[0] is not None]
    return len(set(targets)) == len(targets)


def in_backward() -> bool:
    """Return whether the autograd engine is running."""
    return autograd.current_graph_task_id() != -1


def called_by_engine() -> bool:
    """Return whether the engine's C++ called the operator: no hook, custom backward or recomputation in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TRANSPARENT):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


# torch wraps a dispatch mode's method so that dynamo leaves it alone; those frames are not the program's.
_MEMPROF = __file__.rsplit("/virtual/", 1)[0]
_TRANSPARENT = (
    f"{_MEMPROF}/virtual/",
    f"{_MEMPROF}/stubs/",
    torch.__path__[0] + "/_compile.py",
    torch.__path__[0] + "/_dynamo/",
)
