"""What each stream holds at the reserved peak, and what all would on one stream."""

from __future__ import annotations

from memprof.ledger.ledger import build_ledger
from memprof.ledger.streams import StreamMemory, StreamShare
from tests.unit.allocator.traces import MIB, StreamScript


def memory_of(script: StreamScript) -> StreamMemory | None:
    return StreamMemory.from_ledger(build_ledger(script.trace))


def test_shares_of_two_streams() -> None:
    """40 MiB wait for the default stream, 30 are free, and 50 more are taken on the default stream."""
    script = StreamScript()
    waiting, freed = script.alloc(40 * MIB, stream=3), script.alloc(30 * MIB, stream=3)
    script.alloc(20 * MIB, stream=3)
    script.alloc(16 * MIB, stream=3)
    script.use(waiting, 0)
    script.free(waiting, freed)
    script.alloc(50 * MIB)
    assert memory_of(script) == StreamMemory(
        streams=(
            StreamShare(0, 50 * MIB, 50 * MIB, 0, 0),
            StreamShare(3, 106 * MIB, 36 * MIB, 40 * MIB, 30 * MIB),
        ),
        reserved_bytes=156 * MIB,
        single_stream_bytes=156 * MIB,  # 50 MiB fit into neither of the free blocks
        lower_bound_bytes=156 * MIB,
        upper_bound_bytes=156 * MIB,
    )


def test_on_one_stream_less_is_reserved() -> None:
    script = StreamScript()
    script.free(script.alloc(40 * MIB, stream=3))
    script.alloc(30 * MIB)
    found = memory_of(script)
    assert found is not None and (found.reserved_bytes, found.single_stream_bytes) == (70 * MIB, 40 * MIB)
    assert (found.lower_bound_bytes, found.upper_bound_bytes) == (None, None)  # no stream uses another's memory


def test_bounds_where_a_stream_uses_memory_of_another() -> None:
    script = StreamScript()
    lent = script.alloc(40 * MIB)
    script.use(lent, 3)
    script.free(lent)
    script.alloc(40 * MIB)
    found = memory_of(script)
    assert found is not None and [share.stream for share in found.streams] == [0]  # of one stream alone
    assert (found.reserved_bytes, found.single_stream_bytes) == (80 * MIB, 40 * MIB)
    assert (found.lower_bound_bytes, found.upper_bound_bytes) == (40 * MIB, 80 * MIB)


def test_one_stream_alone_is_nothing_to_tell() -> None:
    script = StreamScript()
    script.alloc(40 * MIB, stream=3)
    assert memory_of(script) is None
