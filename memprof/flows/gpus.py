"""The device of a run, virtual or real, and the settings and state of its caching allocator."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import Any

from memprof.allocator import AllocatorConfig, GpuMemory, LiveAllocator, Settings
from memprof.device.catalog import Gpu, custom_gpu, find_gpu
from memprof.device.host import memory_bytes, processor_name
from memprof.errors import UsageError
from memprof.report.export.memory_viz import convert_snapshot
from memprof.run_spec import RunSpec
from memprof.snapshots.from_trace import convert_to_snapshot
from memprof.spec import HOST_BYTES, TargetSpec
from memprof.trace.events import Trace
from memprof.trace.facts import DeviceFacts

GPUS_PER_MACHINE = 8  # further ranks are on other machines


def resolve_settings(
    alloc_conf: str | None, torch_release: str | None = None, *, flag: str = "--alloc-conf", backend: str = "cuda"
) -> Settings:
    """Return allocator settings from `alloc_conf` or the environment, for this backend, of a torch release
    (None: the installed one).

    Raises UsageError: torch would refuse the settings, or there is no such release.
    """
    version = torch_release or importlib.metadata.version("torch")
    return Settings.resolve(alloc_conf, version, flag=flag, environ=os.environ, backend=backend)


def resolve_spec_settings(spec: TargetSpec | RunSpec) -> Settings:
    """Return the allocator settings of `spec`; raise UsageError if torch would refuse them, or does not have them, or
    if the catalog does not have its GPU."""
    backend = find_spec_gpu(spec).backend
    if spec.torch_release is not None and spec.device != "virtual":
        value = f"--torch-release {spec.torch_release}"
        raise UsageError("a measured run has the installed torch", value=value, hint="leave out --device")
    return resolve_settings(spec.alloc_conf, spec.torch_release, backend=backend)


class RunAllocator(LiveAllocator):
    """The caching allocator of a virtual GPU during a run: returns memory statistics and snapshots as torch does."""

    def __init__(self, trace: Trace, gpu: Gpu, settings: Settings) -> None:
        memory = GpuMemory(gpu.total_bytes, gpu.context_bytes, gpu.backend)
        super().__init__(trace, memory, settings.config, settings.release)
        self._snapshot = functools.partial(convert_to_snapshot, trace, settings.config, memory)

    def snapshot(self) -> dict[str, Any]:
        """Return a dictionary like torch.cuda.memory._snapshot(), with all events since the run began."""
        return convert_snapshot(self._snapshot().snapshot)


def find_spec_gpu(spec: TargetSpec | RunSpec) -> Gpu:
    """Return the GPU that `spec` names; raise UsageError if the catalog does not have this GPU."""
    return find_gpu(spec.gpu) if spec.gpu_vram_bytes is None else custom_gpu(spec.gpu_vram_bytes)


def find_host_bytes(gpu: Gpu) -> int:
    """Return the host memory that a search has, unless `--host-memory` says another: the machine's, if it is one with
    the GPU's."""
    return gpu.unified_bytes or HOST_BYTES


def make_device_facts(
    gpu: Gpu, host_memory_bytes: int | None = None, config: AllocatorConfig | None = None
) -> DeviceFacts:
    """Return the facts of a virtual GPU for the report: name, capacity, usable and context bytes. `config` has the
    limit of an MPS device."""
    usable_bytes = gpu.total_bytes - gpu.context_bytes
    if gpu.backend == "mps":
        usable_bytes = GpuMemory(gpu.total_bytes, 0, "mps").compute_limit(config or AllocatorConfig())
    return DeviceFacts(
        gpu.name,
        gpu.total_bytes,
        usable_bytes,
        gpu.context_bytes,
        host_memory_bytes,
        gpu.backend,
        gpu.unified_bytes,
        gpu.has_bfloat16,
    )


def read_device_facts(device_name: str) -> DeviceFacts:
    """Return the facts of a real device for the report; raise MemprofError if no such device is available."""
    if device_name == "cpu":
        total_bytes = memory_bytes()
        return DeviceFacts(processor_name(), total_bytes, total_bytes)
    from memprof.measured.cuda import current_gpu

    return DeviceFacts(*current_gpu())
