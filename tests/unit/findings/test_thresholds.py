"""Every threshold of a finding, just below, at and just above it, in traces whose bytes are counted by hand.

Sizes of more than 10 MiB are multiples of 2 MiB, so that the allocator adds nothing to them. The thresholds stand here
as numbers: were they taken from the rules, a wrong one would be right in both places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from memprof.allocator import MemoryNeeds
from memprof.findings import (
    attention_scores,
    does_not_fit,
    fragmentation,
    graph_breaks,
    logits,
    optimizer_state,
    ranks_differ,
    state_not_sharded,
    streams,
    unattributed,
    unsharded_group,
    upcast,
    vocabulary,
    weight_cache,
    weight_delta,
)
from memprof.findings.effect import is_decisive
from memprof.findings.finding import Context, Finding
from memprof.findings.groups import is_large
from memprof.ledger.ledger import build_ledger
from memprof.ledger.streams import StreamMemory
from memprof.trace.events import AUTOCAST_KIND, Caller, Forward, GraphBreak, Holder, PhaseKind, Role
from memprof.trace.facts import ShardedGroup
from memprof.units import GIB, KIB, MIB
from tests.unit.allocator.traces import StreamScript
from tests.unit.traces import TraceBuilder

Rule = Callable[[Context], list[Finding]]


def bytes_of(rule: Rule, context: Context) -> list[int | None]:
    return [finding.num_bytes for finding in rule(context)]


def beside(other_bytes: int) -> TraceBuilder:
    """A model of `other_bytes` in bfloat16, in its forward pass."""
    b = TraceBuilder()
    if other_bytes:
        b.parameter("weight", other_bytes // 2, dtype="bfloat16")
    b.phase(PhaseKind.FORWARD)
    return b


@pytest.mark.parametrize(("more", "told"), [(0, []), (2 * KIB, [2 * MIB + 2 * KIB])])
def test_unattributed_is_more_than_a_hundredth_of_the_peak(more: int, told: list[int]) -> None:
    b = beside(198 * MIB)
    b.phase(PhaseKind.OTHER, 0)
    b.new(2 * MIB + more, dtype="uint8", line=None)
    context = b.context()
    assert context.ledger.peak_bytes == 200 * MIB + more
    assert bytes_of(unattributed.find, context) == told


WORDS = 65536


@pytest.mark.parametrize(
    ("rows", "other_bytes", "is_told"),
    [
        (4096, 2 * MIB, False),  # 1 GiB
        (4104, 2 * MIB, True),  # 2 MiB more
        (8192, 18 * GIB, False),  # 2 of 20 GiB: a tenth
        (8192, 18 * GIB - 2 * MIB, True),
    ],
)
def test_logits_are_more_than_a_gibibyte_and_a_tenth(rows: int, other_bytes: int, is_told: bool) -> None:
    b = beside(other_bytes)
    b.new(rows, WORDS)
    assert bytes_of(logits.find, b.context(vocab_size=WORDS)) == [rows * WORDS * 4] * is_told


@pytest.mark.parametrize(("other_mib", "is_told"), [(1940, False), (1938, True)])
def test_float32_state_in_excess_is_more_than_a_hundredth(other_mib: int, is_told: bool) -> None:
    """State of 40 MiB, of which 20 would do, for a parameter of 20 MiB."""
    b = beside(other_mib * MIB)
    b.parameter("layer.weight", 10 * MIB, dtype="bfloat16")
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(10 * MIB, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    assert bytes_of(optimizer_state.find, b.context()) == [20 * MIB] * is_told


@pytest.mark.parametrize(
    ("temporary_mib", "other_mib", "is_told"),
    [(64, 100, False), (66, 100, True), (100, 1900, False), (100, 1898, True)],
)
def test_temporaries_of_the_optimizer_are_more_than_both(temporary_mib: int, other_mib: int, is_told: bool) -> None:
    b = beside(other_mib * MIB)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.free(b.new(temporary_mib * MIB, dtype="uint8"))
    assert bytes_of(optimizer_state.find, b.context()) == [temporary_mib * MIB] * is_told


@pytest.mark.parametrize(
    ("free_mib", "used_mib", "is_told"), [(300, 254, False), (300, 256, True), (4866, 256, False), (4864, 256, True)]
)
def test_streams_cost_at_least_both(free_mib: int, used_mib: int, is_told: bool) -> None:
    """What one stream has freed, the other takes anew: together `free_mib + used_mib` are reserved."""
    script = StreamScript()
    script.free(script.alloc(free_mib * MIB, stream=3))
    script.alloc(used_mib * MIB)
    ledger = build_ledger(script.trace)
    context = Context(ledger=ledger, usable_bytes=None, streams=StreamMemory.from_ledger(ledger))
    assert bytes_of(streams.find, context) == [used_mib * MIB] * is_told


@pytest.mark.parametrize(
    ("rows", "requested", "is_told"),
    [
        (1024, 1000, False),
        (1025, 1000, True),
        (1024, 1024, False),
        (1025, 1024, True),
        (1152, 1025, False),
        (1153, 1025, True),
    ],
)
def test_a_vocabulary_may_be_padded_to_a_multiple_of_128(rows: int, requested: int, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed_tokens.weight", rows, 512)
    b.inputs(1, 8)
    excess = (rows - requested) * 512 * 4
    assert bytes_of(vocabulary.find, b.context(asked_vocab_size=requested)) == [excess] * is_told


@pytest.mark.parametrize(
    ("copy_bytes", "other_bytes", "is_told"),
    [
        (GIB - 2 * MIB, 20 * GIB, False),
        (GIB, 20 * GIB, True),
        (100 * MIB, 1902 * MIB, False),
        (100 * MIB, 1900 * MIB, True),
    ],
)
def test_copies_to_float32_are_a_gibibyte_or_a_twentieth(copy_bytes: int, other_bytes: int, is_told: bool) -> None:
    b = beside(other_bytes)
    b.new(copy_bytes // 4, op="aten._to_copy")
    assert bytes_of(upcast.find, b.context()) == [copy_bytes] * is_told


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "is_told"),
    [(16, 256, 512, True), (15, 256, 512, False), (16, 255, 512, False), (16, 512, 256, True), (16, 512, 255, False)],
)
def test_a_matrix_a_token_is_of_16_tokens_and_256_rows_and_columns(
    tokens: int, rows: int, columns: int, is_told: bool
) -> None:
    b = TraceBuilder()
    b.parameter("down.weight", rows, columns, dtype="bfloat16")
    b.inputs(1, tokens)
    b.new(tokens, rows, columns, dtype="bfloat16")
    assert bytes_of(weight_delta.find, b.context()) == [tokens * rows * columns * 2] * is_told


@pytest.mark.parametrize(
    ("matrix_tokens", "other_bytes", "is_told"),
    [(1024, 40 * GIB, True), (1008, 40 * GIB, False), (32, 606 * MIB, True), (32, 620 * MIB, False)],
)
def test_matrices_of_tokens_are_a_gibibyte_or_a_twentieth(matrix_tokens: int, other_bytes: int, is_told: bool) -> None:
    """512 x 1024 in bfloat16 is 1 MiB a token."""
    b = beside(other_bytes)
    b.parameter("down.weight", 512, 1024, dtype="bfloat16")
    b.inputs(1, matrix_tokens)
    b.new(matrix_tokens, 512, 1024, dtype="bfloat16")
    assert bytes_of(weight_delta.find, b.context()) == [matrix_tokens * MIB] * is_told


@pytest.mark.parametrize(
    ("kept_mib", "peak_mib", "is_told"), [(62, 100, False), (64, 100, True), (64, 1280, True), (64, 1282, False)]
)
def test_graph_breaks_leave_at_least_both(kept_mib: int, peak_mib: int, is_told: bool) -> None:
    b = beside(peak_mib * MIB)
    b.trace.graph_ends.append(GraphBreak("train.py:1 main", "a print", kept_mib * MIB))
    assert bool(graph_breaks.find(b.context())) == is_told


@pytest.mark.parametrize(
    ("least_mib", "most_mib", "beyond_mib"),
    [(1000, 1510, None), (1000, 1512, 256), (9488, 10000, None), (9000, 10000, 500), (9002, 10000, None)],
)
def test_ranks_differ_by_at_least_both(least_mib: int, most_mib: int, beyond_mib: int | None) -> None:
    """Beyond the mean of the two: half of the difference, 256 MiB and a twentieth of what the fullest takes."""
    peaks = {rank: ranks_differ.RankPeak(mib * MIB, {}, ()) for rank, mib in enumerate((least_mib, most_mib))}
    found = ranks_differ.find_differing_ranks(peaks)
    assert [finding.num_bytes for finding in found] == ([] if beyond_mib is None else [beyond_mib * MIB])


def test_ranks_differ_by_the_categories_of_which_the_fullest_has_more() -> None:
    """At most three, largest differences first."""
    least = {"parameters": 500, "gradients": 9, "temporaries": 7}
    for most, told in (
        ({"parameters": 500, "gradients": 8, "temporaries": 8}, {"temporaries": 1}),
        ({"a": 1, "b": 3, "c": 2, "temporaries": 11}, {"temporaries": 4, "b": 3, "c": 2}),
    ):
        sides = enumerate({name: mib * MIB for name, mib in side.items()} for side in (least, most))
        peaks = {rank: ranks_differ.RankPeak((rank + 1) * 1000 * MIB, side, ()) for rank, side in sides}
        (found,) = ranks_differ.find_differing_ranks(peaks)
        _, *lines = found.evidence
        assert {line.text.split(":")[0]: line.num_bytes for line in lines} == {n: m * MIB for n, m in told.items()}
        assert [line.num_bytes for line in lines] == [mib * MIB for mib in told.values()]


@pytest.mark.parametrize(
    ("saved_mib", "peak_mib", "is_told"), [(62, 100, False), (64, 100, True), (64, 3200, True), (64, 3202, False)]
)
def test_sharded_groups_save_at_least_both(saved_mib: int, peak_mib: int, is_told: bool) -> None:
    assert is_large(beside(peak_mib * MIB).context(), saved_mib * MIB) == is_told


def test_sharded_groups_save_no_byte_less() -> None:
    context = beside(100 * MIB).context()
    assert is_large(context, 64 * MIB) and not is_large(context, 64 * MIB - 1)


@pytest.mark.parametrize(("other_mib", "is_told"), [(1802, False), (1800, True)])
def test_whole_optimizer_state_is_told_from_a_twentieth_that_can_be_saved(other_mib: int, is_told: bool) -> None:
    """State of 200 MiB of two equal parameters, of which each of two ranks could have one."""
    b = beside(other_mib * MIB)
    state = [b.new(25 * MIB, owner=(Role.OPTIMIZER_STATE, "momentum_buffer")) for _ in range(2)]
    shapes = tuple(b.trace.storages[index].shape for index in state)
    b.trace.facts = dataclasses.replace(
        b.trace.facts, groups=(ShardedGroup("DistributedDataParallel", "", 2, ("a", "b"), shapes, "float32"),)
    )
    assert bytes_of(state_not_sharded.find, b.context()) == [100 * MIB] * is_told


@pytest.mark.parametrize(
    ("scores_mib", "other_mib", "is_told"),
    [(100, 1900, False), (100, 1898, True), (1022, 30_000, False), (1024, 30_000, True)],
)
def test_attention_scores_are_a_gibibyte_or_more_than_a_twentieth(
    scores_mib: int, other_mib: int, is_told: bool
) -> None:
    b = beside(other_mib * MIB)
    b.new(1, scores_mib, 512, 512, op="aten._softmax")
    assert bytes_of(attention_scores.find, b.context()) == [scores_mib * MIB] * is_told


@pytest.mark.parametrize(
    ("free_mib", "used_mib", "is_told"),
    [(254, 1000, False), (254, 1000.5, False), (256, 1000, True), (300, 5700, True), (300, 5702, False)],
)
def test_fragmentation_is_at_least_both(free_mib: int, used_mib: float, is_told: bool) -> None:
    """A segment is free beside the one that is used: a twentieth is of both. Of 1,002 MiB, 1.5 may be free, too."""
    b = TraceBuilder()
    b.free(b.alloc(free_mib * MIB))
    b.alloc(int(used_mib * MIB))
    assert bytes_of(fragmentation.find, b.context()) == [free_mib * MIB] * is_told


@pytest.mark.parametrize(("kept_mib", "is_told"), [(64, True), (62, False)])
def test_copies_by_autocast_save_at_least_64_mib(kept_mib: int, is_told: bool) -> None:
    """One of two may stay."""
    b = TraceBuilder()
    b.enter("", "Net")
    b.leave()
    copies = tuple(b.new(kept_mib * MIB // 2, dtype="float16", op="aten._to_copy") for _ in range(2))
    end = len(b.trace.events)
    b.trace.forwards += [Forward(end - number, end, 0, -1, False, 0, ()) for number in (2, 1)]
    b.trace.idle_holders.append(Holder(end, AUTOCAST_KIND, "", "a.py:1 f", True, None, copies, 0, 0, None))
    assert bool(weight_cache.find(b.context())) == is_told


@pytest.mark.parametrize(("buffer_mib", "saved_mib"), [(180, 90), (178, None)])
def test_a_buffer_of_nine_tenths_of_a_group_is_for_all_of_it(buffer_mib: int, saved_mib: int | None) -> None:
    """Four layers of 50 MiB, two of which would be whole at once."""
    b = TraceBuilder()
    names = tuple(f"layers.{number}.weight" for number in range(4))
    shapes = ((50 * MIB // 4,),) * 4
    b.new(1, owner=(Role.UNSHARDED, names[0]))
    b.new(buffer_mib * MIB // 4, owner=(Role.COMMUNICATION, "all-gather"))
    b.trace.facts = dataclasses.replace(
        b.trace.facts, groups=(ShardedGroup("fully_shard", "", 2, names, shapes, "float32"),)
    )
    told = bytes_of(unsharded_group.find, b.context())
    assert told == ([] if saved_mib is None else [saved_mib * MIB])


@pytest.mark.parametrize(
    ("kind", "saved_mib"),
    [("all-gather", 100), ("reduce-scatter", 100), ("", 100), ("gradient bucket", None)],
)
def test_buffers_of_a_whole_group_by_their_purpose(kind: str, saved_mib: int | None) -> None:
    b = TraceBuilder()
    names = tuple(f"layers.{number}.weight" for number in range(4))
    b.new(1, owner=(Role.UNSHARDED, names[0]))
    b.new(200 * MIB // 4, owner=(Role.COMMUNICATION, kind))
    group = ShardedGroup("fully_shard", "", 2, names, ((50 * MIB // 4,),) * 4, "float32")
    b.trace.facts = dataclasses.replace(b.trace.facts, groups=(group,))
    told = bytes_of(unsharded_group.find, b.context())
    assert told == ([] if saved_mib is None else [saved_mib * MIB])


@pytest.mark.parametrize(
    ("phase", "owner", "path", "shape", "hidden", "is_saved"),
    [
        (PhaseKind.BACKWARD, None, "layers.3", (80 * MIB // 4,), False, True),
        (PhaseKind.BACKWARD, (Role.GRADIENT, "a"), "layers.3", (80 * MIB // 4,), False, True),
        (PhaseKind.BACKWARD, (Role.BUFFER, "a"), "layers.3", (80 * MIB // 4,), False, False),
        (PhaseKind.BACKWARD, None, "layers.0", (80 * MIB // 4,), False, False),  # one of two that may be whole
        (PhaseKind.BACKWARD, None, None, (80 * MIB // 4,), False, False),
        (PhaseKind.BACKWARD, None, "layers.3", (80 * MIB // 4,), True, False),
        (PhaseKind.FORWARD, None, "layers.3", (80 * MIB // 4,), False, False),
        (PhaseKind.BACKWARD, None, None, (320 * MIB // 4,), False, True),  # a flat one of all
        (PhaseKind.BACKWARD, None, None, (320, MIB // 4), False, False),
        (PhaseKind.BACKWARD, None, None, (286 * MIB // 4,), False, False),
    ],
)
def test_gradients_of_a_whole_group(
    phase: PhaseKind,
    owner: tuple[Role, str] | None,
    path: str | None,
    shape: tuple[int, ...],
    hidden: bool,
    is_saved: bool,
) -> None:
    """Of four layers of 80 MiB, those that come first may be whole."""
    b = TraceBuilder()
    names = tuple(f"layers.{number}.weight" for number in range(4))
    b.new(1, owner=(Role.UNSHARDED, names[0]))
    b.phase(phase)
    if path is not None:
        b.enter(path)
    b.new(*shape, owner=owner, hidden=hidden)
    group = ShardedGroup("fully_shard", "", 2, names, ((80 * MIB // 4,),) * 4, "float32")
    b.trace.facts = dataclasses.replace(b.trace.facts, groups=(group,))
    assert bool(unsharded_group.find(b.context())) == is_saved


@pytest.mark.parametrize(("small_mib", "is_named"), [(98, False), (100, True)])
def test_a_category_from_a_twentieth_of_the_peak_is_named(small_mib: int, is_named: bool) -> None:
    b = beside((2000 - small_mib) * MIB)
    b.new(small_mib * MIB, dtype="uint8")
    (finding,) = does_not_fit.find(b.context(1990 * MIB))
    named = [text for one in finding.evidence[3:] if (text := one.text.partition(":")[0]) != "in use"]
    assert named == ["parameters", *["activations"] * is_named]


@pytest.mark.parametrize(
    ("live_mib", "request_mib", "named"),
    [
        ([98], 400, []),
        ([100], 400, ["100.00 MiB"]),
        ([50, 50], 800, ["2 x 50.00 MiB"]),
        ([98], 98, []),
        ([98], 96, ["98.00 MiB"]),
        ([30, 30, 30, 50], 40, ["50.00 MiB"]),
        ([98, 102, 104, 106], 40, ["106.00 MiB", "104.00 MiB", "102.00 MiB"]),
    ],
)
def test_tensors_from_a_tenth_of_the_memory_or_above_the_request_are_named_where_it_runs_out(
    live_mib: list[int], request_mib: int, named: list[str]
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for mib in live_mib:
        b.new(mib * MIB, dtype="uint8")
    for number in range((1000 - sum(live_mib)) // 20):  # tensors of many kinds, each below both thresholds
        b.new(20 * MIB, dtype="uint8", op=f"aten.op{number}")
    b.new(request_mib * MIB, dtype="uint8")
    (finding,) = does_not_fit.find(b.context(1000 * MIB))
    lines = [one.text.removeprefix("in use: ") for one in finding.evidence if one.text.startswith("in use: ")]
    assert [line.partition(" of ")[0] for line in lines] == named


def test_the_lines_that_led_to_a_tensor_follow_its_own() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(300 * MIB, dtype="uint8", line="/lib/nets/net.py:1 forward")
    b.new(800 * MIB, dtype="uint8", line="/lib/nets/net.py:12 forward")
    b.trace.sources += ["/home/me/model.py:3 forward", "/home/me/train.py:4 main"]
    own, main = len(b.trace.sources) - 2, len(b.trace.sources) - 1
    b.trace.callers = [Caller(0, own, ""), Caller(1, own, ""), Caller(1, main, "torch.func.vmap")]
    (finding,) = does_not_fit.find(b.context(1000 * MIB))
    assert finding.evidence[0].text.endswith(
        "at nets/net.py:12, called at me/model.py:3, called by torch.func.vmap at me/train.py:4"
    )
    assert finding.evidence[4].text.endswith("at nets/net.py:1, called at me/model.py:3")


@pytest.mark.parametrize(("ended", "saved_mib", "is_cause"), [(True, 19, False), (True, 20, True), (False, 1, True)])
def test_what_lets_one_more_allocation_succeed_is_a_cause_from_a_fiftieth_of_the_peak_on(
    ended: bool, saved_mib: int, is_cause: bool
) -> None:
    """The peak of 1,000 MiB does not fit; of a run that went on past it, each byte decides."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(1000 * MIB)
    b.trace.ended_out_of_memory = ended
    needs = MemoryNeeds(1000 * MIB, True, (1000 - saved_mib) * MIB)
    assert is_decisive(b.context(990 * MIB), needs) is is_cause
    assert not is_decisive(b.context(990 * MIB), needs._replace(fits=False))
