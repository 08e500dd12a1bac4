"""FLOPs of a run's operators, bytes that they read and write, and bytes that cross the bus.

They are computed for each operator call from the shapes of its tensors, so that a run with a fix can be compared
with the baseline. Attention and convolutions use torch's own formulas (torch/utils/flop_counter.py), causal attention
half of the operations: its kernels skip the part under the mask.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.torch_private import distributed
from memprof.trace.events import HOST, Work, is_gpu
from memprof.virtual.operator_call import OVERWRITES, OperatorCall, OpInfo, OpKind, find_tensors
from memprof.watch.recorder import Recorder
from memprof.watch.wrappers import get_sparse_parts
from memprof.workload.quantization import import_quietly

_aten = torch.ops.aten
COLLECTIVES = "_c10d_functional"  # namespace of collectives that are operators, as DTensor calls them
_COPIES = frozenset({_aten._to_copy, _aten.copy_})
# Operators that make memory without reading or writing it.
_ACCESSES_NO_MEMORY = frozenset(
    {
        _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.resize_,
        _aten.set_,
    }
)  # fmt: skip


class Meter:
    """Counter of the FLOPs and bytes of operator calls; calls of equal cost are counted together."""

    def __init__(self, recorder: Recorder, device_of: Callable[[torch.Tensor], str]) -> None:
        self._recorder = recorder
        self._device_of = device_of
        self._costs: list[tuple[Any, ...]] = []
        # Key of a call -> its index in `_costs`; None if the call costs nothing.
        self._index_by_key: dict[Any, int | None] = {}
        self._counts: dict[int, list[int]] = {}  # phase -> number of calls for each index in `_costs`

    def count(self, operator: OpInfo, call: OperatorCall, result: Any) -> None:
        """Count `call` of an operator that is not a view."""
        try:
            # The key does not have the devices; few calls are on the host, and a copy goes in either direction.
            key: Any = tuple(call.key)
            if call.on_host or call.gpu != self._recorder.trace.device:
                key = (call.gpu, call.on_gpu and self._device_of(call.tensors[0]), *key)
            index = self._index_by_key.get(key, -1)
        except TypeError:  # an unhashable argument
            key, index = None, -1
        if index == -1:
            cost = self._compute_cost(operator, call, result)
            index = None
            if cost is not None:
                index = len(self._costs)
                self._costs.append(cost)
            if key is not None:
                self._index_by_key[key] = index
        if index is not None:
            self._count_index(index)

    def count_collective(self, name: str, tensor: torch.Tensor, num_bytes: int) -> None:
        """Count the collective `name` on `tensor`, in which this rank sends `num_bytes` to other ranks."""
        self._recorder.storages.record_uses([tensor])
        self._count_cost((name, self._device_of(tensor), _dtype(tensor), 0, 0, 0, 0, num_bytes))

    def count_kernel(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Count a launch of a generated kernel, which reads or writes each of `tensors` once."""
        self._recorder.storages.record_uses(tensors)
        if tensors:
            num_accessed_bytes = sum(map(_num_bytes, tensors))
            self._count_cost((name, self._device_of(tensors[0]), _dtype(tensors[0]), 0, num_accessed_bytes, 0, 0, 0))

    def _count_cost(self, cost: tuple[Any, ...]) -> None:
        index = self._index_by_key.setdefault(cost, len(self._costs))
        assert index is not None
        if index == len(self._costs):
            self._costs.append(cost)
        self._count_index(index)

    def _count_index(self, index: int) -> None:
        counts = self._counts.setdefault(self._recorder.writer.phase_index, [])
        if index >= len(counts):
            counts.extend([0] * (index + 1 - len(counts)))
        counts[index] += 1

    def _compute_cost(self, operator: OpInfo, call: OperatorCall, result: Any) -> tuple[Any, ...] | None:
        """Return operator, device, dtype, FLOPs; bytes accessed, copied to the GPU, from it, sent to other GPUs."""
        outputs = find_tensors(result)
        output_ids = set(map(id, outputs))
        inputs = [tensor for tensor in call.tensors if id(tensor) not in output_ids]
        device = call.device or next((self._device_of(output) for output in outputs if output.is_meta), None)
        if operator.packet in _COPIES and call.tensors:
            copy = outputs[0] if operator.packet is _aten._to_copy and outputs else call.tensors[0]
            devices = self._device_of(call.tensors[-1]), self._device_of(copy)
            if HOST in devices and any(map(is_gpu, devices)):
                copied_bytes = _num_bytes(copy)
                gpu = next(filter(is_gpu, devices))
                to_gpu = copied_bytes if devices[1] == gpu else 0
                return operator.name, gpu, _dtype(copy), 0, 0, to_gpu, copied_bytes - to_gpu, 0
        if call.func.namespace == COLLECTIVES:
            sent = _count_sent_bytes(call)
            return (
                None
                if not sent
                else (operator.name, device or self._recorder.trace.device, _dtype(call.tensors[0]), 0, 0, 0, 0, sent)
            )
        if device is None or device == "meta" or operator.packet in _ACCESSES_NO_MEMORY:
            return None
        if operator.kind is OpKind.IN_PLACE and operator.packet not in OVERWRITES:
            inputs = call.tensors  # an in-place operator also reads the tensor that it writes
            outputs = [*outputs, *(find_tensors(call.args[0]) if not outputs and call.args else [])]
        num_bytes = sum(map(_num_bytes, inputs)) + sum(map(_num_bytes, outputs))
        first_tensor = (call.tensors or outputs)[0]
        return operator.name, device, _dtype(first_tensor), _count_operations(call, result), num_bytes, 0, 0, 0

    def finish(self) -> list[Work]:
        """Return FLOPs and bytes by phase, operator, device and dtype."""
        get_op_index = self._recorder.writer.get_op_index
        totals: Counter[tuple[int, tuple[Any, ...]]] = Counter()
        for phase, counts in [*self._counts.items()]:  # another thread of the program may still count
            for cost, count in zip(self._costs, counts, strict=False):
                if count:
                    totals[phase, cost] += count
        return [
            Work(phase, get_op_index(op), device, dtype, operations, num_bytes, to_device, to_host, calls, sent)
            for (phase, (op, device, dtype, operations, num_bytes, to_device, to_host, sent)), calls in totals.items()
        ]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of `tensor` in memory, which are fewer than by its shape if it is expanded."""
    if tensor.layout is not torch.strided:
        return sum(map(_num_bytes, get_sparse_parts(tensor)))
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot})


@functools.cache
def _flop_formulas() -> dict[Any, Any]:
    # Where Triton is missing, as with torch for the CPU, torch.utils.flop_counter warns on every import.
    flop_registry = import_quietly("torch.utils.flop_counter").flop_registry
    products: dict[Any, Callable[..., int]] = dict.fromkeys(_PRODUCTS, _count_matrix_product)
    if hasattr(_aten, "_grouped_mm"):  # each row of the left matrix meets one of several right matrices
        products[_aten._grouped_mm] = lambda left, right, *args, **kwargs: _count_matrix_product(left, right)
    return {**flop_registry, **products}


def _count_matrix_product(*args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a matrix product: two for each element of the left matrix and column of the right."""
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    return 2 * left.numel() * int(right.shape[-1] if right.dim() > 1 else 1)


