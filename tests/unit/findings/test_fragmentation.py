"""The fragmentation rule: what is free, what pins it, and expandable segments tried out."""

from __future__ import annotations

import pytest

from memprof.allocator import GpuMemory, parse_config, replay_on_gpu
from memprof.findings import Context, Finding, Severity
from memprof.findings.fragmentation import find
from memprof.findings.proposals.segments import propose as propose_segments
from memprof.ledger.ledger import build_ledger
from memprof.trace.events import CudaGraphed, Event, EventKind, Owner, PhaseKind, Role
from tests.unit.findings.figures import all_figures, figures
from tests.unit.traces import TraceBuilder

MIB = 1 << 20
WIDE, NARROW = 128 * MIB // 4, 8 * MIB // 4


def pinned(pieces: int = 4, size: int = WIDE, last: int = 4 * WIDE) -> TraceBuilder:
    """Each wide tensor dies and leaves a narrow one in its segment; then something comes that none of them holds."""
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    wide = [b.new(size, line="model.py:1 wide") for _ in range(pieces)]
    for index in wide:
        b.free(index)
        b.new(NARROW, op="aten.clone", line="model.py:2 keep")
        b.new(size - NARROW, line="model.py:3 fill")
    fillers = [i for i, s in enumerate(b.trace.storages) if s.shape == (size - NARROW,)]
    b.free(*fillers)
    b.new(last)
    return b


def one(context: Context) -> Finding:
    (finding,) = find(context)
    return finding


def test_says_what_is_free_and_what_pins_it() -> None:
    finding = one(pinned().context())
    assert finding.id == "fragmentation" and finding.num_bytes == 4 * 120 * MIB
    assert finding.severity is Severity.WARNING and not finding.is_decisive  # the run fits
    assert "480.00 MiB of the 1.00 GiB" in finding.title and "47%" in finding.title
    kept, evaluated, segments = finding.evidence
    assert kept.num_bytes == 480 * MIB and "in 4 segments" in kept.text
    assert segments.text.startswith("4 segments of 128.00 MiB: 120.00 MiB free each; pinned by")
    assert (segments.op, segments.source, segments.num_bytes) == ("aten.clone", "model.py:2 keep", 480 * MIB)
    assert evaluated.text.startswith("with expandable_segments:True the run reserves")


def test_where_the_room_left_is_more_it_is_a_note() -> None:
    context = pinned().context()
    gap, reserved = one(context).num_bytes or 0, context.ledger.peak_reserved_bytes
    assert one(pinned().context(reserved + gap)).severity is Severity.WARNING
    roomy = one(pinned().context(reserved + gap + 1))
    assert roomy.severity is Severity.NOTE and roomy.fixes == ("expandable-segments",)


def test_expandable_segments_are_evaluated_and_not_only_named() -> None:
    b = pinned()
    before = replay_on_gpu(b.trace, None)
    after = before.compute_needs(parse_config("expandable_segments:True"))
    finding = one(b.context())
    saved = before.required_reserved_bytes - after.required_reserved_bytes
    assert saved > 0 and finding.evidence[1].num_bytes == saved
    assert finding.fixes == ("expandable-segments",)


def test_a_private_pool_gives_nothing_back() -> None:
    """What CUDA graphs hold is named apart, with the line that has them made for several sizes."""
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.free(b.new(3 * WIDE))
    b.trace.events.append(Event(EventKind.POOL, 1))
    for size in (WIDE, 2 * WIDE, 4 * WIDE):
        b.free(b.new(size))
    b.trace.events.append(Event(EventKind.POOL, 0))
    b.trace.graphed += [CudaGraphed("model.py:9 step", 3), CudaGraphed("model.py:8 other", 1)]
    texts = [line.text for line in one(b.context()).evidence]
    assert "384.00 MiB in 1 segment without a tensor: released when the GPU is full" in texts[1]
    assert texts[2].startswith("384.00 MiB in 2 segments of private pools")
    assert texts[3].startswith("compiled code at model.py:9 has CUDA graphs for 3 sizes of its inputs")
    assert not any("model.py:8" in text for text in texts)


def test_the_verdict_before_and_after() -> None:
    context = pinned(last=WIDE).context(600 * MIB)
    assert context.ledger.out_of_memory is not None
    finding = one(context)
    assert "free when the GPU is full" in finding.title
    assert finding.evidence[1].text.endswith("and fits where it does not fit now")
    context.ledger.trace.ended_out_of_memory = True
    assert one(context).evidence[1].text.endswith("what the script would ask for after that is not known")


