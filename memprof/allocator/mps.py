"""The MPS allocator, torch's for Apple's GPUs: buffers in Metal heaps, and what it does near its limits.

Source: `MPSHeapAllocatorImpl` of aten/src/ATen/mps/MPSAllocator.h (v2.13.0, as in its wheel) and MPSAllocator.mm (read
in versions of the repository before and after the tag); backticks name its methods. Metal is closed, and two of its
rules are assumed: a buffer is a multiple of 256 bytes, as out-of-memory messages show for small ones, and lies at the
lowest address of its heap with room. Buffers are free at once, as if no command buffer still used them.
"""

from __future__ import annotations

from bisect import bisect_left

from memprof.allocator.blocks import ADDRESS_BITS, Block, Segment, StreamPool, absorb_next, split_right
from memprof.allocator.config import AllocatorConfig
from memprof.allocator.messages import OomReport, OutOfMemory
from memprof.allocator.pools import PrivatePool, build_layout
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.rounding import MPS_ALIGNMENT
from memprof.allocator.stats import Counters, Statistics
from memprof.allocator.streams import Completion, PendingFrees
from memprof.trace.snapshot import DEFAULT_POOL, PoolId, SnapshotSegment
from memprof.units import MIB, round_up

PAGE = 16_384  # vm_page_size of Apple silicon: available memory of a heap is counted in aligned pages
SMALL_ALLOC = MIB  # kMaxSmallAlloc: buffers up to this size come from the small pool
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc
ROUND_LARGE = 2 * MIB  # kRoundLarge
# MTLDevice.maxBufferLength as a share of the working set that Metal recommends, where both are known: 8 of 10.67 GiB
# (M1 with 16 GB, macOS 13), 54 of 72 GiB (M2 Max with 96 GB; github.com/ggml-org/llama.cpp, issue 3213), 28.08 of 37.44
# GiB (M4 Pro with 48 GB), 156 of 208 GiB (M3 Ultra with 256 GB), the last two with later releases of macOS. With 8, 32
# and 64 GB it is 4, 16 and 36 GiB (llama.cpp, pull request 1706 and issue 1815; gfx-rs/wgpu, pull request 2502).
# Apple's documentation says 256 MB at least.
_MAX_BUFFER_SHARE = 3 / 4
SMALL_HEAP, LARGE_HEAP, XLARGE_HEAP = 8 * MIB, 32 * MIB, 1024 * MIB  # kSmallHeap, kLargeHeap, kXLargeHeap


