"""Programs that name "mps" or "xpu", on the virtual GPU of such a machine; their bytes are worked out by hand."""

import dataclasses
import importlib.util
import pickle
import traceback

import pytest
import torch

import memprof
from memprof.allocator import AllocatorConfig
from memprof.device.catalog import find_gpu
from memprof.errors import UsageError
from memprof.flows.account import analyze
from memprof.flows.gpus import RunAllocator, make_device_facts, resolve_settings
from memprof.snapshots.from_trace import convert_to_snapshot
from memprof.trace.events import FailureKind
from memprof.virtual import VirtualGpu

MIB, GIB = 1 << 20, 1 << 30
MACHINES = {"mps": "m4-max-64gb", "xpu": "arc-b580", "cuda": "a100-80gb"}


@pytest.fixture(params=MACHINES)
def device(request):
    """Return the device type of the virtual GPU that is entered."""
    with memprof.virtual_gpu(MACHINES[request.param]):
        yield request.param


def test_a_program_finds_the_one_device_of_the_machine(device):
    available = {
        "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "xpu": torch.xpu.is_available(),
    }  # fmt: skip
    assert [name for name, is_available in available.items() if is_available] == [device]
    assert torch.mps.is_available() is (device == "mps")
    assert torch.accelerator.current_accelerator() == torch.device(device)
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert getattr(torch, device).device_count() == 1


def test_tensors_answer_with_their_device(device):
    made = torch.zeros(3, device=device)
    for tensor in (
        made,
        torch.zeros(3).to(device),
        torch.tensor([1.0], device=device),
        torch.nn.Linear(2, 2).to(device).bias,
    ):
        assert tensor.device == torch.device(device, 0)
        assert [getattr(tensor, f"is_{name}") for name in MACHINES] == [name == device for name in MACHINES]
        assert tensor.get_device() == 0 and not tensor.is_cpu and not tensor.is_meta
    assert made.type() == f"torch.{device}.FloatTensor"
    assert made.cpu().device.type == "cpu" and (made.cpu() + 1).tolist() == [1.0, 1.0, 1.0]
    assert repr(made).endswith(f"device='{device}:0')")
    with torch.device(device):
        assert torch.ones(2).device.type == device


def test_autocast_generators_and_streams_know_the_type(device):
    generator = torch.Generator(device=device).manual_seed(1)
    assert generator.device.type == device
    rows = torch.randn(4, 4, device=device, generator=generator)
    with torch.autocast(device_type=device, dtype=torch.float16):
        assert (rows @ rows).dtype == torch.float16
        assert rows.softmax(0).dtype == torch.float32
    assert (rows @ rows).dtype == torch.float32
    torch.manual_seed(0)
    getattr(torch, device).manual_seed(0)
    getattr(torch, device).synchronize()
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().device.type == device


@pytest.mark.parametrize("other", MACHINES)
def test_other_devices_raise_what_torch_says(device, other):
    if other == device:
        return
    for make in (lambda: torch.zeros(1, device=other), lambda: torch.zeros(1).to(other)):
        with pytest.raises((AssertionError, RuntimeError), match=f"(?i){other}"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, dtype=torch.float64, device="mps"),
        lambda: torch.zeros(3, dtype=torch.float64).to("mps"),
        lambda: torch.zeros(3, device="mps").double(),
        lambda: torch.nn.Linear(2, 2).double().to("mps"),
    ],
)
def test_metal_has_no_float64(make):
    with memprof.virtual_gpu("m1-8gb") as gpu:
        with pytest.raises(TypeError, match="the MPS framework doesn't support float64"):
            make()
        assert torch.zeros(3, device="mps").cpu().double().dtype == torch.float64
        assert torch.mps.current_allocated_memory() == 0
    assert gpu.trace.failure is None


def test_bytes_on_mps_are_those_of_buffers_and_heaps():
    with memprof.virtual_gpu("m4-max-64gb"):
        assert torch.mps.recommended_max_memory() == 48 * GIB
        weight = torch.zeros(1000, 1000, device="mps")  # 4,000,000 bytes = 15,625 x 256
        half = torch.zeros(1000, 1000, dtype=torch.float16, device="mps")  # 2,000,000, rounded to 2,000,128
        bias = torch.zeros(10, device="mps")  # 40, rounded to 256
        assert torch.mps.current_allocated_memory() == 4_000_000 + 2_000_128 + 256
        assert torch.mps.driver_allocated_memory() == (32 + 8) * MIB  # a heap for large, one for small buffers
        assert torch.accelerator.memory_allocated() == torch.mps.current_allocated_memory()
        assert torch.accelerator.memory_reserved() == torch.mps.driver_allocated_memory()
        del weight, half, bias
        assert (torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()) == (0, 40 * MIB)
        torch.mps.empty_cache()
        assert torch.mps.driver_allocated_memory() == 0
        assert torch.backends.mps.get_name() == "Apple M4 Max"
        assert torch.backends.mps.get_core_count() == 40