def test_small_but_decisive() -> None:
    """32 MiB are no matter in themselves, but without them the run fits."""
    b = TraceBuilder()
    first = b.new(64 * MIB // 4)
    b.free(first)
    b.new(32 * MIB // 4)
    b.new(48 * MIB // 4)
    assert not find(b.context())
    assert one(b.context(100 * MIB)).num_bytes == 32 * MIB


@pytest.mark.parametrize(("kept_mib", "last_mib", "is_told"), [(38, 60, True), (60, 40, True), (62, 48, False)])
def test_silent_where_little_is_free_and_no_setting_lets_the_run_fit(
    kept_mib: int, last_mib: int, is_told: bool
) -> None:
    """2 MiB of the first segment are free, without which the run fits; of 40 MiB, a twentieth. Expandable segments
    grow by 20 MiB."""
    b = TraceBuilder()
    b.free(b.new((kept_mib + 2) * MIB // 4))
    b.new(kept_mib * MIB // 4)
    b.new(last_mib * MIB // 4)
    context = b.context((kept_mib + last_mib) * MIB)
    assert not context.ledger.run.fits and bool(find(context)) == is_told
    context.ledger.trace.ended_out_of_memory = True  # of what comes after, nothing is known
    assert bool(find(context)) == (kept_mib == 38)


@pytest.mark.parametrize(("has_model", "has_begun"), [(True, False), (False, False), (True, True)])
def test_while_a_model_is_built_more_comes_than_the_refused_tensor(has_model: bool, has_begun: bool) -> None:
    """30 MiB of the first segment are free, without which the 20 MiB would fit."""
    b = TraceBuilder()
    b.free(b.new(40 * MIB // 4))
    b.parameter("weight", 10 * MIB // 4) if has_model else b.new(10 * MIB // 4)
    b.new(50 * MIB // 4)
    if has_begun:
        b.phase(PhaseKind.FORWARD)
    b.new(40 * MIB // 4)
    b.trace.ended_out_of_memory = True
    context = b.context(120 * MIB)
    is_told = not has_model or has_begun
    assert bool(find(context)) == bool(list(propose_segments(context))) == is_told


@pytest.mark.parametrize("ends", [True, False])
def test_of_a_run_that_does_not_fit_at_all_only_a_whole_one_has_fragmentation(ends: bool) -> None:
    """Nothing is free where 128 MiB are refused; what the replay does later is the need of a larger GPU."""
    context = pinned().context(140 * MIB)
    context.ledger.trace.ended_out_of_memory = ends
    assert [finding.num_bytes for finding in find(context)] == [480 * MIB] * (not ends)


def test_whole_segments_are_told_apart() -> None:
    b = TraceBuilder()
    b.free(*[b.new(WIDE) for _ in range(3)])
    b.new(3 * WIDE)
    finding = one(b.context())
    assert [line.num_bytes for line in finding.evidence[:2]] == [0, 384 * MIB]
    assert "torch.cuda.empty_cache()" in finding.evidence[1].text


def test_a_parameter_is_named_as_one() -> None:
    b = pinned()
    narrow = [index for index, storage in enumerate(b.trace.storages) if storage.shape == (NARROW,)]
    b.trace.owners |= {index: Owner(Role.PARAMETER, f"layers.{index}.weight") for index in narrow}
    assert "pinned by parameter [2097152] float32" in one(b.context()).evidence[-1].text


def test_silent_where_there_is_room_and_no_setting_reduces_it() -> None:
    """What is asked for next is larger than the 384 MiB that are free before the second tensor."""
    b = TraceBuilder()
    first = b.new(3 * WIDE)
    b.new(WIDE)
    b.free(first)
    b.new(4 * WIDE)
    assert find(b.context())
    assert not find(b.context(10_000 * MIB))


def test_nothing_to_say_of_little() -> None:
    assert not find(pinned(pieces=1).context())  # 120 MiB


def test_silent_on_what_is_kept_for_the_next_step() -> None:
    """Activations are gone when the optimizer asks for one segment more: most is reserved then, and most of it free."""
    b = TraceBuilder()
    b.phase(PhaseKind.FORWARD)
    b.free(*[b.new(WIDE) for _ in range(8)])
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(WIDE + 1, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    assert not find(b.context())


def test_no_fix_where_segments_expand_already() -> None:
    b = pinned()
    run = replay_on_gpu(b.trace, GpuMemory(10_000 * MIB, 0), parse_config("expandable_segments:True"))
    for finding in find(Context(build_ledger(b.trace, run), 10_000 * MIB)):
        assert not finding.fixes and "expandable" not in finding.evidence[1].text
        assert finding.severity is Severity.NOTE


def test_the_verdict_has_its_stage_and_the_share_that_is_free() -> None:
    """Where 128 MiB are refused, 4 segments of 128 have 8 in use."""
    finding = one(pinned(last=WIDE).context(600 * MIB))
    assert (finding.severity, finding.num_bytes, finding.is_decisive) == (Severity.WARNING, 480 * MIB, True)
    title, held, after, pinning = all_figures(finding)
    assert title == ["480.00 MiB", "512.00 MiB", "94%"]
    assert finding.evidence[2].text.endswith("at model.py:2")
    assert held == ["480.00 MiB", "4"] and after[-2:] == ["520.00 MiB", "640.00 MiB"]  # 26 pages of 20 MiB
    assert pinning == [
        "4", "128.00 MiB", "120.00 MiB", "[2097152]", "float32", "aten.clone", "model.py:2",
    ]  # fmt: skip


def test_pieces_of_a_segment_and_several_tensors_in_it() -> None:
    """A segment of 1 GiB with 100 and 50 MiB, between which 200 are free, and 674 after them."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.free(b.alloc(1024 * MIB))
    parts = [b.alloc(mib * MIB, op=f"aten.op{mib}", line=f"model.py:{mib} f") for mib in (100, 200, 50)]
    b.free(parts[1])
    b.alloc(700 * MIB)
    finding = one(b.context())
    assert all_figures(finding)[-1] == [
        "1", "1.00 GiB", "874.00 MiB", "674.00 MiB", "[104857600]", "uint8", "aten.op100", "model.py:100", "1",
    ]  # fmt: skip
    assert (
        " each" not in finding.evidence[-1].text
        and finding.evidence[-1].text.endswith(" and 1 more")
        and finding.evidence[-1].num_bytes == 874 * MIB
    )


def test_kinds_of_segments_the_most_free_first() -> None:
    """Seven of different sizes, of which five are shown; the module is named."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.enter("layers.0.mlp")
    fillers = []
    for number, wide in enumerate([b.alloc(number * 64 * MIB) for number in range(1, 8)], 1):
        b.free(wide)
        pin_mib = 196 if number == 7 else 8
        b.alloc(pin_mib * MIB)
        fillers.append(b.alloc((number * 64 - pin_mib) * MIB))
    b.free(*fillers)
    b.alloc(512 * MIB)
    finding = one(b.context())
    kinds = [line for line in finding.evidence if "pinned by" in line.text]
    assert [line.num_bytes for line in kinds] == [mib * MIB for mib in (376, 312, 252, 248, 184)]
    assert "in layers.*.mlp at train.py:1" in kinds[0].text


@pytest.mark.parametrize(("sizes", "num_lines"), [((1, 1), 0), ((2, 3), 2), ((2, 3, 4, 5, 6, 7), 5)])
def test_functions_with_graphs_of_several_sizes_the_most_first(sizes: tuple[int, ...], num_lines: int) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.events.append(Event(EventKind.POOL, 1))
    b.free(b.new(2 * WIDE))
    b.trace.events.append(Event(EventKind.POOL, 0))
    b.new(4 * WIDE)
    b.trace.graphed += [CudaGraphed(f"model.py:{number} step", number) for number in sizes]
    lines = [figures(line.text) for line in one(b.context()).evidence if "compiled code" in line.text]
    expected = [[f"model.py:{number}", str(number)] for number in sorted(sizes, reverse=True)]
    assert lines == expected[:num_lines]


@pytest.mark.parametrize(
    ("saved", "fits", "is_fix"),
    [(40 * MIB, True, True), (40 * MIB - 1, True, False), (0, False, False), (0, None, True)],
)
def test_expandable_segments_are_a_fix_if_they_save_a_tenth_of_it_or_the_run_fits(
    saved: int, fits: bool | None, is_fix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 MiB are free beside 500. The last run is one that does not fit, and would with them."""
    b = TraceBuilder()
    b.free(b.alloc(400 * MIB))
    b.alloc(500 * MIB)
    context = b.context()
    run = context.ledger.run
    needs = run.compute_needs(run.config)
    other = needs._replace(required_reserved_bytes=run.required_reserved_bytes - saved, fits=fits is not False)
    monkeypatch.setattr(type(run), "compute_needs", lambda *_: other)
    if fits is None:
        monkeypatch.setattr(type(run), "fits", property(lambda _: False))
    assert bool(one(context).fixes) == is_fix


def test_what_decides_is_a_warning_though_expandable_segments_do_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    b = TraceBuilder()
    b.free(b.alloc(64 * MIB))
    b.alloc(32 * MIB)
    b.alloc(48 * MIB)
    context = b.context(100 * MIB)
    needs = context.ledger.run.compute_needs(context.ledger.run.config)
    monkeypatch.setattr(type(context.ledger.run), "compute_needs", lambda *_: needs._replace(fits=False))
    finding = one(context)
    assert finding.severity is Severity.WARNING and finding.is_decisive and not finding.fixes
