"""flash_attn.ops.layer_norm and ops.rms_norm: dropout, a sum with a residual and a norm in one kernel.

Sources: flash_attn/ops/layer_norm.py, ops/rms_norm.py and csrc/layer_norm/ln_api.cpp of
Dao-AILab/flash-attention@v2.8.3. Subsets of rows and two residuals at once are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memprof.stubs.flash_attn import extensions
from memprof.stubs.registry import register_in
from memprof.stubs.tools import kernel

_register_layer_norm, _register_rms_norm = (
    register_in(
        f"flash_attn.ops.{kind}_norm",
        source=f"Dao-AILab/flash-attention@v2.8.3:flash_attn/ops/{kind}_norm.py, csrc/layer_norm/ln_api.cpp",
    )
    for kind in ("layer", "rms")
)


def _norm(
    x0, residual, weight, bias, rowscale, layerscale, dropout_p: float, residual_in_fp32: bool = False,
    prenorm: bool = False, is_rms_norm: bool = False, return_mask: bool = False,
):  # fmt: skip
    """Run DropoutAddLayerNormFn: saves the sum (or the input), the dropout mask (uint8), and two statistics per row."""
    shape, has_residual, has_bias = x0.shape, residual is not None, bias is not None

    def view_rows(tensor):
        return None if tensor is None else tensor.view(-1, shape[-1])

    def forward(*tensors):
        contiguous_tensors: list[Any] = [None if t is None else t.contiguous() for t in tensors]
        x0, residual, weight, bias, rowscale, layerscale = contiguous_tensors
        rows = view_rows(x0)
        residual_rows = None if residual is None else residual.view(rows.shape)
        z, x, mask, mu, sigma = extensions.dropout_add_ln_fwd(
            rows, residual_rows, weight, bias, rowscale, layerscale, None, None, dropout_p, 1e-5, 1.0, 0, None,
            residual_in_fp32, is_rms_norm,
        )  # fmt: skip
        x_sum = (x0 if x is None else x).view(shape)
        saved = (x_sum, x0 if layerscale is not None else None, mask, weight, mu, sigma, rowscale, layerscale)
        outputs = [z.view(shape), *([x_sum.detach()] if prenorm else [])]
        if return_mask:
            outputs.append(torch.ones(shape, dtype=torch.uint8, device=x0.device) if mask is None else mask.view(shape))
        return (tuple(outputs) if len(outputs) > 1 else outputs[0]), saved

    def backward(saved, gradient: torch.Tensor, *other_gradients):
        x, x0, mask, weight, mu, sigma, rowscale, layerscale = saved
        d_x = view_rows(other_gradients[0].contiguous()) if prenorm else None
        d_x0, d_residual, d_weight, d_bias, _, _, *scale_gradients = extensions.dropout_add_ln_bwd(
            view_rows(gradient.contiguous()), d_x, view_rows(x), view_rows(x0), mask, mu, sigma, weight, rowscale,
            layerscale, None, None, dropout_p, 1.0, 0, has_residual, is_rms_norm,
        )  # fmt: skip
        d_residual = None if d_residual is None else d_residual.view(shape)
        d_layerscale = scale_gradients[0] if scale_gradients else None
        return d_x0.view(shape), d_residual, d_weight, d_bias if has_bias else None, None, d_layerscale

    return kernel(forward, backward, x0, residual, weight, bias, rowscale, layerscale)


@_register_layer_norm
def layer_norm(x, weight, bias, epsilon):
    """Return the layer norm; saves two statistics per row; partial gradients of parameters in the backward."""
    return _norm(x, None, weight, bias, None, None, 0.0)


def _make_dropout_add_norm(name: str, is_rms: bool, docstring: str) -> Callable[..., Any]:
    def dropout_add_norm(
        x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, prenorm=False,
        residual_in_fp32=False, return_dropout_mask=False,
    ):  # fmt: skip
        return _norm(
            x0, residual, weight, bias, rowscale, layerscale, dropout_p, residual_in_fp32, prenorm, is_rms,
            return_dropout_mask,
        )  # fmt: skip

    dropout_add_norm.__name__, dropout_add_norm.__doc__ = name, docstring
    return dropout_add_norm


for _register, _kind in ((_register_layer_norm, "layer"), (_register_rms_norm, "rms")):
    _docstring = f"Return the {_kind} norm of dropout(x0) + residual; saves the sum, a uint8 mask, statistics per row."
    _register(_make_dropout_add_norm(f"dropout_add_{_kind}_norm", _kind == "rms", _docstring))


@_register_rms_norm
def rms_norm(x, weight, epsilon):
    """Return the RMS norm; saves two statistics per row; partial gradients of the weight in the backward."""
    return _norm(x, None, weight, None, None, None, 0.0, is_rms_norm=True)


class _NormLayer(nn.Module):
    """The base of norm layers: parameters, and a forward with an optional residual."""

    is_rms = False

    def __init__(
        self, hidden_size, prenorm=False, p=0.0, eps=1e-5, residual_in_fp32=False, device=None, dtype=None
    ) -> None:
        super().__init__()
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        bias = None if self.is_rms else nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0, residual=None):
        dropout_p = self.p if self.training else 0.0
        return _norm(
            x0, residual, self.weight, self.bias, None, None, dropout_p, self.residual_in_fp32, self.prenorm,
            self.is_rms,
        )  # fmt: skip


@_register_layer_norm
class DropoutAddLayerNorm(_NormLayer):
    """A layer norm that calls dropout_add_layer_norm."""


@_register_rms_norm
class DropoutAddRMSNorm(_NormLayer):
    """An RMS norm that calls dropout_add_rms_norm."""

    is_rms = True


@_register_rms_norm
class RMSNorm(_NormLayer):
    """An RMS norm that calls rms_norm."""

    is_rms = True

    def __init__(self, hidden_size, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)

    def forward(self, x):  # type: ignore[override]
        return super().forward(x)
