"""Collectives of ranks that run together: the ranks exchange the known values of their tensors.

For a tensor with unknown values, only the number of elements and the dtype are sent. Ranks that do not run are assumed
equal to the first running rank of the group, so that all running ranks get the same values.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.limits import find_program_line
from memprof.virtual.peers.channel import Channel, CollectiveCall, Payload
from memprof.virtual.peers.known_values import GroupRank, Parts
from memprof.virtual.peers.single_rank import SingleRankBackend, WaitFunction
from memprof.virtual.values import Values

_REDUCTION_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


class MultiRankBackend(SingleRankBackend):
    """Collectives of a rank that runs together with other ranks."""

    def __init__(self, assume: Callable[[str], None], values: Values, channel: Channel) -> None:
        super().__init__(assume, values)
        self._channel = channel
        self._num_calls: dict[tuple[str, tuple[int, ...]], int] = {}

    def are_running(self, ranks: Sequence[int]) -> bool:
        return set(ranks) <= set(self._channel.ranks)

    def all_reduce(self, tensor: torch.Tensor, reduction: str, group: GroupRank) -> WaitFunction:
        element_counts = (tensor.numel(),) * group.size
        wait = self._exchange("all_reduce", [tensor], group, element_counts, element_counts, reduction)
        return lambda: self._known.set(tensor, _reduce_known_values([values[0] for values in wait()], reduction))

    def reduce(self, tensor: torch.Tensor, reduction: str, root: int, group: GroupRank) -> WaitFunction:
        send_counts = _count_for_root(root, tensor.numel(), group)
        receive_counts = (tensor.numel() if root == group.rank else 0,) * group.size
        wait = self._exchange(
            "reduce", [tensor], group, send_counts, receive_counts, f"{reduction} to rank {group.ranks[root]}"
        )
        if root != group.rank:
            return wait
        return lambda: self._known.set(tensor, _reduce_known_values([values[0] for values in wait()], reduction))

    def broadcast(self, tensor: torch.Tensor, root: int, group: GroupRank) -> WaitFunction:
        send_counts = (tensor.numel() if root == group.rank else 0,) * group.size
        receive_counts = _count_for_root(root, tensor.numel(), group)
        wait = self._exchange(
            "broadcast", [tensor], group, send_counts, receive_counts, f"from rank {group.ranks[root]}"
        )
        return wait if root == group.rank else lambda: self._known.set(tensor, wait()[root][0])

    def all_gather(self, parts: Parts, tensor: torch.Tensor, group: GroupRank) -> WaitFunction:
        wait = self._exchange("all_gather", [tensor], group, (tensor.numel(),) * group.size, parts.element_counts)
        return lambda: self._set_parts(parts, [values[0] for values in wait()])

    def gather(self, parts: Parts | None, tensor: torch.Tensor, root: int, group: GroupRank) -> WaitFunction:
        send_counts = _count_for_root(root, tensor.numel(), group)
        receive_counts = (0,) * group.size if parts is None else parts.element_counts
        wait = self._exchange("gather", [tensor], group, send_counts, receive_counts, f"to rank {group.ranks[root]}")
        return wait if parts is None else lambda: self._set_parts(parts, [values[0] for values in wait()])

    def reduce_scatter(self, output: torch.Tensor, parts: Parts, reduction: str, group: GroupRank) -> WaitFunction:
        receive_counts = (output.numel(),) * group.size
        pieces = self._split_if_known(parts, group)
        wait = self._exchange(
            "reduce_scatter", pieces, group, parts.element_counts, receive_counts, reduction, described_parts=parts
        )
        return lambda: self._known.set(
            output, _reduce_known_values([values[group.rank] for values in wait()], reduction)
        )

    def scatter(self, output: torch.Tensor, parts: Parts | None, root: int, group: GroupRank) -> WaitFunction:
        send_counts = (0,) * group.size if parts is None else parts.element_counts
        pieces = [output] * group.size if parts is None else self._split_if_known(parts, group)
        receive_counts = _count_for_root(root, output.numel(), group)
        detail = f"from rank {group.ranks[root]}"
        wait = self._exchange(
            "scatter", pieces, group, send_counts, receive_counts, detail, described_parts=Parts([output])
        )
        return lambda: self._known.set(output, wait()[root][group.rank])

    def all_to_all(self, outputs: Parts, inputs: Parts, group: GroupRank) -> WaitFunction:
        pieces = self._split_if_known(inputs, group)
        wait = self._exchange(
            "all_to_all", pieces, group, inputs.element_counts, outputs.element_counts, described_parts=inputs
        )
        return lambda: self._set_parts(outputs, [values[group.rank] for values in wait()])

    def barrier(self, group: GroupRank) -> WaitFunction:
        return self._exchange("barrier", [], group, (), ())

    def send(self, tensor: torch.Tensor, destination: int, tag: int, group: GroupRank) -> WaitFunction:
        """Send `tensor` to one other rank, without waiting for the receiver."""
        if self.are_running([group.ranks[destination]]):
            call = self._make_call(
                "send",
                [tensor],
                group,
                (tensor.numel(),),
                (),
                f"to rank {group.ranks[destination]}",
                is_collective=False,
            )
            self._channel.send("send", group.ranks[destination], tag, call, _encode_tensor(self._known.read(tensor)))
        return None

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, group: GroupRank) -> WaitFunction:
        source_rank = None if source is None else group.ranks[source]
        if source_rank is not None and not self.are_running([source_rank]):
            return super().receive(tensor, source, tag, group)
        detail = "from any" if source_rank is None else f"from rank {source_rank}"
        call = self._make_call("recv", [tensor], group, (), (tensor.numel(),), detail, is_collective=False)

        def wait() -> int:
            sender, payload = self._channel.request("receive", source_rank, tag, call)
            self._known.set(tensor, _decode_tensor(payload))
            return group.ranks.index(sender)

        return wait

    # -- steps of the collectives -------------------------------------------------------------------------------------

    def _exchange(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        group: GroupRank,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        detail: str = "",
        described_parts: Parts | None = None,
    ) -> Callable[[], list[list[torch.Tensor | None]]]:
        """Send `tensors` to the parent process; return a function that waits for each rank's tensors."""
        described_tensors = tensors if described_parts is None else described_parts.tensors
        call = self._make_call(name, described_tensors, group, send_counts, receive_counts, detail)
        self._channel.send("call", call, [_encode_tensor(self._known.read(tensor)) for tensor in tensors])

        def wait() -> list[list[torch.Tensor | None]]:
            payloads: dict[int, Payload] = self._channel.request("collect", call.collective_id)
            first_running = next(rank for rank in group.ranks if rank in payloads)
            payload_lists = [payloads[rank if rank in payloads else first_running] for rank in group.ranks]
            return [[_decode_tensor(payload) for payload in payload_list] for payload_list in payload_lists]

        return wait

    def _make_call(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        group: GroupRank,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        detail: str = "",
        *,
        is_collective: bool = True,
    ) -> CollectiveCall:
        key = group.name, group.ranks
        call_index = self._num_calls.get(key, 0)
        self._num_calls[key] = call_index + is_collective
        with torch.DisableTorchFunction():
            shapes = list(dict.fromkeys(f"{list(tensor.shape)}" for tensor in tensors))
            dtypes = ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
        repeat_text = f"{len(tensors)} x " if len(tensors) > 1 else ""
        tensors_text = f" of {repeat_text}{' and '.join(shapes[:3])} {dtypes}" if tensors else ""
        summary = f"{name}{tensors_text}" + (f", {detail}" if detail else "")
        return CollectiveCall(
            *key,
            call_index,
            name,
            detail,
            dtypes,
            tuple(send_counts),
            tuple(receive_counts),
            summary,
            find_program_line(),
        )

    def _split_if_known(self, parts: Parts, group: GroupRank) -> Sequence[torch.Tensor]:
        """Return the tensor for each rank; if no values are known, one tensor repeated, as only its size is sent."""
        is_known = any(map(self._known.is_known, parts.tensors))
        return parts.split() if is_known else [parts.tensors[0]] * group.size

    def _set_parts(self, parts: Parts, values: Sequence[torch.Tensor | None]) -> None:
        """Set `parts` to `values`. If the parts share one tensor and a value is None, the tensor becomes unknown."""
        if len(parts.tensors) == len(values):
            for part, value in zip(parts.tensors, values, strict=True):
                self._known.set(part, value)
        else:
            known = [value.reshape(-1) for value in values if value is not None]
            self._known.set(parts.tensors[0], torch.cat(known) if len(known) == len(values) else None)


