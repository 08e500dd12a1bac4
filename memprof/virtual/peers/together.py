"""Contributions of other ranks that run too: what they really know, and nothing of what nobody knows.

A tensor without data is shown to the others as so many elements of a dtype. Of ranks that do not run, the first that
does in a group speaks for them: so all that run see the same.
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
    """A rank among others."""

    def __init__(self, assume: Callable[[str], None], values: Values, channel: Channel) -> None:
        super().__init__(assume, values)
        self._channel = channel
        self._calls: dict[tuple[str, tuple[int, ...]], int] = {}

    def has(self, ranks: Sequence[int]) -> bool:
        return set(ranks) <= set(self._channel.ranks)

    def all_reduce(self, tensor: torch.Tensor, reduction: str, place: GroupRank) -> Finish:
        sizes = (tensor.numel(),) * place.size
        given = self._meet("all_reduce", [tensor], place, sizes, sizes, reduction)
        return lambda: self._known.put(tensor, _reduced([one[0] for one in given()], reduction))

    def reduce(self, tensor: torch.Tensor, reduction: str, root: int, place: GroupRank) -> Finish:
        gives = _to(root, tensor.numel(), place)
        takes = (tensor.numel() if root == place.rank else 0,) * place.size
        given = self._meet("reduce", [tensor], place, gives, takes, f"{reduction} to rank {place.ranks[root]}")
        if root != place.rank:
            return given
        return lambda: self._known.put(tensor, _reduced([one[0] for one in given()], reduction))

    def broadcast(self, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        gives = (tensor.numel() if root == place.rank else 0,) * place.size
        takes = _to(root, tensor.numel(), place)
        given = self._meet("broadcast", [tensor], place, gives, takes, f"from rank {place.ranks[root]}")
        return given if root == place.rank else lambda: self._known.put(tensor, given()[root][0])

    def all_gather(self, parts: Parts, tensor: torch.Tensor, place: GroupRank) -> Finish:
        given = self._meet("all_gather", [tensor], place, (tensor.numel(),) * place.size, parts.sizes)
        return lambda: self._put(parts, [one[0] for one in given()])

    def gather(self, parts: Parts | None, tensor: torch.Tensor, root: int, place: GroupRank) -> Finish:
        gives = _to(root, tensor.numel(), place)
        takes = (0,) * place.size if parts is None else parts.sizes
        given = self._meet("gather", [tensor], place, gives, takes, f"to rank {place.ranks[root]}")
        return given if parts is None else lambda: self._put(parts, [one[0] for one in given()])

    def reduce_scatter(self, output: torch.Tensor, parts: Parts, reduction: str, place: GroupRank) -> Finish:
        takes = (output.numel(),) * place.size
        given = self._meet("reduce_scatter", self._pieces(parts, place), place, parts.sizes, takes, reduction, of=parts)
        return lambda: self._known.put(output, _reduced([one[place.rank] for one in given()], reduction))

    def scatter(self, output: torch.Tensor, parts: Parts | None, root: int, place: GroupRank) -> Finish:
        gives = (0,) * place.size if parts is None else parts.sizes
        pieces = [output] * place.size if parts is None else self._pieces(parts, place)
        takes = _to(root, output.numel(), place)
        given = self._meet("scatter", pieces, place, gives, takes, f"from rank {place.ranks[root]}", of=Parts([output]))
        return lambda: self._known.put(output, given()[root][place.rank])

    def all_to_all(self, outputs: Parts, inputs: Parts, place: GroupRank) -> Finish:
        pieces = self._pieces(inputs, place)
        given = self._meet("all_to_all", pieces, place, inputs.sizes, outputs.sizes, of=inputs)
        return lambda: self._put(outputs, [one[place.rank] for one in given()])

    def barrier(self, place: GroupRank) -> Finish:
        return self._meet("barrier", [], place, (), ())

    def send(self, tensor: torch.Tensor, to: int, tag: int, place: GroupRank) -> Finish:
        """Send to one other rank, which need not be there yet: it does not wait."""
        if self.has([place.ranks[to]]):
            call = self._call(
                "send", [tensor], place, (tensor.numel(),), (), f"to rank {place.ranks[to]}", numbered=False
            )
            self._channel.tell("send", place.ranks[to], tag, call, _packed(self._known.read(tensor)))
        return None

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, place: GroupRank) -> Finish:
        whom = None if source is None else place.ranks[source]
        if whom is not None and not self.has([whom]):
            return super().receive(tensor, source, tag, place)
        detail = "from any" if whom is None else f"from rank {whom}"
        call = self._call("recv", [tensor], place, (), (tensor.numel(),), detail, numbered=False)

        def finish() -> int:
            sender, payload = self._channel.ask("receive", whom, tag, call)
            self._known.put(tensor, _unpacked(payload))
            return place.ranks.index(sender)

        return finish

    # -- how ----------------------------------------------------------------------------------------------------------

    def _meet(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        place: GroupRank,
        gives: Sequence[int],
        takes: Sequence[int],
        detail: str = "",
        of: Parts | None = None,
    ) -> Callable[[], list[list[torch.Tensor | None]]]:
        """Contribute `tensors`; what is returned waits, and gives what each rank of the group contributes."""
        shown = tensors if of is None else of.tensors
        call = self._call(name, shown, place, gives, takes, detail)
        self._channel.tell("call", call, [_packed(self._known.read(tensor)) for tensor in tensors])

        def given() -> list[list[torch.Tensor | None]]:
            found: dict[int, Payload] = self._channel.ask("collect", call.place)
            speaks = next(rank for rank in place.ranks if rank in found)
            return [[_unpacked(one) for one in found[rank if rank in found else speaks]] for rank in place.ranks]

        return given

    def _call(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        place: GroupRank,
        gives: Sequence[int],
        takes: Sequence[int],
        detail: str = "",
        *,
        numbered: bool = True,
    ) -> CollectiveCall:
        at = place.name, place.ranks
        number = self._calls.get(at, 0)
        self._calls[at] = number + numbered
        with torch.DisableTorchFunction():
            shapes = list(dict.fromkeys(f"{list(tensor.shape)}" for tensor in tensors))
            dtypes = ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
        many = f"{len(tensors)} x " if len(tensors) > 1 else ""
        what = f" of {many}{' and '.join(shapes[:3])} {dtypes}" if tensors else ""
        text = f"{name}{what}" + (f", {detail}" if detail else "")
        return CollectiveCall(*at, number, name, detail, dtypes, tuple(gives), tuple(takes), text, program_line())

    def _pieces(self, parts: Parts, place: GroupRank) -> Sequence[torch.Tensor]:
        known = any(map(self._known.knows, parts.tensors))
        return parts.each() if known else [parts.tensors[0]] * place.size

    def _put(self, parts: Parts, given: Sequence[torch.Tensor | None]) -> None:
        """Give each part its own; what is one tensor is known as a whole or not at all."""
        if len(parts.tensors) == len(given):
            for part, one in zip(parts.tensors, given, strict=True):
                self._known.put(part, one)
        else:
            known = [one.reshape(-1) for one in given if one is not None]
            self._known.put(parts.tensors[0], torch.cat(known) if len(known) == len(given) else None)


def _to(root: int, number: int, place: GroupRank) -> tuple[int, ...]:
    return tuple(number if rank == root else 0 for rank in range(place.size))


def _reduced(given: Sequence[torch.Tensor | None], reduction: str) -> torch.Tensor | None:
    known = [one for one in given if one is not None]
    if len(known) < len(given) or reduction not in _REDUCED:
        return None
    with torch.DisableTorchFunction(), disable_current_modes():
        total = functools.reduce(_REDUCED[reduction], known)
        if reduction == "AVG":
            total = total / len(known) if total.is_floating_point() else total // len(known)
        return total.to(known[0].dtype)


def _packed(tensor: torch.Tensor | None) -> Payload:
    """Dtype, shape and bytes: of one element where all are alike."""
    if tensor is None:
        return None
    with torch.DisableTorchFunction(), disable_current_modes():
        shape = tuple(tensor.shape)
        if tensor.numel() and not any(tensor.stride()):
            tensor = tensor.as_strided((1,), (1,))
        flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        return tensor.dtype, shape, bytes(flat.numpy()) if flat.numel() else b""


def _unpacked(payload: Payload) -> torch.Tensor | None:
    if payload is None:
        return None
    dtype, shape, given = payload
    with torch.DisableTorchFunction(), disable_current_modes():
        if not given:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(bytearray(given), dtype=dtype)
        return flat.view(shape) if flat.numel() == math.prod(shape) else flat.expand(shape)
