"""Bytes of Apex's norms and optimizers."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import measured

GPU = find_gpu("a100-80gb")
ROWS, COLUMNS = 600, 512


@pytest.mark.parametrize("thrifty", [False, True])
@pytest.mark.parametrize(("name", "statistics"), [("FusedLayerNorm", 2), ("FusedRMSNorm", 1)])
def test_a_norm_keeps_a_number_a_row_and_sums_its_gradients_in_parts(
    gpu: VirtualGpu, name: str, statistics: int, thrifty: bool
) -> None:
    import apex

    norm = getattr(apex.normalization, name)(COLUMNS, memory_efficient=thrifty).to(torch.bfloat16).cuda()
    x = torch.empty(2, ROWS // 2, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    stays, _, out = measured(lambda: norm(x))
    kept = 1 if thrifty else statistics
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert stays == 2 * ROWS * COLUMNS + 4 * ROWS * kept
    gradient = torch.empty_like(out)
    peak = measured(lambda: out.backward(gradient))[1]
    # The statistics are outputs of the operator: zeros stand for their gradients.
    parameters = statistics
    zeros = 4 * ROWS * statistics
    assert peak == 2 * ROWS * COLUMNS + 2 * COLUMNS * parameters + 4 * 16 * COLUMNS * parameters + zeros


def test_a_mixed_norm_has_the_type_of_its_weight(gpu: VirtualGpu) -> None:
    from apex.normalization import MixedFusedLayerNorm

    norm = MixedFusedLayerNorm(COLUMNS).cuda()
    x = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    stays, _, out = measured(lambda: norm(x))
    assert out.dtype is torch.float32
    assert stays == 4 * ROWS * COLUMNS + 2 * 4 * ROWS
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.bfloat16


def test_autocast_casts_what_a_norm_is_given(gpu: VirtualGpu) -> None:
    from apex.normalization import FusedLayerNorm

    norm = FusedLayerNorm(COLUMNS).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        assert norm(torch.empty(4, COLUMNS, device="cuda")).dtype is torch.float16


def layer(dtype: torch.dtype) -> torch.nn.Linear:
    made = torch.nn.Linear(COLUMNS, ROWS, bias=False, device="cuda", dtype=dtype)
    made.weight.grad = torch.ones_like(made.weight)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_adam_has_moments_in_single_precision(gpu: VirtualGpu, dtype: torch.dtype) -> None:
    from apex.optimizers import FusedAdam

    model = layer(dtype)
    optimizer = FusedAdam(model.parameters())
    stays, peak, _ = measured(optimizer.step)
    number, copy = ROWS * COLUMNS, 0 if dtype is torch.float32 else dtype.itemsize
    assert (stays, peak) == (8 * number, 8 * number + copy * number)
    assert measured(optimizer.step)[:2] == (0, 0)
    assert optimizer.param_groups[0]["step"] == 2
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_adam_with_master_weights(gpu: VirtualGpu) -> None:
    from apex.optimizers import FusedAdam

    model = layer(torch.float16)
    stays, _, optimizer = measured(lambda: FusedAdam(model.parameters(), capturable=True, master_weights=True))
    assert stays == 4 * ROWS * COLUMNS + 4 + 4  # the learning rate, and the flag of overflows
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.float32


def test_lamb_takes_norms(gpu: VirtualGpu) -> None:
    from apex.optimizers import FusedLAMB

    model = layer(torch.float32)
    optimizer = FusedLAMB(model.parameters())
    assert measured(optimizer.step)[0] == 8 * ROWS * COLUMNS
    stays, peak, _ = measured(optimizer.step)
    chunks = -(-ROWS * COLUMNS // 65536)
    # Norms of both types and of all, of the parameter and of its update; while the last is made, what it is made of.
    norms = 4 * (1 + 1 + 1) + 4 * (1 + 1)
    assert (stays, peak) == (0, norms + 4 * (320 + chunks + 1 + 1))


def test_what_a_kernel_writes_is_unknown(gpu: VirtualGpu) -> None:
    from apex.optimizers import FusedSGD

    weight = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    weight.grad = torch.ones(4, device="cuda")
    assert not weight.any()
    FusedSGD([weight], lr=0.1, momentum=0.9).step()
    assert weight.tolist() == [1.0] * 4  # what an unknown number reads as


def test_what_has_no_stub_is_refused_where_it_is_used(gpu: VirtualGpu) -> None:
    import apex
    from apex import amp
    from apex.parallel import DistributedDataParallel

    assert apex.amp is amp
    with pytest.raises(MemprofError, match=r"uses apex\.amp\.init, which is not installed"):
        amp.init()
    with pytest.raises(MemprofError, match=r"apex\.parallel\.DistributedDataParallel"):
        DistributedDataParallel(torch.nn.Linear(2, 2))


MATRIX = COLUMNS * COLUMNS


class Layers(torch.nn.Module):
    """A matrix, and a batch norm of 512 weights and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(COLUMNS, COLUMNS, bias=False)
        self.norm = torch.nn.BatchNorm1d(COLUMNS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).float())


