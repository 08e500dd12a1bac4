"""Runs measured on the CPU, and what a GPU's would be made of."""

import gc
import json
import os
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memprof.errors import MemprofError, RunFailedError
from memprof.flows import profile as flow
from memprof.flows.account import analyze
from memprof.flows.capture import capture_measured
from memprof.ledger.categories import Category
from memprof.measured import MeasuredDevice
from memprof.measured import device as measured_device
from memprof.measured.cuda import NvmlUse
from memprof.measured.history import Allocation, read_history
from memprof.measured.marks import Mark, Marks, OwnerMark
from memprof.measured.merge import RunAllocations, collect_allocations, merge
from memprof.measured.operators import OperatorOrigin, Profile, read_events
from memprof.spec import TargetSpec
from memprof.trace.events import (
    CPU,
    GPU,
    HOST,
    EventKind,
    FailureKind,
    Module,
    ModuleRole,
    Owner,
    Phase,
    PhaseKind,
    Role,
    Trace,
)  # fmt: skip
from memprof.trace.facts import NvmlFacts, OtherProcess
from memprof.trace.io import load_trace, save_trace
from memprof.workload.models import find_source
from memprof.workload.step import Workload
from tests.unit.device.driver import FakeGpu, FakeProcess

MODEL = """
import torch, transformers
def build():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, vocab_size=500,
        attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)

class Fails(torch.nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.error = error
    def forward(self, x):
        y = self.layer(x)
        raise self.error
def fails(): return Fails(ValueError("no such thing"))
def full(): return Fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "small.py"
    file.write_text(textwrap.dedent(MODEL))
    return file


@pytest.fixture(scope="module")
def both(model_file):
    """The report of one run on the CPU, and of the same simulated."""
    spec = TargetSpec(model=f"{model_file}:build", batch_size=2, context_length=48, dtype="float32")
    return flow.profile(spec.edit(device="cpu")), flow.profile(spec)


def owned(trace, role):
    return sorted(
        (owner.name, trace.storages[index].num_bytes)
        for index, owner in trace.owners.items()
        if owner.role is role and trace.storages[index].device != HOST and trace.storages[index].num_bytes >= 4
    )


@pytest.mark.parametrize("role", [Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE])
def test_parameters_gradients_and_states_are_those_of_the_simulation(both, role):
    (measured, _), (simulated, _) = both
    assert owned(measured, role) == owned(simulated, role) != []


def test_stages_are_those_of_the_simulation(both):
    (_, measured), (_, simulated) = both
    assert measured.source == "measured"
    assert [row.name for row in measured.stages] == [row.name for row in simulated.stages if row.name != "context"]
    ours = {(row.step, row.name): row.requested_delta_bytes for row in measured.stages}
    theirs = {(row.step, row.name): row.requested_delta_bytes for row in simulated.stages}
    # What a layer leaves behind does not depend on the kernels, with attention spelled out.
    # Numbers of Python that autograd keeps are 8 bytes each, in host memory on any device.
    for layer in range(3):
        assert 0 <= ours[2, f"layer {layer}"] - theirs[2, f"layer {layer}"] <= 5 * 8
        assert theirs[2, f"layer {layer}"] > 500_000
    assert ours[2, "zero_grad"] == theirs[2, "zero_grad"] < 0


def test_logits_and_activations_are_told_apart(both):
    (_, measured), _ = both
    at_peak = measured.peak.categories
    assert at_peak[Category.PARAMETERS] > 0
    assert at_peak[Category.OPTIMIZER_STATE] == 2 * at_peak[Category.PARAMETERS]
    assert at_peak.get(Category.UNATTRIBUTED, 0) == 0
    assert sum(at_peak.values()) == measured.peak.allocated_bytes


def test_a_gradient_is_of_the_module_whose_forward_it_differentiates(both):
    """Operators that make no autograd node have the number of the next one: the last with a number made it."""
    (trace, _), _ = both
    gradients = [
        index for index, owner in trace.owners.items() if owner == (Role.GRADIENT, "model.embed_tokens.weight")
    ]
    assert {trace.module_path(trace.storages[index]) for index in gradients} == {"model.embed_tokens"}


def test_every_stage_has_its_time_and_some_their_resident_memory(both):
    (trace, measured), _ = both
    assert all(row.seconds is not None and row.seconds >= 0 for row in measured.stages)
    whole = trace.times[-1] / 1e9
    assert sum(row.seconds for row in measured.stages) <= whole * 1.001
    assert trace.times == sorted(trace.times)
    resident = [row.resident_bytes for row in measured.stages if row.resident_bytes]
    assert min(resident) > 10 << 20


def test_what_is_allocated_is_what_is_requested(both):
    (_, measured), _ = both
    for row in measured.stages:
        assert row.allocated_bytes == row.requested_bytes == row.reserved_bytes
        assert row.device_used_bytes is None


def test_a_capture_keeps_all_of_it(both, tmp_path):
    (trace, document), _ = both
    save_trace(trace, tmp_path / "run")
    loaded = load_trace(tmp_path / "run")
    assert (loaded.device, loaded.times, loaded.samples) == (CPU, trace.times, trace.samples)
    assert json.dumps(analyze(loaded).to_json()) == json.dumps(document.to_json())


def test_nothing_of_the_measuring_stays(model_file):
    before = nn.Module.__call__, torch.autograd._engine_run_backward
    with MeasuredDevice("cpu") as device:
        model = nn.Linear(4, 4)
        device.adopt(model)
        model(torch.zeros(1, 4)).sum().backward()
    assert (nn.Module.__call__, torch.autograd._engine_run_backward) == before
    assert not torch.autograd._profiler_enabled()
    owners = list(device.trace.owners.values())
    assert {owner.name for owner in owners if owner.role is not Role.INPUT} == {"weight", "bias"}
    assert [owner.role for owner in owners].count(Role.INPUT) == 1


@pytest.mark.parametrize(
    ("factory", "kind", "fits"), [("fails", FailureKind.ERROR, None), ("full", FailureKind.OUT_OF_MEMORY, False)]
)
def test_a_run_that_fails_gives_the_report_so_far_and_its_memory_back(model_file, factory, kind, fits):
    spec = TargetSpec(model=f"{model_file}:{factory}", context_length=8, device="cpu", dtype="float32")
    with pytest.raises(RunFailedError) as caught:
        flow.profile(spec)
    document = caught.value.document
    assert caught.value.trace.failure.kind is kind
    assert document.verdict.fits is fits
    assert document.failure.phase == "forward of step 1"
    assert any(row.name == "parameters" for row in document.stages)
    gc.collect()
    assert not [known for known in gc.get_objects() if type(known).__name__ == "Fails"]


def test_without_a_gpu_cuda_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MemprofError, match="no CUDA GPU"):
        flow.profile(TargetSpec(model="gpt2", device="cuda"))


def test_a_run_that_host_memory_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr(flow, "available_bytes", lambda: 64 << 20)
    with pytest.raises(MemprofError, match="does not fit host memory"):
        flow.profile(TargetSpec(model="gpt2", context_length=16, device="cpu"))


# -- what is merged ---------------------------------------------------------------------------------------------------


def test_merging_puts_events_in_order_of_time_and_inside_their_modules():
    marks = Marks(lambda: (100, 120, 256, 300, 7))
    marks.phases = [Phase(PhaseKind.FORWARD, 1, 1), Phase(PhaseKind.BACKWARD, 1, 1)]
    marks.marks = [
        Mark(10, EventKind.PHASE, 0), Mark(20, EventKind.ENTER, 0), Mark(40, EventKind.EXIT, 0),
        Mark(50, EventKind.PHASE, 1),
    ]  # fmt: skip
    marks.owner_marks = [OwnerMark(80, 0xB, Owner(Role.GRADIENT, "w"), (4,), "float32", False)]
    marks.read_counters()
    recorded = RunAllocations(
        [
            Allocation(5, 0x9, 64, "cuda:0", OperatorOrigin("aten.empty", 6)),  # before the first phase
            Allocation(
                30, 0xA, 512, "cuda:0", OperatorOrigin("aten.mm", 35), freed_ns=60, shape=(128,), dtype="float32"
            ),
            Allocation(31, 0xC, 32, "cuda:0", OperatorOrigin("aten.mm", 35), freed_ns=34),
            Allocation(55, 0xB, 16, "cuda:0", OperatorOrigin("aten.mm", 56, 7)),
            Allocation(57, 0xD, 8, "cpu", OperatorOrigin("aten.empty", 58)),
        ],
        forward=[(7, 29)],
    )
    trace = Trace(
        source="measured", modules=[Module("layer", "Linear", ModuleRole.OTHER, "")], sources=["a.py:1 forward"]
    )
    merge(trace, marks, recorded, [0])
    kinds = [(event.kind.name, event.ref) for event in trace.events]
    assert kinds == [
        ("PHASE", 0), ("ENTER", 0), ("ALLOC", 0), ("ALLOC", 1), ("FREE", 1), ("EXIT", 0), ("PHASE", 1), ("ALLOC", 2),
        ("ALLOC", 3), ("FREE", 0),
    ]  # fmt: skip
    product, scratch, gradient, host = trace.storages
    assert (product.shape, product.module, product.source, product.hidden) == ((128,), 0, 0, False)
    assert scratch.hidden  # its own operator freed it
    assert (gradient.module, gradient.forward_event) == (0, 2)  # of the operator that ran forward at 29
    assert trace.owners == {2: Owner(Role.GRADIENT, "w")}
    assert (product.device, host.device) == (GPU, HOST)
    (sample,) = trace.samples
    assert (sample.event, sample.allocated_bytes, sample.peak_allocated_bytes) == (len(trace.events) - 1, 100, 120)
    assert trace.times == [0, 10, 20, 21, 24, 30, 40, 45, 47, 50]


def test_counters_of_a_gpu_are_read_where_phases_begin(monkeypatch, model_file, driver):
    """torch.cuda replaced by a stub: the tensors are on the CPU, the counters are the GPU's."""
    calls = []
    stub = {
        "init": lambda: calls.append("init"),
        "synchronize": lambda gpu: calls.append("synchronize"),
        "memory_allocated": lambda gpu: 11 << 20,
        "memory_reserved": lambda gpu=0: 33 << 20,
        "is_current_stream_capturing": lambda: False,
    }
    stats = {"allocated_bytes": {"all": {"peak": 22 << 20}}, "requested_bytes": {"all": {"current": 0}}}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda gpu: stats, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda gpu: calls.append("reset"), raising=False)
    for name, value in stub.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=FakeGpu().uuid))
    own, other = FakeProcess(os.getpid(), 5 << 30), FakeProcess(4_000_002, 1 << 30, b"python3")
    driver(FakeGpu(compute=[own, other]))
    history = {"device_traces": [[]], "segments": []}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options["enabled"]))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: history)

    class OnCpu(MeasuredDevice):
        def __init__(self):
            super().__init__("cuda", NvmlUse())
            self.name = "cpu"
            self.trace.device = CPU

    spec = TargetSpec(model=f"{model_file}:build", context_length=8, steps=1, dtype="float32")
    device = OnCpu()
    with device:
        Workload(spec, find_source(spec)).run(device)
    assert calls[0] == "init"
    assert (calls.count("all"), calls.count(None)) == (1, 1)
    assert calls.count("synchronize") + 1 == calls.count("reset")  # one at the beginning, before anything is read
    assert device.snapshot is history
    sample = device.trace.samples[-1]
    assert sample[2:6] == (11 << 20, 22 << 20, 33 << 20, 2 << 30)
    assert device.trace.facts.nvml == NvmlFacts(
        reserved_bytes=33 << 20,
        process_bytes=5 << 30,
        used_bytes=2 << 30,
        processes=(OtherProcess(4_000_002, "python3", 1 << 30),),
    )


