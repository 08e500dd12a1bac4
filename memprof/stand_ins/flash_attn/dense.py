"""flash_attn.ops.fused_dense and ops.activations: products with what comes after them in one call.

Sources: flash_attn/ops/fused_dense.py and ops/activations.py of Dao-AILab/flash-attention@v2.8.3. What is compiled
there by torch.jit.script runs operator by operator, as its first call does. Groups of several processes are not known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memprof.stand_ins.flash_attn import extensions
from memprof.stand_ins.registry import stand_in
from memprof.stand_ins.tools import kernel, on_card, refused

_MODULE = "flash_attn.ops.fused_dense"
_ACTIVATIONS = ("gelu_approx", "relu", "sqrelu")
_HALF = (torch.float16, torch.bfloat16)


def _public(name: str) -> Callable[[Any], Any]:
    source = "Dao-AILab/flash-attention@v2.8.3:flash_attn/ops/fused_dense.py, csrc/fused_dense_lib/fused_dense.cpp"
    return stand_in(f"{_MODULE}.{name}", source=source)


def _activation(name: str) -> Callable[[Any], Any]:
    source = "Dao-AILab/flash-attention@v2.8.3:flash_attn/ops/activations.py"
    return stand_in(f"flash_attn.ops.activations.{name}", source=source)


@_activation("gelu_bwd")
def gelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """By several operators: each makes a tensor of its own."""
    tanh_out = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    ff = 0.5 * x * ((1 - tanh_out * tanh_out) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh_out)
    return (ff * g).to(dtype=x.dtype)


@_activation("relu_bwd")
def relu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A comparison and a choice."""
    return torch.where(x >= 0, g, 0.0).to(dtype=x.dtype)


@_activation("sqrelu_fwd")
def sqrelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """ReLU, and its square."""
    r = functional.relu(x)
    return (r * r).to(dtype=x.dtype)


@_activation("sqrelu_bwd")
def sqrelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """By three operators."""
    return (2.0 * g * functional.relu(x)).to(dtype=x.dtype)


@_activation("swiglu")
def swiglu(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Both are saved; one kernel each way."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        on_card("flash_attn.ops.activations.swiglu", x, y)
        return torch.empty_like(x), (x, y)

    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.empty_like(one) for one in saved)

    return kernel(forward, backward, x, y)


