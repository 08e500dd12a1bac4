"""A run on a GPU: verdict, what is held, and what other settings would change."""

from __future__ import annotations

import pytest

from memprof.allocator import (
    GpuMemory,
    TraceReplay,
    parse_config,
    parse_release,
    replay_in_host_memory,
    replay_on_gpu,
)
from memprof.errors import MemprofError
from memprof.trace.events import CPU, GPU, EventKind, Workspace
from memprof.trace.facts import DeviceFacts
from tests.unit.allocator.replaying import replay_trace
from tests.unit.allocator.traces import MIB, outgrown_blocks
from tests.unit.traces import TraceBuilder

CONTEXT = 20 * MIB


def test_without_a_gpu_nothing_is_refused():
    run = replay_on_gpu(outgrown_blocks(), None)
    assert (run.first_oom, run.retries, run.required_reserved_bytes) == (None, 0, 240 * MIB)


@pytest.mark.parametrize("total", [260, 1000])
def test_a_gpu_that_is_never_full_changes_nothing(total):
    trace = outgrown_blocks()
    run = replay_on_gpu(trace, GpuMemory(total * MIB, CONTEXT))
    assert run.timeline == replay_trace(trace)
    assert run.first_oom is None and run.retries == 0 and run.required_reserved_bytes == 240 * MIB


def test_fits_because_the_cache_is_given_back():
    """140 MiB hold the three large tensors, but not beside what the small ones left."""
    run = replay_on_gpu(outgrown_blocks(), GpuMemory(140 * MIB + CONTEXT, CONTEXT))
    assert run.first_oom is None and run.retries == 1
    assert run.timeline.peak_reserved.num_bytes <= 140 * MIB < run.required_reserved_bytes == 240 * MIB


@pytest.mark.parametrize(("ended", "least"), [(True, 160), (False, 200)])
def test_a_run_that_memory_ended_needs_no_room_for_the_cache_that_was_released(ended, least):
    """40 MiB are free, and released in vain: with 60 MiB in use, 100 MiB do not fit into 150 MiB."""
    b = TraceBuilder(None)
    first, *_ = b.alloc(40 * MIB), b.alloc(60 * MIB)
    b.free(first)
    b.alloc(100 * MIB)
    b.trace.ended_out_of_memory = ended
    run = replay_on_gpu(b.trace, GpuMemory(150 * MIB + CONTEXT, CONTEXT))
    assert run.first_oom is not None
    assert (run.least_reserved_bytes, run.required_reserved_bytes) == (least * MIB, 200 * MIB)
    assert replay_on_gpu(b.trace, None).least_reserved_bytes == 200 * MIB


