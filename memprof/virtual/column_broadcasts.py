"""Operators that pair each number of a column [N, 1] with each of a row [N], where both may have been meant as one."""

from __future__ import annotations

import torch

from memprof.trace.events import NONE
from memprof.virtual.operator_call import OperatorCall
from memprof.watch.recorder import Recorder

# Not sums and products: squares of norms are paired like this to compute distances.
_NAMES = ("sub", "rsub", "eq", "ne", "mse_loss", "smooth_l1_loss", "huber_loss")
_OPERATORS = frozenset(f"aten.{name}" for name in _NAMES)
# Of [N, 1, 1] and [N, 1], whose dimensions are aligned from the right, these too: nobody pairs numbers like that.
_OPERATORS_BEYOND_MATRICES = _OPERATORS | {"aten.add", "aten.mul", "aten.div"}


def record_column_broadcast(recorder: Recorder, name: str, call: OperatorCall, outputs: list[torch.Tensor]) -> None:
    """Record the output of the operator `name` if it is of all pairs of a column and a row of the same length.

    An output without memory, for which there was none, is the last storage of the trace.
    """
    trace = recorder.trace
    if name not in _OPERATORS_BEYOND_MATRICES or len(outputs) != 1 or len(call.tensors) != 2 or outputs[0].dim() < 2:
        return
    rows, columns, *others = outputs[0].shape
    if any(size != 1 for size in others) or (not others and name not in _OPERATORS):
        return
    tensors = [_drop_last(tensor, len(others)) for tensor in call.tensors]
    kinds = [_find_kind(recorder, tensor, rows) for tensor in tensors]
    index = recorder.storages.get_index(outputs[0])
    if index == NONE:
        index = len(trace.storages) - 1
    if rows == columns > 1 and sorted(kinds) == ["column", "row"]:
        made = trace.storages[index]
        known = (trace.storages[other] for other in trace.column_broadcasts)
        if not any((other.shape, other.source) == (made.shape, made.source) for other in known):
            trace.column_broadcasts.append(index)


def _drop_last(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return a view of `tensor` without its last `count` dimensions, each of one element, as far as it has them."""
    for _ in range(min(count, tensor.dim() - 1)):
        tensor = tensor.select(-1, 0) if tensor.shape[-1] == 1 else tensor
    return tensor


def _find_kind(recorder: Recorder, tensor: torch.Tensor, length: int) -> str:
    """Return "row" or "column", also of a tensor that was expanded to pairs before (by a loss of torch); else "". A row
    that the program has made a column is meant to be one."""
    index = recorder.storages.get_index(tensor)
    made_as = () if index == NONE else recorder.trace.storages[index].shape
    if tensor.shape == (length,) or (tensor.shape == (length, length) and tensor.stride()[0] == 0):
        return "row"
    is_column = tensor.shape == (length, 1) or (tensor.shape == (length, length) and tensor.stride()[1] == 0)
    return "column" if is_column and len(made_as) > 1 else ""
