"""Private pools of the caching allocator, of CUDA graphs and of the program (torch.cuda.MemPool).

Captured code runs once, as plain code. Its memory stays in the graph's pool until the pool's last graph is deleted, and
is not reused outside (`beginAllocateToPool`, `releasePool` of c10/cuda/CUDACachingAllocator.cpp). A replay does
nothing: its tensors are those of the capture.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda
from memprof.virtual.cuda_api.driver import returning
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.watch.recorder import Recorder

Handle = tuple[int, int]
_GRAPHS = "CUDA graphs: what is captured runs once, as plain code; a replay takes nothing and computes nothing."


class _PrivatePools:
    """The private pools of a run, numbered from 1."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_pools = 0
        self._users = Counter[int]()  # number of graphs and MemPools that keep a pool
        self._outer: list[tuple[int, bool]] = []

    def new(self) -> Handle:
        self._num_pools += 1
        return (self._num_pools, 0)

    def keep(self, pool: Handle) -> None:
        self._users[pool[0]] += 1

    def leave(self, pool: Handle) -> None:
        """Remove one user of a pool; without users, the pool's free memory may be released."""
        self._users[pool[0]] -= 1
        if not self._users[pool[0]]:
            self._recorder.active_pool.append_pool_free(pool[0])

    def begin(self, pool: Handle, *, of_thread: bool) -> None:
        """Begin to allocate from a pool; with `of_thread`, not in backward passes, which run in other threads."""
        self._outer.append(self._recorder.active_pool.select_pool(pool[0], is_thread_local=of_thread))

    def end(self) -> None:
        number, of_thread = self._outer.pop()
        self._recorder.active_pool.select_pool(number, is_thread_local=of_thread)


class _CudaGraph:
    """`torch.cuda.CUDAGraph`."""

    pools: _PrivatePools
    assume: Callable[[str], None]

    def __init__(self, keep_graph: bool = False) -> None:
        self.assume(_GRAPHS)
        self._pool: Handle | None = None

    def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        self.reset()
        self._pool = self.pools.new() if pool is None else pool
        self.pools.keep(self._pool)
        self.pools.begin(self._pool, of_thread=False)

    def capture_end(self) -> None:
        self.pools.end()

    def pool(self) -> Handle:
        return self._pool or (0, 0)

    def reset(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self.pools.leave(pool)

    def __del__(self) -> None:
        self.reset()

    replay = instantiate = enable_debug_mode = debug_dump = returning(None)


class _MemPool:
    """`torch.cuda.MemPool`."""

    pools: _PrivatePools

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        if allocator is not None:
            raise unsupported_error(
                "takes memory by an allocator of its own, which has no public rules", "leave it out"
            )
        self.id = self.pools.new()
        self.pools.keep(self.id)

    def use_count(self) -> int:
        """Return the number of uses of the pool: 1, for the object itself."""
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        """Return an empty list: torch.cuda.memory_snapshot() has the segments of all pools."""
        return []

    def __del__(self) -> None:
        if hasattr(self, "id"):
            self.pools.leave(self.id)


class GraphsAndPools(Extension):
    """The CUDA graphs and memory pools of `torch.cuda`: `CUDAGraph`, `MemPool` and functions that use them."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that replace the classes by those of this run."""
        pools = _PrivatePools(context.recorder)
        graph = type("CUDAGraph", (_CudaGraph,), {"assume": staticmethod(context.assume), "pools": pools})
        pool = type("MemPool", (_MemPool,), {"pools": pools})

        @contextlib.contextmanager
        def use_mem_pool(pool: _MemPool, device: Any = None) -> Iterator[None]:
            pools.begin(pool.id, of_thread=True)
            try:
                yield
            finally:
                pools.end()

        replaced = {"CUDAGraph": graph, "MemPool": pool, "use_mem_pool": use_mem_pool, "graph_pool_handle": pools.new}
        for owner in (torch.cuda, torch.cuda.graphs, torch.cuda.memory):
            for name, value in replaced.items():
                if hasattr(owner, name):
                    yield owner, name, value
        if not cuda.host_empty_cache.exists():  # a CPU build, where torch.cuda.graph calls this function
            yield cuda.host_empty_cache.patch(lambda: None)
