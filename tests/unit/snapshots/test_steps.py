"""Steps of recordings, by annotations and by lines that allocate at regular distances, and what leaks from them."""

from __future__ import annotations

import pytest

from memprof.allocator import Block
from memprof.snapshots.recording import Recording, build_recordings
from memprof.snapshots.steps import Leak, Steps, find_leaks, find_steps
from memprof.trace.snapshot import Frame, Snapshot
from tests.unit.snapshots.builder import MIB, WEIGHT, Program, stack

LOOP, OTHER = stack("train.py:3 loop"), stack("train.py:9 log")


def only(program: Program) -> Recording:
    (found,) = build_recordings(program.snapshot())
    return found


def blocks(*stacks, times: list[int | None] | None = None) -> Recording:
    """Blocks of 512 bytes, of which the first takes a segment: their events are 1, 2 and so on."""
    program = Program()
    for frames in stacks:
        program.malloc(512, frames)
    snapshot = program.snapshot()
    if times is not None:
        (events,) = snapshot.traces
        events = [event._replace(time_us=time) for event, time in zip(events, times, strict=True)]
        snapshot = Snapshot(snapshot.segments, [events], snapshot.settings)
    (found,) = build_recordings(snapshot)
    return found


def steps_of(*stacks) -> tuple[int, ...] | None:
    steps = find_steps(blocks(*stacks))
    return None if steps is None else steps.begins


# -- annotations -------------------------------------------------------------------------------------------------------


def notes(*ends: int, **changes: object) -> list[dict[str, object]]:
    note = {"stage": "END", "device": 0, "name": "Optimizer.step#SGD.step", **changes}
    return [{name: value for name, value in note.items() if value is not None} | {"time_us": end} for end in ends]


TIMES = [10, 11, 12, 20, 21, 22, 30, 31, 32]  # of a segment and eight blocks


def annotated(annotations: list[dict[str, object]], times: list[int | None] | None = None) -> Steps | None:
    return find_steps(blocks(*[()] * 8, times=TIMES if times is None else times), annotations)


def test_annotations_of_a_recording_without_events() -> None:
    program = Program()
    program.malloc(512)
    snapshot = program.snapshot()
    (found,) = build_recordings(Snapshot(snapshot.segments, [[]], snapshot.settings))
    assert find_steps(found, notes(12, 22)) is None


def test_steps_are_in_the_order_of_their_events() -> None:
    """Event i is at 10 * (i + 1): a step that ends at 85 is followed by event 8."""
    program = blocks(*[()] * 19, times=[10 * event for event in range(1, 21)])
    assert find_steps(program, notes(15, 85, 165)) == Steps((0, 1, 8, 16), "3 annotated optimizer steps")


def test_a_step_begins_after_the_one_before_has_ended() -> None:
    assert annotated(notes(12, 22)) == Steps((0, 3, 6), "2 annotated optimizer steps")
    assert annotated(notes(21, 15, 16)) == Steps((0, 3, 5), "3 annotated optimizer steps")  # sorted, each once
    assert annotated(notes(12, 22, 32)) == Steps(
        (0, 3, 6), "3 annotated optimizer steps"
    )  # the last ends the recording
    assert annotated(notes(5, 12, 22)) == Steps((0, 3, 6), "3 annotated optimizer steps")  # before its first event
    assert annotated(notes(12, 22, device=None)) is not None  # a file of one device


@pytest.mark.parametrize(
    "annotations",
    [
        notes(12),  # two steps are too few
        notes(12, 13),  # the second is empty
        notes(12, 22, device=1),
        notes(12, 22, stage="START"),
        notes(12, 22, name="Optimizer.zero_grad#SGD"),
        notes(12, 22, name=None),
        [*notes(12), {**notes(22)[0], "time_us": "22"}],
    ],
)
def test_annotations_that_are_no_steps(annotations: list[dict[str, object]]) -> None:
    assert annotated(annotations) is None


@pytest.mark.parametrize(
    ("times", "is_found"),
    [
        ([10, 11, 12, 20, 21, 22, 30, 31, 31], True),
        ([10, 11, 12, 20, 21, 22, 30, 32, 31], False),  # not rising
        ([None, 11, 12, 20, 21, 22, 30, 31, 32], False),  # without a clock
        ([1, 11, 12, 20, 21, 22, 30, 31, 32], True),
    ],
)
def test_annotations_need_the_clock_of_the_events(times: list[int | None], is_found: bool) -> None:
    assert (annotated(notes(12, 22), times) is not None) == is_found


# -- lines that allocate at regular distances --------------------------------------------------------------------------


def test_steps_by_the_lines_of_a_loop() -> None:
    found = find_steps(blocks(LOOP, OTHER, LOOP, OTHER, LOOP, OTHER))
    assert found == Steps((1, 3, 5), "the 2 lines that allocate 3 times, evenly spaced")