def _made(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    known = {"gelu_approx": partial(functional.gelu, approximate="tanh"), "sqrelu": sqrelu_fwd}
    return known.get(name, functional.relu)


def _fits(*tensors: Any) -> bool:
    x = tensors[0]
    half = x.dtype in _HALF or (x.dtype == torch.float32 and torch.is_autocast_enabled("cuda"))
    return half and all(one is None or one.is_cuda for one in tensors)


def _in_autocast(*tensors: Any) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled("cuda"):
        return tuple(one if one is None else one.contiguous() for one in tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(one if one is None else one.to(dtype).contiguous() for one in tensors)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _alone(name: str, process_group: Any) -> None:
    if process_group is not None:
        raise refused(f"{_MODULE}.{name}", "a process group")


def _of_input(gradient: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Of the input; with the residual's gradient added where the input is given back."""
    if residual is None:
        return functional.linear(gradient, weight.t())
    return torch.addmm(_rows(residual), gradient, weight)


@_public("fused_dense_func")
def fused_dense_func(
    x: Any, weight: Any, bias: Any = None, return_residual: Any = False, process_group: Any = None,
    sequence_parallel: Any = True,
) -> Any:  # fmt: skip
    """A product; its backward has the gradients of weight and bias in one, with a workspace of 4 MiB (32 on Hopper)."""
    _alone("fused_dense_func", process_group)
    if not _fits(x, weight, bias):
        out = functional.linear(x, weight, bias)
        return (out, x) if return_residual else out
    wanted = [one is not None and one.requires_grad for one in (x, weight, bias)]

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        on_card("flash_attn.ops.fused_dense.fused_dense_func", x, weight)
        x, weight, bias = _in_autocast(x, weight, bias)
        out = functional.linear(x, weight, bias)
        saved = (x, weight) if wanted[1] else (weight,)
        return (out, x.detach()) if return_residual else out, saved

    def backward(saved: Any, gradient: torch.Tensor, *residual: torch.Tensor) -> Any:
        weight, shape = saved[-1], gradient.shape[:-1]
        gradient = _rows(gradient.contiguous())
        d_x = d_weight = d_bias = None
        if wanted[0]:
            d_x = _of_input(gradient, weight, residual[0] if residual else None).reshape(*shape, -1)
        if wanted[1]:
            d_weight, d_bias = extensions.linear_bias_wgrad(_rows(saved[0]), gradient, wanted[2])
        elif wanted[2]:
            d_bias = gradient
        return d_x, d_weight, d_bias

    return kernel(forward, backward, x, weight, bias)


@_public("FusedDense")
class FusedDense(nn.Linear):
    """fused_dense_func with a weight of its own."""

    def __init__(
        self, in_features: Any, out_features: Any, bias: Any = True, return_residual: Any = False, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Any, process_group: Any = None) -> Any:  # type: ignore[override]
        """fused_dense_func."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


@_public("fused_mlp_func")
def fused_mlp_func(
    x: Any, weight1: Any, weight2: Any, bias1: Any = None, bias2: Any = None, activation: Any = "gelu_approx",
    save_pre_act: Any = True, return_residual: Any = False, checkpoint_lvl: Any = 0, heuristic: Any = 0,
    process_group: Any = None, sequence_parallel: Any = True,
) -> Any:  # fmt: skip
    """Two products and what is between: saved are both sides of the activation, the first, or neither."""
    _alone("fused_mlp_func", process_group)
    assert activation in _ACTIVATIONS
    divides = x.shape[-1] % (128 if activation == "relu" else 8) == 0
    if not _fits(x, weight1, weight2, bias1, bias2) or not (divides or not save_pre_act):
        out = functional.linear(_made(activation)(functional.linear(x, weight1, bias1)), weight2, bias2)
        return (out, x) if return_residual else out
    inputs = (x, weight1, bias1, weight2, bias2)
    wanted = [one is not None and one.requires_grad for one in inputs]
    level, is_gelu = checkpoint_lvl if save_pre_act else 2, activation == "gelu_approx"
    keeps_output = level == 0 or (level == 1 and activation == "relu")

    def inner(x: Any, weight: Any, bias: Any, save: bool) -> list[torch.Tensor]:
        """After the activation, and before it."""
        if heuristic == -1:
            before = functional.linear(_rows(x), weight, bias)
            return [_made(activation)(before), before]
        return extensions.linear_act_forward(_rows(x), weight, bias, is_gelu, save, heuristic)  # type: ignore[no-any-return]

    def forward(*given: Any) -> Any:
        on_card("flash_attn.ops.fused_dense.fused_mlp_func", given[0], given[1], given[3])
        x, weight1, bias1, weight2, bias2 = _in_autocast(*given)
        after, *before = inner(x, weight1, bias1, bool(save_pre_act))
        out = functional.linear(after, weight2, bias2).reshape(*x.shape[:-1], -1)
        kept = (bias1,) if level == 2 else (*before, after) if keeps_output else tuple(before)
        return (out, x.detach()) if return_residual else out, (x, weight1, weight2, *kept)

    def backward(saved: Any, gradient: torch.Tensor, *residual: torch.Tensor) -> Any:
        x, weight1, weight2, *kept = saved
        shape = gradient.shape[:-1]
        if level == 2:
            after, before = inner(x, weight1, kept[0], True)
        else:
            before = kept[0]
            after = kept[1] if keeps_output else _made(activation)(before)
        gradient = _rows(gradient.contiguous())
        d_weight2 = d_weight1 = d_bias1 = d_x = None
        d_bias2 = gradient if wanted[4] else None
        if wanted[3]:
            d_weight2, d_bias2 = extensions.linear_bias_wgrad(after, gradient, wanted[4])
        if heuristic == -1:
            of_activation = gelu_bwd if is_gelu else sqrelu_bwd if activation == "sqrelu" else relu_bwd
            d_before = of_activation(functional.linear(gradient, weight2.t()), before)
        else:
            d_before, d_bias1 = extensions.bias_act_linear_dgrad_bgrad(weight2, gradient, before, is_gelu, heuristic)
        if wanted[0]:
            d_x = _of_input(d_before, weight1, residual[0] if residual else None).reshape(*shape, -1)
        if heuristic == -1:
            if wanted[1]:
                d_weight1, d_bias1 = extensions.linear_bias_wgrad(_rows(x), d_before, wanted[2])
        elif wanted[1]:
            d_weight1 = functional.linear(d_before.t(), _rows(x).t())
        return d_x, d_weight1, d_bias1 if wanted[2] else None, d_weight2, d_bias2

    return kernel(forward, backward, *inputs)


@_public("FusedMLP")
class FusedMLP(nn.Module):
    """fused_mlp_func with weights of its own; on Hopper GELU is a kernel of its own."""

    def __init__(
        self, in_features: Any, hidden_features: Any = None, out_features: Any = None, bias1: Any = True,
        bias2: Any = True, activation: Any = "gelu_approx", return_residual: Any = False, checkpoint_lvl: Any = 0,
        heuristic: Any = "auto", device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        assert checkpoint_lvl in (0, 1, 2) and activation in _ACTIVATIONS
        super().__init__()
        inner = hidden_features or in_features * 4
        self.activation, self.return_residual, self.checkpoint_lvl = activation, return_residual, checkpoint_lvl
        self.heuristic = heuristic if activation != "sqrelu" else -1
        self.fc1 = nn.Linear(in_features, inner, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(inner, out_features or in_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Any, process_group: Any = None) -> Any:
        """fused_mlp_func."""
        heuristic = self.heuristic
        if heuristic == "auto":
            hopper = torch.cuda.get_device_capability("cuda") == (9, 0)
            heuristic = -1 if hopper and self.activation == "gelu_approx" else 0
        return fused_mlp_func(
            x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, activation=self.activation,
            save_pre_act=self.training, return_residual=self.return_residual, checkpoint_lvl=self.checkpoint_lvl,
            heuristic=heuristic, process_group=process_group,
        )  # fmt: skip
