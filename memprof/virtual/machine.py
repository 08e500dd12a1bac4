"""The machine that the program believes in: where each tensor lives, and the record of the storages it makes.

What kernels and the program's edges are given of the virtual GPU. tracker.py makes a dispatch mode of it, so that
operators called `with machine:` run on it in turn.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memprof.torch_private import autograd
from memprof.torch_private.dispatch import TorchDispatchMode
from memprof.trace.events import GPU, HOST, DeviceMismatch, Operand, Workspace, is_card
from memprof.virtual.calls import HOST_COUNTED_BYTES, Call, Operator
from memprof.virtual.card import Card
from memprof.virtual.cards import Cards
from memprof.virtual.engine import Accumulation
from memprof.virtual.flops import Meter
from memprof.virtual.values import Values
from memprof.watch.forward import Place
from memprof.watch.recorder import Recorder
from memprof.watch.wrappers import parts_of_sparse, unwrapped

_NoTorchFunction = torch.DisableTorchFunction
REAL = "real"
"""What is asked for where a tensor is to have data."""
_NONE_HELD = contextlib.nullcontext()
_sequence_number = autograd.get_sequence_nr


class Machine(TorchDispatchMode):
    """A host and its cards."""

    def __init__(self, recorder: Recorder, values: Values, card: Card, cards: Cards, workspaces: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.values = values
        self.card = card
        self.cards = cards
        self.workspaces = workspaces and recorder.storages.counts_hidden
        """Whether what libraries take for a call is counted."""
        self.factory_device: str | None = None
        """Set by the function mode around a factory call: the device that the program asked for."""
        self.calling: tuple[Any, ...] = ()
        """Set by the function mode: the arguments of the function that is running."""
        self.adds_bias = False
        """Whether the operators that run are those of a linear layer with a bias."""
        self.thread = ""
        """Which of the program's own threads this machine is of, each of which has a copy; empty: the first."""
        self.begins: Callable[[], None] | None = None
        """Called before the first operator of such a thread."""
        self.in_turn = False
        """Whether this thread runs an operator, and the others wait."""
        self.kept: dict[str, torch.Tensor] = {}
        """What a library makes once and keeps for good."""
        self.accumulation = Accumulation()
        self.not_waited_for: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.Tensor] = weakref.WeakKeyDictionary()
        """Results of collectives -> what these were given."""
        self._node_cards: dict[int, str] = {}
        """Of several cards: number of an autograd node -> the one that it was made on."""
        self._host_copies: set[int] = set()
        """Numbers of autograd nodes."""
        self._host_sources: dict[int, tuple[Any, int]] = {}
        self.meter = Meter(recorder, self.device_of)

    def run_in_turn(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator while no other thread runs one. When the run is over, threads of it end at their next."""
        with self.recorder.writer.lock:
            if self.thread and self.recorder.writer.closed:
                raise SystemExit
            if self.begins is not None:
                self.begins()
                self.begins = None
            self.in_turn = True
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.in_turn = False

    @contextlib.contextmanager
    def out_of_turn(self) -> Iterator[None]:
        """Inside, the program's own code runs, which may wait for another thread."""
        if not self.in_turn:
            yield
            return
        self.in_turn = False
        self.recorder.writer.lock.release()
        try:
            yield
        finally:
            self.recorder.writer.lock.acquire()
            self.in_turn = True

    def allocating(self, operator: Operator, call: Call, place: Place) -> Any:
        """Run an operator that makes new storages in the ordinary way."""
        raise NotImplementedError

    def device_of(self, tensor: torch.Tensor) -> str:
        """The device that the program believes `tensor` to be on."""
        if not tensor.is_meta:
            return str(tensor.device)
        tensor = unwrapped(tensor)
        if tensor.layout is not torch.strided:
            tensor = parts_of_sparse(tensor)[-1]
        return self.recorder.storages.device_of(tensor.untyped_storage())

    def is_on_card(self, tensor: torch.Tensor) -> bool:
        """Whether the program believes `tensor` to be on the card."""
        with _NoTorchFunction():
            return is_card(self.device_of(tensor))

    def is_virtual(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` stands for one that has data in a real run."""
        with _NoTorchFunction():
            return tensor.is_meta and self.device_of(tensor) != "meta"

    def note_node(self, card: str) -> None:
        """What runs now, on this of several cards, has an autograd node as a rule."""
        if is_card(card):
            self._node_cards[_sequence_number() - 1] = card

    def card_of_node(self) -> str:
        """Where C++ makes a tensor of no other: in a backward pass on the card of the node, else on the current one."""
        node = autograd.current_autograd_node()
        return self.cards.named() if node is None else self._node_cards.get(node._sequence_nr(), self.cards.named())

    def note_source(self, tensor: torch.Tensor) -> None:
        """The autograd node that was just made, if any, is that of a copy of `tensor`."""
        if torch.is_grad_enabled() and self.device_of(tensor) == HOST:
            self._host_copies.add(_sequence_number() - 1)

    def returns_to_host(self) -> bool:
        """Whether the node that is running is that of a copy of a virtual host tensor."""
        node = autograd.current_autograd_node()
        return node is not None and node._sequence_nr() in self._host_copies

    # -- recording --------------------------------------------------------------------------------------------------

    def record(self, tensors: list[torch.Tensor], op: str, place: Place, device: str) -> None:
        """Record the storages of `tensors` that are not known yet."""
        self.recorder.storages.record(tensors, op, place, device)

    def record_real(self, tensor: torch.Tensor, op: str, place: Place) -> None:
        """Record a new host tensor that has data: too small to be virtual, yet a model may have many."""
        storage, storages = tensor.untyped_storage(), self.recorder.storages
        if storage.nbytes() >= HOST_COUNTED_BYTES and storage._cdata not in storages.live:
            storages.allocate(storage, tensor.size(), tensor.dtype, HOST, op, place)

    def record_copy(self, copy: torch.Tensor) -> None:
        """A virtual copy of a real host tensor stands for that one: it is on the host, and takes no memory."""
        storage = copy.untyped_storage()
        self.recorder.storages.uncounted[storage] = HOST
        weakref.finalize(storage, self.values.store.drop, storage._cdata).atexit = False

    def resized(self, storage: torch.UntypedStorage, device: str, place: Place) -> None:
        """The program resized a storage of `device` itself."""
        storages = self.recorder.storages
        index = storages.live.get(storage._cdata)
        if index is not None:
            storages.free(index)
            self.values.store.drop(storage._cdata)
        if storage.nbytes():
            storages.allocate(storage, (storage.nbytes(),), torch.uint8, device, "storage.resize_", place)
        elif device != GPU:
            storages.uncounted[storage] = device

    def hidden(
        self, sizes: Iterable[int], op: str, place: Place, device: str = GPU
    ) -> contextlib.AbstractContextManager[None]:
        """Memory on a card that no tensor shows, for as long as something runs; sizes in bytes, 0 is none."""
        wanted = [size for size in sizes if size]
        return self._held(wanted, op, place, device) if wanted else _NONE_HELD

    @contextlib.contextmanager
    def _held(self, sizes: list[int], op: str, place: Place, device: str) -> Iterator[None]:
        storages = self.recorder.storages
        with contextlib.ExitStack() as taken:  # given back in reverse, as C++ destroys what a function holds
            for size in sizes:
                taken.callback(storages.free_hidden, storages.allocate_hidden(size, op, place, device))
            yield

    def transients(self, sizes: Iterable[int], op: str, place: Place, device: str = GPU) -> None:
        """Temporaries of a kernel: taken one after the other, all given back when it returns."""
        with self.hidden(sizes, op, place, device):
            pass

    def workspace(self, num_bytes: int, most_bytes: int, op: str, place: Place, device: str) -> None:
        """Memory that a library takes for one call, by a rule; what it may be instead is kept beside it."""
        if self.workspaces:
            trace = self.recorder.trace
            trace.workspaces.append(Workspace(len(trace.events), device, num_bytes, most_bytes))
            self.transients((num_bytes,), op, place, device)

    @contextlib.contextmanager
    def asked_for(self, device: str) -> Iterator[None]:
        """Inside, factories make tensors on `device`."""
        outer, self.factory_device = self.factory_device, device
        try:
            yield
        finally:
            self.factory_device = outer

    # -- device mismatch --------------------------------------------------------------------------------------------

    def note_mixed(self, op: str, tensors: list[torch.Tensor], place: Place | None = None) -> None:
        """On a real GPU this call raises: keep what it was given, and where from."""
        place = place or self.recorder.attribution.place(sys._getframe(1))
        self.recorder.trace.mismatches.append(
            DeviceMismatch(
                len(self.recorder.trace.events),
                self.recorder.writer.op_index(op),
                place.module,
                place.source,
                tuple(self._operand(tensor) for tensor in tensors),
            )
        )

    def _operand(self, tensor: torch.Tensor) -> Operand:
        tensor = next(iter(parts_of_sparse(tensor)), tensor)
        storage = tensor.untyped_storage()
        source = -1
        if tensor.is_meta:
            index = self.recorder.storages.live.get(storage._cdata)
            if index is not None:
                source = self.recorder.trace.storages[index].source
        else:
            ref, origin = self._host_sources.get(storage._cdata, (lambda: None, -1))
            if ref() is storage:
                source = origin
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Operand(self.device_of(tensor), tuple(tensor.shape), dtype, source)
