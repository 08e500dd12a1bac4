"""Programs that train on the host, or partly there: each runs on the virtual GPU as it does in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import memprof
from tests.lanes import by_day

# Width and rows, by what has the 1 MiB from which host tensors are virtual.
SIZES = {"all below": (16, 8), "batch above": (16, 1 << 16), "weights above": (1024, 8)}
# Of (width of the model, rows of the batch, dtype, device of the other part): what holds a gradient.
Program = Callable[[int, int, torch.dtype, str], list[torch.Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def linear(width: int, dtype: torch.dtype, device: str = "cpu") -> nn.Linear:
    return nn.Linear(width, width, dtype=dtype, device=device)


def batch(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(rows, width, dtype=dtype, device=device)


def held(*models: nn.Module) -> list[torch.Tensor]:
    return [parameter for model in models for parameter in model.parameters()]


@program
def whole_model(width, rows, dtype, device):
    net = nn.Sequential(linear(width, dtype), nn.LayerNorm(width, dtype=dtype), nn.GELU(), linear(width, dtype))
    net(batch(rows, width, dtype)).square().mean().backward()
    return held(net)


@program
def embedding_on_the_host(width, rows, dtype, device):
    table, net = nn.Embedding(rows, width, dtype=dtype), linear(width, dtype, device)
    net(table(torch.randint(0, rows, (4, 4))).to(device)).sum().backward()
    return held(table, net)


@program
def head_on_the_host(width, rows, dtype, device):
    net, head = linear(width, dtype, device), linear(width, dtype)
    head(net(batch(rows, width, dtype, device)).cpu()).sum().backward()
    return held(net, head)


@program
def middle_on_the_host(width, rows, dtype, device):
    first, middle, last = linear(width, dtype, device), linear(width, dtype), linear(width, dtype, device)
    last(middle(first(batch(rows, width, dtype, device)).cpu()).relu().to(device)).sum().backward()
    return held(first, middle, last)


@program
def loss_on_the_host(width, rows, dtype, device):
    net = linear(width, dtype, device)
    output = net(batch(rows, width, dtype, device)).cpu().float()
    nn.functional.cross_entropy(output, torch.randint(0, width, (rows,))).backward()
    return held(net)


@program
def weight_through_the_host(width, rows, dtype, device):
    weight = nn.Parameter(torch.randn(width, width, dtype=dtype, device=device))
    (batch(rows, width, dtype, device) @ (weight.cpu() * 2).to(device)).sum().backward()
    return [weight]


@program
def weight_of_the_host_used_elsewhere(width, rows, dtype, device):
    weight = nn.Parameter(torch.randn(width, width, dtype=dtype))
    (batch(rows, width, dtype, device) @ weight.to(device)).sum().backward()
    return [weight]


@program
def accumulation(width, rows, dtype, device):
    net, shift = linear(width, dtype), nn.Parameter(torch.zeros(width, dtype=dtype))
    for _ in range(2):
        (net(batch(rows, width, dtype)) + shift).sum().backward()
    (shift * 2).sum().backward()
    return [*held(net), shift]


@program
def unused_in_one_pass(width, rows, dtype, device):
    large, small = nn.Parameter(torch.randn(rows, width, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype))
    small.sum().backward()
    (large.sum() * small).sum().backward()
    return [large, small]


@program
def gradient_given(width, rows, dtype, device):
    net = linear(width, dtype)
    output = net(batch(rows, width, dtype))
    output.backward(torch.tensor([1.0]).to(dtype).expand(rows, width).contiguous())
    small = nn.Parameter(torch.ones(width, dtype=dtype))
    (small * 2).backward(net(batch(rows, width, dtype)).sum(0).detach())
    return [*held(net), small]


@program
def gradients_asked(width, rows, dtype, device):
    net, weight = linear(width, dtype), nn.Parameter(torch.ones(width, dtype=dtype))
    output = net(batch(rows, width, dtype)) * weight
    given = torch.ones(1, width, dtype=dtype).repeat(rows, 1)
    inputs = [weight, *held(net)]
    for one, gradient in zip(inputs, torch.autograd.grad(output, inputs, given), strict=True):
        one.grad = gradient
    return inputs


@program
def recomputed(width, rows, dtype, device):
    net, head, weight = linear(width, dtype, device), linear(width, dtype), nn.Parameter(torch.ones(width, dtype=dtype))
    for reentrant in (False, True):
        hidden = checkpoint(
            lambda x: head(net(x).cpu()) * weight,
            batch(rows, width, dtype, device).requires_grad_(),
            use_reentrant=reentrant,
        )
        hidden.sum().backward()
    return [*held(net, head), weight]


@program
def hooks(width, rows, dtype, device):
    net, weight = linear(width, dtype), nn.Parameter(torch.ones(width, dtype=dtype))
    weight.register_hook(lambda gradient: gradient * 2)
    net.weight.register_hook(lambda gradient: torch.ones(gradient.shape, dtype=gradient.dtype))
    net.bias.register_hook(lambda gradient: torch.tensor([1.0] * width, dtype=dtype))
    weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad * 0.5))
    output = net(batch(rows, width, dtype)) * weight
    output.retain_grad()
    output.register_hook(lambda gradient: gradient.clone())
    output.sum().backward()
    return [*held(net), weight, output]


@program
def hooks_of_modules(width, rows, dtype, device):
    net, head, last = linear(width, dtype, device), linear(width, dtype), nn.Linear(width, 4, dtype=dtype)
    head.register_full_backward_hook(lambda module, given, _: (torch.ones(given[0].shape, dtype=dtype),))
    head.register_full_backward_hook(lambda module, given, _: None)
    last.register_full_backward_pre_hook(lambda module, given: (torch.ones(given[0].shape, dtype=dtype),))
    net.register_full_backward_hook(lambda module, given, _: (given[0] * 2,))
    data = batch(rows, width, dtype, device).requires_grad_()
    last(head(net(data).cpu())).sum().backward()
    return held(net, head, last)


@program
def twice_differentiated(width, rows, dtype, device):
    net, weight = linear(width, dtype), nn.Parameter(torch.ones(width, dtype=dtype))
    data = batch(rows, width, dtype).requires_grad_()
    output = net(data * weight).tanh().sum()
    (gradient,) = torch.autograd.grad(output, data, create_graph=True)
    (of_weight,) = torch.autograd.grad(output, weight, create_graph=True)
    (gradient.square().sum() + (of_weight * weight).square().sum()).backward()
    return [*held(net), weight]


@program
def twice_differentiated_between(width, rows, dtype, device):
    net, weight = linear(width, dtype, device), nn.Parameter(torch.ones(width, dtype=dtype))
    data = batch(rows, width, dtype, device).requires_grad_()
    output = (net(data).cpu() * weight).tanh().sum()
    (gradient,) = torch.autograd.grad(output, data, create_graph=True)
    gradient.square().sum().backward()
    return [net.weight, weight]


class Offloaded(torch.autograd.Function):
    """A product that the host does, by hand."""

    @staticmethod
    def forward(ctx, data, weight):
        ctx.save_for_backward(data.cpu(), weight)
        return (data.cpu() @ weight).to(data.device)

    @staticmethod
    def backward(ctx, gradient):
        data, weight = ctx.saved_tensors
        there = gradient.cpu()
        return (there @ weight.t()).to(gradient.device), data.t() @ there


@program
def offloaded_by_hand(width, rows, dtype, device):
    net, weight = linear(width, dtype, device), nn.Parameter(torch.randn(width, width, dtype=dtype))
    narrow = nn.Parameter(torch.randn(width, 2, dtype=dtype))
    hidden = Offloaded.apply(net(batch(rows, width, dtype, device)), weight)
    Offloaded.apply(hidden, narrow).sum().backward()
    return [*held(net), weight, narrow]


class MadeAnew(torch.autograd.Function):
    """Its gradients are tensors that nothing else gave."""

    @staticmethod
    def forward(ctx, data, weight):
        ctx.shapes = data.shape, weight.shape
        return data * weight

    @staticmethod
    def backward(ctx, gradient):
        dtype = gradient.dtype
        return torch.ones(ctx.shapes[0], dtype=dtype), torch.ones(ctx.shapes[1], dtype=dtype)


@program
def gradients_made_anew(width, rows, dtype, device):
    data, weight = nn.Parameter(batch(rows, width, dtype)), nn.Parameter(torch.ones(width, dtype=dtype))
    MadeAnew.apply(data, weight).sum().backward()
    return [data, weight]


@program
def delta_by_token(width, rows, dtype, device):
    low, up = (nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((width, 2), (2, width)))
    data = batch(2, width, dtype, device)
    delta = torch.einsum("br,dr,rf->bdf", (data @ low.to(device)).cpu(), low.cpu(), up.cpu())
    torch.bmm(data[:, None], delta.to(device)).sum().backward()
    return [low, up]


@program
def assigned(width, rows, dtype, device):
    whole, part = torch.zeros(rows, width, dtype=dtype), nn.Parameter(torch.ones(2, width, dtype=dtype))
    whole[:2] = part
    whole[torch.tensor([4, 5])] = part * 2
    source = nn.Parameter(batch(rows, width, dtype))
    total = torch.zeros(width, dtype=dtype)
    total += source.sum(0)
    total.add_(part[0])
    slot = torch.zeros(2, width, dtype=dtype)
    slot[0] = source[0]
    slot[torch.tensor([1])] = source[1:2]
    slot.copy_(source[2:4])
    (whole.sum() + total.sum() + slot.sum()).backward()
    return [part, source]


@program
def joined(width, rows, dtype, device):
    large, small = nn.Parameter(batch(rows, width, dtype)), nn.Parameter(torch.ones(1, width, dtype=dtype))
    one = nn.Parameter(torch.ones((), dtype=dtype))
    (torch.cat([large, small]) * one).logsumexp(0).sum().backward()
    return [large, small, one]


@program
def made_of_numbers(width, rows, dtype, device):
    listed = nn.Parameter(torch.tensor([[1.0] * width] * rows, dtype=dtype))
    listed[torch.arange(2)].gather(1, torch.zeros(2, 1, dtype=torch.long)).sum().backward()
    (listed.cumsum(0).sum() + nn.functional.embedding(torch.arange(2), listed).sum()).backward()
    return [listed]


@program
def recurrent(width, rows, dtype, device):
    net = nn.LSTM(width, 8)
    net(torch.randn(4, max(1, rows // 4), width))[0].sum().backward()
    return held(net)


@program
def copied_to_the_gpu(width, rows, dtype, device):
    net = nn.Sequential(linear(width, dtype), linear(width, dtype))
    replica = copy.deepcopy(net).to(device)
    replica(batch(rows, width, dtype, device)).sum().backward()
    for own, its in zip(net.parameters(), replica.parameters(), strict=True):
        own.grad = its.grad.cpu()
    torch.optim.AdamW(net.parameters()).step()
    with torch.no_grad():
        for own, its in zip(net.parameters(), replica.parameters(), strict=True):
            its.copy_(own)
    return [*held(net), *held(replica)]


@program
def attention(width, rows, dtype, device):
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=dtype)
    net(batch(rows, 16, dtype).unflatten(0, (-1, 8))).sum().backward()
    return held(net)


@program
def convolution(width, rows, dtype, device):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, dtype=dtype), nn.BatchNorm2d(8, dtype=dtype), nn.MaxPool2d(2))
    net(torch.randn(2 if rows < 16 else 32, 3, 64, 64, dtype=dtype)).sum().backward()
    return held(net)


CASES = [(name, size, dtype) for name in PROGRAMS for size in SIZES for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    by_day(CASES, *(case for case in CASES if case[2] == "float32"), *[c for c in CASES if c[2] != "float32"][::4]),
)
def test_gradients_are_where_plain_torch_has_them(name: str, size: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    expected = [described(one) for one in PROGRAMS[name](*SIZES[size], kind, "cpu")]
    with memprof.virtual_gpu("a100-80gb"):
        made = PROGRAMS[name](*SIZES[size], kind, "cuda")
        assert [described(one) for one in made] == expected
        for one in made:
            assert one.grad is not None and one.grad.device == one.device
            one.grad.add_(one.grad)


def described(one: torch.Tensor) -> tuple[object, ...]:
    assert one.grad is not None
    return one.shape, one.dtype, one.grad.shape, one.grad.dtype


class Elsewhere(torch.autograd.Function):
    """Its gradient is on the device that it is told."""

    @staticmethod
    def forward(ctx, rows, data, device):
        ctx.rows, ctx.device = rows, device
        return data * 2

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.ones(gradient.shape, device=ctx.device), None


def of_a_function(data, device):
    Elsewhere.apply(len(data), data, device).sum().backward()


def of_a_function_inside(data, device):
    Elsewhere.apply(len(data), data * 2, device).sum().backward()


class ByName(torch.autograd.Function):
    """The same, of what may be given by keyword."""

    @staticmethod
    def forward(factor, data, device="cpu"):
        return data * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.device = inputs[2]

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.ones(gradient.shape, device=ctx.device), None


def of_a_function_by_keyword(data, device):
    ByName.apply(2, device=device, data=data).sum().backward()


def given_to_backward(data, device):
    (data * 2).backward(torch.ones(data.shape, device=device))


def of_a_hook(data, device):
    def moved(gradient):
        return torch.ones(gradient.shape, device=device)

    data.register_hook(moved)
    (data * 2).sum().backward()


class Once(Elsewhere):
    """The same, of a backward that is not differentiated."""

    backward = staticmethod(once_differentiable(Elsewhere.backward))


def of_a_function_once(data, device):
    Once.apply(len(data), data, device).sum().backward()


class Boxed(Elsewhere):
    """The same, of a backward that is given its gradients in a list, and empties it."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx, gradients):
        return None, torch.ones(gradients.pop().shape, device=ctx.device), None