def _count_for_root(root: int, num_elements: int, group: GroupRank) -> tuple[int, ...]:
    return tuple(num_elements if rank == root else 0 for rank in range(group.size))


def _reduce_known_values(values: Sequence[torch.Tensor | None], reduction: str) -> torch.Tensor | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or reduction not in _REDUCTION_FUNCTIONS:
        return None
    with torch.DisableTorchFunction(), disable_current_modes():
        total = functools.reduce(_REDUCTION_FUNCTIONS[reduction], known)
        if reduction == "AVG":
            total = total / len(known) if total.is_floating_point() else total // len(known)
        return total.to(known[0].dtype)


def _encode_tensor(tensor: torch.Tensor | None) -> Payload:
    """Return dtype, shape and bytes of `tensor`; only one element's bytes if the tensor is one expanded element."""
    if tensor is None:
        return None
    with torch.DisableTorchFunction(), disable_current_modes():
        shape = tuple(tensor.shape)
        if tensor.numel() and not any(tensor.stride()):
            tensor = tensor.as_strided((1,), (1,))
        flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        return tensor.dtype, shape, bytes(flat.numpy()) if flat.numel() else b""


def _decode_tensor(payload: Payload) -> torch.Tensor | None:
    """Return the tensor that `_encode_tensor` encoded as `payload`; None for None."""
    if payload is None:
        return None
    dtype, shape, content = payload
    with torch.DisableTorchFunction(), disable_current_modes():
        if not content:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(bytearray(content), dtype=dtype)
        return flat.view(shape) if flat.numel() == math.prod(shape) else flat.expand(shape)
