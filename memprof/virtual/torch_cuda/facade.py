"""`torch.cuda` as the program sees it on virtual GPUs: their number, and the chosen one's name, size and capability."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.backends.cudnn.rnn

from memprof.catalog import Gpu
from memprof.trace.events import NONE, Trace
from memprof.virtual.card import cuda_version, cudnn_version, max_threads_per_sm, torch_release
from memprof.virtual.cards import Cards
from memprof.virtual.kernels.recurrent import MODES, is_acceptable
from memprof.virtual.limits import not_yet
from memprof.virtual.torch_cuda import streams
from memprof.virtual.torch_cuda.driver import Properties, driver_patches, rng_state, shared_memory_bytes
from memprof.watch.recorder import Recorder
from memprof.watch.wrappers import parts_of_sparse

_OF_MEMORY = (
    "empty_cache", "mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_stats", "memory_stats_as_nested_dict", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
)  # fmt: skip
"""What the program asks of the allocator."""
_FRACTION = "per_process_memory_fraction"
_OF_RANDOM = (
    "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip


_NOTHING = (
    "init", "_lazy_init", "ipc_collect", "manual_seed", "manual_seed_all", "seed",
    "seed_all", "set_rng_state", "set_rng_state_all",
)  # fmt: skip
_ZERO = ("initial_seed", "utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
_TRUE = ("is_available", "is_initialized", "is_bf16_supported")
"""Functions of `torch.cuda` that do nothing here, give 0, give True."""


def _distinct(value: Any) -> Any:
    """An object of its own for each name: torch.compile's tables, built on import, hold one rule for one function."""
    if isinstance(value, type):
        return type(value.__name__, (value,), {})
    return lambda *args, **kwargs: value(*args, **kwargs)


