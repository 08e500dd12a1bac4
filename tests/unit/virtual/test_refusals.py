"""A GPU that is full raises in the program, which may go on without what it requested."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.allocator import GpuMemory, LiveAllocator
from memprof.device.catalog import custom_gpu
from memprof.flows.account import analyze
from memprof.flows.gpus import resolve_settings
from memprof.trace.events import EventKind
from memprof.trace.facts import DeviceFacts, Facts
from memprof.virtual import VirtualGpu

pytestmark = pytest.mark.usefixtures("small_heap")

MIB = 1 << 20
GIB = 1 << 30


def small_gpu(gib: float = 1.0) -> VirtualGpu:
    gpu = custom_gpu(int(gib * GIB))
    settings = resolve_settings("")
    return VirtualGpu(
        gpu,
        context_bytes=100 * MIB,
        memory=lambda trace: LiveAllocator(
            trace, GpuMemory(gpu.total_bytes, 100 * MIB), settings.config, settings.release
        ),
        raises_oom=True,
    )


def report(gpu: VirtualGpu):
    trace = gpu.trace
    total = gpu.gpu.total_bytes
    device = DeviceFacts(gpu.gpu.name, total, total - 100 * MIB, 100 * MIB)
    trace.facts = Facts(command="test", device=device, allocator=resolve_settings("").facts)
    return analyze(trace)


def bytes_now() -> int:
    return torch.cuda.memory_allocated()


def take(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def test_the_program_goes_on_with_less():
    batch, said, held = 64, [], []
    with small_gpu() as gpu:
        while not held:
            try:
                held = [take(batch * MIB) for _ in range(40)]
            except torch.cuda.OutOfMemoryError as error:
                said.append(str(error))
                batch //= 2
                torch.cuda.empty_cache()
        assert batch == 16 and bytes_now() == 40 * 16 * MIB
    assert len(said) == 2 and all("CUDA out of memory. Tried to allocate" in text for text in said)
    assert len(gpu.trace.refused) == 2 and gpu.trace.failure is None
    document = report(gpu)
    assert document.verdict.fits and document.verdict.oom_message is None
    assert document.peak.allocated_bytes < 924 * MIB  # what was refused was never there


def test_a_run_that_ends_there_dies_there():
    kept = []

    def program():
        kept.append(take(500 * MIB))
        take(600 * MIB)

    gpu = small_gpu()
    with pytest.raises(torch.OutOfMemoryError), gpu:
        program()
    assert gpu.trace.failure is None and not gpu.trace.refused
    verdict = report(gpu).verdict
    assert not verdict.fits and verdict.tried_to_allocate_bytes == 600 * MIB and verdict.in_use_bytes == 500 * MIB
    assert verdict.oom_source.partition(" ")[0].rpartition(":")[0].endswith("test_refusals.py")


def test_wrapped_in_an_error_of_the_program():
    def program():
        try:
            take(2 * GIB)
        except torch.OutOfMemoryError as error:
            raise ValueError("training failed") from error

    gpu = small_gpu()
    with pytest.raises(ValueError, match="training failed"), gpu:
        program()
    assert gpu.trace.failure is None and not report(gpu).verdict.fits


def test_an_error_after_one_that_was_handled():
    def program():
        kept = take(8)
        with contextlib.suppress(torch.OutOfMemoryError):
            take(2 * GIB)
        raise ValueError(f"other {kept.shape}")

    gpu = small_gpu()
    with pytest.raises(ValueError, match="other"), gpu:
        program()
    assert gpu.trace.failure is not None and len(gpu.trace.refused) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointed", [False, True])
def test_in_a_backward(checkpointed):
    """Nothing of an operator that was refused stays: neither its temporaries nor its outputs."""
    with small_gpu(0.5) as gpu:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
        x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        block = torch.empty(0, dtype=torch.uint8, device="cuda")
        free = torch.cuda.mem_get_info()[0]
        hog = take(free - 10 * MIB)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            out.sum().backward()
        hog = block
        model.zero_grad()
        x.grad = None
        del out
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        before = bytes_now()
        out.sum().backward()
        del out, hog
        assert bytes_now() <= before + 40 * MIB
    live = {e.ref for e in gpu.trace.events if e.kind is EventKind.ALLOC}
    freed = [e.ref for e in gpu.trace.events if e.kind is EventKind.FREE]
    assert len(freed) == len(set(freed)) and set(freed) <= live
    hidden = [i for i, s in enumerate(gpu.trace.storages) if s.hidden and i not in set(freed)]
    assert all("workspace" in gpu.trace.op(gpu.trace.storages[i]) for i in hidden)


def test_an_operator_gives_its_temporaries_back():
    with small_gpu(0.5) as gpu:
        keys = torch.empty(4 * MIB, device="cuda")
        free = torch.cuda.mem_get_info()[0]
        sizes = [free - room * MIB for room in range(10, 240, 20)]
        refused = []
        for size in sizes:
            hog = take(size)
            before = bytes_now()
            try:
                keys.sort()
            except torch.cuda.OutOfMemoryError:
                refused.append(size)
            assert bytes_now() == before
            del hog
            torch.cuda.empty_cache()
    # Where the output still fits its temporaries do not.
    assert sizes[0] in refused and sizes[-1] not in refused and len(refused) > 5
    hidden = {index for index, storage in enumerate(gpu.trace.storages) if storage.hidden}
    freed = [event.ref for event in gpu.trace.events if event.kind is EventKind.FREE]
    assert hidden <= set(freed) and len(freed) == len(set(freed))
    assert hidden & set(gpu.trace.refused)


def test_without_refusals_the_run_goes_beyond():
    gpu = custom_gpu(GIB)
    with VirtualGpu(gpu) as virtual:
        take(4 * GIB)
    assert not virtual.trace.refused


def test_a_convolution_without_room_for_its_workspace_goes_on():
    """torch then takes cuDNN's next algorithm: an H100 did so in 66 of 66 convolutions."""
    with small_gpu() as gpu:
        images = torch.empty(8, 64, 128, 128, device="cuda", dtype=torch.bfloat16)  # 16 MiB; copies of both are 32
        weight = torch.empty(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
        rest = take(GIB - (100 + 16 + 2 + 20) * MIB)  # room for the result alone
        torch.nn.functional.conv2d(images, weight, padding=1)
        del rest
    document = report(gpu)
    assert document.verdict.fits and document.verdict.out_of_memory_caught == 0
    assert document.peak.workspaces.refused == 1
    assert document.verdict.required_bytes <= GIB
