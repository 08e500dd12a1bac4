"""transformer_engine's LayerNorm and RMSNorm.

Sources: pytorch/ops/basic/layer_norm.py and rmsnorm.py, pytorch/csrc/extensions/normalization.cpp,
common/normalization/. The backward sums the gradients of weight and bias in parts, one for each concurrent block of
threads: here one for each multiprocessor, since the number of concurrent blocks is not published.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memprof.stubs.tools import autocast_dtype, check_on_gpu, count_multiprocessors, kernel
from memprof.stubs.transformer_engine.precision import Recipe, quantize_output, register


def run_forward(
    x: torch.Tensor, is_rms: bool, recipe: Recipe | None = None, *, transposes: bool = False
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the output, in float8 by `recipe`, and one or two statistics per row (layernorm_fwd, rmsnorm_fwd)."""
    rows = x[..., 0].numel()
    statistics = tuple(x.new_empty(rows, dtype=torch.float32) for _ in range(1 if is_rms else 2))
    if recipe is None:
        return torch.empty_like(x), statistics
    return quantize_output(x, recipe, transposes=transposes), statistics


def run_backward(x: torch.Tensor, weight: torch.Tensor, is_rms: bool) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the input, the weight and the bias (layernorm_bwd, rmsnorm_bwd)."""
    gradients = (torch.empty_like(x), *(torch.empty_like(weight) for _ in range(1 if is_rms else 2)))
    blocks = min(count_multiprocessors(), x[..., 0].numel())
    parts = x.new_empty((len(gradients) - 1, blocks, x.shape[-1]), dtype=torch.float32)
    del parts
    return gradients


class _Norm(nn.Module):
    """The base of LayerNorm and RMSNorm."""

    is_rms = False
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None, **kwargs,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        device = torch.device(kwargs.pop("device", None) or torch.device("cuda", torch.cuda.current_device()))
        dtype = params_dtype or kwargs.pop("dtype", None) or torch.get_default_dtype()
        unexpected = [name for name in kwargs if name not in ("dtype", "sm_margin")]
        if unexpected:
            raise TypeError(f"__init__() got an unexpected keyword argument {unexpected[0]!r}")
        self._shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        for name in ("weight",) if self.is_rms else ("weight", "bias"):
            self.register_parameter(name, nn.Parameter(torch.empty(self._shape, device=device, dtype=dtype)))
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, defer_init=None) -> None:
        if self.weight.device.type == "meta":
            for name, parameter in list(self.named_parameters()):
                self.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="cuda")))
        (nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_)(self.weight)
        if not self.is_rms:
            nn.init.zeros_(self.bias)

    def forward(self, input):
        """Return the norm over the last dimensions; saves the input in autocast's dtype, and row statistics."""
        check_on_gpu(f"transformer_engine.pytorch.{type(self).__name__}", input)
        dtype = autocast_dtype(self.weight.dtype)
        is_rms, shape = self.is_rms, input.shape

        def forward_kernel(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor):
            x = x.contiguous().to(dtype)
            out, statistics = run_forward(x.view(-1, weight.numel()), is_rms)
            return out.view(x.shape), (x.view(-1, weight.numel()), *statistics, weight)

        def backward_kernel(saved, gradient: torch.Tensor):
            gradient = gradient.contiguous().to(dtype)
            x, weight = saved[0], saved[-1]
            d_x, *parameter_gradients = run_backward(x, weight.to(dtype).view(-1), is_rms)
            return (d_x.view(shape), *(grad.view(weight.shape) for grad in parameter_gradients))

        return kernel(forward_kernel, backward_kernel, input, *self.parameters())


@register("module.layernorm", "module")
class LayerNorm(_Norm):
    """A layer norm: saves input, mean and variance; partial parameter gradients per multiprocessor."""


@register("module.rmsnorm", "module")
class RMSNorm(_Norm):
    """An RMS norm: saves input and root mean square; partial weight gradients per multiprocessor."""

    is_rms = True
