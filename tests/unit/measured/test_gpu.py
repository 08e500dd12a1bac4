"""What a run on a GPU puts back, shares and says, with a stub for the GPU."""

import os
import textwrap

import pytest
import torch
from torch import nn

from memprof.errors import MemprofError
from memprof.flows import profile as flow
from memprof.flows.gpus import read_device_facts
from memprof.flows.local_gpu import make_gpu_options
from memprof.ledger.categories import Category, categorize
from memprof.ledger.stages import list_spans
from memprof.measured import MeasuredDevice, cuda
from memprof.measured.operators import sort_by_sequence
from memprof.report.terminal.console import to_text
from memprof.report.terminal.report import render
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.script.capture import capture_script
from memprof.spec import TargetSpec
from memprof.trace.events import CPU, FailureKind, PhaseKind, Role
from tests.unit.device.driver import FakeGpu, FakeProcess
from tests.unit.measured.conftest import MIB

ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def patched():
    return (
        nn.Module.__call__, torch.autograd._engine_run_backward, torch.autograd.profiler._enable_profiler,
        torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats,
    )  # fmt: skip


ASSERT = "CUDA error: device-side assert triggered"


def test_a_lost_gpu_leaves_nothing_behind_and_the_programs_error_is_told(gpu, on_stub):
    before = patched()

    def program():
        with on_stub as device, device.phase(PhaseKind.FORWARD):
            gpu.error = RuntimeError(ASSERT)
            raise IndexError("the program's own")

    with pytest.raises(IndexError, match="the program's own"):
        program()
    assert patched() == before
    assert not torch.autograd._profiler_enabled()
    assert gpu.calls[-1] is None  # the allocator keeps no history
    assert str(on_stub.error) == ASSERT
    assert gpu.calls.count("synchronize") == 3  # CUDA repeats its error: it was not asked again
    assert [phase.kind for phase in on_stub.trace.phases] == [PhaseKind.OTHER, PhaseKind.FORWARD, PhaseKind.OTHER]


def test_what_puts_back_goes_on_where_a_part_raises(gpu, on_stub, monkeypatch):
    before = patched()
    with on_stub as device:
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", gpu.wait)
        gpu.error = RuntimeError(ASSERT)
    assert patched() == before and not torch.autograd._profiler_enabled() and gpu.calls[-1] is None
    assert device.snapshot is None and str(device.error) == ASSERT


def test_what_fails_to_start_leaves_nothing_behind(gpu, on_stub, monkeypatch):
    before = patched()

    def fail(self):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(torch.profiler.profile, "__enter__", fail)
    with pytest.raises(RuntimeError, match="no profiler"):
        on_stub.__enter__()
    assert patched() == before and gpu.calls[-1] is None


def test_an_error_that_only_reading_the_gpu_shows_ends_the_run(gpu, on_stub, tmp_path):
    """A kernel fails after its call has returned; the script ends before it asks the GPU again."""
    script = tmp_path / "script.py"
    script.write_text("import torch\nweight = torch.ones(1000)\n")
    on_stub.phases.begin_model_building = lambda: setattr(gpu, "error", RuntimeError(ASSERT))
    trace, outcome = capture_script(Program(str(script), ()), on_stub, StopRule(2))
    assert (outcome.ended, outcome.exit_code, str(outcome.error)) == (EndReason.ERROR, 1, ASSERT)
    assert trace.failure.kind is FailureKind.ERROR


def test_tensors_on_another_gpu_are_no_measurement(gpu):
    device = MeasuredDevice("cuda")
    with device:
        gpu.elsewhere.append({"action": "alloc", "addr": 0x1000, "size": 512, "stream": 0, "time_us": 1})
        torch.zeros(3)
    assert isinstance(device.error, MemprofError)
    assert "cuda:1" in str(device.error) and "CUDA_VISIBLE_DEVICES=1" in device.error.hint
    assert [storage.num_bytes for storage in device.trace.storages] == [12]


def test_a_programs_peak_counters_and_memprofs_do_not_disturb_each_other(gpu, on_stub):
    peaks = on_stub._peaks
    with on_stub:
        torch.cuda.reset_peak_memory_stats()
        peaks.take_peak(0)
        gpu.take(50)
        assert peaks.take_peak(0) == 50  # memprof's own reset
        assert torch.cuda.max_memory_allocated() == 50  # is not the program's
        gpu.take(20)
        assert torch.cuda.max_memory_allocated() == 50
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        gpu.take(10)
        assert torch.cuda.max_memory_allocated() == 10
        assert torch.cuda.memory_stats()["num_ooms"] == 0
        assert peaks.take_peak(0) == 20  # the program's reset took nothing from memprof
        assert peaks.take_peak(0) == 0


def test_the_context_is_this_process_alone(gpu, driver):
    """100 MiB, 60 free, torch holds 10: 30 are beside torch, 12 of them of this process."""
    driver(FakeGpu(compute=[FakeProcess(os.getpid(), 22 * MIB), FakeProcess(4_000_002, 18 * MIB)]))
    device = read_device_facts("cuda")
    assert (device.context_bytes, device.usable_bytes, device.total_bytes) == (12 * MIB, 70 * MIB, 100 * MIB)


