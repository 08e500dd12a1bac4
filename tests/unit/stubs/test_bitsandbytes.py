"""bitsandbytes and torchao on the virtual GPU: their own code, without the native kernels."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.stubs import bitsandbytes
from memprof.stubs.extension import extensions
from memprof.trace.events import GPU, Role
from memprof.virtual import VirtualGpu

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


@pytest.fixture
def gpu():
    with VirtualGpu(find_gpu("h100-80gb"), tensors_only=True, extensions=extensions()) as gpu:
        yield gpu


def alive(gpu):
    return gpu.recorder.storages.live_bytes


def train(optimizer, parameters, steps=2):
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def test_8_bit_state(gpu):
    """From 4,096 numbers on a byte for each of two moments, a float32 scale for each 256; two tables for all."""
    shapes = [(512, 256), (64, 65), (4095,)]
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda", dtype=torch.bfloat16)) for shape in shapes]
    before = alive(gpu)
    optimizer = bnb.optim.AdamW8bit(parameters)
    assert alive(gpu) == before
    train(optimizer, parameters)
    scales = sum(-(-torch.Size(shape).numel() // 256) for shape in shapes[:2])
    state = 2 * (512 * 256 + 64 * 65) + 2 * 4 * scales + 2 * 4 * 4095 + 2 * 4 * 256
    assert alive(gpu) - before == state
    roles = {owner.role for storage, owner in gpu.trace.owners.items() if gpu.trace.storages[storage].dtype == "uint8"}
    assert roles == {Role.OPTIMIZER_STATE}


def test_paged_state_is_host_memory(gpu):
    """From 100,000 numbers on it is managed memory; the scales stay on the GPU."""
    parameter = nn.Parameter(torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16))
    before = alive(gpu)
    optimizer = bnb.optim.PagedAdamW8bit([parameter])
    train(optimizer, [parameter])
    assert alive(gpu) - before == 2 * 4 * 1024 * 1024 // 256 + 2 * 4 * 256
    paged = [s for s in gpu.trace.storages if s.device != GPU and s.dtype == "uint8" and s.num_bytes == 1 << 20]
    assert len(paged) == 2
    assert any("managed memory" in sentence for sentence in gpu.trace.assumptions)


@pytest.mark.parametrize("double", [True, False])
def test_4_bit_layer(gpu, double):
    """Half a byte a weight and a scale for each 64, in float32 or in a byte with a float32 scale for 256 of these."""
    layer = bnb.nn.Linear4bit(
        1024, 2048, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )
    before = alive(gpu)
    layer = layer.to("cuda")
    weights, blocks = 1024 * 2048, 1024 * 2048 // 64
    codes = 16 * 4
    # The scales' scales, their table of 256 numbers, which the library keeps a copy of, and their mean.
    scales = blocks + 4 * (blocks // 256) + 2 * 4 * 256 + 4 if double else 4 * blocks
    assert alive(gpu) - before == weights // 2 + codes + scales
    assert type(layer.weight).__name__ == "Params4bit"
    assert layer.weight.device.type == "cuda"
    assert layer.weight.quant_state.shape == (2048, 1024)

    states = torch.zeros(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held = alive(gpu)
    gpu.recorder.storages.peak_bytes = held
    product = layer(states)
    # Nothing but the product is left, and the weight was unpacked beside it.
    assert alive(gpu) - held == product.nbytes
    assert gpu.recorder.storages.peak_bytes - held >= product.nbytes + 2 * weights
    product.backward(product)
    assert states.grad.shape == states.shape


def test_how_4_bit_products_run_depends_on_the_gpu():
    """For a few rows a fused kernel reads the packed weight; where it wins is the library's table of GPUs."""

    def peak(name, rows):
        with VirtualGpu(find_gpu(name), tensors_only=True, extensions=extensions()) as gpu:
            layer = bnb.nn.Linear4bit(4096, 4096, bias=False, compute_dtype=torch.bfloat16).to("cuda")
            states = torch.zeros(rows, 4096, device="cuda", dtype=torch.bfloat16)
            held = gpu.recorder.storages.peak_bytes = gpu.recorder.storages.live_bytes
            with torch.no_grad():
                layer(states)
            return gpu.recorder.storages.peak_bytes - held

    unpacked = 2 * 4096 * 4096
    for gpu in ("h100-80gb", "rtx-4090"):
        assert peak(gpu, 1) < unpacked <= peak(gpu, 2048)
    # Twice the same GPU in one process gives the same: nothing is remembered of another.
    assert peak("h100-80gb", 64) == peak("h100-80gb", 64)


