"""Contributions of other ranks that run too: their known values.

A tensor without data is sent as a number of elements of a dtype. Ranks that do not run are assumed equal to the first
running rank of the group, so that all running ranks see the same values.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.limits import program_line
from memprof.virtual.peers.alone import Finish, SingleRankBackend
from memprof.virtual.peers.channel import Channel, CollectiveCall, Payload
from memprof.virtual.peers.known import GroupRank, Parts
from memprof.virtual.values import Values

_REDUCED: dict[str, Callable[[Any, Any], Any]] = {
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
        self._calls: dict[tuple[str, tuple[int, ...]], int] = {}

    def has(self, ranks: Sequence[int]) -> bool:
        return set(ranks) <= set(self._channel.ranks)

    def all_reduce(self, tensor: torch.Tensor, reduction: str, place: GroupRank) -> Finish:
        sizes = (tensor.numel(),) * place.size
        wait = self._exchange("all_reduce", [tensor], place, sizes, sizes, reduction)
        return lambda: self._known.put(tensor, _reduce_known([one[0] for one in wait()], reduction))

    def reduce(self, tensor: torch.Tensor, reduction: str, root: int, place: GroupRank) -> Finish:
        gives = _sizes_to_root(root, tensor.numel(), place)
        takes = (tensor.numel() if root == place.rank else 0,) * place.size
        wait = self._exchange("reduce", [tensor], place, gives, takes, f"{reduction} to rank {place.ranks[root]}")
        if root != place.rank:
            return wait
        return lambda: self._known.put(tensor, _reduce_known([one[0] for one in wait()], reduction))

    def broadcast(self, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        gives = (tensor.numel() if root == place.rank else 0,) * place.size
        takes = _sizes_to_root(root, tensor.numel(), place)
        wait = self._exchange("broadcast", [tensor], place, gives, takes, f"from rank {place.ranks[root]}")
        return wait if root == place.rank else lambda: self._known.put(tensor, wait()[root][0])

    def all_gather(self, parts: Parts, tensor: torch.Tensor, place: GroupRank) -> Finish:
        wait = self._exchange("all_gather", [tensor], place, (tensor.numel(),) * place.size, parts.sizes)
        return lambda: self._put(parts, [one[0] for one in wait()])

    def gather(self, parts: Parts | None, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        gives = _sizes_to_root(root, tensor.numel(), place)
        takes = (0,) * place.size if parts is None else parts.sizes
        wait = self._exchange("gather", [tensor], place, gives, takes, f"to rank {place.ranks[root]}")
        return wait if parts is None else lambda: self._put(parts, [one[0] for one in wait()])

    def reduce_scatter(self, output: torch.Tensor, parts: Parts, reduction: str, place: GroupRank) -> Finish:
        takes = (output.numel(),) * place.size
        pieces = self._pieces(parts, place)
        wait = self._exchange("reduce_scatter", pieces, place, parts.sizes, takes, reduction, of=parts)
        return lambda: self._known.put(output, _reduce_known([one[place.rank] for one in wait()], reduction))

    def scatter(self, output: torch.Tensor, parts: Parts | None, root: int, place: GroupRank) -> Finish:
        gives = (0,) * place.size if parts is None else parts.sizes
        pieces = [output] * place.size if parts is None else self._pieces(parts, place)
        takes = _sizes_to_root(root, output.numel(), place)
        detail = f"from rank {place.ranks[root]}"
        wait = self._exchange("scatter", pieces, place, gives, takes, detail, of=Parts([output]))
        return lambda: self._known.put(output, wait()[root][place.rank])

    def all_to_all(self, outputs: Parts, inputs: Parts, place: GroupRank) -> Finish:
        pieces = self._pieces(inputs, place)
        wait = self._exchange("all_to_all", pieces, place, inputs.sizes, outputs.sizes, of=inputs)
        return lambda: self._put(outputs, [one[place.rank] for one in wait()])

    def barrier(self, place: GroupRank) -> Finish:
        return self._exchange("barrier", [], place, (), ())

    def send(self, tensor: torch.Tensor, to: int, tag: int, place: GroupRank) -> Finish:
        """Send `tensor` to one other rank, without waiting for the receiver."""
        if self.has([place.ranks[to]]):
            call = self._make_call(
                "send", [tensor], place, (tensor.numel(),), (), f"to rank {place.ranks[to]}", is_numbered=False
            )
            self._channel.tell("send", place.ranks[to], tag, call, _pack(self._known.read(tensor)))
        return None

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, place: GroupRank) -> Finish:
        source_rank = None if source is None else place.ranks[source]
        if source_rank is not None and not self.has([source_rank]):
            return super().receive(tensor, source, tag, place)
        detail = "from any" if source_rank is None else f"from rank {source_rank}"
        call = self._make_call("recv", [tensor], place, (), (tensor.numel(),), detail, is_numbered=False)

        def finish() -> int:
            sender, payload = self._channel.ask("receive", source_rank, tag, call)
            self._known.put(tensor, _unpack(payload))
            return place.ranks.index(sender)

        return finish

    # -- steps of the collectives -------------------------------------------------------------------------------------

    def _exchange(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        place: GroupRank,
        gives: Sequence[int],
        takes: Sequence[int],
        detail: str = "",
        of: Parts | None = None,
    ) -> Callable[[], list[list[torch.Tensor | None]]]:
        """Contribute `tensors`, and return a function that waits and returns the contribution of each rank."""
        described = tensors if of is None else of.tensors
        call = self._make_call(name, described, place, gives, takes, detail)
        self._channel.tell("call", call, [_pack(self._known.read(tensor)) for tensor in tensors])

        def wait() -> list[list[torch.Tensor | None]]:
            found: dict[int, Payload] = self._channel.ask("collect", call.place)
            first_running = next(rank for rank in place.ranks if rank in found)
            return [[_unpack(one) for one in found[rank if rank in found else first_running]] for rank in place.ranks]

        return wait

    def _make_call(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        place: GroupRank,
        gives: Sequence[int],
        takes: Sequence[int],
        detail: str = "",
        *,
        is_numbered: bool = True,
    ) -> CollectiveCall:
        at = place.name, place.ranks
        number = self._calls.get(at, 0)
        self._calls[at] = number + is_numbered
        with torch.DisableTorchFunction():
            shapes = list(dict.fromkeys(f"{list(tensor.shape)}" for tensor in tensors))
            dtypes = ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
        count_text = f"{len(tensors)} x " if len(tensors) > 1 else ""
        tensors_text = f" of {count_text}{' and '.join(shapes[:3])} {dtypes}" if tensors else ""
        text = f"{name}{tensors_text}" + (f", {detail}" if detail else "")
        return CollectiveCall(*at, number, name, detail, dtypes, tuple(gives), tuple(takes), text, program_line())

    def _pieces(self, parts: Parts, place: GroupRank) -> Sequence[torch.Tensor]:
        known = any(map(self._known.knows, parts.tensors))
        return parts.each() if known else [parts.tensors[0]] * place.size

    def _put(self, parts: Parts, values: Sequence[torch.Tensor | None]) -> None:
        """Set the values of each part; the parts of a single tensor are all known, or the tensor is unknown."""
        if len(parts.tensors) == len(values):
            for part, one in zip(parts.tensors, values, strict=True):
                self._known.put(part, one)
        else:
            known = [one.reshape(-1) for one in values if one is not None]
            self._known.put(parts.tensors[0], torch.cat(known) if len(known) == len(values) else None)


def _sizes_to_root(root: int, number: int, place: GroupRank) -> tuple[int, ...]:
    return tuple(number if rank == root else 0 for rank in range(place.size))


def _reduce_known(values: Sequence[torch.Tensor | None], reduction: str) -> torch.Tensor | None:
    known = [one for one in values if one is not None]
    if len(known) < len(values) or reduction not in _REDUCED:
        return None
    with torch.DisableTorchFunction(), disable_current_modes():
        total = functools.reduce(_REDUCED[reduction], known)
        if reduction == "AVG":
            total = total / len(known) if total.is_floating_point() else total // len(known)
        return total.to(known[0].dtype)


def _pack(tensor: torch.Tensor | None) -> Payload:
    """Return dtype, shape and bytes of `tensor`; the bytes of one element if all elements are equal."""
    if tensor is None:
        return None
    with torch.DisableTorchFunction(), disable_current_modes():
        shape = tuple(tensor.shape)
        if tensor.numel() and not any(tensor.stride()):
            tensor = tensor.as_strided((1,), (1,))
        flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        return tensor.dtype, shape, bytes(flat.numpy()) if flat.numel() else b""


def _unpack(payload: Payload) -> torch.Tensor | None:
    if payload is None:
        return None
    dtype, shape, content = payload
    with torch.DisableTorchFunction(), disable_current_modes():
        if not content:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(bytearray(content), dtype=dtype)
        return flat.view(shape) if flat.numel() == math.prod(shape) else flat.expand(shape)
