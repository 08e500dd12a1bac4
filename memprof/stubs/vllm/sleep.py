"""vLLM's sleep mode: the engine gives its memory back while it sleeps, and the trainer of the same process uses it.

On a GPU, vllm/device_allocator/cumem.py maps and unmaps memory below torch's tensors, by a compiled allocator. Here the
storages that were allocated in its pool are resized to nothing and back, which the trace has as frees and allocations.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memprof.patching import Patch
from memprof.trace.events import NONE, Owner, Role
from memprof.virtual.install_context import InstallContext

_CACHE_TAG = "kv_cache"
_ALWAYS_WOKEN = ("runtime", "cudagraph", "default", "workspace")


@dataclass(slots=True)
class _Memory:
    """Memory of one storage in the pool of a tag."""

    storage: weakref.ref[torch.UntypedStorage]
    tag: str
    asleep_bytes: int = 0  # 0: it is awake
    index: int = NONE  # in the trace, before it slept
    backup: torch.Tensor | None = None  # on the host


class SleepMode:
    """The memory that the engine has allocated in its pools."""

    def __init__(self, context: InstallContext) -> None:
        self._storages = context.recorder.storages
        self._trace = context.recorder.trace
        self._memory: list[_Memory] = []

    def get_patches(self, module: Any) -> Iterator[Patch]:
        """Yield patches of `module`, vllm.device_allocator.cumem."""
        allocator = module.CuMemAllocator
        yield module, "cumem_available", True
        yield allocator, "use_memory_pool", lambda _, tag=None: self._use_pool(tag or allocator.default_tag)
        yield allocator, "sleep", lambda _, offload_tags=allocator.default_tag: self._sleep(_list(offload_tags))
        yield allocator, "discard", lambda _, tags: self._sleep((), _list(tags))
        yield allocator, "wake_up", lambda _, tags=None: self._wake_up(tags)
        yield allocator, "get_current_usage", lambda _: sum(self._count(memory) for memory in self._memory)

    @contextlib.contextmanager
    def _use_pool(self, tag: str) -> Iterator[None]:
        """Context manager: storages that the body allocates and keeps belong to the pool of `tag`."""
        first = len(self._trace.storages)
        try:
            yield
        finally:
            for storage in self._storages.list_gpu_storages(first):
                self._memory.append(_Memory(weakref.ref(storage), tag))
                if tag == _CACHE_TAG:
                    index = self._storages.index_by_address[storage._cdata]
                    self._trace.owners.setdefault(index, Owner(Role.KV_CACHE, ""))

    def _sleep(self, backup_tags: Sequence[str], tags: Sequence[str] | None = None) -> None:
        """Free the memory of `tags` (None: of all); that of `backup_tags` is copied to pinned memory of the host."""
        for memory in self._memory:
            storage = memory.storage()
            if storage is None or memory.asleep_bytes or (tags is not None and memory.tag not in tags):
                continue
            num_bytes = storage.nbytes()
            if memory.tag in backup_tags:
                memory.backup = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            memory.asleep_bytes = num_bytes
            memory.index = self._storages.index_by_address.get(storage._cdata, NONE)
            storage.resize_(0)
        torch.cuda.empty_cache()

    def _wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocate what sleeps of `tags` (None: of all), and always what is neither weights nor KV cache."""
        torch.cuda.empty_cache()
        for memory in self._memory:
            storage = memory.storage()
            if storage is not None and memory.asleep_bytes and (tags is None or memory.tag in (*tags, *_ALWAYS_WOKEN)):
                storage.resize_(memory.asleep_bytes)
                memory.asleep_bytes, memory.backup = 0, None
                self._keep_category(memory.index, self._storages.index_by_address.get(storage._cdata, NONE))

    def _keep_category(self, old: int, new: int) -> None:
        """Give the storage with index `new` what the trace says of the memory before it slept."""
        if NONE in (old, new):
            return
        self._trace.storages[new] = self._trace.storages[old]
        if old in self._trace.owners:
            self._trace.owners[new] = self._trace.owners[old]

    def _count(self, memory: _Memory) -> int:
        storage = memory.storage()
        return 0 if storage is None else memory.asleep_bytes or storage.nbytes()


def _list(tags: Any) -> Sequence[str]:
    return (tags,) if isinstance(tags, str) else tags or ("default",)
