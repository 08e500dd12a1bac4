"""Autocast in whole models, forward and backward: every operator's dtype follows the lists that torch documents.

Three truths, none of them memprof's own: the documented lists, as data; torch's own autocast, under which every call
that a model makes is made again on fake CUDA tensors; and for the cache of weights, for checkpoints and for backward,
torch's autocast on the CPU, whose lists agree for linear layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from tests.lanes import by_day
from tests.unit.virtual.streams import Called, Functions, Layout, Op, Operators, again_on_fake_cuda


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The lists of https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior, word by word.
LOWER_PRECISION = _names(
    """
    __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell
"""
)
FLOAT32 = _names(
    """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist
    cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss
    layer_norm log log_softmax log10 log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss
    nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus sum renorm tan triplet_margin_loss
"""
)
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot")

# What the documentation calls a function that torch.nn.functional calls by another name.
FUNCTIONS = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss_nd": "nll_loss",
    "linalg_vector_norm": "norm",
    "__rmatmul__": "matmul",
}
UNDOCUMENTED = {
    # aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32; missing in the documentation.
    "scaled_dot_product_attention": LOWER_PRECISION,
    "upsample_bilinear2d": FLOAT32,
    "upsample_nearest2d": FLOAT32,
    "normalize": FLOAT32,  # by a norm, which is documented
}
CASTS = {"to", "float", "half", "bfloat16", "type", "type_as", "double"}
MOVES = {
    "_to_copy",
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "clone",
    "permute",
    "reshape",
    "slice",
    "copy_",
}
ONE_DTYPE = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_prelu_kernel", "_prelu_kernel_backward"}
LOWER_BACKWARD = {"mm", "bmm", "convolution_backward", "_prelu_kernel_backward"}
FLOAT32_BACKWARD = {
    "native_layer_norm_backward",
    "native_group_norm_backward",
    "nll_loss_backward",
    "_softmax_backward_data",
    "linalg_vector_norm_backward",
    "upsample_bilinear2d_backward",
    "upsample_nearest2d_backward",
    "embedding_dense_backward",
}
HALF = [torch.bfloat16, torch.float16]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.act = nn.PReLU(16)
        self.groups = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        states = F.max_pool2d(F.relu(self.norm(self.stem(images))), 2)
        states = self.groups(self.act(self.down(states)))
        states = F.interpolate(F.interpolate(states, scale_factor=2, mode="bilinear"), scale_factor=2)
        states = F.dropout(self.up(states), 0.1)
        states = F.normalize(F.adaptive_avg_pool2d(states, 1).flatten(1), dim=1)
        return F.cross_entropy(self.head(states), target)


def conv_net() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    images, target = torch.randn(2, 3, 16, 16, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    return ConvNet(), lambda model: model(images, target)


def language_model(name: str, attention: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1
        )
        kind = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, max_position_embeddings=32,
        )  # fmt: skip
        kind = transformers.LlamaForCausalLM
    config._attn_implementation = attention
    ids = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
    return kind(config), lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]] = {
    "conv": conv_net,
    "gpt2": lambda: language_model("gpt2", "sdpa"),
    "gpt2 eager": lambda: language_model("gpt2", "eager"),
    "llama": lambda: language_model("llama", "sdpa"),
    "llama eager": lambda: language_model("llama", "eager"),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, dtype), marks=() if dtype == torch.bfloat16 else pytest.mark.nightly)
        for name, dtype in itertools.product(MODELS, HALF)
    ],
    ids=lambda case: f"{case[0]} {case[1]}",
)
def run(request: pytest.FixtureRequest) -> tuple[torch.dtype, list[Called], list[Op], dict[str, Any]]:
    """One training step: calls of torch functions in the forward, all operators, dtypes of the gradients."""
    name, dtype = request.param
    with VirtualGpu(find_gpu("a100-80gb")):
        model, loss_of = MODELS[name]()
        model.to("cuda").train()
        operators = Operators()
        functions = Functions(operators)
        with operators:
            with torch.autocast("cuda", dtype=dtype), functions:
                loss = loss_of(model)
            loss.backward()
        gradients = {path: (p.dtype, p.grad.dtype) for path, p in model.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(model.parameters()))
    return dtype, functions.calls, operators.ops, gradients


def documented(call: Called) -> frozenset[str] | None:
    """The list that a call is in, by the documentation: none for in-place calls, with `out` or with `dtype`."""
    name = FUNCTIONS.get(call.name, call.name)
    if call.arguments[1].get("out") is not None or explicit_dtypes(call):
        return None
    if name in UNDOCUMENTED:
        return UNDOCUMENTED[name]
    return next((members for members in (LOWER_PRECISION, FLOAT32, WIDEST) if name in members), None)


def explicit_dtypes(call: Called) -> list[torch.dtype]:
    return [value for value in _leaves(call.arguments) if isinstance(value, torch.dtype)]


def floats(tensors: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]


def test_every_forward_operator_follows_its_documented_list(run: Any) -> None:
    dtype, calls, _, _ = run
    met = set()
    for call in calls:
        members = documented(call)
        given = floats(value for value in _leaves(call.arguments) if isinstance(value, Layout))
        work = [op for op in call.ops if op.name not in MOVES]
        results = floats(call.ops[-1].outputs[:1])
        if not given or not results:
            continue  # integers and masks
        if explicit_dtypes(call):
            assert results == explicit_dtypes(call), call
            continue
        if members is None:
            # Its own dtype: nothing is cast, and a result has the dtype of an input.
            if call.name not in CASTS:
                assert all(op.name != "_to_copy" for op in call.ops), call
                assert results[0] in given, call
            continue
        met.add(FUNCTIONS.get(call.name, call.name))
        if members is LOWER_PRECISION:
            assert results == [dtype], call
            assert all(set(floats(op.inputs)) <= {dtype} for op in work), call
        elif members is FLOAT32:
            assert results == [torch.float32], call
        else:
            widest = torch.float32 if torch.float32 in given else dtype
            assert results == [widest], call
    # The lists that these models are meant to exercise are exercised.
    assert {"linear", "cross_entropy"} & met
    assert met & LOWER_PRECISION
    assert met & FLOAT32


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Layout) or not isinstance(value, (list, tuple, dict)):
        yield value
        return
    for part in value.values() if isinstance(value, dict) else value:
        yield from _leaves(part)


def test_every_operator_has_its_floats_in_one_dtype_where_its_kernel_needs_that(run: Any) -> None:
    for op in run[2]:
        if op.name in ONE_DTYPE:
            assert len(set(floats(op.inputs + op.outputs))) == 1, op


def test_every_backward_operator_runs_in_the_dtype_of_its_forward(run: Any) -> None:
    dtype, _, ops, _ = run
    backward = [op for op in ops if op.backward]
    met = {op.name for op in backward}
    assert met & LOWER_BACKWARD
    assert met & FLOAT32_BACKWARD
    for op in backward:
        if op.name in LOWER_BACKWARD or op.name.startswith("_scaled_dot_product"):
            assert floats(op.outputs[:1]) in ([dtype], []), op
            assert floats(op.inputs[:1]) == [dtype], op
        if op.name in FLOAT32_BACKWARD:
            assert set(floats(op.inputs + op.outputs)) <= {torch.float32}, op


def test_float32_weights_get_float32_gradients(run: Any) -> None:
    assert set(run[3].values()) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("dtype", by_day(HALF, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_call_runs_the_operators_of_torchs_own_autocast(name: str, dtype: torch.dtype) -> None:
    """Names, dtypes and shapes, casts included, in order. Weights are frozen: fake CUDA tensors have no gradient."""
    with VirtualGpu(find_gpu("a100-80gb")):
        model, loss_of = MODELS[name]()
        model.to("cuda").train().requires_grad_(False)
        operators = Operators()
        functions = Functions(operators)
        with torch.autocast("cuda", dtype=dtype), operators, functions:
            loss_of(model)
    compared, not_compared = 0, set()
    for call in functions.calls:
        actual, expected = call.ops, again_on_fake_cuda(call)
        if expected is None:
            assert documented(call) is None, call
            not_compared.add(call.name)
            continue
        if call.name == "scaled_dot_product_attention":  # chooses by the GPU: compared up to its choice
            casts = len(list(itertools.takewhile(lambda op: op.name == "_to_copy", actual)))
            actual, expected = actual[:casts], expected[:casts]
        assert [op[:3] for op in actual] == [op[:3] for op in expected], call
        compared += 1
    assert compared == len([call for call in functions.calls if call.name not in not_compared])
    assert not_compared <= {"__getitem__", "__bool__", "contiguous", "batch_norm"}


def test_binary_cross_entropy_is_refused() -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        chance, target = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(chance, target)
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                nn.BCELoss()(chance, target)
            with torch.autocast("cuda", enabled=False):
                assert F.binary_cross_entropy(chance, target).dtype is torch.float32
            assert F.binary_cross_entropy_with_logits(chance.half(), target).dtype is torch.float32


def test_a_forward_may_switch_autocast_off_inside() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = self.outer(x)
            with torch.autocast("cuda", enabled=False):
                second = self.inner(first.float())
            return first, second, self.outer(second)

    with VirtualGpu(find_gpu("a100-80gb")):
        model = Careful().to("cuda")
        operators = Operators()
        with operators, torch.autocast("cuda", dtype=torch.bfloat16):
            results = model(torch.ones(4, 8, device="cuda"))
        assert [result.dtype for result in results] == [torch.bfloat16, torch.float32, torch.bfloat16]
        # The weight of `outer` is cast once: the region inside does not end the one outside.
        assert sum(op.name == "_to_copy" and op.inputs[0].shape == (8, 8) for op in operators.ops) == 1


# -- the cache of weights, checkpoints, custom functions: as torch's autocast on the CPU -------------------------------


def _autocast(device: str, **kwargs: Any) -> Any:
    return torch.autocast(device, dtype=torch.bfloat16, **kwargs)


def _reuse(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        with _autocast(device):
            result = layer(layer(x))
        result.sum().backward()


def _no_grad(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    with _autocast(device), torch.no_grad():
        layer(layer(x))


def _no_grad_first(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    with _autocast(device):
        with torch.no_grad():
            layer(x)
        result = layer(x)
    if result.requires_grad:  # torch releases differ
        result.sum().backward()


def _inference(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode(), _autocast(device):
        layer(layer(layer(x)))


def _frozen(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    layer.requires_grad_(False)
    with _autocast(device):
        layer(layer(x))


def _nested(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    with _autocast(device):
        layer(x)
        with _autocast(device, enabled=False):
            layer(x)
        with _autocast(device):
            layer(x)
        layer(x)


def _cache_off(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    with _autocast(device, cache_enabled=False):
        layer(layer(x))


def _views_and_products(device: str, layer: nn.Linear, x: torch.Tensor) -> None:
    with _autocast(device):
        for _ in range(2):
            F.linear(x, layer.weight[:4])
            F.linear(x, layer.weight.t())
            F.linear(x, layer.weight * 1)


def _leaf_input(device: str, layer: nn.Module, x: torch.Tensor) -> None:
    leaf = torch.ones(4, 8, device=device, requires_grad=True)
    with _autocast(device):
        result = layer(leaf) + layer(leaf)
    result.sum().backward()


def _checkpointed(device: str, layer: nn.Module, x: torch.Tensor, *, use_reentrant: bool) -> None:
    block = nn.Sequential(layer, nn.GELU(), nn.Linear(8, 8, device=device))
    leaf = torch.ones(4, 8, device=device, requires_grad=True)
    with _autocast(device):
        result = layer(checkpoint(lambda value: block(block(value)), leaf, use_reentrant=use_reentrant))
    result.float().mean().backward()
    assert {p.grad.dtype for p in block.parameters()} == {torch.float32}


def _custom_function(device: str, layer: nn.Linear, x: torch.Tensor, *, cast_inputs: torch.dtype | None) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, cast_inputs=cast_inputs)
        def forward(ctx: Any, data: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(data, weight)
            assert torch.is_autocast_enabled(device) == (cast_inputs is None)
            return data @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            data, weight = ctx.saved_tensors
            assert torch.is_autocast_enabled(device) == (cast_inputs is None)
            return gradient @ weight.t(), data.t() @ gradient

    half = torch.ones(4, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    with _autocast(device):
        result = Product.apply(half, layer.weight)
    result.sum().backward()
    assert (half.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)


PROGRAMS: dict[str, Callable[..., None]] = {
    "reuse": _reuse,
    "no_grad": _no_grad,
    "no_grad first": _no_grad_first,
    "inference": _inference,
    "frozen": _frozen,
    "nested": _nested,
    "cache off": _cache_off,
    "views and products": _views_and_products,
    "leaf input": _leaf_input,
    "checkpoint": lambda *args: _checkpointed(*args, use_reentrant=False),
    "reentrant checkpoint": lambda *args: _checkpointed(*args, use_reentrant=True),
    "custom function": lambda *args: _custom_function(*args, cast_inputs=None),
    "custom function in float32": lambda *args: _custom_function(*args, cast_inputs=torch.float32),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_casts_are_those_of_torch_on_the_cpu(program: str) -> None:
    def stream(device: str) -> list[Any]:
        layer = nn.Linear(8, 8, device=device)
        operators = Operators()
        with operators:
            PROGRAMS[program](device, layer, torch.ones(4, 8, device=device))
        return [op[:4] for op in operators.ops]

    expected = stream("cpu")
    with VirtualGpu(find_gpu("a100-80gb")):
        actual = stream("cuda")
    assert actual == expected
    assert any(name in ("_to_copy", "to") for name, *_ in expected)
