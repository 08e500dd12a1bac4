"""Private pools of the caching allocator: those of CUDA graphs, and torch.cuda.MemPool.

Captured code runs once, as plain code. Its memory stays in the graph's pool until the pool's last graph is deleted, and
is not reused outside (`beginAllocateToPool`, `releasePool` of c10/cuda/CUDACachingAllocator.cpp). A replay does
nothing: the tensors of a graph are those of its capture.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda
from memprof.trace.events import NONE, GraphPool
from memprof.virtual.gpu_functions import make_constant_function
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.watch.recorder import Recorder

PoolHandle = tuple[int, int]
_GRAPHS = "CUDA graphs: what is captured runs once, as plain code; a replay takes nothing and computes nothing."


class _PrivatePools:
    """The private pools of a run, with indices from 1."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_pools = 0
        self._num_users = Counter[int]()  # number of graphs and MemPools that keep a pool
        self._outer_pools: list[tuple[int, bool]] = []

    def create(self) -> PoolHandle:
        self._num_pools += 1
        return (self._num_pools, 0)

    def add_user(self, pool: PoolHandle) -> None:
        self._num_users[pool[0]] += 1

    def remove_user(self, pool: PoolHandle) -> None:
        """Remove a user (a graph or MemPool) of `pool`; without users, the pool's free memory may be released."""
        self._num_users[pool[0]] -= 1
        if not self._num_users[pool[0]]:
            self._recorder.active_pool.append_pool_free(pool[0])

    def record_capture(self, pool: PoolHandle) -> None:
        """Record the program's current line as that of the first capture into `pool`."""
        trace = self._recorder.trace
        source = self._recorder.attribution.find_call_site(sys._getframe(1)).source
        if source != NONE and all(one.pool != pool[0] for one in trace.graph_pools):
            trace.graph_pools.append(GraphPool(pool[0], trace.sources[source]))

    def begin_allocating(self, pool: PoolHandle, *, is_thread_local: bool) -> None:
        """Allocate from `pool` from now on; with `is_thread_local`, only in this thread, not in backward passes."""
        self._outer_pools.append(self._recorder.active_pool.select_pool(pool[0], is_thread_local=is_thread_local))

    def end_allocating(self) -> None:
        pool_index, is_thread_local = self._outer_pools.pop()
        self._recorder.active_pool.select_pool(pool_index, is_thread_local=is_thread_local)


class _CudaGraph:
    """A replacement of `torch.cuda.CUDAGraph`."""

    pools: _PrivatePools
    assume: Callable[[str], None]

    def __init__(self, keep_graph: bool = False) -> None:
        self.assume(_GRAPHS)
        self._pool: PoolHandle | None = None

    def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        self.reset()
        self._pool = self.pools.create() if pool is None else pool
        self.pools.add_user(self._pool)
        self.pools.record_capture(self._pool)
        self.pools.begin_allocating(self._pool, is_thread_local=False)

    def capture_end(self) -> None:
        self.pools.end_allocating()

    def pool(self) -> PoolHandle:
        return self._pool or (0, 0)

    def reset(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self.pools.remove_user(pool)

    def __del__(self) -> None:
        self.reset()

    replay = instantiate = enable_debug_mode = debug_dump = make_constant_function(None)


class _MemPool:
    """A replacement of `torch.cuda.MemPool`."""

    pools: _PrivatePools

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        if allocator is not None:
            raise unsupported_error(
                "takes memory by an allocator of its own, which has no public rules", "leave it out"
            )
        self.id = self.pools.create()
        self.pools.add_user(self.id)

    def use_count(self) -> int:
        """Return 1: the only user of the pool is this object."""
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        """Return an empty list: torch.cuda.memory_snapshot() has the segments of all pools."""
        return []

    def __del__(self) -> None:
        if hasattr(self, "id"):
            self.pools.remove_user(self.id)


class GraphsAndPools(Extension):
    """Patches of CUDA graphs and memory pools in `torch.cuda`: `CUDAGraph`, `MemPool` and their functions."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the classes `CUDAGraph` and `MemPool`, and of functions that use pools."""
        pools = _PrivatePools(context.recorder)
        graph = type("CUDAGraph", (_CudaGraph,), {"assume": staticmethod(context.assume), "pools": pools})
        pool = type("MemPool", (_MemPool,), {"pools": pools})

        @contextlib.contextmanager
        def use_mem_pool(pool: _MemPool, device: Any = None) -> Iterator[None]:
            pools.begin_allocating(pool.id, is_thread_local=True)
            try:
                yield
            finally:
                pools.end_allocating()

        classes = {"CUDAGraph": graph, "MemPool": pool, "use_mem_pool": use_mem_pool, "graph_pool_handle": pools.create}
        for owner in (torch.cuda, torch.cuda.graphs, torch.cuda.memory):
            for name, replacement in classes.items():
                if hasattr(owner, name):
                    yield owner, name, replacement
        if not cuda.host_empty_cache.exists():  # a CPU build, where torch.cuda.graph calls this function
            yield cuda.host_empty_cache.patch(lambda: None)
