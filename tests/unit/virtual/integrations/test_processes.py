"""Processes that a program starts: those without CUDA work, the others say that they cannot, and name the line."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.multiprocessing

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.trace.events import FailureKind
from memprof.virtual import VirtualGpu
from tests.processes import ROOT, python

GPU = find_gpu("a100-80gb")


def read(queue: Any, file: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    queue.put(float(safetensors.torch.load_file(file)["weight"].sum()))


def add(queue: Any, tensor: torch.Tensor | None) -> None:
    torch.set_num_threads(1)  # a fork takes no threads along, and OpenMP waits for them; data loader workers do so too
    queue.put(float(torch.ones(1 << 20).sum()))  # large enough to be virtual where a GPU is


def use(queue: Any, tensor: torch.Tensor | None) -> None:
    torch.set_num_threads(1)
    said = [f"{torch.cuda.is_available()} {torch.cuda.device_count()}"]
    for attempt in (
        lambda: torch.zeros(4, device="cuda"),
        lambda: torch.zeros(4).cuda(),
        lambda: torch.nn.Linear(2, 2).to("cuda"),
        lambda: tensor + 1 if tensor is not None else torch.cuda.synchronize(),
    ):
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            said.append("nothing")
    queue.put(said)


def run(method: str, target: Any, tensor: Any = None) -> Any:
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=target, args=(queue, tensor), daemon=True)
    process.start()
    result = queue.get(timeout=60)
    process.join()
    assert process.exitcode == 0
    return result


@pytest.mark.slow
def test_a_forked_child() -> None:
    """Of a process of its own: a fork takes along whatever other tests have left in this one."""
    code = "from tests.unit.virtual.integrations.test_processes import forked_child; forked_child()"
    done = python("-c", code, folder=ROOT)
    assert done.exit_code == 0, done.stderr


def forked_child() -> None:
    with VirtualGpu(GPU) as gpu:
        kept = torch.zeros(1 << 20, device="cuda")
        events = len(gpu.trace.events)
        assert run("fork", add) == 1 << 20
        available, *errors = run("fork", use, kept)
        assert len(gpu.trace.events) == events
        assert (kept + 1).is_cuda
    assert available == "True 1"
    assert all(error.startswith("MemprofError: not yet: ") and "test_processes.py" in error for error in errors), errors
    assert all(error.endswith("uses CUDA in another process") for error in errors[:3])
    assert errors[3].endswith("a tensor of the virtual GPU, which has no data")


def test_a_forked_child_reads_files_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "real.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(1 << 20)}, file)
    with VirtualGpu(GPU):
        assert run("fork", read, file) == 1 << 20
        torch.zeros(1, device="cuda")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_child_started_anew() -> None:
    with VirtualGpu(GPU):
        available, *errors = run("spawn", use)
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert available == "True 1"
    assert len(errors) == 4 and all(error.endswith("uses CUDA in another process") for error in errors), errors


def test_a_forked_child_leaves_as_any_process() -> None:
    """Its way out goes through the virtual GPU's own exit."""
    child = 0
    try:
        with VirtualGpu(GPU), torch.device("cuda"):
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert torch.zeros(1).is_cuda
    except SystemExit as leaving:
        os._exit(int(leaving.code or 0) if torch.get_default_device().type == "cpu" else 1)


def test_forks_outside_are_untouched() -> None:
    with VirtualGpu(GPU):
        pass
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.cuda.is_available() == CUDA_HERE else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


CUDA_HERE = torch.cuda.is_available()


def test_spawning_one_process_runs_it_here() -> None:
    def work(rank: int, size: int) -> None:
        seen.append((rank, torch.zeros(size, device="cuda").nbytes, os.getpid()))

    seen: list[Any] = []
    with VirtualGpu(GPU) as gpu:
        torch.multiprocessing.spawn(work, args=(3,), nprocs=torch.cuda.device_count())
        torch.multiprocessing.start_processes(work, (4,), nprocs=1, join=False, start_method="spawn").join()
    assert seen == [(0, 12, os.getpid()), (0, 16, os.getpid())]
    assert any(text.startswith("torch.multiprocessing.spawn") for text in gpu.trace.assumptions)


@pytest.mark.slow
@pytest.mark.nightly
def test_spawning_more_starts_them() -> None:
    with VirtualGpu(GPU), pytest.raises(Exception, match="uses CUDA in another process") as raised:
        torch.multiprocessing.spawn(on_gpu, nprocs=2)
    assert isinstance(raised.value, MemprofError) and "starts 2 processes where" in raised.value.problem
    assert raised.value.hint == "if each takes a GPU: memprof run --gpus 2"


def on_gpu(rank: int) -> None:
    torch.zeros(rank + 1, device="cuda")


def give(queue: Any, taken: Any) -> None:
    torch.set_num_threads(1)
    queue.put({"made": torch.ones(1 << 20)})
    taken.wait(60)


def test_tensors_from_children_and_to_them() -> None:
    with VirtualGpu(GPU) as gpu:
        context: Any = multiprocessing.get_context("fork")
        queue, taken = context.Queue(), context.Event()
        child = context.Process(target=give, args=(queue, taken), daemon=True)
        child.start()
        received = queue.get(timeout=60)["made"]
        taken.set()
        child.join()
        assert received.device.type == "cpu" and received.to("cuda").is_cuda
        for tensor in (torch.zeros(4, device="cuda"), torch.zeros(1 << 20)):
            with pytest.raises(MemprofError, match=r"not yet: .*test_processes\.py.* sends another process a tensor"):
                queue.put([{"tensor": tensor}])
        queue.put(torch.ones(3))
        assert queue.get(timeout=30).tolist() == [1, 1, 1]
    failure = gpu.trace.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED, "also where the program catches it"
    assert "sends another process a tensor" in failure.message and "test_processes.py" in str(failure.source)
