"""The steps of a recorded run, and blocks that accumulate from step to step.

A snapshot does not record where a step begins. Steps are derived in one of two ways:
* torch annotates each `Optimizer.step`, if record_function was active (`external_annotations`): a step ends there;
* else, lines of the program allocate repeatedly at regular distances, outside every module call. A line in a loop over
  layers is regular too, but is inside the forward of a module, as are all lines between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile

from memprof.ledger.categories import Category
from memprof.snapshots.origins import MODULE_CALLS, find_package
from memprof.snapshots.recording import BEFORE, NEVER, BlockLife, Recording, Steps
from memprof.trace.snapshot import Frame

MIN_STEPS = 3  # fewer steps cannot show a trend

MAX_UNEVENNESS = 0.1  # how much distances between steps may differ, as a share of the longest

MIN_COVERAGE = 0.5  # share of the recording that the steps must cover

MAX_CANDIDATES = 10  # step counts that are tried, the likeliest first

_BUILD_CATEGORIES = (Category.PARAMETERS, Category.OPTIMIZER_STATE)
_ENTRY_POINTS = frozenset(("<module>", "_run_code", "_bootstrap", "_bootstrap_inner", "run_path", "main"))


@dataclass(frozen=True, slots=True)
class Leak:
    """Blocks that one source line allocates in step after step and that are never freed."""

    source: str
    module: str
    op: str
    allocated_bytes: int  # Of all blocks live at the end.
    count: int
    per_step_bytes: int  # The median of the bytes that a step leaves.
    steps: int  # Steps that left something.


def find_steps(recording: Recording, annotations: Iterable[dict[str, object]] = ()) -> Steps | None:
    """Return the steps of `recording`; None if fewer than MIN_STEPS are recognised."""
    return _find_annotated_steps(recording, annotations) or _find_periodic_steps(recording)


def _find_annotated_steps(recording: Recording, annotations: Iterable[dict[str, object]]) -> Steps | None:
    ends = [
        note["time_us"]
        for note in annotations
        if note.get("device", 0) == recording.device
        and note.get("stage") == "END"
        and str(note.get("name", "")).startswith("Optimizer.step#")
        and isinstance(note.get("time_us"), int)
    ]
    if len(ends) < MIN_STEPS - 1:
        return None
    times = [max(time, 0) for time in recording.events.times]
    if not times or times[0] == 0 or any(a > b for a, b in pairwise(times)):
        return None
    begins = sorted({bisect_right(times, end) for end in ends if isinstance(end, int)})
    begins = [0, *(begin for begin in begins if 0 < begin < len(times))]
    if len(begins) < MIN_STEPS:
        return None
    return Steps(tuple(begins), f"{len(ends)} annotated optimizer steps")


def _find_periodic_steps(recording: Recording) -> Steps | None:
    lives = [life for life in recording.lives if life.born != BEFORE]
    births_by_site: dict[tuple[int, int], list[int]] = defaultdict(list)
    for life in lives:
        # Lines that build a model run once per layer, as regularly as steps.
        if life.stack and life.origin.category not in _BUILD_CATEGORIES:
            births_by_site[id(life.stack), life.requested].append(life.born)
    frames = {
        key: [frame for frame in stack if frame.filename.endswith(".py")]
        for key, stack in {id(life.stack): life.stack for life in lives}.items()
    }
    anchors: dict[int, list[list[int]]] = defaultdict(list)
    for (stack, _), births in births_by_site.items():
        if len(births) >= MIN_STEPS and _is_complete_stack(frames[stack]) and _is_regular(births):
            anchors[len(births)].append(births)
    # The number of steps is the count that most lines have.
    for _, lines in sorted(anchors.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_CANDIDATES]:
        begins = min(lines)
        step = (begins[-1] - begins[0]) / (len(begins) - 1)
        if begins[-1] - begins[0] + step < MIN_COVERAGE * len(recording.events):
            continue
        inner_stacks = {id(life.stack) for life in lives if begins[0] <= life.born < begins[-1] and life.stack}
        if not _share_a_module(frames[key] for key in inner_stacks):
            return Steps(tuple(begins), f"the {len(lines)} lines that allocate {len(begins)} times, evenly spaced")
    return None


def _is_complete_stack(frames: list[Frame]) -> bool:
    """Return whether a stack reaches the program's entry point; torch cuts off deep stacks."""
    return (
        bool(frames) and frames[-1].name in _ENTRY_POINTS and any(not find_package(frame.filename) for frame in frames)
    )


def _is_regular(events: list[int]) -> bool:
    gaps = [after - before for before, after in pairwise(events)]
    if len(gaps) > 2:
        gaps = gaps[1:]  # the first step allocates the optimizer's state and new segments
    return max(gaps) - min(gaps) <= MAX_UNEVENNESS * max(gaps)


def _share_a_module(stacks: Iterable[list[Frame]]) -> bool:
    """Return whether all complete stacks are inside the same module call."""
    complete = [frames[::-1] for frames in stacks if _is_complete_stack(frames)]
    common = takewhile(lambda frames: len(set(frames)) == 1, zip(*complete, strict=False))
    return any(frames[0].name in MODULE_CALLS for frames in common)


def find_leaks(recording: Recording, steps: Steps) -> list[Leak]:
    """Return the leaks of a run, largest first: blocks that several steps allocate and no step frees.

    A source line leaks if at least two steps, and more than half of the steps before the last, left blocks of it to the
    end. Blocks replaced in each step (gradients, optimizer state) do not count.
    """
    last_step = len(steps.begins) - 1
    survivors: dict[tuple[str, str], list[tuple[int, BlockLife]]] = defaultdict(list)
    for life in recording.lives:
        if life.born >= steps.begins[0] and life.freed == NEVER:
            step = bisect_right(steps.begins, life.born) - 1
            survivors[life.origin.source, life.origin.op].append((step, life))
    leaks = []
    for (source, op), group in survivors.items():
        bytes_by_step = Counter[int]()
        for step, life in group:
            bytes_by_step[step] += life.size
        leaking_steps = [step for step in bytes_by_step if step < last_step]
        if len(leaking_steps) < 2 or 2 * len(leaking_steps) <= last_step:
            continue
        amounts = sorted(bytes_by_step[step] for step in leaking_steps)
        leaks.append(
            Leak(
                source=source,
                module=Counter(life.origin.module for _, life in group).most_common(1)[0][0],
                op=op,
                allocated_bytes=sum(bytes_by_step.values()),
                count=len(group),
                per_step_bytes=amounts[len(amounts) // 2],
                steps=len(bytes_by_step),
            )
        )
    return sorted(leaks, key=lambda leak: (-leak.allocated_bytes, leak.source))
