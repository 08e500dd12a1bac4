"""torch's own quantized tensors on the GPU, by the operators that CUDA has for them, and fake quantization."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memprof.virtual import VirtualGpu
from memprof.virtual.device_rules import _read_entries, find_missing_quantized_kernel
from memprof.virtual.kernels import quantized_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
_aten = torch.ops.aten


def floats() -> torch.Tensor:
    return torch.randn(64, 96, device="cuda")


def quantized(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(floats(), 0.5, 3, dtype)


def by_channel(
    zero_points: torch.dtype = torch.int64, dtype: torch.dtype = torch.quint8, device: str = "cuda"
) -> torch.Tensor:
    scales = torch.ones(64, device=device)
    return torch.quantize_per_channel(floats().to(device), scales, torch.zeros_like(scales).to(zero_points), 0, dtype)


def taken(gpu: VirtualGpu, call: Callable[[], Any], *inputs: Any) -> list[int]:
    """Sizes in bytes of what a call takes, in its order."""
    before = len(gpu.trace.storages)
    call()
    return [storage.num_bytes for storage in gpu.trace.storages[before:]]


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], list[int]]] = {
    "quantize": (lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.qint8), [6144]),
    "in 32 bits": (lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.qint32), [24576]),
    "what is not contiguous": (lambda x: torch.quantize_per_tensor(x.t(), 0.5, 3, torch.qint8), [6144, 24576]),
    "floats": (lambda x: x.dequantize(), []),
    "by its extremes": (lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False), [4, 4, 6144]),
}
_TWO = ([2, 2], [2, 2], [0, 0], [1, 1])  # Window, stride, padding and dilation.
QUANTIZED: dict[str, tuple[Callable[[torch.Tensor], Any], list[int]]] = {
    "dequantize": (lambda q: q.dequantize(), [24576]),
    "dequantize what is not contiguous": (lambda q: q.t().dequantize(), [24576, 6144]),
    "integers": (lambda q: q.int_repr(), [6144]),
    "clone": (lambda q: q.clone(), [6144]),
    "views": (lambda q: (q.view(-1), q[0], q[2:4], q.t(), q.split(2), q.unsqueeze(0)), []),
    "contiguous": (lambda q: q.t().contiguous(), [6144]),
    "another like it": (lambda q: torch.empty_like(q), [6144]),
    "rows": (lambda q: q.index_select(0, torch.tensor([1, 2], device="cuda")), [16, 192]),
    "flip": (lambda q: q.flip(0), [6144]),
    "fill": (lambda q: q.fill_(1.0), [24576]),
    "gelu": (lambda q: torch.nn.functional.gelu(q), [24576, 24576, 6144]),
    "relu": (lambda q: q.relu(), [6144, 6144, 1, 6144, 6144]),
    "sum": (lambda q: torch.ops.quantized.add(q, q, 1.0, 0), [24576, 6144, 24576, 24576]),
    "sum above zero": (lambda q: torch.ops.quantized.add_relu(q, q, 1.0, 0), [24576, 6144, 24576, 24576]),
    "pooling": (lambda q: torch.nn.functional.max_pool2d(q.view(2, 8, 32, 12), 2), [6144, 1536]),
    "pooling of one": (lambda q: torch.ops.quantized.max_pool2d(q.view(8, 64, 12), *_TWO, False), [1536]),
    "a deep copy": (lambda q: copy.deepcopy(q), [6144]),
    "moved to where it is": (lambda q: q.cuda(), []),
}


@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_quantizing(gpu: VirtualGpu, call: Callable[[torch.Tensor], Any], expected: list[int]) -> None:
    data = floats()
    assert taken(gpu, lambda: call(data)) == expected


@pytest.mark.parametrize(("call", "expected"), QUANTIZED.values(), ids=QUANTIZED)
def test_operators_of_quantized(gpu: VirtualGpu, call: Callable[[torch.Tensor], Any], expected: list[int]) -> None:
    data = quantized()
    assert taken(gpu, lambda: call(data)) == expected


def test_what_it_says_of_itself(gpu: VirtualGpu) -> None:
    data = quantized()
    assert (data.dtype, data.device.type, data.is_quantized) == (torch.qint8, "cuda", True)
    assert (data.q_scale(), data.q_zero_point(), data.qscheme()) == (0.5, 3, torch.per_tensor_affine)
    assert data.untyped_storage().nbytes() == 6144
    assert copy.deepcopy(data)[1].q_scale() == data.cpu().q_scale() == 0.5


def test_scales_of_channels_live_with_the_tensor(gpu: VirtualGpu) -> None:
    """As 64-bit numbers of their own, or as the floats that they are."""
    before = torch.cuda.memory_allocated()
    data = by_channel()
    assert torch.cuda.memory_allocated() - before == 6144 + 512 + 512
    assert data.q_per_channel_scales().device.type == "cuda"
    assert (data.qscheme(), data.q_per_channel_axis()) == (torch.per_channel_affine, 0)
    del data
    assert torch.cuda.memory_allocated() == before
    data = by_channel(torch.float32)
    assert data.qscheme() == torch.per_channel_affine_float_qparams


@pytest.mark.parametrize("elements", [24, 1 << 21])
def test_moving_from_the_host_and_back(gpu: VirtualGpu, elements: int) -> None:
    host = torch.quantize_per_tensor(torch.randn(elements), 0.5, 0, torch.qint8)
    assert host.device.type == "cpu"
    before = torch.cuda.memory_allocated()
    moved = host.cuda()
    assert moved.device.type == "cuda"
    assert torch.cuda.memory_allocated() - before == elements
    assert moved.cpu().dequantize().device.type == "cpu"


@pytest.mark.parametrize("quantize", [
    lambda x: torch.quantize_per_tensor(x, 0.5, 3, torch.quint8),
    lambda x: torch.quantize_per_channel(x, *[torch.ones(4, device=x.device)] * 2, 1, torch.quint8),
    lambda x: torch.quantize_per_channel(x, torch.ones(4, device=x.device), torch.ones(4, device=x.device).long(), 1,
                                         torch.quint8),
])  # fmt: skip
def test_layouts_are_those_of_the_cpu(gpu: VirtualGpu, quantize: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for layout in (torch.channels_last, torch.contiguous_format):
        host = quantize(torch.randn(2, 4, 6, 6).to(memory_format=layout))
        data = quantize(torch.randn(2, 4, 6, 6, device="cuda").to(memory_format=layout))
        assert (data.stride(), data.dequantize().stride()) == (host.stride(), host.dequantize().stride())


def test_scales_of_channels_move_with_the_tensor(gpu: VirtualGpu) -> None:
    host = by_channel(device="cpu")
    before = torch.cuda.memory_allocated()
    moved = host.cuda()
    assert torch.cuda.memory_allocated() - before == 6144 + 512 + 512
    assert moved.q_per_channel_scales().device.type == "cuda"
    assert moved.cpu().q_per_channel_scales().device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda q: q + q, NotImplementedError, "'aten::add.out' with arguments from the 'QuantizedCUDA' backend"),
        (lambda q: torch.cat([q, q]), NotImplementedError, "'aten::cat.out' .* 'QuantizedCUDA'"),
        (lambda q: torch.equal(q, q), NotImplementedError, "'aten::equal' .* 'QuantizedCUDA'"),
        (lambda q: torch.dequantize([q]), NotImplementedError, "'aten::dequantize.tensors' .* 'QuantizedCUDA'"),
        (lambda q: q.float(), RuntimeError, "quantized Tensor to non-quantized Tensor is not allowed"),
        (lambda q: floats().copy_(q), RuntimeError, "quantized Tensor to non-quantized Tensor is not allowed"),
        (lambda q: quantized(torch.quint4x2), NotImplementedError, "r_tensor_affine_cuda\" not impl.* 'QUInt4x2'"),
        (
            lambda q: by_channel(torch.float32, torch.quint4x2),
            NotImplementedError,
            "per_channel_float_qparams_cuda\" not implemented for 'QUInt4x2'",
        ),
        (
            lambda q: torch.quantize_per_tensor([floats()], torch.ones(1), torch.zeros(1), torch.qint8),
            NotImplementedError,
            "'aten::quantize_per_tensor.tensors' .* 'CUDA'",
        ),
        (lambda q: torch.quantize_per_tensor(floats().double(), 1.0, 0, torch.qint8), RuntimeError, "got Double"),
    ],
)
def test_what_cuda_cannot_do(
    gpu: VirtualGpu, call: Callable[[torch.Tensor], Any], error: type[Exception], says: str
) -> None:
    data = quantized()
    with pytest.raises(error, match=says):
        call(data)


def test_every_operator_that_cuda_has_for_quantized_tensors() -> None:
    """By torch's own list."""
    found = set()
    for name, entry in _read_entries().items():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(_aten, packet), overload or "default")
        known = packet in _here() or operator.is_view or overload.endswith("out")
        if "QuantizedCUDA" in entry and not (known or operator.overloadpacket in quantized_tensors._DEVICE_INDEPENDENT):
            found.add(packet)
            assert not find_missing_quantized_kernel(name)
    assert found <= {"empty", "empty_strided"}