class MpsAllocator:
    """Replays the decisions of torch's MPS allocator. A heap is a segment; its blocks are buffers, and free ranges.

    Args:
        total_bytes: Metal's recommended working set (recommendedMaxWorkingSetSize); None: unlimited.
        config: has the watermark ratios.
    """

    def __init__(
        self, total_bytes: int | None = None, config: AllocatorConfig | None = None, release: Release = LATEST
    ) -> None:
        self.total_bytes = total_bytes
        self.release = release
        self.device, self.backend = 0, "mps"
        self.statistics = Statistics()
        self.pending = PendingFrees(self.free, Completion.IMMEDIATE)  # never used: there is one stream
        self.pool = PrivatePool(DEFAULT_POOL, self.statistics)
        self.heaps: dict[StreamPool, list[Segment]] = {}
        self._next_address = XLARGE_HEAP
        self.max_buffer_bytes = None if total_bytes is None else compute_max_buffer_bytes(total_bytes)
        self.change_config(AllocatorConfig() if config is None else config)

    def change_config(self, config: AllocatorConfig) -> None:
        """Use the watermark ratios of `config` from now on (`setHighWatermarkRatio`, `setLowWatermarkRatio`)."""
        self.config = config
        self.allowed_bytes = _compute_limit(config.mps_high_watermark_ratio, self.total_bytes)
        self.pressure_bytes = _compute_limit(config.mps_low_watermark_ratio, self.total_bytes)

    def lift_limit(self) -> None:
        """Remove the high watermark and the limit of a buffer; memory is still under pressure above the low one."""
        self.allowed_bytes = self.max_buffer_bytes = None

    @property
    def counters(self) -> Counters:
        """Return the counters of all pools together, such as `allocated_bytes` and `reserved_bytes` (of heaps)."""
        return self.statistics.all

    # -- malloc and free -------------------------------------------------------------------------------------------

    def malloc(self, num_bytes: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block:
        """Return a buffer of at least `num_bytes` (`alloc_buffer_block`). Raises OutOfMemory: the high watermark is
        reached, even after cached buffers were released, or no buffer can be so long."""
        size = round_up(num_bytes, MPS_ALIGNMENT)
        if self.max_buffer_bytes is not None and num_bytes >= self.max_buffer_bytes:
            raise OutOfMemory(self._build_report(num_bytes, size, self.max_buffer_bytes), self.release)
        size_class = self.pool.small if size <= SMALL_ALLOC else self.pool.large
        owner = size_class.get_stream_pool(0)
        has_pressure = (
            not owner.is_small
            and self.pressure_bytes is not None
            and self.pressure_bytes - self.counters.reserved_bytes < MIB
        )
        block, has_pressure = self._find_buffer(owner, size, has_pressure)
        if block is None:
            if has_pressure and size < sum(key >> ADDRESS_BITS for key in owner.keys):
                self._collect_garbage(owner)
            block = self._make_buffer(owner, size, has_pressure)
        if block is None and self._release_available(owner, size):
            block = self._make_buffer(owner, size, has_pressure)
        if block is None:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = self._make_buffer(owner, size, has_pressure)
        if block is None:
            self.statistics.num_ooms += 1
            raise OutOfMemory(self._build_report(num_bytes, size), self.release)
        block.requested = num_bytes
        self._count(block, 1)
        return block

    def free(self, block: Block) -> None:
        """Return a buffer to its pool, where it stays a buffer of its size (`free_buffer`)."""
        self._count(block, -1)
        block.owner.insert(block)

    def empty_cache(self) -> None:
        """Release all cached buffers, and heaps without buffers (`release_cached_buffers`)."""
        for owner in self.heaps:
            for block in list(owner.blocks.values()):
                self._release_buffer(block)

    def _count(self, block: Block, sign: int) -> None:
        for counters in (block.owner.counters, block.owner.total):
            counters.allocation += sign
            counters.allocated_bytes += sign * block.size
            counters.requested_bytes += sign * block.requested
            counters.allocation_peak = max(counters.allocation_peak, counters.allocation)
            counters.allocated_bytes_peak = max(counters.allocated_bytes_peak, counters.allocated_bytes)
            counters.requested_bytes_peak = max(counters.requested_bytes_peak, counters.requested_bytes)
        if sign > 0:
            block.owner.counters.mallocs += 1
            block.owner.counters.mallocs_bytes += block.size
            block.owner.counters.mallocs_requested += block.requested

    def _is_allowed(self, size: int) -> bool:
        return self.allowed_bytes is None or self.counters.reserved_bytes + size <= self.allowed_bytes

    def _find_buffer(self, owner: StreamPool, size: int, has_pressure: bool) -> tuple[Block | None, bool]:
        """Return a cached buffer, if one is large enough and not too large, and whether there is memory pressure still
        (`get_free_buffer`)."""
        if not self._is_allowed(size):
            return None, has_pressure
        owner.pool.num_searches += 1  # of which the age of a cached buffer is counted
        index = bisect_left(owner.keys, size << ADDRESS_BITS)
        if index == len(owner.keys):
            return None, has_pressure
        block = owner.blocks[owner.keys[index]]
        if block.size <= size + LARGE_HEAP:
            owner.remove(block)
            return block, has_pressure
        if self._find_heap(owner, size) is not None:
            return None, has_pressure
        self._release_buffer(block, keeps_heap=True)  # the new buffer is made in the space of the larger one
        return None, False

    def _make_buffer(self, owner: StreamPool, size: int, has_pressure: bool) -> Block | None:
        """Return a new buffer in a heap with room or in a new heap; None at the high watermark (`alloc_buffer`)."""
        if not self._is_allowed(size):
            return None
        block = self._find_heap(owner, size) or self._make_heap(owner, size, has_pressure)
        if block.size > size:
            split_right(block, size).free = True
        block.free = False
        return block

    def _build_report(self, requested_bytes: int, size: int, max_buffer_bytes: int | None = None) -> OomReport:
        counters = self.counters
        return OomReport(
            requested_bytes=requested_bytes,
            tried_bytes=size,
            total_bytes=self.total_bytes or 0,
            free_bytes=max((self.allowed_bytes or 0) - counters.reserved_bytes, 0),
            allocated_bytes=counters.allocated_bytes,
            reserved_bytes=counters.reserved_bytes,
            allowed_bytes=self.allowed_bytes,
            backend=self.backend,
            max_buffer_bytes=max_buffer_bytes,
        )

    # -- heaps -----------------------------------------------------------------------------------------------------

    def _find_heap(self, owner: StreamPool, size: int) -> Block | None:
        """Return the free range for `size` bytes of the heap that has least available, if any (`get_free_heap`)."""
        heaps = [(measure_available(heap, owner), heap.address, heap) for heap in self.heaps.get(owner, ())]
        fitting = [entry for entry in heaps if entry[0] >= size]
        if not fitting:
            return None
        block: Block | None = min(fitting)[2].first
        while block is not None and not (_is_range(block, owner) and block.size >= size):
            block = block.next
        return block

    def _make_heap(self, owner: StreamPool, size: int, has_pressure: bool) -> Block:
        """Return the one free range of a new heap (`createHeapBlock`)."""
        num_bytes = compute_heap_size(size, has_pressure)
        heap = Segment(self._next_address, num_bytes)
        self._next_address += num_bytes
        heap.first = Block(heap.address, num_bytes, owner, heap, None, None, free=True)
        self.heaps.setdefault(owner, []).append(heap)
        self._count_heap(owner, num_bytes, 1)
        return heap.first

    def _count_heap(self, owner: StreamPool, num_bytes: int, num_heaps: int) -> None:
        owner.counters.count_reserved(num_bytes, num_heaps)
        owner.total.count_reserved(num_bytes, num_heaps)

    def _release_buffer(self, block: Block, *, keeps_heap: bool = False) -> None:
        """Return a cached buffer to its heap, and a heap without buffers to the system (`release_buffer`)."""
        owner, heap = block.owner, block.segment
        owner.remove(block)
        block.free = True
        if block.next is not None and _is_range(block.next, owner):
            absorb_next(block)
        if block.prev is not None and _is_range(block.prev, owner):
            block = block.prev
            absorb_next(block)
        if block.size == heap.size and not keeps_heap:
            self.heaps[owner].remove(heap)
            self._count_heap(owner, -heap.size, -1)

    def _release_available(self, owner: StreamPool, size: int) -> bool:
        """Release the smallest cached buffer that is large enough, else the largest ones until they are enough; return
        whether they are (`release_available_cached_buffers`)."""
        index = bisect_left(owner.keys, size << ADDRESS_BITS)
        if index < len(owner.keys):
            self._release_buffer(owner.blocks[owner.keys[index]])
            return True
        released_bytes = 0
        while owner.keys and released_bytes < size:
            block = owner.blocks[owner.keys[-1]]
            released_bytes += block.size
            self._release_buffer(block)
        return released_bytes >= size

    def _collect_garbage(self, owner: StreamPool) -> None:
        """Release cached buffers of at least the mean age, until reserved memory is below the low watermark
        (`garbage_collect_cached_buffers`). Heaps of several buffers stay."""
        assert self.pressure_bytes is not None
        target_bytes = self.counters.reserved_bytes - self.pressure_bytes
        blocks = [owner.blocks[key] for key in owner.keys]
        released_bytes, has_released = 0, True
        while released_bytes < target_bytes and has_released and blocks:
            ages = [owner.pool.num_searches - block.gc_base for block in blocks]
            mean_age, has_released = sum(ages) / len(ages), False
            remaining_blocks = []
            for age, block in zip(ages, blocks, strict=True):
                if age < mean_age or released_bytes >= target_bytes:
                    remaining_blocks.append(block)
                    continue
                has_released = True
                released_bytes += block.size
                is_split = block.segment.size in (SMALL_HEAP, LARGE_HEAP, XLARGE_HEAP)
                self._release_buffer(block, keeps_heap=is_split)
            blocks = remaining_blocks

    # -- what MPS has not, and reports -----------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        """Do nothing: MPS has one stream."""

    def create_pool(self, pool: PoolId) -> None:
        """Do nothing: MPS has no private pools."""

    def retire_pool(self, pool: PoolId) -> None:
        """Do nothing: MPS has no private pools."""

    def stats(self) -> dict[str, int]:
        """Return the statistics by torch's names; `torch.accelerator.memory_stats()` has those of "all"."""
        return self.statistics.as_dict(-1)

    def segments(self) -> list[SnapshotSegment]:
        """Return heaps, and their buffers and free ranges, by address."""
        return build_layout(heap for heaps in self.heaps.values() for heap in heaps)


def compute_max_buffer_bytes(working_set_bytes: int) -> int:
    """Return the length in bytes from which Metal has no buffers, of a GPU with this recommended working set."""
    return round_up(int(_MAX_BUFFER_SHARE * working_set_bytes), PAGE)


def compute_heap_size(size: int, has_pressure: bool = False) -> int:
    """Return the bytes of the heap for a buffer of `size` bytes (`createHeapBlock`)."""
    if size <= SMALL_ALLOC:
        return SMALL_HEAP
    if size < MIN_LARGE_ALLOC:
        return LARGE_HEAP
    if size < XLARGE_HEAP // 2 and not has_pressure:
        return XLARGE_HEAP
    return round_up(size, ROUND_LARGE)


def measure_available(heap: Segment, owner: StreamPool) -> int:
    """Return the bytes of the heap's largest free range from its first aligned page on (maxAvailableSize)."""
    largest = 0
    block: Block | None = heap.first
    while block is not None:
        if _is_range(block, owner):
            largest = max(largest, block.address + block.size - round_up(block.address, PAGE))
        block = block.next
    return largest


def _is_range(block: Block, owner: StreamPool) -> bool:
    """Return whether `block` is free memory of its heap: neither a buffer in use nor a cached one."""
    return block.free and block.size << ADDRESS_BITS | block.address not in owner.blocks


def _compute_limit(ratio: float, total_bytes: int | None) -> int | None:
    """Return this ratio of the working set in bytes; None, for no limit, if it is 0."""
    return None if total_bytes is None or not ratio else int(ratio * total_bytes)
