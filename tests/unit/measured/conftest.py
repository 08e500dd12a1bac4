"""A stand-in for torch.cuda: tensors stay on the CPU, counters are those of a card that a test writes."""

from types import SimpleNamespace

import pytest
import torch

from memprof.measured import MeasuredDevice
from memprof.trace.events import CPU

MIB = 1 << 20


class StandIn:
    """What torch.cuda says, and what it was told."""

    def __init__(self):
        self.calls = []
        self.error = None
        """What every call that waits for the card raises."""
        self.free, self.total, self.reserved = 60 * MIB, 100 * MIB, 10 * MIB
        self.now = {0: 0}
        self.peak = {0: 0}
        self.name = "NVIDIA H100 80GB HBM3"

    def wait(self, card=0):
        self.calls.append("synchronize")
        if self.error is not None:
            raise self.error

    def take(self, num_bytes):
        """Allocated and freed again."""
        self.peak[0] = max(self.peak[0], num_bytes)

    def stats(self, card):
        return {"allocated_bytes": {"all": {"peak": self.peak[card], "current": self.now[card]}}, "num_ooms": 0}

    def reset(self, card):
        self.peak[card] = self.now[card]


@pytest.fixture
def card(monkeypatch):
    fake = StandIn()
    cuda = {
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "synchronize": fake.wait,
        "memory_allocated": lambda card=0: fake.now[card],
        "memory_reserved": lambda card=0: fake.reserved,
        "mem_get_info": lambda: (fake.free, fake.total),
        "get_device_properties": lambda card: SimpleNamespace(name=fake.name),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: device or 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", fake.stats, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", fake.reset, raising=False)
    history = {"device_traces": [[], []], "segments": []}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: history)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: fake.calls.append(options["enabled"])
    )
    return fake


class OnStandIn(MeasuredDevice):
    """Measures on the stand-in, with tensors on the CPU."""

    def __init__(self):
        super().__init__("cuda")
        self.trace.device = CPU


@pytest.fixture
def on_stand_in(card):
    return OnStandIn()