def of_a_function_boxed(data, device):
    Boxed.apply(len(data), data, device).sum().backward()


class Scale(nn.Module):
    def forward(self, data):
        return data * 2


def of_a_hook_of_a_module(data, device):
    net = Scale()
    net.register_full_backward_hook(lambda module, given, _: (torch.ones(given[0].shape, device=device),))
    net(data).sum().backward()


def of_a_hook_before_a_module(data, device):
    net = Scale()
    net.register_full_backward_pre_hook(lambda module, given: (torch.ones(given[0].shape, device=device),))
    net(data).sum().backward()


def of_a_hook_of_all_modules(data, device):
    hook = nn.modules.module.register_module_full_backward_hook(
        lambda module, given, _: (torch.ones(given[0].shape, device=device),)
    )
    try:
        Scale()(data).sum().backward()
    finally:
        hook.remove()


def assigned_by_hand(data, device):
    data.grad = torch.ones(data.shape, device=device)


OF_A_HOOK = "hook 'hook' has changed the type of value (was {} got {})"
IN_A_FUNCTION = "Function ElsewhereBackward returned an invalid gradient at index 0 - expected device {} but got {}"
REFUSED: dict[Callable[[torch.Tensor, str], None], str] = {
    of_a_function: IN_A_FUNCTION,
    of_a_function_inside: IN_A_FUNCTION,
    of_a_function_by_keyword: IN_A_FUNCTION.replace("Elsewhere", "ByName"),
    given_to_backward: "invalid gradient at index 0 - expected device {} but got {}",
    of_a_function_once: IN_A_FUNCTION.replace("Elsewhere", "Once"),
    of_a_function_boxed: IN_A_FUNCTION.replace("Elsewhere", "Boxed"),
    of_a_hook: OF_A_HOOK.replace("'hook'", "'moved'"),
    of_a_hook_of_a_module: OF_A_HOOK,
    of_a_hook_before_a_module: OF_A_HOOK,
    of_a_hook_of_all_modules: OF_A_HOOK,
    assigned_by_hand: "attempting to assign a gradient with device type '{1}' to a tensor with device type '{0}'. "
    "Please ensure that the gradient and the tensor are on the same device",
}


