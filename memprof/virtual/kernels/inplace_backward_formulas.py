"""Backward formulas that compute in place in a run without memprof, and out of place under a dispatch mode.

torch/csrc/autograd/FunctionsManual.cpp calls `areAnyTensorSubclassLike` before a formula overwrites a temporary; the
result is true for meta tensors and with a mode active. `IN_PLACE_OPERATORS` has, for each autograd node, the operator
that the formula then calls, and the operator that it calls on CUDA without a mode. The caller of `find_in_place` checks
that the first argument is a temporary of the formula, not a tensor that a saved tensor or the program references.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.torch_private import autograd
from memprof.virtual.kernels.registry import aten

_LOGICAL_AND = {aten.logical_and.default: aten.logical_and_.default}
# Name of an autograd node -> out-of-place operator -> in-place operator.
IN_PLACE_OPERATORS: dict[str, dict[Any, Any]] = {
    # evenly_distribute_backward, the branch of CUDA
    **dict.fromkeys(("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _LOGICAL_AND),
    # clamp_backward, clamp_backward_min_max
    "ClampBackward0": _LOGICAL_AND | {aten.logical_or.default: aten.logical_or_.default},
    "Atan2Backward0": {aten.masked_fill.Scalar: aten.masked_fill_.Scalar},
    "AminmaxBackward0": {aten.add.Tensor: aten.add_.Tensor},
    "TraceBackward0": {aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor},
    # binary_cross_entropy_target_backward
    "BinaryCrossEntropyBackward0": {aten.mul.Tensor: aten.mul_.Tensor},
    # binary_cross_entropy_with_logits_backward and its like for the target
    "BinaryCrossEntropyWithLogitsBackward0": {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor},
}
# The out-of-place operators of the table.
OUT_OF_PLACE_OPERATORS = frozenset(operator for table in IN_PLACE_OPERATORS.values() for operator in table)


def find_in_place(func: Any, args: Any, producer: str) -> Any:
    """Return the in-place operator that the current backward formula calls on a GPU instead of `func`; None if none.

    `producer` is the operator that created `args[0]`. A `func` that broadcasts `args[0]` is not replaced.
    """
    node = autograd.current_autograd_node()
    replacements = None if node is None else IN_PLACE_OPERATORS.get(node.name())
    if replacements is None or func not in replacements:
        return None
    # The target's gradient without pos_weight is `-self * grad_output` on every device.
    if producer == "aten.neg" and func is aten.mul.Tensor:
        return None
    if func is aten.index_fill.int_Tensor:
        return replacements[func]
    target = args[0]
    shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
    return replacements[func] if torch.broadcast_shapes(*shapes) == target.shape else None