def test_the_refused_request_and_its_message():
    trace = outgrown_blocks()
    run = replay_on_gpu(trace, GpuMemory(119 * MIB + CONTEXT, CONTEXT), release=parse_release("2.6.0"))
    oom = run.first_oom
    assert oom is not None
    # The fourth small tensor: 90 of 119 MiB are in use, and nothing can be released.
    assert trace.events[oom.event].ref == 3 and run.retries == 0
    assert oom.message == (
        "CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 139.00 MiB of which 29.00 MiB "
        "is free. Including non-PyTorch memory, this process has 110.00 MiB memory in use. Of the allocated memory "
        "90.00 MiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    assert run.timeline == replay_trace(trace)  # what the whole run would need
    assert run.required_reserved_bytes == 240 * MIB


def test_refused_at_once_counts_no_retry():
    config = parse_config("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True")
    script = TraceBuilder()
    script.alloc(30 * MIB)
    run = replay_on_gpu(script.trace, GpuMemory(50 * MIB, 0), config)
    assert run.first_oom is not None and run.retries == 0 and run.first_oom.report.allowed_bytes == 25 * MIB


def test_layout_at_an_event_names_the_storages():
    script = TraceBuilder()
    first, second = script.alloc(30 * MIB), script.alloc(2 * MIB)
    script.free(first)
    run = replay_on_gpu(script.trace, None)
    segments, owners = run.layout_at(2)
    assert [segment.allocated for segment in segments] == [2 * MIB, 30 * MIB]
    assert [owners[segment.blocks[0].address] for segment in segments] == [second, first]
    segments, owners = run.layout_at(3)
    assert [segment.allocated for segment in segments] == [2 * MIB, 0] and list(owners.values()) == [second]


def pinned() -> TraceBuilder:
    """Tensors of 190 MiB need 210: one of 40, the third, is in a segment of 60."""
    script = TraceBuilder()
    script.free(script.alloc(100 * MIB), script.alloc(60 * MIB))
    script.alloc(40 * MIB)
    script.alloc(150 * MIB)
    return script


def test_layout_when_the_gpu_refuses():
    """All of the cache that can be released has been: what is left is pinned."""
    script = pinned()
    run = replay_on_gpu(script.trace, GpuMemory(200 * MIB, 0))
    segments, owners = run.layout_at_oom()
    assert [(segment.size, segment.largest_free) for segment in segments] == [(60 * MIB, 20 * MIB)]
    assert list(owners.values()) == [2]
    with pytest.raises(ValueError, match="fits"):
        replay_on_gpu(script.trace, None).layout_at_oom()


def test_expandable_segments_use_what_was_freed():
    run = replay_on_gpu(outgrown_blocks(), GpuMemory(200 * MIB, CONTEXT))
    needs = run.compute_needs(parse_config("expandable_segments:True"))
    assert needs == (120 * MIB, True, max(run.timeline.allocated), False)


HALF = "per_process_memory_fraction:0.5"


@pytest.mark.parametrize("total", [100, 139, 140, 141, 160, 200, 210, 229, 230, 240, 260, 1000, None])
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", HALF, f"expandable_segments:True,{HALF}"])
@pytest.mark.parametrize("make", [outgrown_blocks, lambda: pinned().trace])
def test_other_settings_are_judged_as_a_replay_with_them_is(total, settings, make):
    trace, config = make(), parse_config(settings)
    gpu = None if total is None else GpuMemory(total * MIB, CONTEXT)
    whole = replay_on_gpu(trace, gpu, config)
    allocated = max(whole.timeline.allocated)
    releases_cache = whole.fits and whole.retries > 0
    needs = replay_on_gpu(trace, gpu).compute_needs(config)
    assert needs == (whole.required_reserved_bytes, whole.fits, allocated, releases_cache)


def test_a_skipped_stretch_leaves_the_same_state():
    trace = outgrown_blocks()
    steps, skipped = TraceReplay(trace), TraceReplay(trace)
    for end in (0, 3, 3, None):
        steps.advance(end)
        skipped.advance(end, writes=False)
        assert skipped.event == steps.event and skipped.allocator.stats() == steps.allocator.stats()


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "per_process_memory_fraction:0.9"])
def test_a_request_many_times_the_gpu_is_gone_on_with(settings):
    """Address space for expandable segments is reserved by the size of the GPU: it must not end the replay."""
    script = TraceBuilder()
    script.alloc(30 * MIB)
    script.alloc(500_000 * MIB)
    script.alloc(700_000 * MIB)
    run = replay_on_gpu(script.trace, GpuMemory(1000 * MIB, CONTEXT), parse_config(settings))
    assert run.first_oom is not None and run.first_oom.event == 2
    assert 0 <= run.required_reserved_bytes - 1_200_030 * MIB < 20 * MIB
    assert replay_trace(script.trace, 980 * MIB, parse_config(settings)).allocated[-1] == 1_200_030 * MIB


def test_more_than_can_be_addressed_is_an_error_and_no_traceback():
    script = TraceBuilder()
    script.alloc(1 << 61)
    with pytest.raises(MemprofError, match="more memory than can be addressed"):
        replay_on_gpu(script.trace, GpuMemory(1000 * MIB, CONTEXT))


def test_an_emptied_cache_is_gone_and_asked_for_again():
    script = TraceBuilder()
    script.free(script.alloc(30 * MIB))
    script.empty_cache()
    script.alloc(30 * MIB)
    timeline = replay_on_gpu(script.trace, None).timeline
    assert list(timeline.reserved) == [0, 30 * MIB, 30 * MIB, 0, 30 * MIB]
    assert timeline.stats["num_device_alloc"] == 2


def test_storages_elsewhere_and_empty_ones_take_no_block():
    script = TraceBuilder()
    script.alloc(30 * MIB, device="cpu")
    script.free(script.alloc(0))
    only = script.alloc(700)
    assert replay_on_gpu(script.trace, None).timeline.blocks == {only: 1024}