def test_lines_that_say_nothing_of_steps() -> None:
    for frames in ((), WEIGHT, stack("model.cpp:3 f", main=False), stack("train.py:3 f", main=False)):
        assert steps_of(*[frames] * 3) is None
    # Of packages alone, or inside one call of a module.
    site = "/venv/lib/python3.12/site-packages"
    launcher = (Frame(f"{site}/a/b.py", 3, "f"), Frame("/usr/lib/python3.12/runpy.py", 3, "_run_code"))
    assert steps_of(launcher, launcher, launcher) is None
    layer = stack("layer.py:3 forward", "call", "train.py:3 f")
    assert steps_of(layer, layer, layer) is None and steps_of(OTHER, layer, layer, layer) is None
    inner = stack("layer.py:4 forward", "call", "train.py:3 f")
    assert steps_of(layer, inner, layer, OTHER, layer) == (1, 3, 5)  # of the steps, one has a line outside the call
    started = (*LOOP, Frame("", 0, "__libc_start_main"))
    assert steps_of(started, started, started) == (1, 2, 3)
    # Two allocations are no loop, nor are three at uneven distances.
    assert steps_of(LOOP, LOOP) is None and steps_of(LOOP, LOOP, OTHER, OTHER, LOOP) is None
    assert steps_of(LOOP, OTHER, LOOP, LOOP) is None


@pytest.mark.parametrize("name", ["<module>", "_run_code", "_bootstrap", "_bootstrap_inner", "run_path", "main"])
def test_entry_points_of_programs(name: str) -> None:
    frames = stack("train.py:3 loop", f"train.py:9 {name}", main=False)
    assert steps_of(frames, frames, frames) == (1, 2, 3)
    cut_off = stack("train.py:3 loop", f"train.py:9 {name}", "train.py:9 other", main=False)
    assert steps_of(cut_off, cut_off, cut_off) is None


def test_the_count_that_most_lines_have() -> None:
    """One line allocates three times, two lines four times; of equally many, the fewer steps."""
    a, b, c = (stack(f"train.py:{line} loop") for line in (1, 2, 3))
    assert steps_of(a, b, c, a, b, c, a, b, c, (), b, c) == (2, 5, 8, 11)
    assert steps_of(a, b, a, b, a, b, (), b) == (1, 3, 5)
    # Blocks of another size are another line.
    program = Program()
    for size in (512, 1024, 512, 1024, 512, 1024):
        program.malloc(size, a)
    found = find_steps(only(program))
    assert found is not None and (found.begins, found.found_by.split()[1]) == ((1, 3, 5), "2")


def test_steps_are_distances_of_the_whole_recording() -> None:
    """Three steps of one event and the segment's: half of seven events is more than they are."""
    assert steps_of(LOOP, LOOP, LOOP, OTHER, OTHER) == (1, 2, 3)  # 3 of 6
    assert steps_of(LOOP, LOOP, LOOP, OTHER, OTHER, stack("c.py:1 f")) is None  # 3 of 7


def test_at_most_ten_counts_are_tried() -> None:
    """Loops inside one call of a module have other counts; after ten of them the steps are not searched for."""

    def recording(num_inner: int) -> Recording:
        program = Program()
        for inner in range(num_inner):
            for line in (1, 2):
                frames = stack(f"layer{line}.py:{inner + 1} forward", "call", "net.py:3 f", "call")
                for _ in range(3 + inner):
                    program.malloc(512, frames)
        for _ in range(40):
            program.malloc(512, LOOP)
            for _ in range(12):
                program.malloc(512, ())
        return only(program)

    found = find_steps(recording(9))
    assert found is not None and len(found.begins) == 40
    assert find_steps(recording(10)) is None


# -- leaks -------------------------------------------------------------------------------------------------------------


def leaks(*steps: str) -> list[Leak]:
    """Leaks of steps in which each letter allocates 1 MiB at its line, and a capital frees the last of it."""
    program = Program()
    live: dict[str, list[Block | None]] = {}
    begins = []
    for step in steps:
        begins.append(len(program.recorder.events))
        for letter in step:
            if letter.islower():
                frames = stack(f"{letter}.py:1 f", "train.py:3 loop", op="mul")
                live.setdefault(letter, []).append(program.malloc(MIB, frames))
            else:
                program.free(live[letter.lower()].pop())
    return find_leaks(only(program), Steps(tuple(begins), ""))


def lines_of(*steps: str) -> str:
    return "".join(leak.source[9] for leak in leaks(*steps))


def test_what_most_steps_leave_leaks() -> None:
    (leak,) = leaks("kl", "ll", "ll", "lll")
    assert leak == Leak("/home/me/l.py:1 f", "(outside modules)", "mul", 8 * MIB, 8, 2 * MIB, 4)


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        (["a", "a"], ""),  # one before the last is too few
        (["a", "a", ""], "a"),
        (["a", "b", "a"], ""),
        (["a", "ab", "b", "b", ""], "b"),  # three of four; two are not more than half
        (["ac", "ac", "b", "bc", "", ""], "c"),  # three of five
        (["ac", "ac", "b", "bc", "", "", ""], ""),  # three of six
        (["a", "", "a"], ""),  # the last may not have ended
    ],
)
def test_more_than_half_of_the_steps_before_the_last(steps: list[str], lines: str) -> None:
    assert lines_of(*steps) == lines


def test_what_is_freed_or_older_than_the_steps_does_not_leak() -> None:
    assert leaks("aA", "aA", "aA", "aA") == []
    program = Program()
    for _ in range(6):
        program.malloc(512, LOOP)
    assert [leak.count for leak in find_leaks(only(program), Steps((4, 5, 6), ""))] == [3]


def test_the_median_step_and_the_largest_leak_first() -> None:
    found = leaks("a", "aab", "aaab", "ab", "aabb")
    amounts = [(leak.source[9], leak.allocated_bytes, leak.per_step_bytes, leak.steps) for leak in found]
    assert amounts == [("a", 9 * MIB, 2 * MIB, 5), ("b", 5 * MIB, MIB, 4)]
    assert lines_of("ba", "ba", "ba") == "ab"  # of equal size, by name
