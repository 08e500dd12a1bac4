"""Patches by which `torch.distributed` creates process groups without NCCL.

The program's groups are of class `RankGroup` (rank_group.py). All other code is torch's, so that DDP's buckets and
fully_shard's shards are allocated in the order of a run on a GPU.
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
from memprof.virtual.distributed import stores
from memprof.virtual.distributed.rank_group import BACKEND, RankGroup
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import invalid_on_cuda_error
from memprof.virtual.peers.known_values import GroupRank

_c10d: Any = getattr(dist, "distributed_c10d", None)  # None if torch was built without torch.distributed
_HOST_BACKENDS = ("gloo", "mpi")  # backends that allow several processes per GPU
_REPLACED_BACKENDS = frozenset({"nccl", "gloo", "mpi", "ucc", "undefined"})
_TIMEOUT = datetime.timedelta(minutes=10)
_NCCL_MEMORY = "What NCCL takes of the GPU outside the caching allocator is not known, and not counted."
_ONE_PROCESS = "torch.distributed runs with one process: collectives change nothing."


class ProcessGroups(Extension):
    """Patches of `torch.distributed`; process groups are destroyed when the run ends."""

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return a context manager that destroys the program's remaining groups on exit."""
        return destroy_groups_at_end()

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the functions that initialize and create process groups, and of stores."""
        self._context = context
        self._store = stores.make_store_class(context.channel)
        self._rank_facts = RankFacts()  # rank and world size of the program
        if _c10d is None:
            return
        init_function = self._make_init_process_group(dist.init_process_group)
        for owner in (dist, _c10d, getattr(dist, "device_mesh", None)):  # a mesh initializes a group that is missing
            for name, replacement in (("init_process_group", init_function), ("split_group", _split_group)):
                if hasattr(owner, name):
                    yield owner, name, replacement
        helper = distributed.new_process_group_helper
        yield helper.patch(self._make_group_helper(helper.get()))
        yield distributed.store_based_barrier.patch(lambda *args, **options: None)
        for owner in (dist, _c10d):
            for name in ("TCPStore", "FileStore"):
                if hasattr(owner, name):
                    yield owner, name, self._store
        yield dist, "is_nccl_available", lambda: True
        yield torch.cuda.nccl, "version", lambda: context.libraries.nccl
        if hasattr(dist, "Logger"):  # DistributedDataParallel has no timers for meta tensors, and would warn
            yield dist.Logger, "set_runtime_stats_and_log", lambda logger: None
        if getattr(_c10d, "default_pg_nccl_timeout", None) is None:  # a build without NCCL warns
            yield _c10d, "default_pg_nccl_timeout", _TIMEOUT

    def _make_init_process_group(self, original: Callable[..., Any]) -> Callable[..., None]:
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
            world_rank = rank if rank >= 0 else _read_setting("rank", init_method)
            if size is None or (size > 1 and world_rank is None) or str(backend) == "fake":  # torch raises the error
                self._context.record_rank(RankFacts())
                original(backend, init_method, timeout, world_size, rank, store, group_name, *rest, **options)
                return
            facts = RankFacts(world_rank or 0, size, without_nccl=str(backend) in _HOST_BACKENDS)
            self._check_rank(facts, str(backend))
            if not facts.without_nccl:
                self._context.assume(_NCCL_MEMORY)
            if size == 1:
                self._context.assume(_ONE_PROCESS)
            self._context.record_rank(facts)
            self._rank_facts = facts
            # Without a network store and options for NCCL only (pg_options, device_id).
            store_options = {} if backend == "mpi" else {"store": self._store(), "rank": facts.rank, "world_size": size}
            original(backend, timeout=timeout or _TIMEOUT, **store_options)

        return init_process_group

    def _check_rank(self, facts: RankFacts, backend: str) -> None:
        """Raise an error if `facts.rank` is not in the world, or the run has no GPU for it."""
        if not facts.rank < facts.world_size:
            raise invalid_on_cuda_error(
                f"is rank {facts.rank} of {facts.world_size}, and there is none", "ranks count from 0"
            )
        max_ranks = self._context.gpus.num_gpus * self._context.options.nodes
        if facts.world_size > max_ranks and backend not in _HOST_BACKENDS:
            raise invalid_on_cuda_error(
                f"joins a group of {facts.world_size} processes, and there are GPUs for {max_ranks}",
                f"memprof run --gpus {facts.world_size}, or with --nodes: so many on each machine",
            )
        channel = self._context.channel
        if channel is not None and (facts.rank, facts.world_size) != (channel.rank, channel.size):
            raise invalid_on_cuda_error(
                f"joins as rank {facts.rank} of {facts.world_size}, where rank {channel.rank} of {channel.size} runs",
                "ask for as many ranks as the program has: --gpus and --nodes, or its launcher's options",
            )

    def _make_group_helper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of `_new_process_group_helper` that creates a `RankGroup`."""

        def create_group(
            size: int, rank: int, ranks: Any, backend: Any, store: Any, group_name: str, *rest: Any, **options: Any
        ) -> Any:
            backend_name = str(backend)
            if not {part.rpartition(":")[2] for part in backend_name.split(",")} <= _REPLACED_BACKENDS:
                return original(size, rank, ranks, backend, store, group_name, *rest, **options)
            options.pop("backend_options", None)
            if self._rank_facts.without_nccl and backend_name not in _HOST_BACKENDS:
                self._rank_facts = dataclasses.replace(self._rank_facts, without_nccl=False)
                self._context.record_rank(self._rank_facts)
                self._context.assume(_NCCL_MEMORY)
            if size < 0:  # MPI would provide the size
                size, rank, store = self._rank_facts.world_size, self._rank_facts.rank, self._store()
            group_rank = GroupRank(str(group_name), tuple(ranks or range(size)), rank)
            _clear_stale_sharding_caches(group_rank)
            with _register_backend(lambda *args: RankGroup(group_rank, backend_name, self._context)):
                group, prefix = original(size, rank, ranks, _c10d.Backend(BACKEND), store, group_name, *rest, **options)
            if isinstance(group, RankGroup):
                # Show the program the backend that it requested.
                name = "nccl" if backend_name == "undefined" else backend_name
                distributed.world.get().pg_map[group] = (name, distributed.world.get().pg_map[group][1])
                distributed.world.get().pg_backend_config[group] = str(_c10d.BackendConfig(_c10d.Backend(name)))
            return group, prefix

        return create_group


