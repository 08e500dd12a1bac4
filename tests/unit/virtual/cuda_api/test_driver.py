"""What programs ask of a CUDA build below `torch.cuda`, answered for the virtual GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.flows.script import run_script
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")


@pytest.fixture
def gpu():
    with VirtualGpu(GPU) as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: torch.cuda.current_device(), 0),
        (lambda: torch._C._cuda_getDeviceCount(), 1),
        (lambda: torch.cuda.random.get_rng_state().numel(), 16),
        (lambda: torch.cuda.random.get_rng_state("cuda:0").dtype, torch.uint8),
        (lambda: len(torch.cuda.get_rng_state_all()), 1),
        (lambda: torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all()), None),
        (lambda: torch.cuda.random.manual_seed(3), None),
        (lambda: torch.cuda.initial_seed(), 0),
        (lambda: torch.cuda.can_device_access_peer(0, 0), False),
        (lambda: torch.cuda.get_allocator_backend(), "native"),
        (lambda: torch.cuda.get_sync_debug_mode(), 0),
        (lambda: torch.cuda.set_stream(torch.cuda.Stream()), None),
        (lambda: torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin, 227 * 1024),
        (lambda: torch.cuda.device_memory_used(), 0),
        (lambda: torch.get_device_module(), torch.cuda),
        (lambda: torch.accelerator.memory.memory_allocated(), 0),
        (lambda: torch.accelerator.current_device_idx(), 0),
        (lambda: torch.cuda.memory_summary().count("\n") > 10, True),
        (lambda: torch.cuda.memory._snapshot()["segments"], []),
    ],
)  # fmt: skip
def test_answers(gpu, ask, answer):
    assert ask() == answer


@pytest.mark.parametrize(
    "name", [name for name in ("get_device_capability", "Graph") if hasattr(torch.accelerator, name)]
)  # fmt: skip
def test_what_an_accelerator_is_not_asked_is_said(gpu, name):
    with pytest.raises(MemprofError, match=r"torch\.accelerator") as refused:
        getattr(torch.accelerator, name)()
    assert "torch.cuda" in str(refused.value.hint)


def test_properties_as_torch_prints_them(gpu):
    shown = repr(torch.cuda.get_device_properties(0))
    assert shown.startswith("_CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=")


def test_generators(gpu):
    generator = torch.Generator("cuda").manual_seed(7)
    assert generator.device == torch.device("cuda", 0) and generator.initial_seed() == 7
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu" and torch.Generator(device="cpu").manual_seed(1).initial_seed() == 1
    noise = torch.randn(1000, generator=generator, device="cuda")
    noise.normal_(generator=generator).uniform_(generator=generator)
    order = torch.randperm(10, generator=generator, device="cuda")
    drawn = torch.multinomial(torch.ones(4, device="cuda"), 2, generator=generator)
    assert noise.is_cuda and order.is_cuda and drawn.shape == (2,)
    generator.set_state(generator.get_state())
    real = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(real, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_legacy_types(gpu):
    made = torch.cuda.FloatTensor(2, 3).fill_(1.0)
    assert made.is_cuda and made.shape == (2, 3) and made.dtype is torch.float32
    assert torch.cuda.LongTensor([4, 5]).tolist() == [4, 5]
    assert isinstance(made, torch.cuda.FloatTensor) and not isinstance(made, torch.cuda.HalfTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)


def test_nvml(monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    with VirtualGpu(GPU, context_bytes=1 << 29):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        kept = torch.empty(1 << 20, device="cuda")
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        assert memory.used == (1 << 29) + 4 * kept.numel() and memory.total == GPU.total_bytes
        assert pynvml.nvmlDeviceGetCount() == 1 and pynvml.nvmlDeviceGetName(handle) == GPU.name


def test_nothing_is_left_behind():
    before = {name: vars(torch._C).get(name) for name in ("_cuda_getDeviceCount", "_get_accelerator", "Generator")}
    original = torch.Generator
    with VirtualGpu(GPU):
        assert torch.Generator is not original
    assert torch.Generator is original
    assert {name: vars(torch._C).get(name) for name in before} == before


def test_a_share_of_the_gpu(tmp_path):
    script = tmp_path / "share.py"
    script.write_text(
        "import torch\n"
        "torch.cuda.set_per_process_memory_fraction(0.25)\n"
        "assert torch.cuda.get_per_process_memory_fraction() == 0.25\n"
        "kept = [torch.empty(10 << 30, dtype=torch.uint8, device='cuda')]\n"
        "kept.append(torch.empty(12 << 30, dtype=torch.uint8, device='cuda'))\n"
    )
    found = run_script(Program(str(script)), StopRule(None), RunSpec(gpu=GPU.key))
    assert found.outcome.ended is EndReason.REFUSED and "12.00 GiB" in str(found.outcome.error)


def test_parameters_move_to_the_host_with_their_gradients(gpu):
    model = torch.nn.Linear(4, 4).cuda()
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    before = torch.cuda.memory_allocated()
    model.cpu()
    assert not model.weight.is_cuda and not model.weight.grad.is_cuda and model.weight.grad.shape == (4, 4)
    assert torch.cuda.memory_allocated() < before
    model.cuda()
    assert model.weight.is_cuda and model.weight.grad.is_cuda
    model.zero_grad()
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("kind", "place", "dtype"),
    [
        (lambda: torch.cuda.FloatTensor, "cuda", torch.float32),
        (lambda: torch.cuda.LongTensor, "cuda", torch.int64),
        (lambda: "torch.cuda.HalfTensor", "cuda", torch.float16),
        (lambda: torch.FloatTensor, "cpu", torch.float32),
        (lambda: "torch.LongTensor", "cpu", torch.int64),
    ],
)
@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_a_type_given_as_a_class(gpu: VirtualGpu, kind: Any, place: str, dtype: torch.dtype, start: str) -> None:
    made = torch.ones(2, 3, device=start).type(kind())
    assert made.device.type == place and made.dtype == dtype


def test_tensors_of_the_default_type_are_on_the_gpu(gpu: VirtualGpu) -> None:
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    made = torch.Tensor([2.0]), torch.Tensor(2, 3), torch.Tensor()
    torch.set_default_tensor_type(torch.FloatTensor)
    assert [(tensor.device.type, tensor.dtype, tuple(tensor.shape)) for tensor in made] == [
        ("cuda", torch.float16, (1,)),
        ("cuda", torch.float16, (2, 3)),
        ("cuda", torch.float16, (0,)),
    ]
    assert torch.Tensor([2.0]).device.type == "cpu"


def test_the_class_of_tensors_is_put_back() -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        torch.set_default_device(None)
    assert "__new__" not in vars(torch.Tensor)
    assert torch.Tensor([2.0]).tolist() == [2.0]
    assert torch.Tensor(2, 3).shape == (2, 3)


def test_default_tensor_type(gpu: VirtualGpu) -> None:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.nn.Linear(2, 2).weight.is_cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.randn(2).is_cpu


def test_new_of_numbers_and_of_a_shape(gpu: VirtualGpu) -> None:
    tensor = torch.ones(2, device="cuda")
    assert tensor.new([1.0, 2.0, 3.0]).tolist() == [1.0, 2.0, 3.0]
    assert tensor.new(4, 5).is_cuda and tensor.new(torch.Size([4, 5])).shape == (4, 5)