def test_a_training_step_on_mps():
    """Of a linear layer, with SGD: parameters, input, output and gradients, as their shapes say."""
    with memprof.virtual_gpu("m4-max-64gb") as gpu:
        layer = torch.nn.Linear(1024, 512).to("mps")
        rows = torch.randn(256, 1024, device="mps")
        loss = layer(rows).sum()
        loss.backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        weight, bias, data, output = 1024 * 512 * 4, 512 * 4, 256 * 1024 * 4, 256 * 512 * 4
        assert torch.mps.current_allocated_memory() == 2 * (weight + bias) + data + 256  # the loss has four bytes
    report = gpu.report()
    assert report.device.backend == "mps" and report.verdict.fits and not report.paged_bytes
    assert report.peak.allocated_bytes >= 2 * weight + data + output
    assert not any("CUDA context" in text or "cuBLAS" in text for text in report.assumptions)
    assert sum("kernels take beside tensors" in text for text in report.assumptions) == 1


def test_a_mac_refuses_only_above_its_high_watermark():
    with memprof.virtual_gpu("m1-8gb") as gpu:  # Metal recommends 16/3 GiB; 1.7 times of it are 9.07 GiB
        kept = [torch.zeros(GIB // 2, device="mps") for _ in range(4)]
    report = gpu.report()
    assert (report.verdict.fits, report.paged_bytes) == (True, 8 * GIB - int(16 / 3 * GIB))
    assert report.fits_in_memory is False  # at which searches aim
    assert report.to_json()["verdict"]["paged_bytes"] == report.paged_bytes
    assert "Fits, but pages: needs 8.00 GiB" in str(report)
    with memprof.virtual_gpu("m1-8gb") as gpu:
        kept = [torch.zeros(GIB // 2, device="mps") for _ in range(5)]
    assert not gpu.report().verdict.fits
    assert "max allowed: 9.07 GiB). Tried to allocate 2.00 GiB on shared pool" in gpu.report().verdict.oom_message
    del kept


def test_a_mac_refuses_a_tensor_that_no_buffer_of_metal_holds():
    """Three quarters of the working set, 4 of 5.33 GiB: memory is free, and the tensor is refused all the same."""
    with memprof.virtual_gpu("m1-8gb") as gpu:
        torch.zeros(4 * GIB - 1, dtype=torch.uint8, device="mps")
    assert gpu.report().verdict.fits
    with memprof.virtual_gpu("m1-8gb") as gpu:
        small = torch.zeros(MIB, dtype=torch.uint8, device="mps")
        torch.zeros(4 * GIB, dtype=torch.uint8, device="mps")
        del small
    report = gpu.report()
    assert (report.verdict.fits, report.verdict.oom_message) == (False, "Invalid buffer size: 4.00 GiB")
    assert report.to_json()["verdict"]["max_buffer_bytes"] == 4 * GIB
    text = " ".join(str(report).split())
    assert "Metal refuses a tensor of 4.00 GiB in code outside modules: its buffers are below 4.00 GiB." in text
    assert [found.id for found in report.findings if found.id in ("does-not-fit", "fragmentation")] == ["does-not-fit"]
    assert "Metal's buffers on Apple M1 (8 GB) are below 4.00 GiB" in report.findings[0].title


def test_the_program_sets_the_limit_of_mps():
    with memprof.virtual_gpu("m1-8gb") as gpu:
        torch.mps.set_per_process_memory_fraction(0.0)
        kept = [torch.zeros(GIB // 2, device="mps") for _ in range(5)]
    assert gpu.report().verdict.fits
    del kept
    with memprof.virtual_gpu("m1-8gb"), pytest.raises(ValueError, match="Allowed range: 0~2"):
        torch.mps.set_per_process_memory_fraction(2.5)


def test_host_tensors_count_where_memory_is_one():
    with memprof.virtual_gpu("m1-8gb") as gpu:
        host = torch.zeros(GIB)  # 4 GiB
        kept = [torch.zeros(5 * GIB // 8, device="mps") for _ in range(2)]  # 5 GiB, of the 5.33 that Metal recommends
    assert gpu.report().paged_bytes == 1 * GIB
    del host, kept


def test_xpu_is_the_caching_allocator_with_words_of_its_own():
    with memprof.virtual_gpu("arc-b580") as gpu:
        kept = torch.zeros(100, device="xpu")
        assert (torch.xpu.memory_allocated(), torch.xpu.memory_reserved()) == (512, 2 * MIB)
        assert torch.xpu.get_device_name() == "Intel(R) Arc(TM) B580 Graphics"
        assert torch.xpu.get_device_properties(0).total_memory == torch.xpu.mem_get_info()[1]
        more = torch.zeros(3 * GIB, device="xpu")
    message = gpu.report().verdict.oom_message
    assert message.startswith(
        "XPU out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 11.33 GiB of"
    )
    assert message.endswith("Please use `empty_cache` to release all unoccupied cached memory.")
    del kept, more


def enter_strict(machine):
    """Return a virtual GPU that raises as the device does, as in `memprof run`."""
    gpu = find_gpu(machine)
    settings = resolve_settings(None, backend=gpu.backend)
    return VirtualGpu(gpu, memory=lambda trace: RunAllocator(trace, gpu, settings), raises_oom=True)


@pytest.mark.parametrize(
    ("machine", "kind", "words"),
    [
        ("m1-8gb", RuntimeError, "RuntimeError: Invalid buffer size: 400.00 GiB"),
        ("arc-b580", torch.OutOfMemoryError, "torch.OutOfMemoryError: XPU out of memory."),
        ("mi300x", torch.OutOfMemoryError, "torch.OutOfMemoryError: HIP out of memory."),
    ],
)
def test_memory_that_runs_out_raises_what_torch_raises(machine, kind, words):
    """On MPS a plain RuntimeError, which programs that catch torch.OutOfMemoryError do not catch."""
    with enter_strict(machine) as gpu, pytest.raises(RuntimeError) as caught:
        torch.zeros(100 * GIB, device=torch.accelerator.current_accelerator())
    assert isinstance(caught.value, torch.OutOfMemoryError) is (kind is torch.OutOfMemoryError)
    assert traceback.format_exception_only(caught.value)[0].startswith(words)
    assert type(pickle.loads(pickle.dumps(caught.value))) is kind  # as another process has it
    assert len(gpu.trace.refused) == 1 and not gpu.trace.ended_out_of_memory  # the program went on


def test_a_run_that_ends_out_of_memory_on_mps_is_a_verdict():
    with pytest.raises(RuntimeError, match="MPS backend out of memory"), enter_strict("m1-8gb") as gpu:
        _kept = [torch.zeros(GIB // 2, device="mps") for _ in range(5)]
    assert gpu.trace.ended_out_of_memory and gpu.trace.failure is None


def test_rocm_says_hip():
    with memprof.virtual_gpu("mi300x") as gpu:
        kept = torch.zeros(60 * GIB, device="cuda")
    # As in Tongyi-MAI/Z-Image, issue 103: without the sentence on the process, for which CUDA asks NVML.
    assert gpu.report().verdict.oom_message.startswith(
        "HIP out of memory. Tried to allocate 240.00 GiB. GPU 0 has a total capacity of 191.98 GiB of which 191.57 GiB "
        "is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but"
    )
    del kept


def test_rocm_describes_itself():
    with memprof.virtual_gpu("mi300x"):
        properties = torch.cuda.get_device_properties(0)
        assert isinstance(torch.version.hip, str) and torch.version.cuda is None and torch.cuda.is_available()
        assert (properties.gcnArchName, properties.warp_size) == ("gfx942:sramecc+:xnack-", 64)
        assert torch.cuda.get_arch_list() == ["gfx942"] and torch.cuda.get_device_capability() == (9, 4)
    assert torch.version.hip is None
    with memprof.virtual_gpu("strix-halo"):
        properties = torch.cuda.get_device_properties(0)
        assert (properties.gcnArchName, properties.warp_size, properties.is_integrated) == ("gfx1151", 32, 1)


def test_a_mac_has_one_gpu():
    with pytest.raises(UsageError, match="torch has one MPS device"):
        memprof.virtual_gpus(2, "m4-max-64gb")


@pytest.mark.parametrize(
    ("machine", "dropout", "backend"),
    [("m4-max-64gb", 0.0, "math"), ("arc-b580", 0.0, "overrideable"), ("arc-b580", 0.1, "math")],
)
def test_attention_keeps_scores_where_no_kernel_is_fused(machine, dropout, backend):
    """Of 4 heads with 512 x 512 scores of 4 bytes: 4 MiB, beside 0.5 MiB of queries."""
    with memprof.virtual_gpu(machine) as gpu:
        query = torch.randn(1, 4, 512, 64, device=find_gpu(machine).device_type, requires_grad=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        before = torch.accelerator.memory_allocated()
        output = attend(query, query, query, dropout_p=dropout)
        kept = torch.accelerator.memory_allocated() - before
        output.sum().backward()
    assert any(f"{backend} backend" in text for text in gpu.report().assumptions)
    # Without scores: the output, and 512 row sums of each head.
    assert kept > 4 * MIB if backend == "math" else kept == MIB // 2 + 4 * 512 * 4


def test_attention_without_gradients_on_mps():
    """The output, and scores of 4 heads with 512 x 512 in half precision: 2 MiB, where training takes float32."""
    with memprof.virtual_gpu("m4-max-64gb") as gpu:
        query = torch.randn(1, 4, 512, 64, device="mps", dtype=torch.float16)
        output = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert (output.shape, output.dtype, output.device.type) == (query.shape, torch.float16, "mps")
        assert torch.mps.current_allocated_memory() == 2 * 4 * 512 * 64 * 2  # the scores are free again
    sizes = [storage.num_bytes for storage in gpu.trace.storages if storage.num_bytes > 4 * 512 * 64 * 4]
    assert sizes == [4 * 512 * 512 * 2]


@pytest.mark.parametrize(("machine", "is_found"), [("m1-8gb", False), ("arc-b580", False), ("h100", True)])
def test_packages_of_kernels_for_cuda_are_stubbed_for_cuda_alone(machine, is_found):
    assert importlib.util.find_spec("xformers") is None
    importlib.import_module("bitsandbytes")  # whose kernels for CUDA are for "cuda" alone
    with memprof.virtual_gpu(machine):
        assert (importlib.util.find_spec("xformers") is not None) is is_found


def test_nothing_stays_after_a_run():
    before = torch.mps.recommended_max_memory, torch.xpu.is_available, torch.backends.mps.is_available, torch.Generator
    for machine in MACHINES.values():
        with memprof.virtual_gpu(machine):
            pass
    assert before == (
        torch.mps.recommended_max_memory, torch.xpu.is_available, torch.backends.mps.is_available, torch.Generator
    )  # fmt: skip


@pytest.mark.parametrize(("machine", "asked", "example"), [("h100", "mps", "m4-max-64gb"), ("m1-8gb", "cuda", "h100")])
def test_a_program_for_another_type_is_told_of_its_gpus(machine, asked, example):
    with pytest.raises((AssertionError, RuntimeError)), memprof.virtual_gpu(machine) as gpu:
        torch.zeros(1, device=asked)
    assert gpu.trace.failure.kind is FailureKind.ERROR
    assert f"asks for '{asked}'" in gpu.trace.failure.hint and f"--gpu {example}" in gpu.trace.failure.hint


def test_checkpoints_come_back_to_their_device(device, tmp_path):
    torch.save({"rows": torch.ones(3, device=device)}, tmp_path / "rows.pt")
    for options in ({}, {"map_location": device}):
        assert torch.load(tmp_path / "rows.pt", **options)["rows"].device == torch.device(device, 0)
    assert torch.load(tmp_path / "rows.pt", map_location="cpu")["rows"].tolist() == [1.0, 1.0, 1.0]


def test_only_cuda_runs_recurrent_layers_on_cudnn(device):
    with torch.autocast(device, dtype=torch.float16):
        output, _ = torch.nn.LSTM(8, 16).to(device)(torch.randn(5, 2, 8, device=device))
    assert (output.shape, output.dtype) == ((5, 2, 16), torch.float16)
    assert ("CudnnRnn" in type(output.grad_fn).__name__) is (device == "cuda")


def test_a_capture_keeps_the_backend(tmp_path):
    with memprof.virtual_gpu("m1-8gb") as gpu:
        kept = [torch.zeros(GIB // 2, device="mps") for _ in range(4)]
    gpu.save(tmp_path / "run.json")
    report = memprof.load(tmp_path / "run.json")
    assert (report.device, report.peak.allocated_bytes) == (gpu.report().device, 8 * GIB)
    assert report.device.unified_bytes == 8 * GIB and "Fits, but pages" in str(report)
    assert report.to_json()["device"]["backend"] == "mps"
    del kept


def test_a_run_on_mps_is_no_snapshot():
    with memprof.virtual_gpu("m1-8gb") as gpu:
        torch.zeros(GIB // 4, device="mps")
    with pytest.raises(UsageError, match="a run on MPS has no snapshot"):
        convert_to_snapshot(gpu.trace, AllocatorConfig(), None)


def test_a_gpu_of_cuda_that_shares_memory_pages_with_its_host():
    """As a GB10 or a Strix Halo: the driver says what it gives, and host tensors take of the same memory."""
    machine = dataclasses.replace(find_gpu("rtx-4060"), unified_bytes=8 * GIB)
    with VirtualGpu(machine) as gpu:
        host, kept = torch.zeros(GIB), torch.zeros(5 * GIB // 4, device="cuda")  # 4 and 5 GiB
    trace = gpu.trace
    trace.facts = dataclasses.replace(trace.facts, device=make_device_facts(machine))
    report = analyze(trace)
    assert report.paged_bytes == 1 * GIB + machine.context_bytes
    assert "above the 8.00 GiB that GPU and CPU share" in " ".join(str(report).split())
    del host, kept
