"""flash_attn.ops.fused_dense and ops.activations: matrix products fused with the following operation.

Sources: flash_attn/ops/fused_dense.py and ops/activations.py of Dao-AILab/flash-attention@v2.8.3. Functions compiled
there by torch.jit.script run operator by operator, as in their first call. Process groups are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memprof.stubs.flash_attn import extensions
from memprof.stubs.registry import register_in
from memprof.stubs.tools import HALF, autocast_dtype, check_on_gpu, kernel, refuse_if

_MODULE = "flash_attn.ops.fused_dense"
_ACTIVATIONS = ("gelu_approx", "relu", "sqrelu")
_SOURCE = "Dao-AILab/flash-attention@v2.8.3:"
_register = register_in(_MODULE, source=_SOURCE + "flash_attn/ops/fused_dense.py, csrc/fused_dense_lib/fused_dense.cpp")
_register_activation = register_in("flash_attn.ops.activations", source=_SOURCE + "flash_attn/ops/activations.py")


@_register_activation
def gelu_bwd(g, x):
    """Return the gradient of GELU's input, for the gradient `g` of its output; each operator allocates its result."""
    tanh_out = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    ff = 0.5 * x * ((1 - tanh_out * tanh_out) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh_out)
    return (ff * g).to(dtype=x.dtype)


@_register_activation
def relu_bwd(g, x):
    """Return the gradient of ReLU's input, for the gradient `g` of its output, by a comparison and torch.where."""
    return torch.where(x >= 0, g, 0.0).to(dtype=x.dtype)


@_register_activation
def sqrelu_fwd(x):
    """Return the square of ReLU's output, which is allocated too."""
    r = functional.relu(x)
    return (r * r).to(dtype=x.dtype)


@_register_activation
def sqrelu_bwd(g, x):
    """Return the gradient of squared ReLU's input, for the gradient `g` of its output, by three operators."""
    return (2.0 * g * functional.relu(x)).to(dtype=x.dtype)


@_register_activation
def swiglu(x, y):
    """Return SiLU(x) * y; saves `x` and `y`; forward and backward are one kernel each, without scratch."""

    def forward(x: torch.Tensor, y: torch.Tensor):
        check_on_gpu("flash_attn.ops.activations.swiglu", x, y)
        return torch.empty_like(x), (x, y)

    def backward(saved, gradient: torch.Tensor):
        return tuple(torch.empty_like(t) for t in saved)

    return kernel(forward, backward, x, y)


def _get_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    functions: dict[str, Any] = {"gelu_approx": partial(functional.gelu, approximate="tanh"), "sqrelu": sqrelu_fwd}
    return functions.get(name, functional.relu)


def _can_fuse(x, *parameters) -> bool:
    is_half = x.dtype in HALF or (x.dtype == torch.float32 and torch.is_autocast_enabled("cuda"))
    return is_half and all(tensor is None or tensor.is_cuda for tensor in (x, *parameters))


def _cast_for_autocast(*tensors) -> tuple[Any, ...]:
    return tuple(t if t is None else t.to(autocast_dtype(t.dtype)).contiguous() for t in tensors)


def _flatten_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _compute_input_gradient(gradient: torch.Tensor, weight: torch.Tensor, shape, *residual: torch.Tensor):
    """Return the input's gradient [*shape, in_features], to which the residual's gradient is added if there is one."""
    if residual:
        return torch.addmm(_flatten_rows(residual[0]), gradient, weight).reshape(*shape, -1)
    return functional.linear(gradient, weight.t()).reshape(*shape, -1)


@_register
def fused_dense_func(x, weight, bias=None, return_residual=False, process_group=None, sequence_parallel=True):
    """Linear layer, whose backward computes weight and bias gradients in one product; scratch: 4 MiB (Hopper: 32)."""
    refuse_if(f"{_MODULE}.fused_dense_func", {"a process group": process_group is not None})
    if not _can_fuse(x, weight, bias):
        out = functional.linear(x, weight, bias)
        return (out, x) if return_residual else out
    needs_grad = [t is not None and t.requires_grad for t in (x, weight, bias)]

    def forward(x, weight, bias):
        check_on_gpu("flash_attn.ops.fused_dense.fused_dense_func", x, weight)
        x, weight, bias = _cast_for_autocast(x, weight, bias)
        out = functional.linear(x, weight, bias)
        saved = (x, weight) if needs_grad[1] else (weight,)
        return (out, x.detach()) if return_residual else out, saved

    def backward(saved, gradient: torch.Tensor, *residual: torch.Tensor):
        weight, shape = saved[-1], gradient.shape[:-1]
        gradient = _flatten_rows(gradient.contiguous())
        d_x = d_weight = d_bias = None
        if needs_grad[0]:
            d_x = _compute_input_gradient(gradient, weight, shape, *residual)
        if needs_grad[1]:
            d_weight, d_bias = extensions.linear_bias_wgrad(_flatten_rows(saved[0]), gradient, needs_grad[2])
        elif needs_grad[2]:
            d_bias = gradient
        return d_x, d_weight, d_bias

    return kernel(forward, backward, x, weight, bias)


@_register
class FusedDense(nn.Linear):
    """A linear layer that calls fused_dense_func."""

    def __init__(self, in_features, out_features, bias=True, return_residual=False, device=None, dtype=None):
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x, process_group=None):  # type: ignore[override]
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