OF_ALL_DEVICES = (
    "view as_strided _reshape_alias unfold squeeze unsqueeze qscheme q_scale q_zero_point q_per_channel_scales "
    "q_per_channel_axis q_per_channel_zero_points empty_quantized empty_like set_ max min"
)


@pytest.mark.parametrize("name", OF_ALL_DEVICES.split())
def test_operators_that_have_one_function_for_all_devices(name: str) -> None:
    assert getattr(_aten, name) in quantized_tensors._DEVICE_INDEPENDENT


def _here() -> set[str]:
    return {operator.__name__ for operator, _ in quantized_tensors.quantized_kernel.items()} | {
        "_empty_affine_quantized",
        "_empty_per_channel_affine_quantized",
    }


FAKES: dict[str, tuple[Callable[..., torch.Tensor], list[int]]] = {
    "of a tensor": (
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        [24576, 6144],
    ),
    "of a tensor, by tensors": (
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s[:1], z[:1].int(), -128, 127),
        [4, 8, 24576, 6144],
    ),
    "of channels": (
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, -128, 127),
        [24576, 6144],
    ),
    "of channels, by integers": (
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z.int(), 0, -128, 127),
        [256, 4, 4, 24576, 6144],
    ),
    "learned, of a tensor": (
        lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s[:1], z[:1], -128, 127, 1.0),
        [24576, 6144],
    ),
    "learned, of channels": (
        lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s, z, 0, -128, 127, 1.0),
        [256, 256, 4, 4, 24576, 6144],
    ),
}


