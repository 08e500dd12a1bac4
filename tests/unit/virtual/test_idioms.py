"""Idioms of real programs, each of which was once wrong on the virtual GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import Role
from memprof.units import GIB
from memprof.virtual import VirtualGpu

CUDA = torch.device("cuda", 0)


class _Scripted(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))

    @torch.jit.script_method
    def forward(self, x):
        return self.inner(x * self.scale) + self.kept


@pytest.mark.parametrize("make", [_Scripted, lambda: torch.jit.script(nn.Linear(4, 4))])
def test_scripted_modules_move(gpu, make):
    """C++ holds their parameters."""
    module = nn.Sequential(make(), nn.Linear(4, 4)).cuda()
    assert {tensor.device for tensor in module.state_dict().values()} == {CUDA}
    module(torch.ones(2, 4, device="cuda")).sum().backward()
    assert {parameter.grad.device for parameter in module.parameters()} == {CUDA}
    assert not gpu.trace.mismatches
    assert any("TorchScript" in assumption for assumption in gpu.trace.assumptions)


def test_a_scripted_module_that_is_never_called_is_there_at_the_end():
    """Its parameters are in no dictionary."""
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        module = _Scripted().cuda()
    assert module.scale.device.type != "cpu" and {owner.role for owner in gpu.trace.owners.values()} >= {Role.PARAMETER}


class _Sum(nn.Module):
    def forward(self, x, y):
        return x + y


@pytest.mark.parametrize(("width", "is_full"), [(1024, True), (1023, False)])
def test_torchscript_hides_the_error_of_a_full_gpu(width, is_full):
    """Its interpreter raises RuntimeError for every error of an operator, that of shapes too."""
    gpu = VirtualGpu(find_gpu("rtx-4090"), raises_oom=True)
    gpu.recorder.storages.find_oom_message = lambda device: (
        "full" if gpu.recorder.storages.live_bytes > 3 * GIB else None
    )
    summed = torch.jit.script(_Sum())
    with pytest.raises(RuntimeError, match="TorchScript interpreter"), gpu:
        summed(torch.empty(1 << 19, 1024, device="cuda"), torch.empty(1, width, device="cuda"))
    assert gpu.trace.ended_out_of_memory == is_full
    assert (gpu.trace.failure is None) == is_full


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("cuda"),
        lambda m: m.to(torch.device("cuda")),
        lambda m: m.to(device="cuda"),
        lambda m: m.to(torch.device("cuda", 0), torch.float32),
        lambda m: m.to(0),
        lambda m: m.cuda(),
        lambda m: m.cuda(0),
    ],
)
def test_modules_move(gpu, move):
    module = move(nn.Linear(4, 4))
    assert module.weight.device == CUDA
    assert module.bias.is_cuda
    assert gpu.recorder.storages.live_bytes == 4 * 4 * 4 + 4 * 4


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: torch.tensor([5, 6], device="cuda"), [5, 6]),
        (lambda: torch.tensor(3, device="cuda"), 3),
        (lambda: torch.as_tensor([1, 2], device="cuda"), [1, 2]),
        (lambda: torch.ones(3).new_tensor([1, 2], device="cuda"), [1.0, 2.0]),
        (lambda: torch.zeros(3, device="cuda", dtype=torch.int32).new_tensor([1, 2]), [1, 2]),
        (lambda: torch.tensor(torch.tensor([7, 8], device="cuda")), [7, 8]),
    ],
)
def test_tensors_from_data(gpu, make, values):
    tensor = make()
    assert tensor.device == CUDA
    assert tensor.tolist() == values
    assert gpu.recorder.storages.live_bytes == tensor.numel() * tensor.element_size()


def test_tensors_from_data_under_a_device_context(gpu):
    with torch.device("cuda"):
        tensor = torch.tensor([1, 2])
    assert tensor.device == CUDA
    assert tensor.tolist() == [1, 2]


def test_a_moved_module_keeps_its_ties_and_its_optimizer(gpu):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters())
    module.to("cuda")
    assert module[1].weight is module[0].weight
    assert optimizer.param_groups[0]["params"][0] is module[0].weight
    module(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert module[0].weight.grad is not None
    assert optimizer.state[module[0].weight]["exp_avg"].is_cuda


def test_printing(gpu):
    known = torch.tensor([1, 2], device="cuda")
    assert str(known) == "tensor([1, 2], device='cuda:0')"
    unknown = torch.randn(3, device="cuda")
    assert repr(unknown) == "tensor(..., device='cuda:0', size=(3,), dtype=torch.float32)"
    loss = unknown.sum()
    assert f"{loss:.2f}" == "1.00"
    assert str(loss) == "tensor(1., device='cuda:0')"
    assert torch.allclose(unknown, unknown)
    assert repr(torch.zeros(2)) == "tensor([0., 0.])"


def test_host_tensors_indexed_by_device_tensors_are_a_mismatch(gpu):
    table = torch.arange(10)
    assert table[torch.arange(4, device="cuda")].tolist() == [0, 1, 2, 3]
    counts = torch.zeros(5)
    counts[torch.arange(2, device="cuda")] = 1.0
    assert counts.tolist() == [1, 1, 0, 0, 0]
    assert len(gpu.trace.mismatches) == 2


def test_device_tensors_indexed_by_host_tensors_are_fine(gpu):
    table = torch.arange(10, device="cuda")
    assert table[torch.tensor([1, 2])].tolist() == [1, 2]
    assert not gpu.trace.mismatches


@pytest.mark.parametrize("size", [9, 9000])
def test_unknown_numbers_are_finite(gpu, size):
    numbers = torch.randn(size, device="cuda")
    assert torch.isfinite(numbers).all().item() is True
    assert torch.isnan(numbers).any().item() is False
    assert numbers.isinf().any().item() is False


def test_the_trace_does_not_depend_on_the_seed():
    shapes = []
    for seed in range(3):
        torch.manual_seed(seed)
        with VirtualGpu(find_gpu("a100-80gb")):
            numbers = torch.randn(64, 8, device="cuda")
            chosen = torch.randint(0, 9, (50,), device="cuda")
            shapes.append((numbers[numbers > 0].shape, chosen[chosen > 4].shape))
    assert shapes[0] == shapes[1] == shapes[2]


def test_selection_by_a_mask_keeps_what_is_known(gpu):
    numbers = torch.arange(5, device="cuda")
    mask = numbers > 2
    assert numbers[mask].tolist() == [3, 4]
    assert numbers.masked_select(mask).tolist() == [3, 4]
    numbers[mask] = 9
    assert numbers.tolist() == [0, 1, 2, 9, 9]
    written = torch.zeros(5, dtype=torch.int64, device="cuda")
    torch.add(numbers, 1, out=written)
    assert written.tolist() == [1, 2, 3, 10, 10]
    assert torch.ones(2, dtype=torch.int32, device="cuda").view(torch.int16).tolist() == [1, 0, 1, 0]


def test_setting_an_element_to_a_number_allocates_nothing(gpu):
    tensor = torch.zeros(4, device="cuda")
    before = len(gpu.trace.storages)
    tensor[0] = 2.0
    assert len(gpu.trace.storages) == before
    assert tensor.tolist() == [2, 0, 0, 0]


def test_the_rest_of_torch_cuda(gpu):
    assert torch.device(0) == CUDA
    assert torch.accelerator.is_available()
    with torch.cuda.device(0):
        tensor = torch.ones(3, device=0)
    tensor.record_stream(torch.cuda.current_stream())
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 12
    assert torch.randn(3, device="cuda", generator=torch.Generator()).is_cuda
    with torch.cuda.nvtx.range("named"):
        torch.cuda.synchronize()


def test_grouped_matrix_products_in_float32(gpu):
    if not hasattr(torch.ops.aten, "_grouped_mm"):
        pytest.skip("this torch release has no _grouped_mm")
    tokens, weights = torch.ones(8, 16, device="cuda"), torch.ones(2, 16, 32, device="cuda")
    ends = torch.tensor([3, 8], dtype=torch.int32, device="cuda")
    result = torch.ops.aten._grouped_mm(tokens, weights, ends)
    assert result.shape == (8, 32)
    assert result.dtype is torch.float32


def test_backward_of_a_selection_by_mask(gpu):
    weight = nn.Parameter(torch.zeros(8, 4, device="cuda"))
    mask = torch.arange(8, device="cuda") > 4
    weight[mask].square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


def test_composite_operators_are_seen_inside_under_inference_mode():
    def operators(mode):
        with VirtualGpu(find_gpu("a100-80gb")) as gpu, mode():
            query = torch.randn(4, 16, 128, 64, device="cuda")
            mask = torch.ones(128, 128, device="cuda", dtype=torch.bool)
            scores = torch.where(mask, torch.einsum("bhqd,bhkd->bhqk", query, query), float("-inf"))
            nn.functional.linear(scores, torch.ones(5, 128, device="cuda"))
        return [(gpu.trace.op(storage), storage.num_bytes) for storage in gpu.trace.storages]

    assert operators(torch.inference_mode) == operators(torch.no_grad)


@pytest.mark.parametrize("trains", [True, False])
def test_a_linear_layer_adds_its_bias_in_place_where_it_is_no_single_product(gpu, trains):
    """native/Linear.cpp; under a mode C++ adds out of place. Seen in a recording of nn.MultiheadAttention."""
    layer = nn.Linear(8, 16).to("cuda")
    data = torch.randn(4, 3, 8, device="cuda").transpose(0, 1)
    begin = len(gpu.trace.storages)
    with torch.set_grad_enabled(trains):
        output = layer(data)
    made = [(gpu.trace.op(storage), storage.num_bytes) for storage in gpu.trace.storages[begin:]]
    assert made == [("aten.clone", 4 * 12 * 8), ("aten.mm", 4 * 12 * 16)]
    if trains:
        assert output.grad_fn.name() == "AddBackward0"
        output.sum().backward()
        assert layer.bias.grad.shape == (16,)
        assert layer.weight.grad.shape == (16, 8)


@pytest.mark.parametrize("size", [8, 1 << 20])
def test_saved_tensors_wait_in_pinned_host_memory(gpu, size):
    assert torch.empty(size, pin_memory=True).device.type == "cpu"
    weight = nn.Parameter(torch.ones(size, device="cuda"))
    before = gpu.recorder.storages.live_bytes
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        kept = (weight * 2).exp()
    assert kept.requires_grad
    # exp keeps its result, which is the one tensor that is still on the GPU.
    assert gpu.recorder.storages.live_bytes - before == 4 * size


def test_a_mask_is_filled_with_a_number_without_indices():
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        logits = torch.randn(4, 1000, device="cuda")
        labels = torch.arange(8, device="cuda")
        mask, few = logits > 0, labels < 3
        before = len(gpu.trace.storages)
        logits[mask] = float("-inf")
        logits[:, None][mask[:, None]] = 0
        labels[few] = -100
        assert len(gpu.trace.storages) == before
        assert labels.tolist() == [-100, -100, -100, 3, 4, 5, 6, 7]
        logits[mask] = torch.zeros((), device="cuda")  # a number on the GPU is assigned by indices
        assert "aten.nonzero" in {gpu.trace.op(storage) for storage in gpu.trace.storages[before:]}


def test_a_dropout_that_does_nothing_allocates_nothing():
    for mode in (torch.no_grad, torch.inference_mode):
        with VirtualGpu(find_gpu("a100-80gb")) as gpu, mode():
            data = torch.ones(4, 100, device="cuda")
            before = len(gpu.trace.storages)
            torch.nn.functional.dropout(data, 0.5, training=False)
            torch.nn.Dropout(0.5).eval()(data)
            assert len(gpu.trace.storages) == before


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_parameter_of_which_a_graph_is_made_already_moves(gpu, normed):
    module = normed(nn.Linear(4, 4)).to("cuda")
    assert {parameter.device for parameter in module.parameters()} == {CUDA}
    module(torch.ones(2, 4, device="cuda")).sum().backward()
    assert all(parameter.grad.is_cuda for parameter in module.parameters())


def test_hooks_of_a_parameter_move_with_it(gpu):
    module = nn.Linear(4, 4)
    called = []
    module.weight.register_hook(lambda gradient: called.append("gradient"))
    module.bias.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    module.cuda()(torch.ones(2, 4, device="cuda")).sum().backward()
    assert sorted(called) == ["accumulated", "gradient"]


@pytest.mark.parametrize("size", [64, 4096])
def test_gradients_from_the_gpu_for_masters_on_the_host(size):
    with VirtualGpu(find_gpu("a100-80gb")):
        weight = nn.Linear(size, size, device="cuda").weight
        known, unknown = weight.new_zeros(size, size).cpu().requires_grad_(), weight.detach().cpu().requires_grad_()
        weight.sum().backward()
        optimizer = torch.optim.AdamW([known, unknown])
        for gradient in (weight.grad.cpu(), torch.ones(size, size)):
            for master in (known, unknown):
                master.grad = gradient
                assert master.grad.device.type == "cpu" and master.grad.shape == weight.shape
            optimizer.step()
        known.grad = None
        assert known.grad is None


class Slice(torch.Tensor):
    """A part of a parameter that says itself where it is, as nanotron's ZeRO has it."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Slice:
        part = whole.view(-1)[2:6]
        made: Slice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, part.size(), strides=part.stride(), dtype=part.dtype, device=part.device
        )
        made.inner = part
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_subclass_that_says_it_is_on_the_gpu_is_copied_into(gpu, mode):
    whole, source = torch.zeros(10, dtype=torch.bfloat16, device="cuda"), torch.ones(4, device="cuda")
    with mode():
        part = Slice(whole)
        assert part.is_cuda
        before = torch.cuda.memory_allocated()
        part.copy_(source)
        assert whole.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
        assert torch.cuda.memory_allocated() == before