def with_workspace(*sizes: int) -> tuple[TraceBuilder, int]:
    """60 MiB, a library's call with a workspace of 50, and tensors of `sizes` in MiB."""
    script = TraceBuilder()
    script.alloc(60 * MIB)
    script.trace.workspaces.append(Workspace(len(script.trace.events), GPU, 50 * MIB, 50 * MIB))
    workspace = script.alloc(50 * MIB)
    script.free(workspace)
    for size in sizes:
        script.alloc(size * MIB)
    return script, workspace


def test_a_call_without_room_for_its_workspace_does_without():
    script, workspace = with_workspace(30)
    run = replay_on_gpu(script.trace, GpuMemory(100 * MIB, 0))
    assert (run.fits, run.refused, run.retries) == (True, {workspace}, 0)
    assert run.required_reserved_bytes == run.timeline.peak_reserved.num_bytes == 90 * MIB
    assert max(run.timeline.allocated) == 90 * MIB and workspace not in run.timeline.blocks
    roomy = replay_on_gpu(script.trace, GpuMemory(110 * MIB, 0))
    assert (roomy.refused, roomy.required_reserved_bytes) == (frozenset(), 110 * MIB)


def test_a_run_that_does_not_fit_has_no_workspace_either():
    script, workspace = with_workspace(30, 30)
    run = replay_on_gpu(script.trace, GpuMemory(100 * MIB, 0))
    assert run.first_oom is not None and run.first_oom.event == len(script.trace.events) - 1
    assert (run.refused, run.retries, run.required_reserved_bytes) == ({workspace}, 0, 120 * MIB)
    assert len(run.timeline.allocated) == len(script.trace.events)
    assert run.first_oom.report.process_bytes == 90 * MIB


def test_a_workspace_after_the_error_is_taken_from_what_the_run_would_need():
    script = TraceBuilder()
    script.alloc(120 * MIB)
    script.trace.workspaces.append(Workspace(len(script.trace.events), GPU, 50 * MIB, 50 * MIB))
    script.alloc(50 * MIB)
    run = replay_on_gpu(script.trace, GpuMemory(100 * MIB, 0))
    assert run.first_oom is not None and run.first_oom.event == 1
    assert (run.refused, run.required_reserved_bytes) == (frozenset(), 170 * MIB)


def test_retries_of_a_run_before_its_error():
    """The cache is released once with success, and once before the error, which is not counted."""
    script = TraceBuilder()
    script.free(script.alloc(60 * MIB))
    script.alloc(80 * MIB)
    script.alloc(30 * MIB)
    run = replay_on_gpu(script.trace, GpuMemory(100 * MIB, 0))
    assert run.first_oom is not None and run.retries == 1 and run.required_reserved_bytes == 140 * MIB


def test_retries_of_failed_allocations_that_the_program_caught_are_not_counted():
    script = TraceBuilder()
    script.free(script.alloc(60 * MIB))
    script.alloc(80 * MIB)  # after the cache was released
    caught = script.alloc(50 * MIB)
    script.free(caught)
    script.trace.refused.append(caught)
    run = replay_on_gpu(script.trace, GpuMemory(100 * MIB, 0))
    assert run.fits and run.retries == 1 and run.refused == {caught}


def test_a_caught_failure_releases_the_cache_as_its_pool_does():
    script = TraceBuilder()
    script.free(script.alloc(60 * MIB))
    script.add(EventKind.POOL, 2)
    caught = script.alloc(50 * MIB)
    script.free(caught)
    script.trace.refused.append(caught)
    timeline = replay_on_gpu(script.trace, GpuMemory(100 * MIB, 0)).timeline
    assert timeline.reserved[-1] == 50 * MIB  # not the 60 of the default pool, in which there was room


def test_the_event_of_the_error_without_a_timeline():
    script = TraceBuilder()
    for _ in range(3):
        script.alloc(60 * MIB)
    replay = TraceReplay(script.trace, GpuMemory(130 * MIB, 0))
    replay.advance(writes=False)
    assert replay.timeline.first_oom is not None and replay.timeline.first_oom.event == 3