def _count_operations(call: OperatorCall, result: Any) -> int:
    formula = _flop_formulas().get(call.func.overloadpacket)
    if formula is None:
        return 0
    positions, args = _argument_positions(call.func), list(call.args)
    try:
        if call.func.overloadpacket.__name__.startswith("_scaled_dot_product"):
            # Where several query heads share a key, count as if each had its own key: torch's formulas of attention
            # support no other case before release 2.12. They accept shapes as well as tensors.
            for position in (positions["key"], positions["value"]):
                *batch, _, length, width = args[position].shape
                args[position] = torch.Size((*batch, args[positions["query"]].shape[-3], length, width))
        operations = int(formula(*args, **call.kwargs, out_val=result))
    except (TypeError, ValueError, IndexError, AttributeError, AssertionError):
        return 0  # torch's formula does not know this overload, or these shapes
    if "is_causal" in positions:
        index = positions["is_causal"]
        causal = call.args[index] if index < len(call.args) else call.kwargs.get("is_causal", False)
        # With different lengths, a causal mask hides less than half.
        if causal and call.args[positions["query"]].shape[-2] == call.args[positions["key"]].shape[-2]:
            operations //= 2
    return operations


@functools.cache
def _argument_positions(func: Any) -> dict[str, int]:
    """Return the position of each argument of an operator, by name."""
    return {argument.name: position for position, argument in enumerate(func._schema.arguments)}


def _count_sent_bytes(call: OperatorCall) -> int:
    """Return the bytes that this GPU sends in a collective, by the ring model of nccl-tests (PERFORMANCE.md).

    A reduction sends twice the input without one rank's part, an all-gather the parts that other ranks lack; in an
    all-to-all each rank keeps its own part. Zero for operators that send nothing: waiting, or a group of one rank.
    """
    name = call.func.overloadpacket.__name__.removesuffix("_").removesuffix("_coalesced")
    if name not in _SENT_FRACTIONS and name not in ("all_to_all_single", "broadcast"):
        return 0
    group: Any = call.kwargs.get("group_name", call.args[-1])
    if isinstance(group, str):  # the group's name, or the group itself: torch releases differ
        group = distributed.resolve_process_group(group)
    num_ranks = group.size()
    input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in call.tensors)
    if num_ranks == 1:
        return 0
    if name == "broadcast":
        return input_bytes
    if name == "all_to_all_single":
        splits = [int(size) for size in call.args[2]]
        return input_bytes * (sum(splits) - splits[group.rank()]) // max(sum(splits), 1)
    return round(input_bytes * _SENT_FRACTIONS[name](num_ranks))


# Collective -> function of the number of ranks: sent bytes divided by the bytes of the input.
_SENT_FRACTIONS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
}
