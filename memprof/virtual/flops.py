"""FLOPs and memory traffic of a run: of each operator, the FLOPs, bytes read and written, and bytes over PCIe.

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
from memprof.trace.events import GPU, HOST, Work, is_gpu
from memprof.virtual.operator_call import OVERWRITES, OperatorCall, OpInfo, OpKind, find_tensors
from memprof.watch.recorder import Recorder
from memprof.watch.wrappers import get_sparse_parts
from memprof.workload.quantization import import_quietly

_aten = torch.ops.aten
COLLECTIVES = "_c10d_functional"  # namespace of collectives that are operators, as DTensor calls them
_COPIES = frozenset({_aten._to_copy, _aten.copy_})
# Operators that make memory without reading or writing it.
_TOUCHES_NOTHING = frozenset(
    {
        _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.resize_,
        _aten.set_,
    }
)  # fmt: skip


class Meter:
    """Counter of equal calls during the run, which returns their total work afterwards."""

    def __init__(self, recorder: Recorder, device_of: Callable[[torch.Tensor], str]) -> None:
        self._recorder = recorder
        self._device_of = device_of
        self._costs: list[tuple[Any, ...]] = []
        # Key of a call -> its index in `_costs`; None if the call costs nothing.
        self._known: dict[Any, int | None] = {}
        self._counts: dict[int, list[int]] = {}  # phase -> number of calls for each index in `_costs`

    def count(self, operator: OpInfo, call: OperatorCall, result: Any) -> None:
        """Count a call of an operator that is no view."""
        try:
            # The key does not have the devices; few calls are on the host, and a copy goes in either direction.
            key: Any = tuple(call.key)
            if call.on_host or call.gpu != GPU:
                key = (call.gpu, call.on_gpu and self._device_of(call.tensors[0]), *key)
            place = self._known.get(key, -1)
        except TypeError:  # an unhashable argument
            key, place = None, -1
        if place == -1:
            cost = self._cost(operator, call, result)
            place = None
            if cost is not None:
                place = len(self._costs)
                self._costs.append(cost)
            if key is not None:
                self._known[key] = place
        if place is not None:
            self._count_index(place)

    def sent(self, name: str, tensor: torch.Tensor, num_bytes: int) -> None:
        """Count a collective on `tensor`, in which this rank sends `num_bytes` to other ranks."""
        self._count_cost((name, self._device_of(tensor), _dtype(tensor), 0, 0, 0, 0, num_bytes))

    def kernel(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Count a launch of a generated kernel, which reads or writes each of `tensors` once."""
        if tensors:
            moved = sum(map(_num_bytes, tensors))
            self._count_cost((name, self._device_of(tensors[0]), _dtype(tensors[0]), 0, moved, 0, 0, 0))

    def _count_cost(self, cost: tuple[Any, ...]) -> None:
        place = self._known.setdefault(cost, len(self._costs))
        assert place is not None
        if place == len(self._costs):
            self._costs.append(cost)
        self._count_index(place)

    def _count_index(self, place: int) -> None:
        counts = self._counts.setdefault(self._recorder.writer.phase_index, [])
        if place >= len(counts):
            counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1

    def _cost(self, operator: OpInfo, call: OperatorCall, result: Any) -> tuple[Any, ...] | None:
        """Return operator, device, dtype, operations, bytes accessed, sent to the GPU, from it, to other GPUs."""
        outputs = find_tensors(result)
        made_here = set(map(id, outputs))
        inputs = [tensor for tensor in call.tensors if id(tensor) not in made_here]
        device = call.device or next((self._device_of(made) for made in outputs if made.is_meta), None)
        if operator.packet in _COPIES and call.tensors:
            target = outputs[0] if operator.packet is _aten._to_copy and outputs else call.tensors[0]
            ends = self._device_of(call.tensors[-1]), self._device_of(target)
            if HOST in ends and any(map(is_gpu, ends)):
                crossing = _num_bytes(target)
                gpu = next(filter(is_gpu, ends))
                to_gpu = crossing if ends[1] == gpu else 0
                return operator.name, gpu, _dtype(target), 0, 0, to_gpu, crossing - to_gpu, 0
        if call.func.namespace == COLLECTIVES:
            sent = _bytes_sent(call)
            return None if not sent else (operator.name, device or GPU, _dtype(call.tensors[0]), 0, 0, 0, 0, sent)
        if device is None or device == "meta" or operator.packet in _TOUCHES_NOTHING:
            return None
        if operator.kind is OpKind.IN_PLACE and operator.packet not in OVERWRITES:
            inputs = call.tensors  # an in-place operator also reads the tensor that it writes
            outputs = [*outputs, *(find_tensors(call.args[0]) if not outputs and call.args else [])]
        moved = sum(map(_num_bytes, inputs)) + sum(map(_num_bytes, outputs))
        main = (call.tensors or outputs)[0]
        return operator.name, device, _dtype(main), _count_operations(call, result), moved, 0, 0, 0

    def finish(self) -> list[Work]:
        """Return the total work."""
        index = self._recorder.writer.get_op_index
        totals: Counter[tuple[int, tuple[Any, ...]]] = Counter()
        for phase, counts in [*self._counts.items()]:  # another thread of the program may still count
            for cost, count in zip(self._costs, counts, strict=False):
                if count:
                    totals[phase, cost] += count
        return [
            Work(phase, index(op), device, dtype, operations, moved, to_device, to_host, calls, sent)
            for (phase, (op, device, dtype, operations, moved, to_device, to_host, sent)), calls in totals.items()
        ]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes to read: an expanded tensor is smaller in memory than its shape."""
    if tensor.layout is not torch.strided:
        return sum(map(_num_bytes, get_sparse_parts(tensor)))
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot})


@functools.cache
def _formulas() -> dict[Any, Any]:
    # Where Triton is missing, as with torch for the CPU, torch.utils.flop_counter warns on every import.
    flop_registry = import_quietly("torch.utils.flop_counter").flop_registry
    products: dict[Any, Callable[..., int]] = dict.fromkeys(_PRODUCTS, _count_matrix_product)
    if hasattr(_aten, "_grouped_mm"):  # each row of the left matrix meets one of several right matrices
        products[_aten._grouped_mm] = lambda left, right, *args, **kwargs: _count_matrix_product(left, right)
    return {**flop_registry, **products}


def _count_matrix_product(*args: Any, **kwargs: Any) -> int:
    """Return the operations of a matrix product: each number of the left matrix meets each column of the right."""
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    return 2 * left.numel() * int(right.shape[-1] if right.dim() > 1 else 1)


def _count_operations(call: OperatorCall, result: Any) -> int:
    formula = _formulas().get(call.func.overloadpacket)
    if formula is None:
        return 0
    places, args = _argument_positions(call.func), list(call.args)
    try:
        if call.func.overloadpacket.__name__.startswith("_scaled_dot_product"):
            # Where several query heads share a key, count as if each had its own key: torch's formulas of attention
            # support no other case before release 2.12. They accept shapes as well as tensors.
            for place in (places["key"], places["value"]):
                *batch, _, length, width = args[place].shape
                args[place] = torch.Size((*batch, args[places["query"]].shape[-3], length, width))
        operations = int(formula(*args, **call.kwargs, out_val=result))
    except (TypeError, ValueError, IndexError, AttributeError, AssertionError):
        return 0  # torch's formula does not know this overload, or these shapes
    if "is_causal" in places:
        at = places["is_causal"]
        causal = call.args[at] if at < len(call.args) else call.kwargs.get("is_causal", False)
        # With different lengths, a causal mask hides less than half.
        if causal and call.args[places["query"]].shape[-2] == call.args[places["key"]].shape[-2]:
            operations //= 2
    return operations


@functools.cache
def _argument_positions(func: Any) -> dict[str, int]:
    """Return the position of each argument of an operator, by name."""
    return {argument.name: place for place, argument in enumerate(func._schema.arguments)}


def _bytes_sent(call: OperatorCall) -> int:
    """Return the bytes that leave this GPU in a collective, by nccl-tests' ring model (PERFORMANCE.md).

    A reduction sends twice the input without one rank's part, an all-gather the parts that other ranks lack; in an
    all-to-all each rank keeps its own part. Zero for operators that send nothing: waiting, or a group of one rank.
    """
    name = call.func.overloadpacket.__name__.removesuffix("_").removesuffix("_coalesced")
    if name not in _SHARES and name not in ("all_to_all_single", "broadcast"):
        return 0
    group: Any = call.kwargs.get("group_name", call.args[-1])
    if isinstance(group, str):  # the group's name, or the group itself: torch releases differ
        group = distributed.resolve_process_group(group)
    ranks = group.size()
    given = sum(tensor.numel() * tensor.element_size() for tensor in call.tensors)
    if ranks == 1:
        return 0
    if name == "broadcast":
        return given
    if name == "all_to_all_single":
        splits = [int(size) for size in call.args[2]]
        return given * (sum(splits) - splits[group.rank()]) // max(sum(splits), 1)
    return round(given * _SHARES[name](ranks))


# Collective -> function of the number of ranks: sent bytes divided by the bytes of the input.
_SHARES = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
}
