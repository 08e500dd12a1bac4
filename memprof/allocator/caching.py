"""The caching allocator of one device: malloc, free, and what it does when the GPU is full.

Source: `DeviceCachingAllocator` of c10/cuda/CUDACachingAllocator.cpp; backticks in docstrings name its methods.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memprof.allocator import reclaim
from memprof.allocator.blocks import ADDRESS_BITS, Block, StreamPool, absorb_next
from memprof.allocator.config import AllocatorConfig
from memprof.allocator.driver import UNKNOWN_SPACE, Driver, SimulatedDriver
from memprof.allocator.messages import ONE_EXABYTE, OomReport, OutOfMemory
from memprof.allocator.pools import PrivatePool, build_layout
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.rounding import MIN_BLOCK, SMALL_SIZE, round_size, segment_size
from memprof.allocator.segments import Segments
from memprof.allocator.stats import Counters, Statistics
from memprof.allocator.streams import Completion, PendingFrees
from memprof.errors import UsageError
from memprof.trace.snapshot import DEFAULT_POOL, PoolId, SnapshotSegment

SPLIT_SLACK = SMALL_SIZE  # A block of the large pool is split when more than this remains


class CachingAllocator:
    """Replays the decisions of torch's CUDA caching allocator, block by block.

    Args:
        total_bytes: capacity of the GPU (cudaMemGetInfo's total); None: unlimited.
        driver: the CUDA driver that segments come from; None: a SimulatedDriver of `total_bytes`.
        completion: when work of other streams completes, which delays the free of blocks that they use.
        counts: whether `counters` and `stats` are updated, which takes a third of the time; else only the reserved
            bytes are valid. Decisions of the allocator do not depend on counters.

    Raises:
        UsageError: the settings select another allocator (backend:cudaMallocAsync).
    """

    def __init__(
        self,
        total_bytes: int | None = None,
        config: AllocatorConfig | None = None,
        release: Release = LATEST,
        driver: Driver | None = None,
        *,
        completion: Completion = Completion.IMMEDIATE,
        counts: bool = True,
    ) -> None:
        self.config = config = AllocatorConfig() if config is None else config
        if config.backend != "native":
            raise UsageError(
                "only torch's native allocator can be replayed",
                value=f"backend:{config.backend}",
                hint="leave the setting out; the CUDA driver's own pool has no public rules",
            )
        self.release = release
        self.counts = counts
        self.device, self.backend = 0, "cuda"  # the GPU's index and torch's backend, for messages
        self.driver = SimulatedDriver(total_bytes) if driver is None else driver
        self.pending = PendingFrees(self._free_block, completion)
        self.statistics = Statistics()
        self.expandable = config.expandable_segments and release.has_expandable_segments
        total = self.driver.memory_info()[1] if total_bytes is None else total_bytes
        self.allowed_bytes: int | None = None
        if config.per_process_memory_fraction < 1 and total:  # a GPU without limit has no fractions
            self.allowed_bytes = int(config.per_process_memory_fraction * total)
        reserve_bytes = config.expandable_segments_reserve_bytes
        if reserve_bytes is None:  # without a limit of memory, the reservation must not be a limit either
            reserve_bytes = int(total * config.expandable_segments_reserve) if total else UNKNOWN_SPACE
        self.segment_store = Segments(
            self.driver, self.statistics, config.large_segment_size, config.max_split_size, address_space=reserve_bytes
        )
        self.default_pool = PrivatePool(DEFAULT_POOL, self.statistics)
        self.pools: dict[PoolId, PrivatePool] = {DEFAULT_POOL: self.default_pool}
        self.retired_pools: list[PrivatePool] = []  # private pools without users (`graph_pools_freeable`)
        self.max_split_size = config.max_split_size
        self.divisions = config.roundup_power2_divisions
        self._rounded_sizes: dict[int, int] = {}
        self.gc_enabled = self.allowed_bytes is not None and config.garbage_collection_threshold > 0
        self._uses_plain_search = not self.expandable and not self.gc_enabled

    def change_config(self, config: AllocatorConfig) -> None:
        """Use `config` for requests from now on (`AcceleratorAllocatorConfig::parseArgs` at run time). What is decided
        once keeps its settings: the fraction of memory, and expandable segments' address space."""
        self.config = config
        self.expandable = config.expandable_segments and self.release.has_expandable_segments
        self.segment_store.large_segment = config.large_segment_size
        self.segment_store.max_split_size = self.max_split_size = config.max_split_size
        self.divisions = config.roundup_power2_divisions
        self._rounded_sizes.clear()
        self.gc_enabled = self.allowed_bytes is not None and config.garbage_collection_threshold > 0
        self._uses_plain_search = not self.expandable and not self.gc_enabled

    # -- malloc and free -------------------------------------------------------------------------------------------

    def malloc(self, num_bytes: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block:
        """Return a block of at least `num_bytes` (positive) for `stream` (`malloc`). Raises OutOfMemory: there is no
        memory, even after cached segments were released."""
        if self.pending.queues:
            self.pending.poll()
        if self.divisions:
            size = self._rounded_sizes.get(num_bytes, 0) or self._round_request(num_bytes)
        else:
            size = (num_bytes + 511) & -512 or MIN_BLOCK
        pool_pair = self.default_pool if pool is DEFAULT_POOL else self.pools[pool]
        size_class = pool_pair.small if size <= SMALL_SIZE else pool_pair.large
        owner = size_class.streams.get(stream) or size_class.get_stream_pool(stream)

        # get_free_block, with the usual case inlined.
        block: Block | None = None
        keys = owner.keys
        if self._uses_plain_search:
            index = bisect_left(keys, size << ADDRESS_BITS)
            if index < len(keys):
                key = keys[index]
                block = owner.blocks[key]
                if block.segment.expandable or block.size >= self.max_split_size:
                    block = self._find_free_block(owner, size)
                else:
                    del keys[index]
                    del owner.blocks[key]
                    block.free = False
        else:
            block = self._find_free_block(owner, size)
        if block is None:
            block = self._obtain_block(owner, num_bytes, size)
            owner = block.owner

        # should_split and alloc_found_block
        was_split = block.prev is not None or block.next is not None
        remaining = block.size - size
        counters, total = owner.counters, owner.total
        if remaining and self._should_split(owner, size, remaining):
            address = block.address + size
            next_block = block.next
            remainder = Block(address, remaining, owner, block.segment, block, next_block)
            if next_block is not None:
                next_block.prev = remainder
            block.next = remainder
            block.size = size
            key = remaining << ADDRESS_BITS | address
            insort(keys, key)
            owner.blocks[key] = remainder
            remainder.free = True
            remainder.gc_base = owner.pool.num_searches
            if self.counts and not block.segment.expandable:
                if was_split:
                    counters.inactive_split_bytes -= size
                    total.inactive_split_bytes -= size
                else:
                    counters.change_inactive_split(1, remaining)
                    total.change_inactive_split(1, remaining)
        else:
            size = block.size
            if self.counts and was_split and not block.segment.expandable:
                counters.inactive_split -= 1
                counters.inactive_split_bytes -= size
                total.inactive_split -= 1
                total.inactive_split_bytes -= size
        block.requested = num_bytes
        if size >= self.max_split_size:
            self.statistics.oversize_allocations.add()
        if not self.counts:
            return block
        counters.mallocs += 1
        counters.mallocs_bytes += size
        counters.mallocs_requested += num_bytes
        for counter_set in (counters, total):
            new_value = counter_set.allocation = counter_set.allocation + 1
            if new_value > counter_set.allocation_peak:
                counter_set.allocation_peak = new_value
            new_value = counter_set.allocated_bytes = counter_set.allocated_bytes + size
            if new_value > counter_set.allocated_bytes_peak:
                counter_set.allocated_bytes_peak = new_value
            new_value = counter_set.requested_bytes = counter_set.requested_bytes + num_bytes
            if new_value > counter_set.requested_bytes_peak:
                counter_set.requested_bytes_peak = new_value
        if total.waiting:
            counters.update_active_peak()
            total.update_active_peak()
        return block

    def _round_request(self, num_bytes: int) -> int:
        """Return `num_bytes` rounded up by `roundup_power2_divisions`; results are cached."""
        size = self._rounded_sizes[num_bytes] = max(round_size(num_bytes, self.divisions), MIN_BLOCK)
        return size

    def free(self, block: Block) -> None:
        """Free `block` (torch's `free`): at once, or when the other streams that used it are done.

        Freeing at once (`free_block`) merges the block with free neighbours, and adds it to the free blocks.
        """
        size = block.size
        owner = block.owner
        counters, total = owner.counters, owner.total
        if self.counts:
            counters.allocation -= 1
            counters.allocated_bytes -= size
            total.allocation -= 1
            total.allocated_bytes -= size
        if size >= self.max_split_size:
            self.statistics.oversize_allocations.current -= 1
        if block.uses:
            counters.count_waiting(1, size)
            total.count_waiting(1, size)
            self.pending.add(block)
            return
        if self.counts:
            counters.requested_bytes -= block.requested
            total.requested_bytes -= block.requested
        keys, blocks = owner.keys, owner.blocks
        split_count = split_bytes = 0
        previous_block, next_block = block.prev, block.next
        if next_block is not None and next_block.free and next_block.mapped:
            key = next_block.size << ADDRESS_BITS | next_block.address
            del keys[bisect_left(keys, key)]
            del blocks[key]
            split_count -= 1
            split_bytes -= next_block.size
            absorb_next(block)
        if previous_block is not None and previous_block.free and previous_block.mapped:
            key = previous_block.size << ADDRESS_BITS | previous_block.address
            del keys[bisect_left(keys, key)]
            del blocks[key]
            split_count -= 1
            split_bytes -= previous_block.size
            absorb_next(previous_block)
            block = previous_block
        key = block.size << ADDRESS_BITS | block.address
        insort(keys, key)
        blocks[key] = block
        block.free = True
        block.gc_base = owner.pool.num_searches
        if self.counts and not block.segment.expandable:
            if block.prev is not None or block.next is not None:
                split_count += 1
                split_bytes += block.size
            if split_count or split_bytes:
                # Counters.change_inactive_split, inlined.
                for counter_set in (counters, total):
                    counter_set.inactive_split += split_count
                    counter_set.inactive_split_bytes += split_bytes
                    if split_count > 0:
                        counter_set.inactive_split_added += split_count
                        if counter_set.inactive_split > counter_set.inactive_split_peak:
                            counter_set.inactive_split_peak = counter_set.inactive_split
                    if split_bytes > 0:
                        counter_set.inactive_split_bytes_added += split_bytes
                        if counter_set.inactive_split_bytes > counter_set.inactive_split_bytes_peak:
                            counter_set.inactive_split_bytes_peak = counter_set.inactive_split_bytes

    def _free_block(self, block: Block) -> None:
        """Free a block that waited for other streams. First count it as allocated again, since `free` subtracts it."""
        counters, total, size = block.owner.counters, block.owner.total, block.size
        for counter_set in (counters, total):
            counter_set.count_waiting(-1, -size)
            if self.counts:
                counter_set.allocation += 1
                counter_set.allocated_bytes += size
        if size >= self.max_split_size:
            self.statistics.oversize_allocations.current += 1
        self.free(block)

    # -- finding and obtaining a block -----------------------------------------------------------------------------

    def _find_free_block(self, owner: StreamPool, size: int) -> Block | None:
        """Return the smallest sufficient free block, at the lowest address (`get_free_block`), or None."""
        if self.gc_enabled:
            owner.pool.num_searches += 1
        keys, blocks = owner.keys, owner.blocks
        index = bisect_left(keys, size << ADDRESS_BITS)
        if index == len(keys):
            return None
        block = blocks[keys[index]]
        if block.segment.expandable:
            if self.expandable:
                while block.segment.expandable and index + 1 < len(keys):
                    next_block = blocks[keys[index + 1]]
                    if _get_mergeable_size(next_block) >= _get_mergeable_size(block):
                        break
                    block = next_block
                    index += 1
            else:
                while block.segment.expandable:
                    index += 1
                    if index == len(keys):
                        return None
                    block = blocks[keys[index]]
        max_split_size = self.max_split_size
        if size < max_split_size <= block.size:
            return None
        if size >= max_split_size and block.size >= size + self.config.max_non_split_rounding:
            return None
        owner.remove(block)
        return block

    def needs_driver(self, size: int, stream: int, pool: PoolId = DEFAULT_POOL) -> bool:
        """Return whether a request of `size` bytes (already rounded) needs memory from the driver."""
        size_class = self.pools[pool].small if size <= SMALL_SIZE else self.pools[pool].large
        owner = size_class.get_stream_pool(stream)
        block = self._find_free_block(owner, size)
        if block is not None:
            owner.insert(block)
            return False
        free_range = self.segment_store.find_expandable_block(owner, size) if self.expandable else None
        return free_range is None or not free_range.mapped or free_range.size < size

    def _should_split(self, owner: StreamPool, size: int, remaining: int) -> bool:
        """Return whether a block is split for `size` bytes (`should_split`), so that `remaining` bytes stay free."""
        if owner.is_small or self.expandable:
            return remaining >= MIN_BLOCK
        return size < self.max_split_size and remaining > SPLIT_SLACK

    def _obtain_block(self, owner: StreamPool, num_bytes: int, size: int) -> Block:
        """Return a block of new memory, after releasing cached segments if necessary. Raises OutOfMemory."""
        if num_bytes >= ONE_EXABYTE:
            raise OutOfMemory(self._build_report(num_bytes, num_bytes), self.release)
        if self.gc_enabled:
            assert self.allowed_bytes is not None
            threshold = int(self.config.garbage_collection_threshold * self.allowed_bytes)
            reclaim.collect_garbage(self.segment_store, self.default_pool.large, threshold)
        segment_bytes = segment_size(size, self.config.large_segment_size)
        block = self._ask_driver(owner, size, segment_bytes)
        if block is None and reclaim.release_oversize(self.segment_store, owner, size):
            block = self._ask_driver(owner, size, segment_bytes)
        if block is None:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = self._ask_driver(owner, size, segment_bytes)
        if block is None:
            self.statistics.num_ooms += 1
            raise OutOfMemory(self._build_report(num_bytes, segment_bytes), self.release)
        return block

    def _ask_driver(self, owner: StreamPool, size: int, segment_bytes: int) -> Block | None:
        """Return a block of a new segment (`alloc_block`); None if the GPU or the memory fraction is full."""
        store = self.segment_store
        if self.allowed_bytes is not None and store.total_bytes + segment_bytes > self.allowed_bytes:
            if self.config.throw_on_cudamalloc_oom:
                self.statistics.num_ooms += 1
                self.statistics.num_oom_rejections += 1
                raise OutOfMemory(self._build_report(size, segment_bytes), self.release)
            return None
        return store.grow(owner, size) if self.expandable else store.allocate(owner, segment_bytes)

    def _build_report(self, requested: int, segment_bytes: int) -> OomReport:
        free, total = self.driver.memory_info()
        private_bytes = sum(
            key >> ADDRESS_BITS
            for pool in self.pools.values()
            if pool is not self.default_pool
            for size_class in (pool.small, pool.large)
            for owner in size_class.streams.values()
            for key in owner.keys
        )
        counters = self.statistics.all
        return OomReport(
            requested_bytes=requested,
            tried_bytes=segment_bytes,
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=counters.allocated_bytes + private_bytes,
            reserved_bytes=counters.reserved_bytes,
            private_pool_bytes=private_bytes,
            allowed_bytes=self.allowed_bytes,
            device=self.device,
            backend=self.backend,
        )

    # -- streams ---------------------------------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that `stream` uses `block`: the free of the block then waits for that stream's work."""
        if stream != block.owner.stream:
            if block.uses is None:
                block.uses = set()
            block.uses.add(stream)

    def synchronize(self) -> None:
        """Complete the work of all streams; free the blocks that wait (`synchronize_and_free_events`)."""
        self.statistics.num_sync_all_streams += 1
        self.pending.synchronize()

    # -- cache, pools, statistics -----------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Release all segments without allocated blocks, in the default and retired pools (`release_cached_blocks`)."""
        self.synchronize()
        for pool in (self.default_pool, *self.retired_pools):
            reclaim.release_pool(self.segment_store, pool.large)
            reclaim.release_pool(self.segment_store, pool.small)

    def create_pool(self, pool: PoolId) -> PrivatePool:
        """Return the private pool `pool`, created if it is new. Its segments stay until `retire_pool`."""
        if pool not in self.pools:
            self.pools[pool] = PrivatePool(pool, self.statistics)
        return self.pools[pool]

    def retire_pool(self, pool: PoolId) -> None:
        """Mark `pool` as unused, so that its free segments may be released (`releasePool`)."""
        if pool in self.pools:
            self.retired_pools.append(self.pools[pool])

    def lift_limit(self) -> None:
        """Remove all limits that depend on the GPU's size: memory fraction, garbage collection, and address space."""
        self.allowed_bytes = None
        self.gc_enabled = False
        self.segment_store.address_space = UNKNOWN_SPACE

    @property
    def counters(self) -> Counters:
        """Return the counters of all pools together, such as `allocated_bytes` and `reserved_bytes`."""
        return self.statistics.all

    def stats(self) -> dict[str, int]:
        """Return the statistics in the form of torch.cuda.memory_stats()."""
        return self.statistics.as_dict(self.config.reported_max_split_size)

    def segments(self) -> list[SnapshotSegment]:
        """Return segments and blocks by address, as torch.cuda.memory_snapshot(): one entry per mapped range."""
        return build_layout(self.segment_store.live.values())


def _get_mergeable_size(block: Block) -> int:
    next_block = block.next
    return block.size + (next_block.size if next_block is not None and not next_block.mapped else 0)