def test_memory_in_host_memory_is_what_is_requested():
    script = TraceBuilder()
    script.trace.device = CPU
    first = script.alloc(700, device=CPU)
    script.alloc(99, device="cpu")
    script.free(first)
    script.empty_cache()
    script.alloc(300, device=CPU)
    script.alloc(400, device=CPU)
    run = replay_in_host_memory(script.trace)
    assert list(run.timeline.requested) == list(run.timeline.allocated) == [0, 700, 700, 0, 0, 300, 700]
    assert list(run.timeline.reserved) == [0, 700, 700, 0, 0, 300, 700]
    peak = run.timeline.peak_reserved
    assert (peak.num_bytes, peak.event, run.required_reserved_bytes) == (700, 1, 700)
    assert run.fits and not run.rounds and run.retries == 0 and run.bounds is None
    assert run.trace is script.trace and run.gpu is None


@pytest.mark.parametrize(
    ("total", "usable", "context", "memory"),
    [
        (1000, None, 100, GpuMemory(1000, 100)),
        (1000, 700, 100, GpuMemory(1000, 300)),  # beside other processes
        (None, 700, 100, None),
    ],
)
def test_memory_of_a_device(total, usable, context, memory):
    assert GpuMemory.of(DeviceFacts("a GPU", total, usable, context)) == memory
    assert memory is None or memory.usable_bytes == (700 if usable else 900)
    assert GpuMemory(100, 300).usable_bytes == 0


def test_layouts_of_several_events_are_those_of_each():
    """On the GPU if the run fits it, else on one without limit, from which nothing is released."""
    for total, sizes in ((100, [80]), (130, [60, 80]), (None, [60, 80])):
        script = TraceBuilder()
        script.free(script.alloc(60 * MIB))
        script.alloc(80 * MIB)
        if total == 130:
            script.alloc(60 * MIB)
            script.alloc(60 * MIB)
        gpu = None if total is None else GpuMemory(total * MIB, 0)
        run = replay_on_gpu(script.trace, gpu)
        run.prepare_layouts([3, 1, 3])
        segments, owners = run.layout_at(3)
        assert sorted(segment.size // MIB for segment in segments) == sizes
        assert list(owners.values()) == [1] and list(run.layout_at(1)[1].values()) == [0]


def test_a_gpu_that_refused_is_told_by_its_limits():
    script = TraceBuilder()
    script.alloc(30 * MIB)
    for conf, total, was_limited in (("", 100, False), ("", 29, True), ("per_process_memory_fraction:0.9", 100, True)):
        replay = TraceReplay(script.trace, GpuMemory(total * MIB, 0), parse_config(conf))
        replay.advance()
        assert replay.was_limited == was_limited


def test_a_replay_may_stop_at_the_error():
    script = TraceBuilder()
    for _ in range(3):
        script.alloc(60 * MIB)
    replay = TraceReplay(script.trace, GpuMemory(100 * MIB, 0))
    replay.advance(stop_at_oom=True)
    assert len(replay.timeline.allocated) == 3 and replay.event == 3
    assert replay.finish().retries == 1


def test_requests_on_streams_and_in_pools():
    script = TraceBuilder()
    script.add(EventKind.POOL, 2)
    script.free(script.alloc(30 * MIB))
    script.add(EventKind.POOL, 0)
    script.alloc(30 * MIB)
    script.add(EventKind.STREAM, 5)
    script.free(script.alloc(30 * MIB))
    script.add(EventKind.STREAM, 0)
    script.alloc(30 * MIB)
    script.empty_cache()
    script.add(EventKind.POOL_FREE, 2)
    script.empty_cache()
    timeline = replay_trace(script.trace)
    assert [size // MIB for size in timeline.reserved] == [0, 0, 30, 30, 30, 60, 60, 90, 90, 90, 120, 90, 90, 60]
    assert [(segment.stream, segment.pool_id) for segment in timeline.segments] == [(0, (0, 0))] * 2


def test_another_gpu_is_named_and_has_its_own_storages():
    script = TraceBuilder()
    script.alloc(60 * MIB)
    other = script.alloc(150 * MIB, device="cuda:1")
    run = replay_on_gpu(script.trace.select_device("cuda:1"), GpuMemory(100 * MIB, 0))
    assert run.first_oom is not None and run.first_oom.event == 2 and run.first_oom.report.device == 1
    assert "GPU 1 has a total capacity of 100.00 MiB of which 100.00 MiB is free" in run.first_oom.message
    assert run.timeline.blocks == {other: 150 * MIB}
