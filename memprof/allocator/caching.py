"""The caching allocator of one device: malloc, free, and the reaction to a full GPU.

Source: `DeviceCachingAllocator` of c10/cuda/CUDACachingAllocator.cpp; docstrings of methods name its functions.
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

    Its attributes are those of torch's allocator, and the settings of `config` that malloc reads at each call.

    Args:
        total_bytes: capacity of the GPU (cudaMemGetInfo's total); None: without limit.
        driver: source of segments; a SimulatedDriver of `total_bytes` by default.
        completion: when blocks that other streams used are free again.
        counts: whether `counters` and `stats` are maintained, which takes a third of the time; else only the reserved
            bytes are valid. Decisions do not depend on counters.

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
        self.device = 0  # the GPU's index, for messages
        self.driver = SimulatedDriver(total_bytes) if driver is None else driver
        self.pending = PendingFrees(self._free_block, completion)
        self.statistics = Statistics()
        self.expandable = config.expandable_segments and release.has_expandable_segments
        total = self.driver.memory_info()[1] if total_bytes is None else total_bytes
        self.allowed_bytes: int | None = None
        if config.per_process_memory_fraction < 1 and total:  # a GPU without limit has no fractions
            self.allowed_bytes = int(config.per_process_memory_fraction * total)
        reserve = config.expandable_segments_reserve_bytes
        if reserve is None:  # without a limit of memory, the reservation must not be a limit either
            reserve = int(total * config.expandable_segments_reserve) if total else UNKNOWN_SPACE
        self.segment_store = Segments(
            self.driver, self.statistics, config.large_segment_size, config.max_split_size, address_space=reserve
        )
        self.default_pool = PrivatePool(DEFAULT_POOL, self.statistics)
        self.pools: dict[PoolId, PrivatePool] = {DEFAULT_POOL: self.default_pool}
        self.retired: list[PrivatePool] = []  # private pools without users (`graph_pools_freeable`)
        self.max_split_size = config.max_split_size
        self.divisions = config.roundup_power2_divisions
        self._rounded_sizes: dict[int, int] = {}
        self.gc_enabled = self.allowed_bytes is not None and config.garbage_collection_threshold > 0
        self._uses_plain_search = not self.expandable and not self.gc_enabled

    # -- malloc and free -------------------------------------------------------------------------------------------

    def malloc(self, num_bytes: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block:
        """Return a block for `num_bytes` (at least 1: empty tensors take none), usable on `stream` (`malloc`). Raises
        OutOfMemory: the driver refused, even after cached memory was released."""
        if self.pending.queues:
            self.pending.poll()
        if self.divisions:
            size = self._rounded_sizes.get(num_bytes, 0) or self._round_request(num_bytes)
        else:
            size = (num_bytes + 511) & -512 or MIN_BLOCK
        home = self.default_pool if pool is DEFAULT_POOL else self.pools[pool]
        sized = home.small if size <= SMALL_SIZE else home.large
        owner = sized.streams.get(stream) or sized.get_stream_pool(stream)

        # get_free_block, with the usual case inlined.
        block: Block | None = None
        keys = owner.keys
        if self._uses_plain_search:
            at = bisect_left(keys, size << ADDRESS_BITS)
            if at < len(keys):
                key = keys[at]
                block = owner.blocks[key]
                if block.segment.expandable or block.size >= self.max_split_size:
                    block = self._find_free_block(owner, size)
                else:
                    del keys[at]
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
            following = block.next
            rest = Block(address, remaining, owner, block.segment, block, following)
            if following is not None:
                following.prev = rest
            block.next = rest
            block.size = size
            key = remaining << ADDRESS_BITS | address
            insort(keys, key)
            owner.blocks[key] = rest
            rest.free = True
            rest.gc_base = owner.pool.calls
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
        for count in (counters, total):
            held = count.allocation = count.allocation + 1
            if held > count.allocation_peak:
                count.allocation_peak = held
            held = count.allocated_bytes = count.allocated_bytes + size
            if held > count.allocated_bytes_peak:
                count.allocated_bytes_peak = held
            held = count.requested_bytes = count.requested_bytes + num_bytes
            if held > count.requested_bytes_peak:
                count.requested_bytes_peak = held
        if total.waiting:
            counters.note_active()
            total.note_active()
        return block

    def _round_request(self, num_bytes: int) -> int:
        """Return `round_size` with divisions, cached: a run requests few different sizes."""
        size = self._rounded_sizes[num_bytes] = max(round_size(num_bytes, self.divisions), MIN_BLOCK)
        return size

    def free(self, block: Block) -> None:
        """Free `block` (`free`): at once, or when the streams that used the block are done.

        Freeing at once is `free_block`: merge with free neighbours, previous first, and insert into the free blocks.
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
            counters.wait(1, size)
            total.wait(1, size)
            self.pending.add(block)
            return
        if self.counts:
            counters.requested_bytes -= block.requested
            total.requested_bytes -= block.requested
        keys, blocks = owner.keys, owner.blocks
        split_count = split_bytes = 0
        previous, following = block.prev, block.next
        if following is not None and following.free and following.mapped:
            key = following.size << ADDRESS_BITS | following.address
            del keys[bisect_left(keys, key)]
            del blocks[key]
            split_count -= 1
            split_bytes -= following.size
            absorb_next(block)
        if previous is not None and previous.free and previous.mapped:
            key = previous.size << ADDRESS_BITS | previous.address
            del keys[bisect_left(keys, key)]
            del blocks[key]
            split_count -= 1
            split_bytes -= previous.size
            absorb_next(previous)
            block = previous
        key = block.size << ADDRESS_BITS | block.address
        insort(keys, key)
        blocks[key] = block
        block.free = True
        block.gc_base = owner.pool.calls
        if self.counts and not block.segment.expandable:
            if block.prev is not None or block.next is not None:
                split_count += 1
                split_bytes += block.size
            if split_count or split_bytes:
                # Counters.change_inactive_split, inlined.
                for count in (counters, total):
                    count.inactive_split += split_count
                    count.inactive_split_bytes += split_bytes
                    if split_count > 0:
                        count.inactive_split_added += split_count
                        if count.inactive_split > count.inactive_split_peak:
                            count.inactive_split_peak = count.inactive_split
                    if split_bytes > 0:
                        count.inactive_split_bytes_added += split_bytes
                        if count.inactive_split_bytes > count.inactive_split_bytes_peak:
                            count.inactive_split_bytes_peak = count.inactive_split_bytes

    def _free_block(self, block: Block) -> None:
        """Free a block whose streams are done. The block counts as allocated again first, since `free` subtracts it."""
        counters, total, size = block.owner.counters, block.owner.total, block.size
        for count in (counters, total):
            count.wait(-1, -size)
            if self.counts:
                count.allocation += 1
                count.allocated_bytes += size
        if size >= self.max_split_size:
            self.statistics.oversize_allocations.current += 1
        self.free(block)

    # -- finding and obtaining a block -----------------------------------------------------------------------------

    def _find_free_block(self, owner: StreamPool, size: int) -> Block | None:
        """Return the smallest sufficient free block, of these the lowest (`get_free_block`), if it is allowed."""
        if self.gc_enabled:
            owner.pool.calls += 1
        keys, blocks = owner.keys, owner.blocks
        at = bisect_left(keys, size << ADDRESS_BITS)
        if at == len(keys):
            return None
        block = blocks[keys[at]]
        if block.segment.expandable:
            if self.expandable:
                while block.segment.expandable and at + 1 < len(keys):
                    following = blocks[keys[at + 1]]
                    if _mergeable_size(following) >= _mergeable_size(block):
                        break
                    block = following
                    at += 1
            else:
                while block.segment.expandable:
                    at += 1
                    if at == len(keys):
                        return None
                    block = blocks[keys[at]]
        limit = self.max_split_size
        if size < limit <= block.size:
            return None
        if size >= limit and block.size >= size + self.config.max_non_split_rounding:
            return None
        owner.remove(block)
        return block

    def needs_driver(self, size: int, stream: int, pool: PoolId = DEFAULT_POOL) -> bool:
        """Return whether a request of `size` bytes (rounded) needs memory from the driver."""
        sized = self.pools[pool].small if size <= SMALL_SIZE else self.pools[pool].large
        owner = sized.get_stream_pool(stream)
        block = self._find_free_block(owner, size)
        if block is not None:
            owner.insert(block)
            return False
        room = self.segment_store.find_free_stretch(owner, size) if self.expandable else None
        return room is None or not room.mapped or room.size < size

    def _should_split(self, owner: StreamPool, size: int, remaining: int) -> bool:
        """Return whether torch splits the block (`should_split`): the remainder is large enough for use."""
        if owner.is_small or self.expandable:
            return remaining >= MIN_BLOCK
        return size < self.max_split_size and remaining > SPLIT_SLACK

    def _obtain_block(self, owner: StreamPool, num_bytes: int, size: int) -> Block:
        """Return a block where no free one serves: collect garbage, ask the driver, release segments, or raise."""
        if num_bytes >= ONE_EXABYTE:
            raise OutOfMemory(self._build_report(num_bytes, num_bytes), self.release)
        if self.gc_enabled:
            assert self.allowed_bytes is not None
            threshold = int(self.config.garbage_collection_threshold * self.allowed_bytes)
            reclaim.collect_garbage(self.segment_store, self.default_pool.large, threshold)
        segment = segment_size(size, self.config.large_segment_size)
        block = self._ask_driver(owner, size, segment)
        if block is None and reclaim.release_oversize(self.segment_store, owner, size):
            block = self._ask_driver(owner, size, segment)
        if block is None:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = self._ask_driver(owner, size, segment)
        if block is None:
            self.statistics.num_ooms += 1
            raise OutOfMemory(self._build_report(num_bytes, segment), self.release)
        return block

    def _ask_driver(self, owner: StreamPool, size: int, segment: int) -> Block | None:
        """Allocate a segment within the memory limit (`alloc_block`, without its count of retries)."""
        store = self.segment_store
        if self.allowed_bytes is not None and store.total_bytes + segment > self.allowed_bytes:
            if self.config.throw_on_cudamalloc_oom:
                self.statistics.num_ooms += 1
                self.statistics.num_oom_rejections += 1
                raise OutOfMemory(self._build_report(size, segment), self.release)
            return None
        return store.grow(owner, size) if self.expandable else store.allocate(owner, segment)

    def _build_report(self, requested: int, tried: int) -> OomReport:
        free, total = self.driver.memory_info()
        private = sum(
            key >> ADDRESS_BITS
            for pool in self.pools.values()
            if pool is not self.default_pool
            for sized in (pool.small, pool.large)
            for owner in sized.streams.values()
            for key in owner.keys
        )
        counters = self.statistics.all
        return OomReport(
            requested_bytes=requested,
            tried_bytes=tried,
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=counters.allocated_bytes + private,
            reserved_bytes=counters.reserved_bytes,
            private_pool_bytes=private,
            allowed_bytes=self.allowed_bytes,
            device=self.device,
        )

    # -- streams ---------------------------------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that another `stream` uses `block`, so that the block's free waits for that stream's work."""
        if stream != block.owner.stream:
            if block.uses is None:
                block.uses = set()
            block.uses.add(stream)

    def synchronize(self) -> None:
        """Wait for the work of all streams (`synchronize_and_free_events`)."""
        self.statistics.num_sync_all_streams += 1
        self.pending.synchronize()

    # -- cache, pools, figures -------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Release every segment that is wholly free, in the default and in retired pools (`release_cached_blocks`)."""
        self.synchronize()
        for pool in (self.default_pool, *self.retired):
            reclaim.release_pool(self.segment_store, pool.large)
            reclaim.release_pool(self.segment_store, pool.small)

    def create_pool(self, pool: PoolId) -> PrivatePool:
        """Return a private pool (MemPool, CUDA graphs), created if new; until `retire_pool` its segments stay."""
        if pool not in self.pools:
            self.pools[pool] = PrivatePool(pool, self.statistics)
        return self.pools[pool]

    def retire_pool(self, pool: PoolId) -> None:
        """Retire a pool without users: its free segments may be released (`releasePool`)."""
        if pool in self.pools:
            self.retired.append(self.pools[pool])

    def lift_limit(self) -> None:
        """Remove all limits that depend on the GPU's size: memory fraction, garbage collection, and address space."""
        self.allowed_bytes = None
        self.gc_enabled = False
        self.segment_store.address_space = UNKNOWN_SPACE

    @property
    def counters(self) -> Counters:
        """Return the counters of all pools together: `.allocated_bytes`, `.reserved_bytes` and so on."""
        return self.statistics.all

    def stats(self) -> dict[str, int]:
        """Return the statistics in the form of torch.cuda.memory_stats()."""
        return self.statistics.as_dict(self.config.reported_max_split_size)

    def segments(self) -> list[SnapshotSegment]:
        """Return segments and blocks by address, as torch.cuda.memory_snapshot(): one entry per mapped run."""
        return build_layout(self.segment_store.live.values())


def _mergeable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