# Name of a group -> ranks of the last group of the name in this process, and whether this rank was a member.
_MEMBERSHIPS: dict[str, tuple[tuple[int, ...], bool]] = {}


def _clear_stale_sharding_caches(group_rank: GroupRank) -> None:
    """Clear DTensor's caches of sharding propagation, which identify groups by name, if an earlier group of this
    name had other ranks."""
    membership = group_rank.ranks, group_rank.rank in range(len(group_rank.ranks))
    if _MEMBERSHIPS.get(group_rank.name, membership) != membership and "torch.distributed.tensor" in sys.modules:
        distributed.op_dispatcher.get().sharding_propagator.propagate_op_sharding.cache_clear()
        if distributed.clear_fast_path_sharding_prop_cache.exists():
            distributed.clear_fast_path_sharding_prop_cache()
        _MEMBERSHIPS.clear()
    _MEMBERSHIPS[group_rank.name] = membership


def _split_group(
    parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None, *args: Any, **rest: Any
) -> Any:
    """Create a group for each list of `split_ranks`, as NCCL's communicator split; return the group of this rank."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent: Any = parent_pg or dist.group.WORLD
    own_group = None
    for part in split_ranks:
        group = dist.new_group([dist.get_global_rank(parent, rank) for rank in part], timeout=timeout)
        own_group = group if dist.get_rank(parent) in part else own_group
    return own_group


@contextlib.contextmanager
def destroy_groups_at_end() -> Iterator[None]:
    """Context manager: on exit, destroy the groups that the program created, and restore `sys.excepthook`."""
    excepthook = sys.excepthook
    was_initialized = _c10d is not None and dist.is_initialized()
    try:
        yield
    finally:
        sys.excepthook = excepthook
        if _c10d is not None and dist.is_initialized() and not was_initialized:
            dist.destroy_process_group()


def _read_setting(name: str, init_method: str | None) -> int | None:
    """Return the integer `name` from the URL `init_method` or from the environment; None if it is not set."""
    query = urllib.parse.parse_qs(urllib.parse.urlparse(init_method or "").query)
    value = query.get(name, [os.environ.get(name.upper(), "")])[0]
    return int(value) if value.isdigit() else None


@contextlib.contextmanager
def _register_backend(create: Callable[..., Any]) -> Iterator[None]:
    """Context manager: register memprof's backend in torch, to create a group; remove it on exit."""
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