def test_the_context_is_the_usual_one_where_nvml_does_not_say(gpu, driver):
    gpu.free, gpu.total = 3000 * MIB, 4000 * MIB
    driver(FakeGpu(compute=[FakeProcess(os.getpid())]))
    device = read_device_facts("cuda")
    assert (device.context_bytes, device.usable_bytes) == (750 * MIB, 3010 * MIB)


LINEAR = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
    def memprof_inputs(self, batch_size, context_length):
        return {"x": torch.zeros(batch_size, 1024)}
    def forward(self, x):
        return self.layer(x).sum()
"""


@pytest.mark.parametrize("by_nvml", [True, False])
@pytest.mark.parametrize(("free", "device"), [(90, "cuda"), (5, "virtual")])
def test_auto_judges_by_what_is_free_and_simulates_the_gpu_that_is_here(
    gpu, driver, tmp_path, monkeypatch, free, device, by_nvml
):
    """CUDA is asked where NVML does not tell, and else does not begin."""
    file = tmp_path / "linear.py"
    file.write_text(LINEAR)
    gpu.free, gpu.total = free * MIB, 81089 * MIB
    if by_nvml:
        driver(FakeGpu(used=(81559 - 551 - 750 - free) * MIB))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("CUDA was asked"))
    spec, simulated = flow.resolve_device(TargetSpec(model=f"{file}:Model", batch_size=1, context_length=8))
    assert spec.device == device and (simulated is not None) is (device == "virtual")
    if device == "virtual":
        assert spec.gpu == "h100-80gb" and spec.gpu_vram_bytes is None


def test_auto_simulates_a_gpu_that_the_catalog_does_not_know_by_its_memory():
    assert make_gpu_options("Some GPU", 7 << 30) == {"gpu_vram_bytes": 7 << 30}
    assert make_gpu_options("NVIDIA H100 80GB HBM3", 10 << 30) == {"gpu_vram_bytes": 10 << 30}  # a slice


def test_the_last_operator_of_a_number_made_its_node():
    assert sort_by_sequence([(3, 10), (3, 30), (3, 20), (1, 40)]) == [(1, 40), (3, 30)]


SCRIPT = """
import torch
from torch import nn
class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x * 2
model, teacher = nn.Linear(100, 200), Doubles()
optimizer = torch.optim.SGD(model.parameters())
for step in range(2):
    batch = torch.randn(64, 100)
    with torch.no_grad():
        seen = teacher(batch)
    {start}
    model(seen).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def measured(tmp_path, start=""):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("{start}", start)))
    return capture_script(Program(str(script), ()), MeasuredDevice("cpu"), StopRule(2))


def test_a_measured_script_has_its_inputs(tmp_path):
    trace, outcome = measured(tmp_path)
    assert outcome.ended is EndReason.STEPS
    inputs = [trace.storages[index] for index, owner in trace.owners.items() if owner.role is Role.INPUT]
    assert [(trace.op(one), one.shape) for one in inputs] == [("aten.randn", (64, 100))] * 2  # the teacher's are none


def test_data_beside_the_model_is_input_as_in_a_simulation(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(SCRIPT.replace("{start}", "")).replace("for step", "data = torch.ones(5000)\nfor step")
    )
    trace, _ = capture_script(Program(str(script), ()), MeasuredDevice("cpu"), StopRule(2))
    (data,) = [index for index, storage in enumerate(trace.storages) if storage.shape == (5000,)]
    assert categorize(trace, list_spans(trace))[data] is Category.INPUTS


def test_a_script_that_starts_a_profiler_itself_is_told_so(tmp_path):
    trace, outcome = measured(tmp_path, "torch.profiler.profile().__enter__()")
    assert isinstance(outcome.error, MemprofError) and "profiler itself" in str(outcome.error)
    assert trace.failure.source.startswith(f"{tmp_path}/script.py:16")
    assert trace.storages  # what was seen until then
    assert not torch.autograd._profiler_enabled()


def test_memprof_inside_a_profiler_says_so():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(MemprofError, match="inside another profiler"):
            MeasuredDevice("cpu").__enter__()
        assert torch.autograd._profiler_enabled()
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_a_script_on_the_cpu_has_no_context(tmp_path):
    from memprof.flows.script import run_script

    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("{start}", "")))
    found = run_script(Program(str(script), ()), StopRule(2), RunSpec(gpu="h100-80gb", device="cpu"))
    assert found.trace.device == CPU and found.document.on_cpu
    text = to_text(render(found.document))
    assert "CUDA" not in text and "this GPU" not in text and "Measured: tensors took up to" in text


def test_asking_for_a_gpu_leaves_the_environment_as_it_was(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(os.environ[ASKS_NVML]))
    monkeypatch.delenv(ASKS_NVML, raising=False)
    assert "finds no driver" in cuda.cuda_unavailable_reason()
    assert ASKS_NVML not in os.environ
    monkeypatch.setenv(ASKS_NVML, "0")
    cuda.cuda_unavailable_reason()
    assert (asked, os.environ[ASKS_NVML]) == (["1", "1"], "0")
