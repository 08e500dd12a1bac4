"""Which backend attention takes on a GPU under a release, and what cuDNN's takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import attention
from memprof.virtual.kernels.attention import prefers_cudnn

HALF = torch.bfloat16


def properties(capability=(9, 0), release=(2, 11)):
    return DeviceProperties(capability, 132, 2048, release)


def backend(
    on, query=(2, 8, 64, 64), key=None, value=None, *, dtype=HALF, mask=None, dropout=0.0, grad=False, gqa=False
):
    """The backend for meta tensors of these shapes on GPU `on`."""
    shapes = query, key or query, value or key or query
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape in shapes]
    return attention.choose_backend(on, attention.AttentionArguments(*tensors, mask, dropout, enable_gqa=gqa))


@pytest.mark.parametrize(
    ("capability", "release", "preferred"),
    [
        ((9, 0), (2, 10), False),
        ((9, 0), (2, 11), True),
        ((10, 0), (2, 13), True),
        ((10, 3), (2, 13), True),
        ((8, 0), (2, 13), False),
        ((12, 0), (2, 13), False),
    ],
)
def test_cudnn_comes_first_on_hopper_and_data_centre_blackwell_from_2_11_on(
    capability, release, preferred, monkeypatch
):
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert prefers_cudnn(properties(capability, release)) is preferred
    assert backend(properties(capability, release)) == ("cudnn" if preferred else "flash")


def test_the_environment_puts_cudnn_last(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert backend(properties()) == "flash"


def test_what_cudnn_cannot_goes_to_the_others():
    assert backend(properties(), (2, 8, 64, 256)) == "cudnn"
    assert backend(properties((10, 0)), (2, 8, 64, 256)) == "flash"  # a head too large for it there
    assert backend(properties(), (2, 8, 64, 264)) == "efficient"
    assert backend(properties(), (2, 8, 64, 100)) == "flash"  # not a multiple of 8; flash pads it
    assert backend(properties(), (2, 8, 64, 64), (2, 8, 1, 64)) == "flash"  # a single key
    assert backend(properties(), (2, 8, 1, 64), (2, 8, 9, 64), dropout=0.1) == "flash"
    assert backend(properties(), dtype=torch.float32) == "efficient"
    assert backend(properties(), (2, 8, 64, 192), (2, 8, 64, 192), (2, 8, 64, 128)) == "cudnn"
    assert backend(properties((8, 0)), (2, 8, 64, 192), (2, 8, 64, 192), (2, 8, 64, 128)) == "efficient"


def test_a_mask_goes_to_cudnn_unless_it_is_trained():
    mask = torch.empty(64, 64, dtype=HALF, device="meta")
    assert backend(properties(), mask=mask) == "cudnn"
    assert backend(properties(), mask=mask.requires_grad_()) == "efficient"
    assert backend(properties((8, 0)), mask=mask.detach()) == "efficient"


def test_a_mask_whose_last_dimension_is_strided_is_left_to_math():
    biases = torch.empty(64, 64, 8, device="meta").permute(2, 0, 1)[None]  # T5's, of positions
    assert backend(properties(), dtype=torch.float32, mask=biases) == "math"
    assert backend(properties(), dtype=torch.float32, mask=biases.contiguous()) == "efficient"


@pytest.mark.parametrize(("release", "expected"), [((2, 13), "math"), ((2, 15), "efficient")])
def test_masked_grouped_queries_fall_back_to_math_until_the_efficient_kernel_takes_them(release, expected):
    mask = torch.empty(64, 64, dtype=HALF, device="meta")
    grouped = {"query": (2, 8, 64, 64), "key": (2, 2, 64, 64)}
    assert backend(properties((8, 0), release), **grouped, mask=mask, gqa=True) == expected
    assert backend(properties((8, 0), release), **grouped, gqa=True) == "flash"
    assert backend(properties((9, 0), release), **grouped, mask=mask, gqa=True) == "cudnn"


def test_heads_that_differ_without_being_grouped_are_left_to_math():
    assert backend(properties(), (2, 8, 64, 64), (2, 1, 64, 64)) == "math"


def test_a_last_dimension_that_is_strided_is_left_to_math():
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        strided = torch.randn(2, 8, 64, 64, device="cuda", dtype=HALF).transpose(2, 3)
        scaled_dot_product_attention(strided, strided, strided)
        assert any("math backend" in sentence for sentence in gpu.trace.assumptions)


@pytest.fixture
def gpu():
    gpu = VirtualGpu(find_gpu("h100-80gb"), workspaces=False)
    gpu.dispatch_mode.gpu = dataclasses.replace(gpu.dispatch_mode.gpu, release=(2, 11))
    with gpu:
        yield gpu


def made(gpu, first, op):
    return [
        (storage.num_bytes, storage.hidden)
        for storage in gpu.trace.storages[first:]
        if gpu.trace.op(storage) == f"aten.{op}"
    ]


@pytest.mark.parametrize("heads", [8, 2])
def test_cudnn_attention_keeps_row_sums_and_makes_the_gradient_of_the_queries_in_float32(gpu, heads):
    query = torch.randn(2, 64, 8, 64, device="cuda", dtype=HALF).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(2, heads, 96, 64, device="cuda", dtype=HALF, requires_grad=True) for _ in range(2))
    first = len(gpu.trace.storages)
    output = scaled_dot_product_attention(query, key, value, enable_gqa=heads != 8)
    rows = 2 * 8 * 64
    forward = made(gpu, first, "_scaled_dot_product_cudnn_attention")
    assert forward == [(8, False), (8, False), (2 * rows * 64, False), (4 * rows, False), (256, True)]
    assert output.stride() == query.stride()
    first = len(gpu.trace.storages)
    output.backward(torch.ones_like(output))
    backward = made(gpu, first, "_scaled_dot_product_cudnn_attention_backward")
    keys = 2 * key.numel()
    # Recorded on an H100 with cuDNN 9.19: with grouped queries keys and values for each of their heads.
    grouped = 2 * keys * 8 // heads if heads != 8 else 0
    assert backward == [(2 * rows * 64, False), (keys, False), (keys, False), (4 * rows * 65 + grouped + 256, True)]
    assert key.grad.shape == key.shape
    assert any("cuDNN's attention" in sentence for sentence in gpu.trace.assumptions)


def test_cudnn_attention_keeps_no_row_sums_without_a_backward(gpu):
    query = torch.randn(2, 8, 64, 64, device="cuda", dtype=HALF)
    first = len(gpu.trace.storages)
    scaled_dot_product_attention(query, query, query, is_causal=True)
    assert [size for size, _ in made(gpu, first, "_scaled_dot_product_cudnn_attention")] == [8, 8, 131_072, 256]


def test_the_program_may_choose(gpu):
    query = torch.randn(2, 8, 64, 64, device="cuda", dtype=HALF)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(query, query, query)
    assert any("flash backend" in sentence for sentence in gpu.trace.assumptions)


def test_values_of_another_width_keep_the_order_of_the_queries(gpu):
    query = torch.randn(2, 64, 8, 192, device="cuda", dtype=HALF).transpose(1, 2)
    value = torch.randn(2, 8, 64, 128, device="cuda", dtype=HALF)
    output = scaled_dot_product_attention(query, query, value)
    assert output.shape == (2, 8, 64, 128)
    assert output.transpose(1, 2).is_contiguous()
