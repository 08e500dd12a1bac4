"""The peak of a training step with and without a fix: simulated on a virtual GPU, and measured on this machine.

On a CUDA device the measurement is the caching allocator's `max_memory_allocated`. On the CPU it is the peak of the
running sum of allocations and frees that the CPU allocator reports to torch's profiler, with no mode active. The CPU
has one memory: tensors that a fix moves to the host are still counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memprof.allocator import CurrentSettings, Settings, replay_on_gpu
from memprof.device.catalog import DEFAULT_GPU, find_gpu
from memprof.fixes.applied import apply
from memprof.fixes.catalog import Fix
from memprof.fixes.micro_batch import MicroBatches
from memprof.flows.verify.specimens import Specimen
from memprof.measured.operators import quiet_profiler
from memprof.torch_private import cuda
from memprof.watch.collection import disable_garbage_collection

STEPS = 2  # the second step begins with the optimizer's state


def make_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, the optimizer of all workloads of this module."""
    # foreach is off, as by default on the CPU, and unlike the default on CUDA.
    return torch.optim.AdamW(parameters, foreach=False)


def train(specimen: Specimen, fix: Fix | None, options: dict[str, Any], rows: int, device: str) -> None:
    """Build the large model, apply `fix` (UsageError if impossible), and train two steps on `rows` sequences."""
    torch.manual_seed(0)
    model = specimen.build_large().to(device).train()
    result: Any = None
    if fix is not None:
        result = apply(model, fix.name, undoable=False, **options).results.get(fix.name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = result if hasattr(result, "param_groups") else make_adamw(trained)
    for _ in range(STEPS):
        ids = torch.zeros(rows, specimen.peak_tokens, dtype=torch.int64, device=device)
        if isinstance(result, MicroBatches):
            result(input_ids=ids, labels=ids)
        else:
            model(input_ids=ids, labels=ids)[0].backward()
        optimizer.step()
        optimizer.zero_grad()


def simulate_peak(program: Callable[[str], None], *, workspaces: bool, reserved: bool = False) -> int:
    """Return the peak of allocated (or reserved) bytes while `program` runs on a virtual GPU.

    `workspaces` counts the workspaces of CUDA's libraries, which a CPU does not have.
    """
    from memprof.stubs.extension import extensions
    from memprof.virtual import VirtualGpu

    settings = CurrentSettings(Settings(torch.__version__))
    parts = extensions(stubs=False)
    with VirtualGpu(find_gpu(DEFAULT_GPU), workspaces=workspaces, allocator_settings=settings, extensions=parts) as gpu:
        program("cuda")
    if not reserved:
        return gpu.recorder.storages.peak_bytes
    return replay_on_gpu(gpu.trace, None, settings.now.config, settings.now.release).required_reserved_bytes


def measure_peak(program: Callable[[str], None], device: str, *, reserved: bool = False) -> int:
    """Return the peak of allocated (on CUDA, or reserved) bytes while `program` runs on "cuda" or "cpu"."""
    gc.collect()  # no garbage is left when the program begins
    with disable_garbage_collection():
        if device == "cuda":
            torch.cuda.synchronize()
            # cuBLAS handles keep their workspaces: cleared, so that each program allocates them.
            cuda.clear_cublas_workspaces()
            bytes_before = torch.cuda.memory_reserved() if reserved else torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            program(device)
            torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_reserved() if reserved else torch.cuda.max_memory_allocated()
            return peak_bytes - bytes_before
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with quiet_profiler():
            profiler.start()
        try:
            program(device)
        finally:
            with quiet_profiler():
                profiler.stop()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0))
