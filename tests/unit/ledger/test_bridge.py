"""The bridge: every step is there, in bytes, and the steps add up."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from memprof.allocator import GpuMemory, TraceReplay, parse_config, replay_in_host_memory, replay_on_gpu
from memprof.flows.account import analyze
from memprof.ledger.bridge import FreeSegments, PoolUse, build_bridge
from memprof.ledger.ledger import build_ledger
from memprof.ledger.state import compute_model_state
from memprof.report.terminal.bridge import render_bridge
from memprof.report.terminal.cells import choose_unit
from memprof.trace.events import CPU, HOST, EventKind, Owner, PhaseKind, Role, Sample
from memprof.trace.facts import DeviceFacts, Facts, NvmlFacts, OtherProcess, RankFacts
from tests.lanes import examples
from tests.unit.allocator.traces import MIB, outgrown_blocks
from tests.unit.traces import TraceBuilder

CONTEXT = 426 * MIB
GPU = DeviceFacts("a GPU", 1 << 40, (1 << 40) - CONTEXT, CONTEXT)


def bridge_of(trace, conf="", nvml=None, rank=None):
    trace.facts = Facts(device=GPU, nvml=nvml, rank=rank)
    config = parse_config(conf)
    ledger = build_ledger(trace, replay_on_gpu(trace, GpuMemory(GPU.total_bytes, CONTEXT), config))
    return build_bridge(ledger)


@st.composite
def random_traces(draw):
    """Requests of all size classes, freed in any order."""
    script, alive = TraceBuilder(), []
    sizes = st.one_of(st.integers(1, 4096), st.integers(1 << 19, 3 << 20), st.integers(5 * MIB, 60 * MIB))
    for _ in range(draw(st.integers(1, 60))):
        if alive and draw(st.booleans()):
            script.free(alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            alive.append(script.alloc(draw(sizes)))
    if not script.trace.storages:
        script.alloc(1)
    return script.trace


@settings(max_examples=examples(60), deadline=None)
@given(random_traces(), st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20"]))
def test_the_steps_add_up_and_empty_cache_gives_back_what_is_said(trace, conf):
    bridge = bridge_of(trace, conf)
    for moment in (bridge.peak_reserved, bridge.peak_allocated):
        assert moment.requested_bytes + moment.rounding_bytes == moment.allocated_bytes
        held = moment.allocated_bytes + moment.fragmentation_bytes
        assert held + moment.released_bytes == moment.reserved_bytes
        assert moment.reserved_bytes + CONTEXT == moment.device_used_bytes
        assert sum(pool.free_bytes for pool in moment.pools) == moment.fragmentation_bytes
        assert all(pool.free_bytes == pool.pinned_bytes + pool.releasable_bytes for pool in moment.pools)
        assert min(moment.rounding_bytes, moment.fragmentation_bytes, moment.released_bytes) >= 0
    # The same run up to the height of reserved memory, and then really torch.cuda.empty_cache().
    replay = TraceReplay(trace, None, parse_config(conf))
    replay.advance()
    peak = replay.finish().peak_reserved
    again = TraceReplay(trace, None, parse_config(conf))
    again.advance(peak.event + 1, writes=False)
    before = again.allocator.statistics.all.reserved_bytes
    again.allocator.empty_cache()
    given_back = before - again.allocator.statistics.all.reserved_bytes
    assert sum(pool.releasable_bytes for pool in bridge.peak_reserved.pools) == given_back
    assert bridge.peak_reserved.reserved_bytes == peak.num_bytes


def test_which_segments_and_pools():
    """Four freed tensors of 30 MiB leave empty segments; a small one is in the small pool."""
    trace = outgrown_blocks()
    bridge = bridge_of(trace)
    moment = bridge.peak_reserved
    assert bridge.same_moment
    (large,) = moment.pools
    assert (large.pool, large.segments, large.empty_segments) == ("large", 7, 4)
    assert large.free_bytes == large.releasable_bytes == 120 * MIB
    (kind,) = moment.free_segments
    assert (kind.count, kind.size_bytes, kind.free_bytes, kind.tensors) == (4, 30 * MIB, 30 * MIB, False)
    script = TraceBuilder()
    script.alloc(1000)
    small = bridge_of(script.trace).peak_reserved
    assert (small.pools[0].pool, small.pools[0].free_bytes, small.rounding_bytes) == ("small", 2 * MIB - 1024, 24)


def test_pools_and_segments_of_each_kind():
    """The small and the large pool, and a private one, of which nothing is released."""
    b = TraceBuilder()
    b.alloc(1000)
    b.alloc(3 * MIB)
    b.add(EventKind.POOL, 1)
    graphs = b.alloc(30 * MIB)
    b.alloc(12 * MIB)
    b.add(EventKind.POOL, 0)
    freed = [b.alloc(40 * MIB) for _ in range(2)]
    b.free(graphs, *freed)
    b.phase(PhaseKind.FORWARD, 2, 3)
    b.alloc(50 * MIB)
    moment = bridge_of(b.trace).peak_reserved
    assert (moment.stage, moment.step, moment.micro_batch) == ("output", 2, 3)
    small = 2 * MIB - 1024
    assert [tuple(getattr(pool, name) for name in PoolUse.__slots__) for pool in moment.pools] == [
        # name, segments, reserved, allocated, free, pinned, releasable, empty segments
        ("small", 1, 2 * MIB, 1024, small, small, 0, 0),
        ("large", 4, 150 * MIB, 53 * MIB, 97 * MIB, 17 * MIB, 80 * MIB, 2),
        ("large, private (1, 0)", 2, 42 * MIB, 12 * MIB, 30 * MIB, 30 * MIB, 0, 1),
    ]
    assert moment.free_segments == (
        FreeSegments("large", 2, 40 * MIB, 40 * MIB, tensors=False, expandable=False),
        FreeSegments("large, private (1, 0)", 1, 30 * MIB, 30 * MIB, tensors=False, expandable=False),
        FreeSegments("large", 1, 20 * MIB, 17 * MIB, tensors=True, expandable=False),
        FreeSegments("small", 1, 2 * MIB, small, tensors=True, expandable=False),
    )


def test_the_five_kinds_of_segments_with_most_free_memory():
    b = TraceBuilder()
    b.free(*[b.alloc(size * MIB) for size in (12, 12, 14, 16, 18, 20, 22, 24)])
    b.alloc(100 * MIB)
    kinds = bridge_of(b.trace).peak_reserved.free_segments
    assert [(kind.count, kind.size_bytes // MIB) for kind in kinds] == [(2, 12), (1, 24), (1, 22), (1, 20), (1, 18)]


def test_expandable_segments_release_whole_units_of_their_pool():
    """Of three free MiB of the small pool, one unit of 2 MiB; of 77 of the large one, three of 20."""
    b = TraceBuilder()
    small = [b.alloc(MIB) for _ in range(6)]
    b.alloc(3 * MIB)
    large = b.alloc(70 * MIB)
    b.free(*small[3:], large)
    b.add(EventKind.STREAM, 1)
    b.alloc(100 * MIB)
    moment = bridge_of(b.trace, "expandable_segments:True").peak_reserved
    assert [
        (pool.pool, pool.segments, pool.free_bytes, pool.releasable_bytes, pool.pinned_bytes) for pool in moment.pools
    ] == [
        ("small", 1, 3 * MIB, 2 * MIB, MIB),
        ("large", 2, 77 * MIB, 60 * MIB, 17 * MIB),
    ]
    assert [kind.expandable for kind in moment.free_segments] == [True, True]


def test_a_larger_mapping_unit_releases_less():
    b = TraceBuilder()
    b.alloc(3 * MIB)
    b.free(b.alloc(70 * MIB))
    b.add(EventKind.STREAM, 1)
    b.alloc(100 * MIB)
    conf = "expandable_segments:True,large_segment_size_mb:32"
    (pool,) = bridge_of(b.trace, conf).peak_reserved.pools
    assert (pool.reserved_bytes, pool.releasable_bytes) == ((96 + 128) * MIB, 64 * MIB)


def view_of(bridge):
    console = Console(width=100, file=io.StringIO())
    console.print(render_bridge(bridge, choose_unit(MIB), DeviceFacts()))
    return console.file.getvalue()


def test_what_is_free_after_the_peak_is_cached():
    """90 MiB were in use at once, in segments that a request of 60 MiB does not fit into: 60 are never in use."""
    script = TraceBuilder()
    activations = [script.alloc(size * MIB) for size in (40, 50)]
    for tensor in activations:
        script.free(tensor)
    script.alloc(60 * MIB)
    bridge = bridge_of(script.trace)
    first = bridge.peak_reserved
    assert (first.reserved_bytes, first.allocated_bytes) == (150 * MIB, 60 * MIB)
    assert (first.fragmentation_bytes, bridge.cached_bytes(first)) == (90 * MIB, 30 * MIB)
    assert bridge.cached_bytes(bridge.peak_allocated) == 0
    assert "60.00 MiB fragmentation, the rest cached" in view_of(bridge)


def test_simulated_runs_know_nothing_of_libraries_and_others():
    moment = (bridge := bridge_of(outgrown_blocks())).peak_reserved
    assert moment.libraries_bytes is None and moment.other_processes_bytes is None and bridge.processes is None


def test_what_nccl_takes_of_a_rank_is_not_known_and_said():
    trace = outgrown_blocks()
    alone = bridge_of(trace)
    assert alone.nccl_group_bytes is None and "NCCL" not in view_of(alone)
    used = alone.peak_reserved.device_used_bytes
    bridge = bridge_of(trace, rank=RankFacts(3, 8))
    assert bridge.nccl_group_bytes == (544 * MIB, 1_600_000_000) and bridge.peak_reserved.device_used_bytes == used
    text = " ".join(view_of(bridge).split())
    assert "+ NCCL not known 544.00 MiB to 1.49 GiB for each group, where others measured it" in text
    assert "not known: libraries outside the allocator, NCCL, other processes" in text
    assert bridge_of(trace, rank=RankFacts(3, 8, without_nccl=True)).nccl_group_bytes is None
    assert bridge_of(trace, rank=RankFacts(0, 1)).nccl_group_bytes is None
    assert bridge_of(trace, rank=RankFacts(1, 2)).nccl_group_bytes is not None
    trace.source = "measured"
    assert bridge_of(trace, rank=RankFacts(3, 8)).nccl_group_bytes is None


def test_what_nvml_saw_closes_the_gap():
    """The GPU says 1,900 MiB: 240 reserved, 426 of context, 34 of libraries, 1,200 of others."""
    nvml = NvmlFacts(
        reserved_bytes=240 * MIB,
        process_bytes=700 * MIB,
        used_bytes=1900 * MIB,
        processes=(OtherProcess(12, "Xorg", 1000 * MIB), OtherProcess(13, "python")),
    )
    bridge = bridge_of(outgrown_blocks(), nvml=nvml)
    moment = bridge.peak_reserved
    assert (moment.libraries_bytes, moment.other_processes_bytes) == (34 * MIB, 1200 * MIB)
    assert moment.device_used_bytes == 1900 * MIB
    assert [(one.pid, one.name) for one in bridge.processes] == [(12, "Xorg"), (13, "python")]

    text = view_of(bridge)
    assert "Xorg (12) 1,000.00 MiB, python (13) ?" in text and "+ libraries outside" in text


def test_samples_of_a_measured_run_have_libraries_and_others_in_one():
    trace = outgrown_blocks()
    trace.source = "measured"
    trace.samples = [
        Sample(1, 0.1, None, None, 60 * MIB, 900 * MIB, None),
        Sample(5, 0.2, None, None, 240 * MIB, 1900 * MIB, None),
        Sample(6, 0.3, None, None, 240 * MIB, None, None),
    ]
    bridge = bridge_of(trace)
    moment = bridge.peak_reserved
    assert moment.unattributed_bytes == (1900 - 240 - 426) * MIB and moment.libraries_bytes is None
    assert moment.device_used_bytes == 1900 * MIB and not bridge.is_outside_unknown
    console = Console(width=100, file=io.StringIO())
    console.print(render_bridge(bridge, choose_unit(MIB), DeviceFacts()))
    assert "not told apart" in console.file.getvalue() and "not known" not in console.file.getvalue()


@pytest.mark.parametrize(
    ("known", "libraries", "others", "outside_unknown"),
    [
        ({"used_bytes": 5}, None, None, True),  # NVML may not name processes
        ({"process_bytes": 700}, None, None, True),
        ({"reserved_bytes": 240, "process_bytes": 700}, 34, None, False),
        ({"process_bytes": 700, "used_bytes": 1900}, None, 1200, True),
        ({"reserved_bytes": 240, "process_bytes": 665, "used_bytes": 665}, 0, 0, False),  # less than what torch has
        ({"reserved_bytes": 240, "process_bytes": 667, "used_bytes": 668}, 1, 1, False),
        ({"reserved_bytes": 240, "process_bytes": 666, "used_bytes": 600}, 0, 0, False),
    ],
)
def test_what_nvml_does_not_say_is_unknown(known, libraries, others, outside_unknown):
    bridge = bridge_of(outgrown_blocks(), nvml=NvmlFacts(**{name: value * MIB for name, value in known.items()}))
    moment = bridge.peak_reserved
    mib = [None if value is None else value // MIB for value in (moment.libraries_bytes, moment.other_processes_bytes)]
    assert mib == [libraries, others] and moment.unattributed_bytes is None
    assert moment.device_used_bytes == (240 + 426 + (libraries or 0) + (others or 0)) * MIB
    assert bridge.is_outside_unknown == outside_unknown


@pytest.mark.parametrize(
    ("samples", "unattributed"),
    [
        ([(240, 700)], 34),
        ([(240, 600)], 0),  # less than reserved memory and the context
        ([(240, 700), (100, 9000)], 34),  # the sample with most reserved memory
        ([(240, 700), (240, 710)], 44),  # of two, the one that has more of the device
        ([(None, 700), (240, None)], None),
    ],
)
def test_the_sample_with_most_reserved_memory(samples, unattributed):
    trace = outgrown_blocks()
    trace.samples = [
        Sample(1, 0.1, None, None, reserved and reserved * MIB, used and used * MIB, None) for reserved, used in samples
    ]
    moment = bridge_of(trace).peak_reserved
    assert moment.unattributed_bytes == (None if unattributed is None else unattributed * MIB)
    assert moment.context_bytes == CONTEXT
    assert moment.device_used_bytes == (240 + 426 + (unattributed or 0)) * MIB
    with_nvml = bridge_of(trace, nvml=NvmlFacts(reserved_bytes=240 * MIB, process_bytes=700 * MIB)).peak_reserved
    assert (with_nvml.libraries_bytes, with_nvml.unattributed_bytes) == (34 * MIB, None)  # they are told apart


def test_there_is_none_without_a_gpu():
    trace = outgrown_blocks()
    trace.device = CPU
    trace.storages = [storage._replace(device=CPU) for storage in trace.storages]
    trace.facts = Facts(device=DeviceFacts("a CPU", 1, 1))
    assert build_bridge(build_ledger(trace, replay_in_host_memory(trace))) is None


def test_model_state_is_of_roles_and_without_kernels_own():
    script = TraceBuilder()
    weight, gradient, workspace, host, moment = (script.alloc(n) for n in (1000, 900, 50, 70, 30))
    trace = script.trace
    trace.storages[workspace] = trace.storages[workspace]._replace(hidden=True)
    trace.storages[host] = trace.storages[host]._replace(device=HOST)
    roles = {weight: Role.PARAMETER, gradient: Role.GRADIENT, moment: Role.OPTIMIZER_STATE, host: Role.PARAMETER}
    trace.owners = {index: Owner(role, "x") for index, role in roles.items()}
    script.free(gradient)
    trace.owners[script.alloc(800)] = Owner(Role.GRADIENT, "x")
    state = compute_model_state(trace)
    assert (state.parameters_bytes, state.gradients_bytes, state.optimizer_state_bytes) == (1000, 900, 30)
    assert state.tensors_bytes == 1000 + 900 + 30 and state.buffers_bytes == 0


def test_model_state_is_the_peak_of_each_role():
    """Of what is there at different times, and not rounded."""
    b = TraceBuilder()
    for role, sizes in ((Role.BUFFER, (10, 20)), (Role.PARAMETER, (7, 5)), (Role.INPUT, (90, 1))):
        for size in sizes:
            b.free(b.alloc(size, owner=(role, "x")))
    two = [b.alloc(6, owner=(Role.BUFFER, "x")) for _ in range(4)]
    b.alloc(500, device="cuda:1")
    b.free(*two)
    b.add(EventKind.EMPTY_CACHE, two[0])
    state = compute_model_state(b.trace)
    assert (state.buffers_bytes, state.parameters_bytes, state.gradients_bytes) == (24, 7, 0)
    assert state.tensors_bytes == 90


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_one_replay_gives_the_layouts_of_several_moments(conf):
    trace = outgrown_blocks()
    run = replay_on_gpu(trace, None, parse_config(conf))
    run.prepare_layouts((9, 3))
    other = replay_on_gpu(trace, None, parse_config(conf))
    assert run.layout_at(3) == other.layout_at(3)
    assert run.layout_at(9) == other.layout_at(9)


def test_what_a_measured_run_requires_includes_its_libraries():
    """What NVML counts of the process beyond segments and the context of its start is required on the next run too."""
    trace = outgrown_blocks()
    trace.facts = Facts(device=GPU)
    before = analyze(trace).verdict.required_bytes
    trace.facts = Facts(device=GPU, nvml=NvmlFacts(reserved_bytes=240 * MIB, process_bytes=700 * MIB))
    after = analyze(trace)
    assert after.verdict.required_bytes - before == 34 * MIB
    assert after.peak.device_used_bytes == after.bridge.peak_reserved.device_used_bytes