@pytest.mark.parametrize("rows", [4, 1 << 18], ids=["real", "virtual"])
@pytest.mark.parametrize("ends", [("cuda:0", "cpu"), ("cpu", "cuda:0")], ids=" from ".join)
@pytest.mark.parametrize("hands", REFUSED)
def test_a_gradient_from_another_device_is_refused_as_on_a_real_gpu(
    hands: Callable[[torch.Tensor, str], None], ends: tuple[str, str], rows: int
) -> None:
    named = ends
    if "hook" in REFUSED[hands]:
        named = tuple("torch.FloatTensor" if end == "cpu" else "torch.cuda.FloatTensor" for end in ends)
    elif hands is assigned_by_hand:
        named = tuple(end.removesuffix(":0") for end in ends)
    with memprof.virtual_gpu("a100-80gb"), pytest.raises(RuntimeError) as raised:
        hands(torch.randn(rows, device=ends[0], requires_grad=True), ends[1])
    assert str(raised.value) == REFUSED[hands].format(*named)


@pytest.mark.parametrize("rows", [4, 1 << 18], ids=["real", "virtual"])
@pytest.mark.parametrize("ends", [("cuda:0", "cpu"), ("cpu", "cuda:0")], ids=" from ".join)
def test_a_gradient_without_dimensions_is_moved_as_on_a_real_gpu(ends: tuple[str, str], rows: int) -> None:
    with memprof.virtual_gpu("a100-80gb"):
        data = torch.randn(rows, device=ends[0], requires_grad=True)
        data.sum().backward(torch.ones(rows, device=ends[1]).sum())
        Elsewhere.apply(1, data.sum(), ends[1]).backward()
        assert data.grad is not None and str(data.grad.device) == ends[0]