def test_detail_gives_the_line_of_an_allocation(model_file):
    spec = TargetSpec(
        model=f"{model_file}:build", context_length=8, steps=1, device="cpu", dtype="float32", detail=True
    )
    trace, _ = flow.profile(spec)
    lines = {trace.source_line(storage) for storage in trace.storages if trace.op(storage) == "aten.silu"}
    assert lines
    assert all("activations" in line or "modeling_llama.py" in line for line in lines)


def test_an_input_that_another_thread_lets_go_of_is_freed():
    """The profiler is told of nothing in threads of the program's."""
    with MeasuredDevice("cpu") as device:
        model, box = nn.Linear(64, 64), [torch.randn(32, 64)]
        device.adopt(model)
        model(box[0]).sum().backward()
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
    trace = device.trace
    (batch,) = [index for index, owner in trace.owners.items() if owner.role is Role.INPUT]
    assert (EventKind.FREE, batch) in trace.events


def test_a_models_run_is_the_same_from_the_allocators_history(model_file, monkeypatch):
    """The history as a GPU's allocator would have recorded it, beside what the profiler has on a GPU: operators'."""
    profiles = []
    monkeypatch.setattr(
        measured_device, "read_events", lambda *given: profiles.append(read_events(*given)) or profiles[0]
    )
    spec = TargetSpec(model=f"{model_file}:build", batch_size=2, context_length=48, device="cpu", dtype="float32")
    flow.profile(spec)
    (profile,) = profiles
    events = [one._replace(device="cuda:0") for one in profile.memory if one.num_bytes]
    entries = [
        {
            "action": "alloc" if one.num_bytes > 0 else "free_requested", "addr": one.address, "stream": 0,
            "size": abs(one.num_bytes), "time_us": one.time_ns // 1000,
        }
        for one in events
    ]  # fmt: skip
    inside = [one for one in events if one.origin.op]
    assert 20 < len(events) - len(inside) < len(events) / 2
    history = read_history({"device_traces": [entries], "segments": []}, 0, inside)
    from_history = collect_allocations(Profile(), history).allocations
    from_profile = collect_allocations(Profile(events)).allocations
    assert [(one.num_bytes, one.origin.op, one.is_temporary) for one in from_history] == [
        (one.num_bytes, one.origin.op, one.is_temporary) for one in from_profile
    ]
    ends = [sorted(one.freed_ns for one in found if one.freed_ns) for found in (from_history, from_profile)]
    assert len(ends[0]) == len(ends[1]) and max(abs(a - b) for a, b in zip(*ends, strict=True)) < 2000


def test_progress_is_told(model_file):
    told = []
    spec = TargetSpec(model=f"{model_file}:build", context_length=8, steps=1, device="cpu", dtype="float32")
    capture_measured(Workload(spec, find_source(spec)), "cpu", told.append)
    assert "training step 1 of 1" in told
