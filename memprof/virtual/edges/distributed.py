"""`torch.distributed` with one process: what a launcher starts on one card.

There is no NCCL and nobody to talk to. The group that the program asks for is one whose collectives give back what they
are given, and which allocates on the card what NCCL's allocates there for one rank. All else is torch's own, so that
DistributedDataParallel makes its buckets where and when it does on a card. A group of more than one process ends the
run: what the other processes would send is not known here, nor what sharding leaves on this card.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from memprof.virtual.card import nccl_version, torch_release
from memprof.virtual.limits import not_yet

_c10d: Any = getattr(dist, "distributed_c10d", None)
"""None in a build of torch without it."""
_OURS = "memprof_one_rank"
_REPLACED = frozenset({"nccl", "gloo", "mpi", "ucc", "undefined"})
_TIMEOUT = datetime.timedelta(minutes=10)
_ONE_PROCESS = (
    "torch.distributed runs with one process: collectives change nothing. What NCCL takes of the card outside the "
    "caching allocator is not counted."
)


def patches(
    assume: Callable[[str], None], on_card: Callable[[torch.Tensor], bool], joined: Callable[[], None] = lambda: None
) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement) that give a program a process group of its own; `joined` is told of it."""
    if _c10d is None:
        return

    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        *rest: Any,
        **options: Any,
    ) -> None:
        joined()
        count = _world_size(init_method, world_size)
        if count is None or str(backend) == "fake":  # torch says what is missing
            original(backend, init_method, timeout, world_size, rank, store, group_name, *rest, **options)
            return
        if count > 1:
            raise not_yet(
                f"joins a group of {count} processes (torch.distributed)",
                "run one process, on one card: without a launcher, or with WORLD_SIZE=1",
            )
        assume(_ONE_PROCESS)
        # Neither a store of the network nor what only NCCL understands (pg_options, device_id).
        original(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout or _TIMEOUT
        )

    original = dist.init_process_group
    for owner in (dist, _c10d):
        yield owner, "init_process_group", init_process_group
    yield _c10d, "_new_process_group_helper", _creating(_c10d._new_process_group_helper, on_card)
    yield dist, "is_nccl_available", lambda: True
    yield torch.cuda.nccl, "version", lambda: nccl_version(torch_release())
    if getattr(_c10d, "default_pg_nccl_timeout", None) is None:  # a build without NCCL warns
        yield _c10d, "default_pg_nccl_timeout", _TIMEOUT


@contextlib.contextmanager
def groups_end_with_the_run() -> Iterator[None]:
    """A group that the program leaves behind belongs to no process afterwards; nor does the hook that it installs."""
    hook = sys.excepthook
    before = _c10d is not None and dist.is_initialized()
    try:
        yield
    finally:
        sys.excepthook = hook
        if _c10d is not None and dist.is_initialized() and not before:
            dist.destroy_process_group()


def _world_size(init_method: str | None, world_size: int) -> int | None:
    """How many processes join; None if that is not said."""
    if world_size > 0:
        return world_size
    query = urllib.parse.parse_qs(urllib.parse.urlparse(init_method or "").query)
    text = query.get("world_size", [os.environ.get("WORLD_SIZE", "")])[0]
    return int(text) if text.isdigit() else None


def _creating(original: Callable[..., Any], on_card: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    def create(group_size: int, group_rank: int, ranks: Any, backend: Any, store: Any, *rest: Any, **more: Any) -> Any:
        asked = str(backend)
        if not {part.rpartition(":")[2] for part in asked.split(",")} <= _REPLACED:
            return original(group_size, group_rank, ranks, backend, store, *rest, **more)
        more.pop("backend_options", None)
        with _registered(lambda store, rank, size, timeout: OneRank(rank, size, on_card, "nccl" in asked)):
            group, prefix = original(group_size, group_rank, ranks, _c10d.Backend(_OURS), store, *rest, **more)
        if isinstance(group, OneRank):
            # What the program reads as its backend.
            name = "nccl" if asked == "undefined" else asked
            _c10d._world.pg_map[group] = (name, _c10d._world.pg_map[group][1])
            _c10d._world.pg_backend_config[group] = str(_c10d.BackendConfig(_c10d.Backend(name)))
        return group, prefix

    return create


@contextlib.contextmanager
def _registered(create: Callable[..., Any]) -> Iterator[None]:
    """Our backend, known to torch while a group is made."""
    backend = _c10d.Backend
    backend.register_backend(_OURS, create, devices=["cpu", "cuda"])
    try:
        yield
    finally:
        delattr(backend, _OURS.upper())
        for table in vars(backend).values():
            if isinstance(table, list) and _OURS in table:
                table.remove(_OURS)
            elif isinstance(table, dict):
                for name in (_OURS, _OURS.upper()):
                    table.pop(name, None)


_ProcessGroup: Any = getattr(dist, "ProcessGroup", object)


class OneRank(_ProcessGroup):
    """A process group of one: every collective is done when it is called."""

    def __init__(self, rank: int, size: int, on_card: Callable[[torch.Tensor], bool], is_nccl: bool) -> None:
        super().__init__(rank, size)
        self._on_card = on_card
        self._is_nccl = is_nccl

    def size(self) -> int:
        """One."""
        return 1

    @property
    def group_name(self) -> str:
        """The name by which operators of torch find it."""
        return str(_c10d._world.pg_names[self])

    def getBackendName(self) -> str:  # noqa: N802
        """As torch asks for it."""
        return _OURS

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """In place, and nothing to add."""
        return _done(tensors)

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: Any = None) -> Any:
        """NCCL's reduces a number on the card."""
        if self._is_nccl:
            torch.zeros(1, device="cuda")
        return _done([])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """NCCL gathers into one tensor, and copies the parts out of it."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            _copy(parts[0], self._flat(tensor))
        return _done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """NCCL scatters from one tensor, into which the parts are copied."""
        for tensor, parts in zip(outputs, inputs, strict=True):
            _copy(tensor, self._flat(parts[0]))
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """To this rank alone."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            _copy(parts[0], tensor)
        return _done(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """From this rank alone."""
        for tensor, parts in zip(outputs, inputs, strict=True):
            _copy(tensor, parts[0])
        return _done(outputs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Each list has this rank's tensor alone."""
        for output, tensor in zip(outputs, inputs, strict=True):
            _copy(output, tensor)
        return _done(outputs)

    def alltoall_base(self, output: Any, tensor: Any, *splits: Any, **options: Any) -> Any:
        """One tensor to one."""
        _copy(output, tensor)
        return _done([output])

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        _copy(output, tensor)
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """One by one."""
        return self.alltoall(outputs, inputs)

    # Names of these in releases of torch before and after 2.12.
    _reduce_scatter_base = all_gather_single = reduce_scatter_single = _allgather_base
    all_to_all_single = alltoall_base
    reduce_scatter_tensor_coalesced = all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = allgather_coalesced = allgather_into_tensor_coalesced

    def _flat(self, tensor: Any) -> Any:
        if not self._is_nccl or not self._on_card(tensor):
            return tensor
        flat = torch.empty_like(tensor, requires_grad=False)
        _copy(flat, tensor)
        return flat


def _copy(output: torch.Tensor, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        output.detach().view(tensor.shape).copy_(tensor.detach())


def _done(result: Any) -> Any:
    """The handle of work that is finished."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    create: Any = getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009 - not in its stubs
    return create(future)
