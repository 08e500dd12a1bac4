"""Threads of the program's own on the virtual GPU."""

from __future__ import annotations

import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind, PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.integrations import threads

GPU = find_gpu("a100-80gb")
MIB = 1 << 20


def test_a_preloader_takes_memory_on_its_own_stream() -> None:
    batches: queue.Queue[torch.Tensor] = queue.Queue(2)

    def load() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                batches.put(torch.zeros(MIB // 8, dtype=torch.int64).pin_memory().to("cuda", non_blocking=True))

    with VirtualGpu(GPU, workspaces=False) as gpu:
        model = nn.Linear(8, 8).cuda()
        loader = threading.Thread(target=load)
        loader.start()
        for _ in range(4):
            batch = batches.get()
            assert batch.is_cuda and batch.nbytes == MIB
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            model(batch[:8].float()).sum().backward()
        loader.join()
    trace = gpu.trace
    made = [(index, one) for index, one in enumerate(trace.storages) if one.num_bytes == MIB and one.device != "cpu"]
    assert {trace.phases[one.phase].kind for _, one in made} == {PhaseKind.INPUTS}
    assert len(made) == 4 and all(one.module == -1 for _, one in made)
    streams, now = {}, 0
    for kind, ref in trace.events:
        now = ref if kind is EventKind.STREAM else now
        streams.setdefault(ref, now) if kind is EventKind.ALLOC else None
    assert all(streams[index] for index, _ in made), "they lie in the memory of the default stream"
    assert sum("threads of its own" in one for one in trace.assumptions) == 1


def test_a_model_that_a_thread_trains_is_known_by_its_parts() -> None:
    """As where a text is generated in a thread while the program shows it."""

    def train() -> None:
        for _ in range(2):
            model(torch.ones(4, 16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with VirtualGpu(GPU, workspaces=False) as gpu:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        kinds = {phase.kind for phase in gpu.trace.phases}
        assert {PhaseKind.FORWARD, PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP} <= kinds
    trace = gpu.trace
    outputs = [one for one in trace.storages if one.shape == (4, 32) and trace.phases[one.phase].kind == "forward"]
    assert {trace.modules[one.module].path for one in outputs} == {"0", "1"}
    gradients = [one for one in trace.storages if one.shape == (32, 16) and trace.phases[one.phase].kind == "backward"]
    assert {trace.modules[one.module].path for one in gradients} == {"0"}


def test_a_thread_begins_on_the_first_gpu() -> None:
    found: list[str] = []
    with VirtualGpu(GPU, gpus=2, workspaces=False):
        torch.cuda.set_device(1)
        thread = threading.Thread(target=lambda: found.append(str(torch.ones(4, device="cuda").device)))
        thread.start()
        thread.join()
        assert found == ["cuda:0"] and torch.cuda.current_device() == 1


def test_cublas_has_a_workspace_for_each_thread_that_is_alive() -> None:
    """Handles go from a thread that has ended to the next (aten/src/ATen/cuda/detail/DeviceThreadHandles.h)."""

    def multiply() -> None:
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")

    with VirtualGpu(GPU) as gpu:
        multiply()
        for _ in range(2):
            thread = threading.Thread(target=multiply)
            thread.start()
            thread.join()
    assert sum(gpu.trace.op(one) == "cublas workspace" for one in gpu.trace.storages) == 2


def test_many_threads_leave_a_record_that_adds_up() -> None:
    def work(number: int) -> int:
        kept = [torch.zeros(128 * (1 + number), device="cuda") for _ in range(100)]
        return sum((one + 1).nbytes for one in kept)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with VirtualGpu(GPU, workspaces=False) as gpu:
            with ThreadPoolExecutor(4) as pool:
                taken = list(pool.map(work, range(8)))
            assert torch.cuda.memory_allocated() == 0
            held = gpu.held_bytes
    finally:
        sys.setswitchinterval(switching)
    trace = gpu.trace
    assert taken == [100 * 512 * (1 + number) for number in range(8)] and held == 0
    assert [ref for kind, ref in trace.events if kind is EventKind.ALLOC] == list(range(len(trace.storages)))
    assert sum(kind is EventKind.FREE for kind, _ in trace.events) == len(trace.storages)
    assert sum(one.num_bytes for one in trace.storages) == 2 * sum(taken)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of SystemExit too
def test_a_thread_that_goes_on_after_the_run_ends_there() -> None:
    begun, over = threading.Event(), threading.Event()
    after: list[str] = []

    def work() -> None:
        torch.ones(4, device="cuda")
        begun.set()
        over.wait(10)
        after.append("waited")
        torch.ones(4, device="cuda")
        after.append("took more")

    with VirtualGpu(GPU, workspaces=False) as gpu:
        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(10)
    made = len(gpu.trace.storages)
    over.set()
    thread.join()
    assert after == ["waited"] and len(gpu.trace.storages) == made


def test_a_thread_may_be_waited_for_in_an_operator_of_the_programs_own() -> None:
    @torch.library.custom_op("memprof_tests::threaded", mutates_args=())
    def threaded(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: x + 1).result(10)

    with VirtualGpu(GPU, workspaces=False):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.ones, 4).result()
        assert threaded(torch.ones(4, device="cuda")).is_cuda


@pytest.mark.parametrize(("file", "is_program"), [("train.py", True), (f"{torch.__path__[0]}/x.py", False)])
def test_whose_thread_it_is(file: str, is_program: bool) -> None:
    scope: dict[str, object] = {"sys": sys}
    exec(compile("def frame():\n    return sys._getframe(0)", file, "exec"), scope)
    assert threads.is_started_by_program(scope["frame"]()) is is_program  # type: ignore[operator]