@_register
def fused_mlp_func(
    x, weight1, weight2, bias1=None, bias2=None, activation="gelu_approx", save_pre_act=True, return_residual=False,
    checkpoint_lvl=0, heuristic=0, process_group=None, sequence_parallel=True,
):  # fmt: skip
    """MLP of two products; saves the activation's input and output, one of them, or neither (`checkpoint_lvl`)."""
    refuse_if(f"{_MODULE}.fused_mlp_func", {"a process group": process_group is not None})
    assert activation in _ACTIVATIONS
    is_aligned = x.shape[-1] % (128 if activation == "relu" else 8) == 0
    if not _can_fuse(x, weight1, weight2, bias1, bias2) or not (is_aligned or not save_pre_act):
        out = functional.linear(_get_activation(activation)(functional.linear(x, weight1, bias1)), weight2, bias2)
        return (out, x) if return_residual else out
    inputs = (x, weight1, bias1, weight2, bias2)
    needs_grad = [t is not None and t.requires_grad for t in inputs]
    level, is_gelu = checkpoint_lvl if save_pre_act else 2, activation == "gelu_approx"
    saves_output = level == 0 or (level == 1 and activation == "relu")

    def run_first_product(x, weight, bias, saves_input: bool) -> list[torch.Tensor]:
        """Return the activation's output and, if `saves_input`, its input."""
        if heuristic == -1:
            pre_act = functional.linear(_flatten_rows(x), weight, bias)
            return [_get_activation(activation)(pre_act), pre_act]
        return extensions.linear_act_forward(_flatten_rows(x), weight, bias, is_gelu, saves_input, heuristic)  # type: ignore[no-any-return]

    def forward(*inputs):
        check_on_gpu("flash_attn.ops.fused_dense.fused_mlp_func", inputs[0], inputs[1], inputs[3])
        x, weight1, bias1, weight2, bias2 = _cast_for_autocast(*inputs)
        activated, *pre_act = run_first_product(x, weight1, bias1, bool(save_pre_act))
        out = functional.linear(activated, weight2, bias2).reshape(*x.shape[:-1], -1)
        saved = (bias1,) if level == 2 else (*pre_act, activated) if saves_output else tuple(pre_act)
        return (out, x.detach()) if return_residual else out, (x, weight1, weight2, *saved)

    def backward(saved, gradient: torch.Tensor, *residual: torch.Tensor):
        x, weight1, weight2, *saved_activations = saved
        shape = gradient.shape[:-1]
        if level == 2:
            activated, pre_act = run_first_product(x, weight1, saved_activations[0], True)
        else:
            pre_act = saved_activations[0]
            activated = saved_activations[1] if saves_output else _get_activation(activation)(pre_act)
        gradient = _flatten_rows(gradient.contiguous())
        d_weight2 = d_weight1 = d_bias1 = d_x = None
        d_bias2 = gradient if needs_grad[4] else None
        if needs_grad[3]:
            d_weight2, d_bias2 = extensions.linear_bias_wgrad(activated, gradient, needs_grad[4])
        if heuristic == -1:
            differentiate = gelu_bwd if is_gelu else sqrelu_bwd if activation == "sqrelu" else relu_bwd
            d_before = differentiate(functional.linear(gradient, weight2.t()), pre_act)
        else:
            d_before, d_bias1 = extensions.bias_act_linear_dgrad_bgrad(weight2, gradient, pre_act, is_gelu, heuristic)
        if needs_grad[0]:
            d_x = _compute_input_gradient(d_before, weight1, shape, *residual)
        if heuristic == -1:
            if needs_grad[1]:
                d_weight1, d_bias1 = extensions.linear_bias_wgrad(_flatten_rows(x), d_before, needs_grad[2])
        elif needs_grad[1]:
            d_weight1 = functional.linear(d_before.t(), _flatten_rows(x).t())
        return d_x, d_weight1, d_bias1 if needs_grad[2] else None, d_weight2, d_bias2

    return kernel(forward, backward, *inputs)


@_register
class FusedMLP(nn.Module):
    """An MLP that calls fused_mlp_func; on Hopper GELU is a separate kernel."""

    def __init__(
        self, in_features, hidden_features=None, out_features=None, bias1=True, bias2=True, activation="gelu_approx",
        return_residual=False, checkpoint_lvl=0, heuristic="auto", device=None, dtype=None,
    ):  # fmt: skip
        assert checkpoint_lvl in (0, 1, 2) and activation in _ACTIVATIONS
        super().__init__()
        hidden = hidden_features or in_features * 4
        self.activation, self.return_residual, self.checkpoint_lvl = activation, return_residual, checkpoint_lvl
        self.heuristic = heuristic if activation != "sqrelu" else -1
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x, process_group=None):
        heuristic = self.heuristic
        if heuristic == "auto":
            is_hopper = torch.cuda.get_device_capability("cuda") == (9, 0)
            heuristic = -1 if is_hopper and self.activation == "gelu_approx" else 0
        return fused_mlp_func(
            x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, activation=self.activation,
            save_pre_act=self.training, return_residual=self.return_residual, checkpoint_lvl=self.checkpoint_lvl,
            heuristic=heuristic, process_group=process_group,
        )  # fmt: skip
