"""Runs on a stub for a GPU: what its allocator does is told to torch's own profiler and to the history."""

import sys
import threading
import time

import pytest
import torch

from memprof.allocator.cublas import CublasWorkspace
from memprof.errors import MemprofError
from memprof.measured import MeasuredDevice, cuda
from memprof.trace.events import GPU, EventKind, PhaseKind

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the profiler is told through a symbol of Linux's")


@pytest.fixture
def gpu(gpu):
    return gpu


def lives(trace):
    """Address-free: bytes, operator and whether it was freed, of all on the GPU in order."""
    freed = {ref for kind, ref in trace.events if kind is EventKind.FREE}
    return [
        (storage.num_bytes, trace.op(storage), index in freed)
        for index, storage in enumerate(trace.storages)
        if storage.device == GPU
    ]


def run(program):
    device = MeasuredDevice("cuda")
    with device, device.phase(PhaseKind.FORWARD):
        program()
    return device


@pytest.mark.parametrize("detail", [False, True])
def test_what_is_outside_operators_is_seen(gpu, detail):
    def program():
        gpu.allocate(0x1000, 500)
        with torch.profiler.record_function("made::up"):
            gpu.allocate(0x2000, 1024)
        gpu.release(0x2000)
        gpu.allocate(0x2000, 1000)
        with torch.profiler.record_function("made::other"):
            gpu.release(0x2000)
            gpu.allocate(0x3000, 2048)

    device = MeasuredDevice("cuda", detail=detail)
    with device, device.phase(PhaseKind.FORWARD):
        program()
    assert device.error is None
    # With stacks, the profiler puts an operator that Python began below the call that began it.
    up, other = ("", "") if detail else ("made.up", "made.other")
    assert lives(device.trace) == [(500, "", False), (1024, up, True), (1000, "", True), (2048, other, False)]


@pytest.mark.parametrize("pause", [0, 0.01])
def test_other_threads_are_seen(gpu, pause):
    """With a pause between history and profiler: a thread may lose the processor there."""

    def program():
        gpu.allocate(0x1000, 512, pause=pause)
        for act in (lambda: gpu.release(0x1000), lambda: gpu.allocate(0x2000, 100)):
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()

    device = run(program)
    assert device.error is None, device.error.value
    assert lives(device.trace) == [(512, "", True), (100, "", False)]


def test_scratch_memory_of_an_operator_is_hidden(gpu):
    def program():
        with torch.profiler.record_function("made::up"):
            gpu.allocate(0x1000, 512)
            gpu.release(0x1000)
        with torch.profiler.record_function("made::up"):
            gpu.allocate(0x1000, 512)
        gpu.release(0x1000)

    assert [storage.hidden for storage in run(program).trace.storages] == [True, False]


def test_what_cublas_keeps_is_its_workspace_and_no_result(gpu, monkeypatch):
    """Recorded on an H100: 32 MiB with the first product of a thread, and 1 MiB with the first that has a bias."""
    monkeypatch.setattr(cuda, "get_cublas_workspace", lambda gpu: CublasWorkspace.for_gpu((9, 0), (2, 11)))

    def program():
        with torch.profiler.record_function("aten::addmm"):
            gpu.allocate(0x1000, 32 * MIB)
            gpu.allocate(0x2000, 1 * MIB)
            gpu.allocate(0x3000, 64 * MIB)  # as large as neither: a result that nothing was made of
        with torch.profiler.record_function("aten::randn"):
            gpu.allocate(0x4000, 32 * MIB)  # no product's
        with torch.profiler.record_function("aten::mm"):
            gpu.allocate(0x5000, 32 * MIB)
        gpu.release(0x5000)  # a handle would keep it

    trace = run(program).trace
    found = [(trace.op(one), one.hidden) for one in trace.storages]
    assert found == [
        ("cublas workspace", True), ("cublaslt workspace", True), ("aten.addmm", False), ("aten.randn", False),
        ("aten.mm", False),
    ]  # fmt: skip