class MemoryStatistics(Protocol):
    """What the program's caching allocator would say now; it is not known here, and given from above."""

    def stats(self) -> dict[str, int]:
        """The flat dictionary of `torch.cuda.memory_stats()`."""

    def reset_peak(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats()`."""

    def reset_accumulated(self) -> None:
        """As `torch.cuda.reset_accumulated_memory_stats()`."""

    def refusal(self) -> str | None:
        """What torch.OutOfMemoryError says if there is no room for the request that is the trace's last event."""

    def snapshot(self) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot()`."""


class AllocatorSettings(Protocol):
    """The caching allocator's settings, as the program reads and sets them."""

    def get(self) -> str:
        """The text that was set last; empty for torch's defaults."""

    def set(self, alloc_conf: str) -> None:
        """As PYTORCH_CUDA_ALLOC_CONF."""


class UnusedSettings:
    """Settings where there is no allocator: a text."""

    def __init__(self) -> None:
        self._text = ""

    def get(self) -> str:
        """What was set last."""
        return self._text

    def set(self, alloc_conf: str) -> None:
        """Remembered."""
        self._text = alloc_conf


class _LivingTensors:
    """Statistics without an allocator: the bytes of the tensors that are alive."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def stats(self) -> dict[str, int]:
        """Allocated, active, requested and reserved are the same."""
        found: dict[str, int] = {}
        for kind in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
            found[f"{kind}.all.current"] = self._recorder.live_bytes
            found[f"{kind}.all.peak"] = self._recorder.peak_bytes
        found["num_ooms"] = found["num_alloc_retries"] = 0
        return found

    def reset_peak(self) -> None:
        """From here on."""
        self._recorder.peak_bytes = self._recorder.live_bytes

    def reset_accumulated(self) -> None:
        """Nothing is accumulated."""

    def refusal(self) -> str | None:
        """There is always room."""
        return None

    def snapshot(self) -> dict[str, Any]:
        """There are no segments."""
        return {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}


class Memory:
    """The statistics of a run's cards, made when they are first asked for, and again when the settings have changed.

    Args:
        recorder: who writes the trace.
        make: see VirtualGpu.
    """

    def __init__(self, recorder: Recorder, make: Callable[[Trace], MemoryStatistics] | None) -> None:
        self._recorder = recorder
        self._make = make
        self._made: dict[str, MemoryStatistics] = {}

    def of(self, device: str) -> MemoryStatistics:
        """What answers for a card now."""
        made = self._made.get(device)
        if made is None:
            trace = self._recorder.trace
            trace = trace if device == trace.device else trace.on(device)
            made = self._made[device] = _LivingTensors(self._recorder) if self._make is None else self._make(trace)
        return made

    def settings_changed(self) -> None:
        """The next answer follows other settings."""
        self._made.clear()


class History:
    """What `torch.cuda.memory._record_memory_history` asks for: nothing before it is called, a ring of the last
    entries, and nothing once it is disabled (torch/csrc/cuda/memory_snapshot.cpp; c10/cuda/CUDACachingAllocator.cpp,
    recordHistory)."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._begin: int | None = None
        self._most = 0

    def record(
        self,
        enabled: str | bool | None = "all",
        context: Any = "all",
        stacks: Any = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        trace_alloc_max_entries: int = 1,
        **unused: object,
    ) -> None:
        """As torch's; a boolean chooses the signature that it had before, with one entry unless told."""
        if not enabled:
            self._begin = None
            return
        if self._begin is None or clear_history:
            self._begin = len(self._trace.events)
        self._most = max_entries if enabled == "all" else trace_alloc_max_entries if enabled is True else 1

    def cut(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """The snapshot with as much of the history as was asked for; `time_us` counts the trace's events."""
        begin = len(self._trace.events) if self._begin is None else self._begin
        traces = [[e for e in trace if e["time_us"] >= begin][-self._most :] for trace in snapshot["device_traces"]]
        return {**snapshot, "device_traces": traces}


def cuda_facade(
    gpu: Gpu,
    cards: Cards,
    recorder: Recorder,
    context_bytes: int,
    memory: Memory,
    settings: AllocatorSettings,
) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement) that make `torch.cuda` describe `gpu`.

    Args:
        gpu: the card.
        cards: how many of it there are, and which is current.
        recorder: who writes the trace.
        context_bytes: what the CUDA context takes of the card.
        memory: what answers questions about memory.
        settings: of the caching allocator.
    """
    major, minor = gpu.compute_capability
    properties = Properties(
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
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        **shared_memory_bytes(gpu.compute_capability),
    )

    def returning(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    class Device:
        """`with torch.cuda.device(1)`."""

        def __init__(self, device: Any = None) -> None:
            self.idx = cards.index(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = cards.select(self.idx)

        def __exit__(self, *exc: object) -> None:
            cards.select(self.prev_idx)

    def of(device: Any) -> MemoryStatistics:
        return memory.of(cards.named(device))

    def one(name: str) -> Callable[..., int]:
        return lambda device=None: of(device).stats()[name]

    def reset_peak(device: Any = None) -> None:
        of(device).reset_peak()

    def reset_accumulated(device: Any = None) -> None:
        of(device).reset_accumulated()

    def set_device(device: Any) -> None:
        cards.select(device)

    def synchronize(device: Any = None) -> None:
        recorder.streams.wait_for_all(cards.devices[cards.use(device)])

    def of_card(value: Any) -> Callable[..., Any]:
        def answer(device: Any = None) -> Any:
            try:
                cards.index(device)
            except RuntimeError:
                raise AssertionError("Invalid device id") from None
            return value

        return answer

    def empty_cache() -> None:
        recorder.empty_cache()

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        reserved = memory.of(cards.devices[cards.use(device)]).stats()["reserved_bytes.all.current"]
        return max(0, gpu.total_bytes - context_bytes - reserved), gpu.total_bytes

    def memory_stats(device: Any = None) -> dict[str, int]:
        return collections.defaultdict(int, of(device).stats())

    def nested_stats(device: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, value in of(device).stats().items():
            *path, last = name.split(".")
            inner = nested
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return nested

    def set_stream(stream: Any) -> None:
        if stream is not None:
            recorder.streams.select(cards.named(stream.device), stream.stream_id)
            cards.select(stream.device)

    def current_stream(device: Any = None) -> streams.CudaStream:
        card = cards.named(device)
        return streams.CudaStream(card, stream_id=recorder.streams.current(card))

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        for part in parts_of_sparse(tensor) or [tensor]:
            index = recorder.index_of(part)
            if index != NONE:
                recorder.streams.use(index, stream.stream_id)

    fraction = 1.0

    def set_fraction(value: float, device: Any = None) -> None:
        nonlocal fraction
        if not isinstance(value, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= value <= 1:
            raise ValueError(f"Invalid fraction value: {value}. Allowed range: 0~1")
        fraction = value
        kept = [part for part in settings.get().split(",") if part and not part.startswith(_FRACTION)]
        settings.set(",".join([*kept, f"{_FRACTION}:{value}"]))

    def snapshot(*args: Any) -> dict[str, Any]:
        made = [memory.of(device).snapshot() for device in cards.devices]
        segments = [{**one, "device": index} for index, each in enumerate(made) for one in each["segments"]]
        traces = [trace for each in made for trace in each["device_traces"]]
        return history.cut({**made[0], "segments": segments, "device_traces": traces})

    def lacking(what: str, hint: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise not_yet(what, hint)

        return refuse

    history = History(recorder.trace)
    nothing = returning(None)
    cuda: dict[str, Any] = {
        **dict.fromkeys(_NOTHING, nothing),
        **dict.fromkeys(_ZERO, returning(0)),
        **dict.fromkeys(_TRUE, returning(True)),
        "device_count": returning(cards.number),
        "current_device": lambda: cards.current,
        "set_device": set_device,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "get_rng_state": lambda device=None: rng_state(),
        "get_rng_state_all": lambda: [rng_state() for _ in cards.devices],
        "get_device_name": of_card(gpu.name),
        "get_device_capability": of_card((major, minor)),
        "get_device_properties": of_card(properties),
        "get_arch_list": returning([f"sm_{major}{minor}"]),
        "mem_get_info": mem_get_info,
        "memory_allocated": one("allocated_bytes.all.current"),
        "max_memory_allocated": one("allocated_bytes.all.peak"),
        "memory_reserved": one("reserved_bytes.all.current"),
        "max_memory_reserved": one("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": reset_peak,
        "reset_accumulated_memory_stats": reset_accumulated,
        "memory_stats": memory_stats,
        "memory_stats_as_nested_dict": nested_stats,
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: fraction,
        "list_gpu_processes": returning("no processes are running"),
        "device_memory_used": lambda device=None: gpu.total_bytes - mem_get_info(device)[0],
        "device": Device,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: streams.CudaStream(cards.named(device), stream_id=0),
        "is_current_stream_capturing": returning(False),
    }
    for name, value in cuda.items():
        yield torch.cuda, name, _distinct(value)
        for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
            # torch.cuda.memory_summary, and who imports them from there
            if vars(module).get(name) is not None:
                yield module, name, _distinct(value)
        if name in _OF_RANDOM:
            yield torch.cuda.random, name, _distinct(value)
    yield torch.Tensor, "record_stream", _distinct(record_stream)
    yield from driver_patches(cards)
    accelerator: dict[str, Any] = {
        "is_available": returning(True),
        "current_accelerator": returning(torch.device("cuda")),
        "device_count": returning(cards.number),
        "current_device_index": lambda: cards.current,
        "current_device_idx": lambda: cards.current,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "empty_host_cache": nothing,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "get_memory_info": mem_get_info,
        "get_device_capability": lacking("asks torch.accelerator for its capability", "ask torch.cuda for the card's"),
        "Graph": lacking("makes a torch.accelerator.Graph", "make a torch.cuda.CUDAGraph"),
        **{name: cuda[name] for name in _OF_MEMORY if name not in ("empty_cache", "mem_get_info")},
    }
    for name, value in accelerator.items():
        if hasattr(torch.accelerator, name):  # releases differ
            yield torch.accelerator, name, _distinct(value)
        if hasattr(getattr(torch.accelerator, "memory", None), name):
            yield torch.accelerator.memory, name, _distinct(value)
    nvtx = SimpleNamespace(
        rangePushA=returning(0), rangePop=returning(0), rangeStartA=returning(0), rangeEnd=nothing, markA=nothing
    )
    yield torch.cuda.nvtx, "_nvtx", nvtx
    yield torch.cuda.memory, "_record_memory_history", history.record
    # What memory_snapshot, _snapshot and _dump_snapshot read.
    yield torch._C, "_cuda_memorySnapshot", snapshot
    yield torch.cuda.memory, "_set_allocator_settings", _distinct(settings.set)
    for name, value in (
        ("_accelerator_setAllocatorSettings", settings.set),
        ("_accelerator_getAllocatorSettings", settings.get),
    ):
        if hasattr(torch._C, name):  # releases differ
            yield torch._C, name, value
    yield from streams.patches(recorder.streams)
    yield torch.cuda, "device_of", Device
    if torch.version.cuda is None:  # a CPU build; programs read off it whether bfloat16 can be
        yield torch.version, "cuda", cuda_version(torch_release())
        yield torch.backends.cuda, "is_built", returning(True)
    yield torch.backends.cudnn, "is_available", returning(True)
    yield torch.backends.cudnn, "version", returning(cudnn_version(torch_release()))
    yield torch.backends.cudnn, "is_acceptable", is_acceptable
    yield torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: MODES[mode.lower()]
    yield torch, "_use_cudnn_rnn_flatten_weight", returning(True)
