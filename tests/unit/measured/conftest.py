"""A stub for torch.cuda: tensors stay on the CPU, counters and the allocator's history are what a test writes."""

import contextlib
import ctypes
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memprof.measured import MeasuredDevice
from memprof.measured.cuda import MAX_ENTRIES
from memprof.trace.events import CPU

MIB = 1 << 20
BLOCK = 512


class _Device(ctypes.Structure):
    """c10::Device."""

    _fields_ = (("type", ctypes.c_int8), ("index", ctypes.c_int8))


def report(address, num_bytes, gpu=0):
    """Tell torch's profiler what a GPU's allocator would: an allocation, or a free of negative size."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = library._ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE  # c10/core/Allocator.h
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, _Device)
    function.restype = None
    function(address, num_bytes, 0, 0, _Device(1, gpu))


class Stub:
    """What torch.cuda says, and what it was told."""

    def __init__(self):
        self.calls = []
        self.error = None  # What every call that waits for the GPU raises.
        self.free, self.total, self.reserved = 60 * MIB, 100 * MIB, 10 * MIB
        self.now = {0: 0}
        self.peak = {0: 0}
        self.name = "NVIDIA H100 80GB HBM3"
        self.requested = 0
        self.entries = []
        self.elsewhere = []  # Of the allocator's history on another GPU.
        self.alive = {}
        self.is_capturing = False

    def wait(self, gpu=0):
        self.calls.append("synchronize")
        if self.error is not None:
            raise self.error

    def take(self, num_bytes):
        self.peak[0] = max(self.peak[0], num_bytes)

    def allocate(self, address, num_bytes, *, stream=0, pool=(0, 0), pause=0):
        """As torch's allocator does it: written into its history, counted, and told to the profiler of this thread."""
        self.write("alloc", address, num_bytes, stream, pool)
        self.alive[address] = (num_bytes, stream, pool)
        self.requested += num_bytes
        time.sleep(pause)
        report(address, -(-num_bytes // BLOCK) * BLOCK)

    def release(self, address, *, completes=True):
        """Free what was allocated there; another stream may still use it."""
        num_bytes, stream, pool = self.alive.pop(address)
        self.write("free_requested", address, num_bytes, stream, pool)
        self.requested -= num_bytes
        report(address, num_bytes // -BLOCK * BLOCK)
        if completes:
            self.write("free_completed", address, num_bytes, stream, pool)

    def write(self, action, address, num_bytes, stream=0, pool=(0, 0)):
        place = {"addr": address, "size": num_bytes, "stream": stream, "pool_id": pool}
        self.entries.append({"action": action, "time_us": time.time_ns() // 1000, **place})

    def snapshot(self):
        blocks = [
            {"address": address, "requested_size": num_bytes, "state": "active_allocated"}
            for address, (num_bytes, *_) in self.alive.items()
        ]
        return {"device_traces": [self.entries, self.elsewhere], "segments": [{"device": 0, "blocks": blocks}]}

    @contextlib.contextmanager
    def capturing(self):
        """A CUDA graph is made: what waits for the GPU raises."""
        self.is_capturing, error, self.error = True, self.error, RuntimeError("operation not permitted when capturing")
        yield
        self.is_capturing, self.error = False, error

    def stats(self, gpu):
        counts = {"peak": self.peak[gpu], "current": self.now[gpu]}
        return {
            "allocated_bytes": {"all": counts},
            "requested_bytes": {"all": {"current": self.requested}},
            "num_ooms": 0,
        }

    def reset(self, gpu):
        self.peak[gpu] = self.now[gpu]


@pytest.fixture
def gpu(monkeypatch):
    fake = Stub()
    cuda = {
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda gpu=0: (9, 0),
        "synchronize": fake.wait,
        "memory_allocated": lambda gpu=0: fake.now[gpu],
        "memory_reserved": lambda gpu=0: fake.reserved,
        "mem_get_info": lambda: (fake.free, fake.total),
        "get_device_properties": lambda gpu: SimpleNamespace(name=fake.name),
        "is_current_stream_capturing": lambda: fake.is_capturing,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: device or 0)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", fake.stats, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", fake.reset, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)

    def record(enabled="all", context="all", stacks="all", max_entries=0):
        assert enabled is None or max_entries == MAX_ENTRIES
        fake.calls.append(enabled)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    return fake


class OnStub(MeasuredDevice):
    """Measures on the stub, with tensors on the CPU."""

    def __init__(self):
        super().__init__("cuda")
        self.trace.device = CPU


@pytest.fixture
def on_stub(gpu):
    return OnStub()