@pytest.mark.parametrize(("call", "expected"), FAKES.values(), ids=FAKES)
def test_fake_quantization(gpu: VirtualGpu, call: Callable[..., torch.Tensor], expected: list[int]) -> None:
    scale, zero_point = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    data = floats().requires_grad_()
    assert taken(gpu, lambda: call(data, scale, zero_point)) == expected
    call(data, scale, zero_point).sum().backward()
    assert data.grad is not None
    assert data.grad.shape == data.shape


@pytest.mark.parametrize("by_channels", [False, True])
def test_gradients_of_learned_scales_are_as_large_as_the_data(gpu: VirtualGpu, by_channels: bool) -> None:
    number = 64 if by_channels else 1
    scale, zero_point = (make(number, device="cuda", requires_grad=True) for make in (torch.ones, torch.zeros))
    data = floats().requires_grad_()
    if by_channels:
        result = torch._fake_quantize_learnable_per_channel_affine(data, scale, zero_point, 0, -128, 127, 1.0)
    else:
        result = torch._fake_quantize_learnable_per_tensor_affine(data, scale, zero_point, -128, 127, 1.0)
    sizes = taken(gpu, lambda: result.sum().backward())
    assert sizes.count(data.nbytes) == 3
    assert scale.grad is not None
    assert scale.grad.shape == scale.shape


@pytest.mark.parametrize("axis", [0, 1])
def test_observers_get_their_size_from_the_data(gpu: VirtualGpu, axis: int) -> None:
    """Rows along the second dimension are copied to be looked through."""
    data, on = torch.randn(8, 4, 3, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    kinds = (torch.float32, torch.float32, torch.float32, torch.int32)
    observers = [torch.empty(0, dtype=kind, device="cuda") for kind in kinds]
    sizes = taken(
        gpu, lambda: torch.fused_moving_avg_obs_fake_quant(data, on, on, *observers, 0.1, -128, 127, axis, True, True)
    )
    assert [observer.shape[0] for observer in observers] == [data.shape[axis]] * 4
    assert sizes[-2:] == [384, 96]
    assert (384 in sizes[:-2]) is (axis == 1)


def test_a_wrong_range_is_an_error_of_torch(gpu: VirtualGpu) -> None:
    with pytest.raises(RuntimeError, match="quant_min"):
        torch.fake_quantize_per_tensor_affine(floats(), 0.1, 0, 5, -5)
