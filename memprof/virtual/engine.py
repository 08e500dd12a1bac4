"""Corrections of changes that an active dispatch mode causes in the autograd engine.

The engine adds up gradients of one tensor. Where it holds the only reference to the first gradient, it adds the second
in place (torch/csrc/autograd/input_buffer.cpp, `accumulate`); under a dispatch mode it calls `add` and allocates.
Several backward formulas that check `areAnyTensorSubclassLike` (torch/csrc/autograd/FunctionsManual.cpp) fill a new
tensor of zeros in place, and out of place under a mode. The dispatch mode sees those calls and does what a run without
modes does.
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
# Out-of-place operator of a backward formula -> operator that a run without modes calls on the new zeros.
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
_ENGINE_CODE = autograd.engine_run_backward_of_graph.get().__code__


class _ReferenceProbe(TorchDispatchMode):
    """Dispatch mode that records the reference counts of a gradient that only the autograd engine holds."""

    counts = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and autograd.current_graph_task_id() != -1:
            self.counts = _count_references(args[0])
        return func(*args, **(kwargs or {}))


def _count_references(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the reference counts of `tensor` and of its storage, as seen by a dispatch mode."""
    return tensors.use_count(tensor), tensors.storage_use_count(tensor.untyped_storage()._cdata)


@functools.cache
def _count_sole_owner_references() -> tuple[int, int]:
    """Return the reference counts of a gradient that only the autograd engine holds, and of its storage."""
    leaf = torch.empty(2, device="meta", requires_grad=True)
    probe = _ReferenceProbe()
    with torch.enable_grad():
        loss = (leaf.sin() * leaf.cos()).sum()
        with probe:
            torch.autograd.grad(loss, leaf)
    return probe.counts


class Accumulation:
    """Detection of gradient accumulations that the autograd engine does in place if no mode is active."""

    def __init__(self) -> None:
        self._sole_owner = _count_sole_owner_references()

    def is_in_place(self, args: Any, kwargs: Any, is_from_node: bool) -> bool:
        """Return whether `add(*args)` is the engine's accumulation into a gradient that only the engine holds.

        A backward formula also adds to its own temporaries, out of place; the running node made these
        (`is_from_node`). The engine adds to a tensor that the running node made only if the node has several
        gradients for the same input.
        """
        if kwargs or not is_in_backward() or torch.is_grad_enabled():
            return False
        first, second = args
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        return self.is_sole_owner(first) and is_called_by_engine() and not (is_from_node and _feeds_distinct_inputs())

    def is_sole_owner(self, tensor: torch.Tensor) -> bool:
        """Return whether the calling C++ code holds the only references to `tensor` and its storage."""
        references, storage_references = _count_references(tensor)
        sole, storage_sole = self._sole_owner
        is_dense = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return references <= sole and storage_references <= storage_sole and is_dense


def _feeds_distinct_inputs() -> bool:
    """Return whether the running autograd node has at most one gradient for each input of another node."""
    node = autograd.current_autograd_node()
    targets = [] if node is None else [target for target in node.next_functions if target[0] is not None]
    return len(set(targets)) == len(targets)


def is_in_backward() -> bool:
    """Return whether the autograd engine is running."""
    return autograd.current_graph_task_id() != -1


def is_called_by_engine() -> bool:
    """Return whether the autograd engine itself called the operator, not a hook, custom backward or recomputation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TRANSPARENT):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE_CODE


# torch wraps a dispatch mode's method to hide it from dynamo; the frames of the wrapper are not the program's.
_MEMPROF = __file__.rsplit("/virtual/", 1)[0]
_TRANSPARENT = (
    f"{_MEMPROF}/virtual/",
    f"{_MEMPROF}/stubs/",
    torch.__path__[0] + "/_compile.py",
    torch.__path__[0] + "/_dynamo/",
)
