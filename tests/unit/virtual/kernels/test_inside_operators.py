"""What operators allocate inside: composites that arrive whole, losses before their reduction, formulas in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu

N = 4096
FLOATS, BOOLS = 4 * N, N


@pytest.fixture
def gpu():
    with VirtualGpu(find_gpu("a100-80gb"), tensors_only=True) as gpu:
        yield gpu


class Since:
    def __init__(self, gpu):
        self.gpu = gpu
        self.first = len(gpu.trace.events)

    def made(self):
        trace = self.gpu.trace
        events = [event for event in trace.events[self.first :] if event.kind is EventKind.ALLOC]
        return [(trace.storages[event.ref].num_bytes, trace.op(trace.storages[event.ref])[5:]) for event in events]

    def sizes(self):
        return [size for size, _ in self.made()]


def leaf(*shape):
    return torch.randn(*(shape or (N,)), device="cuda", requires_grad=True)


# -- composites with a derivative of their own -----------------------------------------------------------------------


def test_binary_cross_entropy_with_logits_shows_its_temporaries(gpu):
    logits, target = torch.randn(N, device="cuda"), torch.rand(N, device="cuda")
    since = Since(gpu)
    nn.functional.binary_cross_entropy_with_logits(logits, target)
    # The releases have different formulas; all of them have 1 - y, more than one temporary, and a mean at the end.
    *temporaries, last = since.sizes()
    assert len(temporaries) > 1 and set(temporaries) == {FLOATS} and last == 4
    assert gpu.recorder.storages.live_bytes == 2 * FLOATS


def test_logsumexp_takes_a_difference_as_large_as_the_input(gpu):
    data = torch.randn(8, N, device="cuda")
    since = Since(gpu)
    torch.logsumexp(data, 1)
    assert since.made() == [(32, "amax"), (32, "abs"), (8, "eq"), (8 * FLOATS, "sub"), (32, "sum")]


def test_operators_that_make_their_result_alone_keep_their_name(gpu):
    data = torch.randn(N, device="cuda")
    since = Since(gpu)
    torch.zeros_like(data), data.clone(), data.sum()
    assert since.made() == [(FLOATS, "zeros_like"), (FLOATS, "clone"), (4, "sum")]


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss])
def test_a_structured_loss_makes_two_and_keeps_one(gpu, loss):
    data, target = torch.randn(N, device="cuda"), torch.rand(N, device="cuda")
    before, since = gpu.recorder.storages.live_bytes, Since(gpu)
    result = loss(data, target)
    assert result.shape == () and since.sizes() == [FLOATS, FLOATS]
    assert gpu.recorder.storages.live_bytes - before == FLOATS
    del result
    assert gpu.recorder.storages.live_bytes == before


def test_binary_cross_entropy_keeps_memory_as_large_as_its_input(gpu):
    data, target = torch.rand(N, device="cuda"), torch.rand(N, device="cuda")
    before, since = gpu.recorder.storages.live_bytes, Since(gpu)
    result = nn.functional.binary_cross_entropy(data, target)
    assert result.shape == () and since.sizes() == [FLOATS, 4]
    assert gpu.recorder.storages.live_bytes - before == FLOATS


def test_huber_loss_keeps_the_number_alone(gpu):
    data, target = torch.rand(N, device="cuda"), torch.rand(N, device="cuda")
    before, since = gpu.recorder.storages.live_bytes, Since(gpu)
    result = nn.functional.huber_loss(data, target)
    assert since.sizes() == [FLOATS, 4]
    assert gpu.recorder.storages.live_bytes - before == result.element_size()


def test_without_reduction_a_loss_is_one_tensor(gpu):
    data, target = torch.rand(N, device="cuda"), torch.rand(N, device="cuda")
    since = Since(gpu)
    for loss in (nn.functional.mse_loss, nn.functional.huber_loss, nn.functional.binary_cross_entropy):
        loss(data, target, reduction="none")
    assert since.sizes() == [FLOATS] * 3


# -- formulas that are in place on a plain run -------------------------------------------------------------------------


def test_the_gradient_of_a_maximum_has_three_masks(gpu):
    data = leaf()
    largest = data.max()
    since = Since(gpu)
    largest.backward()
    # isnan of input and value, equality; the two "and" and "or" are in place.
    assert since.sizes().count(BOOLS) == 2 and "logical_and" not in {op for _, op in since.made()}


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch has another formula from 2.14 or 2.15 on")
def test_clamping_by_tensors_combines_masks_in_place(gpu):
    data = leaf()
    low, high = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")
    clamped = torch.clamp(data, low, high)
    since = Since(gpu)
    clamped.sum().backward()
    assert since.sizes().count(BOOLS) == 2


def test_a_formula_that_adds_to_its_own_temporary_makes_a_new_one(gpu):
    data = leaf()
    variance, mean = torch.var_mean(data)
    since = Since(gpu)
    torch.autograd.backward([variance, mean], [torch.ones_like(variance), torch.ones_like(mean)])
    assert (FLOATS, "add") in since.made()


def test_gradients_of_one_node_for_one_tensor_are_added_in_place(gpu):
    data = leaf()
    squared = data * data
    since = Since(gpu)
    squared.backward(torch.ones_like(squared))
    assert [op for _, op in since.made()] == ["ones_like", "mul", "mul"]


# -- what torch takes apart for meta tensors ---------------------------------------------------------------------------


def pieces_of_mish():
    seen = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    data = torch.ones(4, device="meta", requires_grad=True)
    result = nn.functional.mish(data)
    with Seen():
        result.backward(torch.empty_like(result))
    return seen


def test_mish_has_one_backward_kernel_while_the_gpu_is_active():
    outside = pieces_of_mish()
    assert "aten::tanh" in outside
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        data = leaf()
        result = nn.functional.mish(data)
        since = Since(gpu)
        result.backward(torch.ones_like(result))
        assert [op for _, op in since.made()] == ["ones_like", "mish_backward"]
    assert pieces_of_mish() == outside, "the kernel for meta tensors stayed behind"


# -- selections and the rest -------------------------------------------------------------------------------------------


def test_several_dimensions_are_rolled_one_by_one(gpu):
    data = torch.randn(4, N, device="cuda")
    since = Since(gpu)
    torch.roll(data, (1, 2), (0, 1))
    assert since.sizes() == [4 * FLOATS, 4 * FLOATS]


def test_a_mask_selects_by_positions(gpu):
    data = torch.arange(N, device="cuda")
    chosen = data < 100
    since = Since(gpu)
    assert torch.masked_select(data, chosen).shape == (100,)
    assert since.made() == [(800, "nonzero"), (800, "index")]


def test_the_median_of_all_is_taken_from_a_sorted_copy(gpu):
    data = torch.randn(8, N, device="cuda")
    since = Since(gpu)
    assert data.median().shape == ()
    assert since.sizes()[:2] == [8 * FLOATS, 16 * FLOATS]  # values and positions


def test_nonzero_elements_are_counted_by_a_mask(gpu):
    data = torch.randn(8, N, device="cuda")
    since = Since(gpu)
    torch.count_nonzero(data, 1)
    assert since.sizes() == [8 * BOOLS, 64]


def test_a_copy_may_be_asked_for_by_position(gpu):
    data = torch.randn(N, device="cuda")
    since = Since(gpu)
    copied = data.to(torch.float32, False, True)
    assert since.sizes() == [FLOATS] and copied.is_cuda
    assert data.to("cuda", torch.float32, True) is data


def test_factors_of_a_matrix_have_a_layout_though_torch_knows_none(gpu):
    factored, factors = torch.geqrf(torch.randn(3, 8, 5, device="cuda"))
    assert (factored.shape, factored.stride(), factors.shape) == ((3, 8, 5), (40, 1, 8), (3, 5))


def test_what_writes_an_argument_may_return_a_new_tensor_too(gpu):
    data = torch.randn(N, device="cuda")
    for _ in range(2):
        since = Since(gpu)
        result = nn.functional.rrelu(data, training=True)
        assert since.sizes() == [FLOATS, FLOATS] and result.is_cuda  # the noise and the result


def test_an_operator_in_python_allocates_what_its_body_does() -> None:
    @torch.library.custom_op("memprof_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(4)
        return wide[: x.numel()].clone()

    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        x = torch.empty(1 << 20, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = doubled(x)
        assert made.shape == x.shape
        assert torch.cuda.memory_allocated() - before == 4 << 20
        assert torch.cuda.max_memory_allocated() - before == 5 * 4 << 20


def test_of_an_operator_in_python_the_gpus_body_runs() -> None:
    @torch.library.custom_op("memprof_test::by_device", mutates_args=(), device_types="cpu")
    def by_device(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("that of the host")

    @by_device.register_kernel("cuda")
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])

    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        assert by_device(torch.empty(8, device="cuda")).shape == (16,)


def test_elements_are_repeated_in_their_dimension_where_autograd_is_passed_by() -> None:
    """The overload with a number is a composite, which a body in Python meets whole."""

    @torch.library.custom_op("memprof_test::repeated", mutates_args=())
    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(3, -1)

    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        assert repeated(torch.empty(8, 2, device="cuda")).shape == (8, 6)
