"""The joining of `torch.distributed`'s process groups by a program, and what it finds there.

There is no NCCL. The groups that the program asks for are those of group.py. All else is torch's
own, so that DistributedDataParallel makes its buckets, and fully_shard its shards, where and when they do on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from memprof.patching import Extension, Patch
from memprof.torch_private import distributed
from memprof.trace.facts import RankFacts
from memprof.virtual.device_properties import nccl_version, torch_release
from memprof.virtual.distributed import stores
from memprof.virtual.distributed.group import BACKEND, RankGroup
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import invalid_on_cuda_error
from memprof.virtual.peers.known import GroupRank

_c10d: Any = getattr(dist, "distributed_c10d", None)  # None in a build of torch without it
_OF_HOSTS = ("gloo", "mpi")  # backends that take as many processes on a GPU as there are
_REPLACED = frozenset({"nccl", "gloo", "mpi", "ucc", "undefined"})
_TIMEOUT = datetime.timedelta(minutes=10)
_OUTSIDE = "What NCCL takes of the GPU outside the caching allocator is not known, and not counted."
_ONE_PROCESS = "torch.distributed runs with one process: collectives change nothing."


class ProcessGroups(Extension):
    """`torch.distributed`, and its groups, which end with the run."""

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return what destroys groups that the program leaves behind."""
        return groups_end_with_the_run()

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace what joins groups and makes them."""
        self._context = context
        self._store = stores.kind(context.channel)
        self._found = RankFacts()  # what the program has joined as
        if _c10d is None:
            return
        starting = self._starting(dist.init_process_group)
        for owner in (dist, _c10d, getattr(dist, "device_mesh", None)):  # a mesh joins where the program has not
            for name, joining in (("init_process_group", starting), ("split_group", _split_group)):
                if hasattr(owner, name):
                    yield owner, name, joining
        yield distributed.new_process_group_helper.patch(self._creating(distributed.new_process_group_helper.get()))
        yield distributed.store_based_barrier.patch(lambda *args, **options: None)
        for owner in (dist, _c10d):
            for name in ("TCPStore", "FileStore"):
                if hasattr(owner, name):
                    yield owner, name, self._store
        yield dist, "is_nccl_available", lambda: True
        yield torch.cuda.nccl, "version", lambda: nccl_version(torch_release())
        if hasattr(dist, "Logger"):  # of DistributedDataParallel: it has no timers for such tensors, and says so
            yield dist.Logger, "set_runtime_stats_and_log", lambda logger: None
        if getattr(_c10d, "default_pg_nccl_timeout", None) is None:  # a build without NCCL warns
            yield _c10d, "default_pg_nccl_timeout", _TIMEOUT

    def _starting(self, original: Callable[..., Any]) -> Callable[..., None]:
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
            size = world_size if world_size > 0 else _read_setting("world_size", init_method)
            place = rank if rank >= 0 else _read_setting("rank", init_method)
            if size is None or (size > 1 and place is None) or str(backend) == "fake":  # torch says what is missing
                self._context.note_joined(RankFacts())
                original(backend, init_method, timeout, world_size, rank, store, group_name, *rest, **options)
                return
            found = RankFacts(place or 0, size, without_nccl=str(backend) in _OF_HOSTS)
            self._check(found, str(backend))
            if not found.without_nccl:
                self._context.assume(_OUTSIDE)
            if size == 1:
                self._context.assume(_ONE_PROCESS)
            self._context.note_joined(found)
            self._found = found
            # Neither a store of the network nor what only NCCL understands (pg_options, device_id).
            where = {} if backend == "mpi" else {"store": self._store(), "rank": found.rank, "world_size": size}
            original(backend, timeout=timeout or _TIMEOUT, **where)

        return init_process_group

    def _check(self, found: RankFacts, backend: str) -> None:
        if not found.rank < found.world_size:
            raise invalid_on_cuda_error(
                f"is rank {found.rank} of {found.world_size}, and there is none", "ranks count from 0"
            )
        most_ranks = self._context.gpus.number * self._context.options.nodes
        if found.world_size > most_ranks and backend not in _OF_HOSTS:
            raise invalid_on_cuda_error(
                f"joins a group of {found.world_size} processes, and there are GPUs for {most_ranks}",
                f"memprof run --gpus {found.world_size}, or with --nodes: so many on each machine",
            )
        channel = self._context.channel
        if channel is not None and (found.rank, found.world_size) != (channel.rank, channel.size):
            raise invalid_on_cuda_error(
                f"joins as rank {found.rank} of {found.world_size}, where rank {channel.rank} of {channel.size} runs",
                "ask for as many ranks as the program has: --gpus and --nodes, or its launcher's options",
            )

    def _creating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create(
            size: int, rank: int, ranks: Any, backend: Any, store: Any, group_name: str, *rest: Any, **more: Any
        ) -> Any:
            asked = str(backend)
            if not {part.rpartition(":")[2] for part in asked.split(",")} <= _REPLACED:
                return original(size, rank, ranks, backend, store, group_name, *rest, **more)
            more.pop("backend_options", None)
            if self._found.without_nccl and asked not in _OF_HOSTS:
                self._found = dataclasses.replace(self._found, without_nccl=False)
                self._context.note_joined(self._found)
                self._context.assume(_OUTSIDE)
            if size < 0:  # of MPI, which would say that itself
                size, rank, store = self._found.world_size, self._found.rank, self._store()
            place = GroupRank(str(group_name), tuple(ranks or range(size)), rank)
            _forget_layouts(place)
            with _registered(lambda *given: RankGroup(place, asked, self._context)):
                group, prefix = original(size, rank, ranks, _c10d.Backend(BACKEND), store, group_name, *rest, **more)
            if isinstance(group, RankGroup):
                # What the program reads as its backend.
                name = "nccl" if asked == "undefined" else asked
                distributed.world.get().pg_map[group] = (name, distributed.world.get().pg_map[group][1])
                distributed.world.get().pg_backend_config[group] = str(_c10d.BackendConfig(_c10d.Backend(name)))
            return group, prefix

        return create


# By name: the ranks of the last group of that name in this process, and whether it had this one.
_GROUPS: dict[str, tuple[tuple[int, ...], bool]] = {}


def _forget_layouts(place: GroupRank) -> None:
    """DTensor keeps what an operator does to meshes of equal shape, with the names of their groups, for the process:
    another rank, run after this one, is in other groups."""
    found = place.ranks, place.rank in range(len(place.ranks))
    if _GROUPS.get(place.name, found) != found and "torch.distributed.tensor" in sys.modules:
        distributed.op_dispatcher.get().sharding_propagator.propagate_op_sharding.cache_clear()
        if distributed.clear_fast_path_sharding_prop_cache.exists():
            distributed.clear_fast_path_sharding_prop_cache()
        _GROUPS.clear()
    _GROUPS[place.name] = found


def _split_group(
    parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None, *args: Any, **more: Any
) -> Any:
    """New groups of parts of another, which NCCL splits a communicator for; the one in which this rank is."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent: Any = parent_pg or dist.group.WORLD
    own = None
    for part in split_ranks:
        made = dist.new_group([dist.get_global_rank(parent, rank) for rank in part], timeout=timeout)
        own = made if dist.get_rank(parent) in part else own
    return own


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


def _read_setting(name: str, init_method: str | None) -> int | None:
    """Return a number that a program does not give as an argument; None if it is not set."""
    query = urllib.parse.parse_qs(urllib.parse.urlparse(init_method or "").query)
    text = query.get(name, [os.environ.get(name.upper(), "")])[0]
    return int(text) if text.isdigit() else None


@contextlib.contextmanager
def _registered(create: Callable[..., Any]) -> Iterator[None]:
    """Our backend, known to torch while a group is made."""
    backend = _c10d.Backend
    backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
    try:
        yield
    finally:
        delattr(backend, BACKEND.upper())
        for table in vars(backend).values():
            if isinstance(table, list) and BACKEND in table:
                table.remove(BACKEND)
            elif isinstance(table, dict):
                for name in (BACKEND, BACKEND.upper()):
                    table.pop(name, None)