@pytest.mark.parametrize(
    ("level", "weights", "masters", "state"),
    [("O0", 4, 0, 8), ("O2", 2, 4, 8), ("O3", 2, 0, 4)],
)
def test_amp_casts_models_and_keeps_copies(gpu: VirtualGpu, level: str, weights: int, masters: int, state: int) -> None:
    from apex import amp

    model = Layers().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    norms = torch.float16 if level == "O3" else torch.float32
    assert (model.linear.weight.element_size(), model.norm.weight.dtype) == (weights, norms)
    x = torch.ones(ROWS, COLUMNS, device="cuda")
    for step in range(2):
        before = torch.cuda.memory_allocated()
        optimizer.zero_grad()
        out = model(x)
        assert out.dtype == torch.float32
        with amp.scale_loss(out.mean(), optimizer) as scaled:
            assert scaled.dtype == torch.float32
            scaled.backward()
        gradients = [p.grad for p in amp.master_params(optimizer)]
        assert all(gradient is not None for gradient in gradients)
        assert gradients[0].element_size() == (masters or weights)
        optimizer.step()
        del out, scaled, gradients
        if not step:
            gained = torch.cuda.memory_allocated() - before
            # The copy, two moments, and the gradient that the model keeps; the norm's own are small.
            assert gained == pytest.approx(MATRIX * (masters + state + weights), rel=0.02)
    assert torch.cuda.memory_allocated() == pytest.approx(before, abs=4 * MATRIX)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (65536.0 if level == "O2" else 1.0)


class Steps(torch.nn.Module):
    """A product in half precision, twice by one weight, and a loss in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(COLUMNS, COLUMNS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(self.linear(self.linear(x)), -1)


def test_amp_casts_around_functions_and_remembers_weights(gpu: VirtualGpu) -> None:
    from apex import amp

    before = torch.nn.functional.linear, torch.Tensor.__add__, torch.sum
    model = Steps().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0)
    assert model.linear.weight.dtype is torch.float32
    x = torch.ones(ROWS, COLUMNS, device="cuda")
    size = ROWS * COLUMNS
    stays, _, out = measured(lambda: model(x))
    assert out.dtype is torch.float32
    # The weight in half precision once; its input and the two products; the second cast up is what softmax is given.
    assert stays == 2 * MATRIX + 2 * size + 2 * size + 4 * size
    assert (out + torch.ones(ROWS, COLUMNS, device="cuda", dtype=torch.float16)).dtype is torch.float32
    with amp.disable_casts():
        assert model.linear(x).dtype is torch.float32
    with pytest.raises(NotImplementedError, match="in-place method exp_ on fp16"):
        torch.ones(4, device="cuda", dtype=torch.float16).exp_()
    with amp.scale_loss(out.mean(), optimizer) as scaled:
        scaled.backward()
    del out
    assert model.linear.weight.grad.dtype is torch.float32
    optimizer.step()
    assert before != (torch.nn.functional.linear, torch.Tensor.__add__, torch.sum)
    # Input, weight and gradient; the scaled loss, and flags of overflows of the loss, the optimizer and the handle.
    assert torch.cuda.memory_allocated() == 4 * (size + 2 * MATRIX) + 4 * 4


def test_amp_copies_the_weights_of_a_recurrent_layer_into_one_tensor(gpu: VirtualGpu) -> None:
    from apex import amp

    layer = torch.nn.LSTM(COLUMNS, COLUMNS).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer, optimizer = amp.initialize(layer, optimizer, opt_level="O1")
    first = len(gpu.trace.storages)
    out, _ = layer(torch.ones(5, 2, COLUMNS, device="cuda"))
    assert out.dtype is torch.float16
    weights = 2 * (8 * MATRIX + 8 * COLUMNS)
    assert [one.num_bytes for one in gpu.trace.storages[first:]].count(weights) == 1
    out.sum().backward()
    assert all(weight.grad.dtype is torch.float32 for weight in layer.parameters())


def test_functions_are_as_they_were_when_the_run_has_ended() -> None:
    before = torch.nn.functional.linear, torch.Tensor.__add__, torch.nn.modules.rnn._VF
    with VirtualGpu(GPU, extensions=[StubExtension()]):
        from apex import amp

        model = torch.nn.Linear(4, 4).cuda()
        amp.register_float_function(torch, "sigmoid")
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert torch.sigmoid(torch.ones(4, device="cuda", dtype=torch.float16)).dtype is torch.float32
    assert (torch.nn.functional.linear, torch.Tensor.__add__, torch.nn.modules.rnn._VF) == before
    assert torch.sigmoid(torch.ones(4)).dtype is torch.float32


def test_functions_are_patched_at_one_level(gpu: VirtualGpu) -> None:
    from apex import amp

    model = torch.nn.Linear(4, 4).cuda()
    with pytest.raises(MemprofError, match="patch_torch_functions=True at O2"):
        amp.initialize(model, opt_level="O2", patch_torch_functions=True)
