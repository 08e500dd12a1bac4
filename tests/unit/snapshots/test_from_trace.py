"""What a converted trace has of each event, storage and module, by hand."""

from __future__ import annotations

import pytest

from memprof.allocator import AllocatorConfig, GpuMemory, parse_config, replay_snapshot
from memprof.snapshots.from_trace import ConvertedTrace, TimelineSlice, convert_to_snapshot
from memprof.snapshots.origins import OUTSIDE_MODULES, Origin, Part
from memprof.trace.events import GPU, EventKind, ModuleRole, PhaseKind, Role, Workspace
from memprof.trace.snapshot import Action, Frame
from memprof.units import MIB
from tests.unit.allocator.traces import StreamScript
from tests.unit.traces import TraceBuilder


def convert(b: TraceBuilder, conf: str = "", usable_mib: int | None = None) -> ConvertedTrace:
    gpu = None if usable_mib is None else GpuMemory((usable_mib + 20) * MIB, 20 * MIB)
    return convert_to_snapshot(b.trace, parse_config(conf), gpu)


def events_of(converted: ConvertedTrace) -> list[tuple[str, int, int, int | None]]:
    """Return action, MiB, stream and time of each event."""
    (events,) = converted.snapshot.traces
    return [(event.action.value, event.size // MIB, event.stream, event.time_us) for event in events]


def test_events_of_two_streams() -> None:
    b = TraceBuilder(None)
    b.phase(PhaseKind.INPUTS, 1)
    first = b.alloc(30 * MIB, line="train.py:7 load")
    b.add(EventKind.STREAM, 7)
    second = b.alloc(40 * MIB, line="train.py:8 load")
    b.alloc(0)
    b.alloc(5 * MIB, device="cuda:1")
    b.free(first)
    b.empty_cache()
    b.phase(PhaseKind.FORWARD, 1)
    b.phase(PhaseKind.INPUTS, 2)
    b.free(second)
    converted = convert(b)
    assert events_of(converted) == [
        ("segment_alloc", 30, 0, 1), ("alloc", 30, 0, 1),
        ("segment_alloc", 40, 7, 3), ("alloc", 40, 7, 3),
        ("free_requested", 30, 0, 6), ("free_completed", 30, 0, 6),
        ("segment_free", 30, 0, 7),  # of its own stream
        ("free_requested", 40, 7, 10), ("free_completed", 40, 7, 10),
    ]  # fmt: skip
    (events,) = converted.snapshot.traces
    stacks = [(Frame("", 0, "aten.empty"), Frame("train.py", line, "load")) for line in (7, 8)]
    assert [event.frames for event in events] == [stacks[0]] * 2 + [stacks[1]] * 2 + [()] * 5
    assert len({event.address for event in events}) == 2
    assert converted.steps == [0, 7] and len(converted.origins) == 2
    (segment,) = converted.snapshot.segments
    assert (segment.stream, segment.allocated) == (7, 0)


def test_private_pools() -> None:
    b = TraceBuilder(None)
    b.phase(PhaseKind.OTHER, 0)
    b.add(EventKind.POOL, 2)
    inside = b.alloc(30 * MIB)
    b.add(EventKind.POOL, 0)
    b.alloc(20 * MIB)
    b.free(inside)
    b.empty_cache()
    b.add(EventKind.POOL_FREE, 2)
    b.empty_cache()
    converted = convert(b)
    (events,) = converted.snapshot.traces
    assert [(event.action.value, event.size // MIB, event.pool_id, event.time_us) for event in events] == [
        ("segment_alloc", 30, (0, 0), 2), ("alloc", 30, (2, 0), 2),
        ("segment_alloc", 20, (0, 0), 4), ("alloc", 20, (0, 0), 4),
        ("free_requested", 30, (2, 0), 5), ("free_completed", 30, (2, 0), 5),
        ("segment_free", 30, (0, 0), 8),  # not before the pool is out of use
    ]  # fmt: skip
    (segment,) = converted.snapshot.segments
    (block,) = segment.blocks
    assert block.frames == events[3].frames != ()


def test_an_unmapped_range_is_of_the_stream_that_mapped_it() -> None:
    """70 MiB are mapped as 80 at once, of which the 60 behind the first unit are unmapped."""
    b = TraceBuilder(None)
    b.phase(PhaseKind.OTHER, 0)
    b.add(EventKind.STREAM, 3)
    b.free(b.alloc(70 * MIB))
    b.alloc(3 * MIB)
    b.add(EventKind.STREAM, 4)
    b.alloc(20 * MIB)
    b.empty_cache()
    converted = convert(b, "expandable_segments:True")
    assert [event for event in events_of(converted) if event[0].startswith("segment")] == [
        ("segment_map", 80, 3, 2), ("segment_map", 20, 4, 6), ("segment_unmap", 60, 3, 7),
    ]  # fmt: skip
    (events,) = converted.snapshot.traces
    assert events[-1].address == events[0].address + 20 * MIB and events[-1].frames == ()


def test_the_first_error_ends_the_limits_of_the_gpu() -> None:
    for conf in ("", "per_process_memory_fraction:0.9,garbage_collection_threshold:0.5", "expandable_segments:True"):
        b = TraceBuilder(None)
        b.phase(PhaseKind.OTHER, 0)
        b.alloc(60 * MIB)
        b.alloc(500 * MIB, line="train.py:3 f")
        b.alloc(700 * MIB)
        converted = convert(b, conf, 100)
        actions = [event for event in events_of(converted) if event[0] in ("alloc", "oom")]
        assert actions == [("alloc", 60, 0, 1), ("oom", 500, 0, 2), ("alloc", 500, 0, 2), ("alloc", 700, 0, 3)]
        failure = next(event for event in converted.snapshot.traces[0] if event.action is Action.OOM)
        assert failure.address == 40 * MIB and failure.frames == (Frame("", 0, "aten.empty"), Frame("train.py", 3, "f"))
        assert len(converted.origins) == 3
        (replayed,) = replay_snapshot(converted.snapshot)  # on a GPU without limit, address by address
        assert replayed.exact


def test_a_free_completes_when_the_stream_that_used_the_block_has_been_waited_for() -> None:
    script = StreamScript()
    batch = script.alloc(40 * MIB, stream=1)
    script.use(batch, 0)
    script.free(batch)
    script.alloc(50 * MIB, stream=1)
    script.wait(0, by_host=True)
    script.alloc(30 * MIB, stream=1)
    assert [event[:3] for event in events_of(convert(script))] == [
        ("segment_alloc", 40, 1), ("alloc", 40, 1), ("free_requested", 40, 1),
        ("segment_alloc", 50, 1), ("alloc", 50, 1), ("free_completed", 40, 1), ("alloc", 30, 1),
    ]  # fmt: skip


def test_failed_allocations_after_which_the_run_goes_on_have_no_block() -> None:
    """One that the program caught, and the workspace of a library."""
    b = TraceBuilder(None)
    b.phase(PhaseKind.OTHER, 0)
    b.alloc(60 * MIB)
    caught, workspace = b.alloc(50 * MIB), b.alloc(70 * MIB)
    b.trace.workspaces.append(Workspace(len(b.trace.events) - 1, GPU, 70 * MIB, 70 * MIB))
    b.free(caught, workspace)
    b.trace.refused.append(caught)
    b.alloc(90 * MIB)  # this one ends it
    converted = convert(b, "", 100)
    assert [event[:2] for event in events_of(converted)] == [
        ("segment_alloc", 60), ("alloc", 60), ("oom", 50), ("oom", 70), ("oom", 90), ("segment_alloc", 90),
        ("alloc", 90),
    ]  # fmt: skip
    assert len(converted.origins) == 2


@pytest.mark.parametrize(
    ("line", "frames"),
    [
        ("model.py:12 forward", [Frame("model.py", 12, "forward")]),
        ("model.py:12", [Frame("model.py", 12, "")]),
        (r"C:\me\my model.py:3 <lambda>", [Frame(r"C:\me\my model.py", 3, "<lambda>")]),
        ("a library", [Frame("a library", 0, "")]),
        (None, []),
    ],
)
def test_a_stack_has_operator_line_and_module(line: str | None, frames: list[Frame]) -> None:
    b = TraceBuilder(None)
    b.phase(PhaseKind.FORWARD)
    b.new(8, line=line, op="aten.mm")
    b.enter("", "Net", ModuleRole.ROOT)
    b.new(8, line=line)
    b.enter("layers.0", "Layer", ModuleRole.LAYER)
    b.new(8, line=line, op="aten.add")
    stacks = [event.frames for event in convert(b).snapshot.traces[0] if event.action is Action.ALLOC]
    assert stacks == [
        (Frame("", 0, "aten.mm"), *frames),
        (Frame("", 0, "aten.mm"), *frames, Frame("(root)", 0, "Net")),
        (Frame("", 0, "aten.add"), *frames, Frame("layers.0", 0, "Layer")),
    ]


def test_origins() -> None:
    b = TraceBuilder()
    b.new(8, owner=(Role.PARAMETER, "a"), line=None)
    b.new(8, owner=(Role.BUFFER, "b"), line=r"C:\memprof\workload\step.py:3 run")
    b.new(8, owner=(Role.BUFFER, "c"), line="train.py:3 run")
    b.new(8, line=None, op="aten.ones")
    b.phase(PhaseKind.FORWARD)
    b.enter("", role=ModuleRole.ROOT)
    b.new(8, line="train.py:4 run")
    b.enter("layers.0", role=ModuleRole.LAYER)
    b.new(8, line="train.py:5 run", op="aten.mul")
    b.leave()
    b.leave()
    for kind in (PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.OPTIMIZER, PhaseKind.OTHER):
        b.phase(kind)
        b.new(8, line="train.py:6 run")
    origins = convert(b).origins
    forward, outside = Part.FORWARD, OUTSIDE_MODULES
    assert origins[:6] == [
        Origin("parameter a", "aten.mm", outside, forward, "parameters"),
        Origin("buffer b", "aten.mm", outside, forward, "buffers"),
        Origin("train.py:3 run", "aten.mm", outside, forward, "buffers"),
        Origin("aten.ones", "aten.ones", outside, forward, "temporaries"),
        Origin("train.py:4 run", "aten.mm", "(root)", forward, "activations", in_module=True),
        Origin("train.py:5 run", "aten.mul", "layers.0", forward, "activations", in_module=True),
    ]
    assert [origin.part for origin in origins[6:]] == [Part.BACKWARD, Part.OPTIMIZER, Part.OPTIMIZER, forward]


def test_slices_of_stages_and_of_calls() -> None:
    b = TraceBuilder()
    b.new(8)
    b.phase(PhaseKind.FORWARD, 2)
    b.enter("", "Net", ModuleRole.ROOT)
    b.enter("layers.0", "Layer", ModuleRole.LAYER)
    b.new(8)
    b.leave()
    b.leave()
    converted = convert(b)
    assert converted.slices == [
        TimelineSlice("parameters", 0, 2, "stages"),
        TimelineSlice("layer 0 (step 2)", 4, 8, "stages"),
        TimelineSlice("Net", 3, 7, "modules"),
        TimelineSlice("layers.0 (Layer)", 4, 6, "modules"),
    ]
    notes = [(note["stage"], note["name"], note["device"], note["time_us"]) for note in converted.snapshot.annotations]
    assert notes == [
        ("START", "parameters", 0, 0), ("END", "parameters", 0, 2),
        ("START", "layer 0 (step 2)", 0, 4), ("END", "layer 0 (step 2)", 0, 8),
    ]  # fmt: skip


def test_calls_that_raised_end_with_the_call_around_them() -> None:
    b = TraceBuilder()
    for path in ("", "a", "a.b", "a.c"):
        b.enter(path, f"Class{path}")
    b.add(EventKind.EXIT, 1)  # of `a`, in which `a.b` called `a.c`
    b.add(EventKind.EXIT, 1)  # of nothing
    b.enter("d", "D")
    b.new(8)
    modules = [one for one in convert(b).slices if one.track == "modules"]
    assert [(one.name, one.begin, one.end) for one in modules] == [
        ("Class", 1, 9), ("a (Classa)", 2, 5), ("a.b (Classa.b)", 3, 5), ("a.c (Classa.c)", 4, 5), ("d (D)", 7, 9),
    ]  # fmt: skip


def test_settings_are_written_as_torch_writes_them() -> None:
    b = TraceBuilder()
    b.new(8)
    conf = "roundup_power2_divisions:[1:2,>:4],max_split_size_mb:40,garbage_collection_threshold:0.5"
    assert convert(b, conf).snapshot.settings == {
        "PYTORCH_CUDA_ALLOC_CONF": conf,
        "max_split_size": 40 * MIB,
        "garbage_collection_threshold": 0.5,
        "expandable_segments": False,
        "roundup_power2_divisions": {str(1 << octave): 4 if octave else 2 for octave in range(16)},
    }
    plain = convert_to_snapshot(b.trace, AllocatorConfig(expandable_segments=True), None).snapshot.settings
    assert plain["max_split_size"] == -1 and plain["expandable_segments"] is True
    assert plain["roundup_power2_divisions"] == {str(1 << octave): 0 for octave in range(16)}