def test_8_bit_layer(gpu):
    layer = bnb.nn.Linear8bitLt(1024, 2048, bias=False, has_fp16_weights=False, threshold=6.0)
    before = alive(gpu)
    layer = layer.to("cuda")
    assert alive(gpu) - before == 1024 * 2048 + 4 * 2048
    states = torch.zeros(256, 1024, device="cuda", dtype=torch.float16, requires_grad=True)
    held = alive(gpu)
    gpu.recorder.storages.peak_bytes = held
    product = layer(states)
    assert alive(gpu) - held == product.nbytes
    # The product in 32-bit integers, before it is scaled, beside the input in 8 bits with a scale for each row.
    assert gpu.recorder.storages.peak_bytes - held == 4 * 256 * 2048 + product.nbytes + 256 * 1024 + 4 * 256
    product.backward(product)
    assert states.grad.dtype == torch.float16


def test_numbers_on_the_host_are_really_quantized(gpu):
    weight = torch.randn(8, 64, device="cpu")
    codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    assert codes.device.type == "cpu"
    unpacked = bnb.functional.dequantize_4bit(codes, state)
    assert 0 < float((unpacked - weight).norm() / weight.norm()) < 0.2


def test_nothing_is_left_behind():
    from bitsandbytes import functional

    before = functional.lib, functional.get_paged, functional.GlobalPageManager._instance, list(sys.meta_path)
    with VirtualGpu(find_gpu("h100-80gb"), extensions=extensions()):
        parameter = nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
        train(bnb.optim.PagedAdamW8bit([parameter]), [parameter])
        assert functional.get_paged is not before[1]
        bnb.nn.Linear4bit(64, 64).to("cuda")
    after = functional.lib, functional.get_paged, functional.GlobalPageManager._instance, list(sys.meta_path)
    assert after == before
    assert functional.dequantize_4bit(*functional.quantize_4bit(torch.ones(64, 64), compress_statistics=True)).sum() > 0
    model = nn.Linear(64, 128)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    weight = model.weight.detach().clone()
    optimizer.step()  # really, on the CPU
    assert not torch.equal(weight, model.weight)


@pytest.mark.slow
@pytest.mark.nightly
def test_imported_on_the_virtual_gpu():
    """By a program that imports it where the GPU seems to be there."""
    program = """
    import torch, memprof
    with memprof.virtual_gpu("h100-80gb") as gpu:
        import bitsandbytes as bnb
        parameter = torch.nn.Parameter(torch.zeros(512, 256, device="cuda"))
        optimizer = bnb.optim.AdamW8bit([parameter])
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        print(optimizer.state[parameter]["state1"].dtype, optimizer.state[parameter]["state1"].device)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["torch.uint8", "cuda:0"], done.stderr
    assert done.stderr == ""  # not a word of the library for CUDA that a machine without one does not have


@pytest.mark.parametrize(("name", "per_number", "block"), [("AdamW8bit", 2, 256), ("AdamW4bit", 1, 128)])
def test_state_of_torchao(name, per_number, block):
    """Two moments of 8 or 4 bits, scales in float32, two tables a parameter; a step is one compiled kernel."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with VirtualGpu(find_gpu("h100-80gb"), tensors_only=True, extensions=extensions()) as gpu:
        parameter = nn.Parameter(torch.zeros(512, 256, device="cuda", dtype=torch.bfloat16))
        before = alive(gpu)
        train(getattr(optim, name)([parameter]), [parameter])
        numbers = 512 * 256
        table = 4 * (256 if per_number == 2 else 16)
        scales = 2 * 4 * (numbers // block)
        assert alive(gpu) == before  # the optimizer is gone
        assert gpu.recorder.storages.peak_bytes - before == per_number * numbers + scales + 2 * table + parameter.nbytes
    assert any("one compiled kernel" in sentence for sentence in gpu.trace.assumptions)


def test_operators_that_come_later_are_found(gpu, monkeypatch):
    """A run may import a part of the package before its kernels: the next run had no operator."""
    monkeypatch.setattr(bitsandbytes.dispatch, "dispatch_get_all_op_names", list)
    assert not bitsandbytes._list_operators()
    monkeypatch.undo()
    assert torch.ops.bitsandbytes.quantize_blockwise.default in bitsandbytes._list_operators()
