"""`torch.cuda` as the program sees it on the virtual GPU: one card, with the chosen one's name, size and capability."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.backends.cudnn.rnn

from memprof.capture.recorder import Recorder
from memprof.capture.virtual.card import cudnn_version, max_threads_per_sm, torch_release
from memprof.capture.virtual.recurrent import MODES, is_acceptable
from memprof.catalog import Gpu


class _Device(contextlib.nullcontext[None]):
    """`with torch.cuda.device(0)`: there is one card, and it is current."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


class _Stream:
    """A CUDA stream or event: on the virtual GPU everything happens at once and in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between two events: no time passes on the virtual GPU."""
        return 0.0

    def is_capturing(self) -> bool:
        """No graph is being captured."""
        return False

    def query(self) -> bool:
        """Everything has completed."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = wait_stream = wait_event = record_event = _nothing


def _distinct(value: Any) -> Any:
    """An object of its own for each name: torch.compile's tables, built on import, hold one rule for one function."""
    if isinstance(value, type):
        return type(value.__name__, (value,), {})
    return lambda *args, **kwargs: value(*args, **kwargs)


def cuda_facade(gpu: Gpu, recorder: Recorder, context_bytes: int) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement) that make `torch.cuda` describe `gpu`."""
    major, minor = gpu.compute_capability
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.total_bytes,
        multi_processor_count=gpu.num_sms,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=max_threads_per_sm(gpu.compute_capability),
        L2_cache_size=gpu.l2_bytes or 0,
        gcnArchName=f"sm_{major}{minor}",
    )

    def returning(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    def allocated(device: Any = None) -> int:
        return recorder.live_bytes

    def peak(device: Any = None) -> int:
        return recorder.peak_bytes

    def reset_peak(device: Any = None) -> None:
        recorder.peak_bytes = recorder.live_bytes

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(0, gpu.total_bytes - context_bytes - recorder.live_bytes), gpu.total_bytes

    def memory_stats(device: Any = None) -> dict[str, int]:
        stats: dict[str, int] = collections.defaultdict(int)
        for kind in ("allocated_bytes", "active_bytes", "requested_bytes"):
            stats[f"{kind}.all.current"] = recorder.live_bytes
            stats[f"{kind}.all.peak"] = recorder.peak_bytes
        return stats

    @contextlib.contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    nothing = returning(None)
    cuda: dict[str, Any] = {
        "is_available": returning(True),
        "is_initialized": returning(True),
        "is_bf16_supported": returning(True),
        "device_count": returning(1),
        "current_device": returning(0),
        "set_device": nothing,
        "init": nothing,
        "_lazy_init": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "seed": nothing,
        "seed_all": nothing,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing,
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state_all": nothing,
        "get_device_name": returning(gpu.name),
        "get_device_capability": returning((major, minor)),
        "get_device_properties": returning(properties),
        "get_arch_list": returning([f"sm_{major}{minor}"]),
        "mem_get_info": mem_get_info,
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "memory_reserved": allocated,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset_peak,
        "reset_accumulated_memory_stats": nothing,
        "memory_stats": memory_stats,
        "set_per_process_memory_fraction": nothing,
        "memory_snapshot": returning([]),
        "list_gpu_processes": returning("no processes are running"),
        "utilization": returning(0),
        "memory_usage": returning(0),
        "temperature": returning(0),
        "power_draw": returning(0),
        "clock_rate": returning(0),
        "memory_summary": lambda *args, **kwargs: f"allocated {recorder.live_bytes} bytes (virtual GPU)",
        "device": _Device,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": stream,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "is_current_stream_capturing": returning(False),
    }
    for name, value in cuda.items():
        yield torch.cuda, name, _distinct(value)
    yield torch.Tensor, "record_stream", _distinct(nothing)
    if not hasattr(torch._C, "_scatter"):  # a CPU build; DataParallel calls it, with the one card that there is
        yield torch._C, "_scatter", lambda tensor, *args: (tensor.to("cuda"),)
    accelerator: dict[str, Any] = {
        "is_available": returning(True),
        "current_accelerator": returning(torch.device("cuda")),
        "device_count": returning(1),
        "current_device_index": returning(0),
        "set_device_index": nothing,
        "current_stream": lambda device=None: _Stream(),
        "set_stream": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "memory_reserved": allocated,
        "max_memory_reserved": peak,
        "memory_stats": memory_stats,
        "get_memory_info": mem_get_info,
        "reset_peak_memory_stats": reset_peak,
    }
    for name, value in accelerator.items():
        if hasattr(torch.accelerator, name):  # releases differ
            yield torch.accelerator, name, _distinct(value)
    nvtx = SimpleNamespace(
        rangePushA=returning(0), rangePop=returning(0), rangeStartA=returning(0), rangeEnd=nothing, markA=nothing
    )
    yield torch.cuda.nvtx, "_nvtx", nvtx
    yield torch.cuda.memory, "_record_memory_history", _distinct(nothing)
    yield torch.cuda.memory, "_dump_snapshot", _distinct(nothing)
    yield torch.cuda, "device_of", _Device
    yield torch.backends.cudnn, "is_available", returning(True)
    yield torch.backends.cudnn, "version", returning(cudnn_version(torch_release()))
    yield torch.backends.cudnn, "is_acceptable", is_acceptable
    yield torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: MODES[mode.lower()]
    yield torch, "_use_cudnn_rnn_flatten_weight", returning(True)
    for name in ("memory_allocated", "max_memory_allocated", "mem_get_info", "reset_peak_memory_stats"):
        yield torch.cuda.memory, name, _distinct(cuda[name])