def test_a_hook_may_return_nothing() -> None:
    with memprof.virtual_gpu("a100-80gb"):
        data, seen = torch.randn(4, device="cuda", requires_grad=True), []
        data.register_hook(lambda gradient: seen.append(gradient.device))
        data.sum().backward()
        assert [str(device) for device in seen] == ["cuda:0"]
        assert data.grad is not None


@pytest.mark.parametrize("rows", [4, 1 << 16], ids=["real", "virtual"])
def test_gradients_come_in_the_order_of_plain_torch(rows: int) -> None:
    def order(device: str) -> list[str]:
        seen: list[str] = []
        first = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16))
        last, scale = nn.Linear(16, 2, device=device), nn.Parameter(torch.ones(16))
        net = nn.ModuleDict({"first": first, "last": last})
        net.register_parameter("scale", scale)
        for name, one in net.named_parameters():
            one.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        last((first(torch.randn(rows, 16)) * scale).to(device)).sum().backward()
        return seen

    plain = order("cpu")
    with memprof.virtual_gpu("a100-80gb"):
        assert order("cuda") == plain


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def doubled(x):
    return Doubled.apply(x)


def test_torchscript_calls_a_function_as_it_does_alone() -> None:
    """It reads the signature of `Function.apply`, and takes no annotation that is a string."""
    with memprof.virtual_gpu("h100-80gb"):
        assert torch.jit.script(doubled)(torch.ones(3, device="cuda")).device.type == "cuda"


def test_a_spectrum_of_a_large_host_tensor_takes_a_small_window() -> None:
    """C++ compares their devices: one is virtual, the other real."""
    with memprof.virtual_gpu("h100-80gb"):
        window = torch.hann_window(1200)
        spectrum = torch.stft(torch.randn(1 << 18), 1200, 160, window=window, return_complex=True)
        assert (spectrum.shape, spectrum.device.type) == ((601, 1639), "cpu")
        assert torch.istft(spectrum, 1200, 160, window=window).device.type == "cpu"