def test_streams_and_pools_are_written_down(gpu):
    def program():
        gpu.allocate(0x1000, 512)
        gpu.allocate(0x2000, 512, stream=0x5555, pool=(0, 3))
        gpu.allocate(0x3000, 512, stream=0x5555)
        gpu.allocate(0x4000, 512)
        gpu.release(0x2000)
        gpu.write("segment_free", 0x2000, 2 << 20, 0x5555, (0, 3))

    kinds = (EventKind.ALLOC, EventKind.STREAM, EventKind.POOL, EventKind.FREE, EventKind.POOL_FREE)
    events = [(kind.name, ref) for kind, ref in run(program).trace.events if kind in kinds]
    assert events == [
        ("ALLOC", 0), ("STREAM", 1), ("POOL", 1), ("ALLOC", 1), ("POOL", 0), ("ALLOC", 2), ("STREAM", 0), ("ALLOC", 3),
        ("FREE", 1), ("POOL_FREE", 1),
    ]  # fmt: skip


def test_a_block_that_another_stream_uses_is_free_later(gpu):
    def program():
        gpu.allocate(0x1000, 512)
        gpu.release(0x1000, completes=False)
        gpu.allocate(0x2000, 512)
        gpu.write("free_completed", 0x1000, 512)

    trace = run(program).trace
    events = [kind.name for kind, _ in trace.events if kind is not EventKind.PHASE]
    assert events == ["ALLOC", "USE", "FREE", "ALLOC", "WAIT"]
    (use,), (wait,) = trace.uses, trace.waits
    assert use.storage == 0 and wait.by_host and [done.stream for done in wait.done] == [use.stream]


def test_nothing_waits_while_a_graph_is_captured(gpu):
    device = MeasuredDevice("cuda")
    with device:
        waits = gpu.calls.count("synchronize")
        with gpu.capturing(), device.phase(PhaseKind.FORWARD):
            gpu.allocate(0x1000, 512, pool=(0, 1))
        assert gpu.calls.count("synchronize") == waits
    assert device.error is None and lives(device.trace) == [(512, "", False)]


def test_memory_from_before_the_run_may_be_freed_in_it(gpu):
    gpu.allocate(0x1000, 512)
    gpu.entries.clear()

    def program():
        gpu.release(0x1000)
        gpu.allocate(0x1000, 100)

    device = run(program)
    assert device.error is None, device.error.value
    assert lives(device.trace) == [(100, "", False)]


@pytest.mark.parametrize("missing", ["alloc", "free_requested"])
def test_a_history_that_torchs_counters_contradict_is_no_measurement(gpu, missing):
    def program():
        gpu.allocate(0x1000, 3 << 20)
        gpu.allocate(0x2000, 512)
        gpu.release(0x1000)
        gpu.entries[:] = [entry for entry in gpu.entries if (entry["action"], entry["addr"]) != (missing, 0x1000)]
        time.sleep(0.01)  # clocks may be 2 ms apart

    error = run(program).error
    says = {"alloc": "512 bytes, what was recorded adds up to -3.00 MiB", "free_requested": "adds up to 3.00 MiB"}[
        missing
    ]
    assert "not all" in str(error) and says in error.value


def test_blocks_of_the_end_that_nobody_allocated_are_no_measurement(gpu):
    def program():
        gpu.allocate(0x1000, 512)
        gpu.alive[0x1000] = (700, 0, (0, 0))

    assert "differ by 700 bytes" in run(program).error.value


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((), {"max_entries": 10, "clear_history": True}),
        (("all", "all", "python", 10), {}),
        ((True,), {"trace_alloc_max_entries": 10}),
    ],
)
def test_a_program_that_records_history_itself_does_not_end_memprofs(gpu, given, options):
    def program():
        torch.cuda.memory._record_memory_history(*given, **options)
        gpu.allocate(0x1000, 512)
        torch.cuda.memory._record_memory_history(enabled=None)
        gpu.allocate(0x2000, 512)

    device = run(program)
    assert len(lives(device.trace)) == 2
    assert gpu.calls.count(None) == 1


def test_an_allocator_without_a_history_is_not_measured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(MemprofError, match="keeps no history") as caught:
        run(lambda: None)
    assert caught.value.value == "cudaMallocAsync" and "PYTORCH_CUDA_ALLOC_CONF" in caught.value.hint
