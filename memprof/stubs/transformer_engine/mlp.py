"""transformer_engine's LayerNormMLP: a norm, two matrix products and an activation, as one autograd node.

Sources: pytorch/module/layernorm_mlp.py, jit.py (bias_gelu_fused_), csrc/extensions/activation.cpp and bias.cpp.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from memprof.stubs.tools import kernel, refuse
from memprof.stubs.transformer_engine import norms
from memprof.stubs.transformer_engine.linear import (
    Base,
    _initialize_normal,
    cast,
    free,
    from_gradient,
    norm_parameters,
    norm_tensors,
    product,
)
from memprof.stubs.transformer_engine.precision import Quantized, quantized, te, turned

# Activations whose backward under delayed scaling is one kernel with the bias gradient and the cast.
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")


@te("module.layernorm_mlp", "module")
class LayerNormMLP(Base):
    """An MLP with a norm: saves the input, the outputs of the norm, first product and activation, and both weights."""

    gemms = 2

    def __init__(
        self, hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
        get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
        activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
        params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
        micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False,
        name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False,
    ):  # fmt: skip
        self._begin(
            name, tp_size, tp_group, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute, return_layernorm_output=return_layernorm_output,
            checkpoint=checkpoint, return_layernorm_output_gathered=return_layernorm_output_gathered,
        )  # fmt: skip
        if activation not in (*_PLAIN, *_GATED):
            raise NotImplementedError(f"Activation type {activation} is not supported!")
        self.activation, self.eps, self.use_bias, self.return_bias = activation, eps, bias, return_bias
        of: dict[str, Any] = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        norm_parameters(self, hidden_size, normalization, zero_centered_gamma, of["dtype"], device)
        wide = ffn_hidden_size * (2 if activation in _GATED else 1)
        self.fc1_weight = nn.Parameter(torch.empty(wide, hidden_size, **of))
        self.fc1_bias = nn.Parameter(torch.empty(wide, **of)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **of))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **of)) if bias else None
        if torch.device(device).type != "meta":
            (init_method or _initialize_normal)(self.fc1_weight)
            (output_layer_init_method or _initialize_normal)(self.fc2_weight)
            for one in (self.fc1_bias, self.fc2_bias) if bias else ():
                nn.init.zeros_(one)  # type: ignore[arg-type]

    def forward(self, inp, is_first_microbatch=None):
        """Return the MLP's output for an input [..., hidden_size]."""
        inp, dtype, recipe = self._prepare(inp)
        weights = (self.fc1_weight, self.fc2_weight)
        frozen = not all(weight.requires_grad for weight in weights) and torch.is_grad_enabled()
        refuse("transformer_engine.pytorch.LayerNormMLP", {"frozen weights": frozen})
        grads, is_rms, activation = torch.is_grad_enabled(), self.is_rms, self.activation
        adds_second = self.use_bias and not self.return_bias
        fuses = activation == "gelu" and recipe is None
        with_bias = fuses and os.environ.get("NVTE_BIAS_GELU_NVFUSION", "1") == "1"
        current_scaling = recipe is not None and recipe.float8_current_scaling()
        given_shape = inp.shape
        (wide, size), (rows, narrow) = (weight.shape for weight in weights)

        def forward_kernel(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b1, b2, *of_norm: torch.Tensor):
            x = cast(x.view(-1, x.shape[-1]), dtype)
            scales = [cast(one, dtype) for one in of_norm]
            made, statistics = norms.forward(x, is_rms, recipe, columns=grads)
            given = Quantized(made) if recipe is None else made
            first = self._weight_for_products("fc1_weight", w1, dtype, recipe, is_first_microbatch, grads)
            second = self._weight_for_products("fc2_weight", w2, dtype, recipe, is_first_microbatch, grads)
            shifts = [cast(one, dtype) for one in (b1, b2)]
            inner = product((x.shape[0],), w1.shape[0], dtype, x)
            if recipe is None:
                active = Quantized(inner.new_empty((x.shape[0], w2.shape[1])))
            else:
                shape = inner[:, : w2.shape[1]]
                active = quantized(shape, columns=False, current_scaling=False)
                if current_scaling:
                    whole, found = inner.new_empty((x.shape[0], w2.shape[1])), x.new_empty(2, dtype=torch.float32)
                    del whole, found
            out = product(inp.shape[:-1], w2.shape[0], dtype, x)
            return out, (x, *given, inner, *active, *first, *second, *statistics, *shifts, scales[0])

        def backward_kernel(saved, gradient: torch.Tensor):
            x, given, inner = saved[0], Quantized(*saved[1:4]), saved[4]
            active, scale = Quantized(*saved[5:8]), saved[-1]
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            got, of_second = from_gradient(gradient, recipe, adds_second, dtype)
            through = product((x.shape[0],), narrow, dtype, gradient)
            active, got = turned(recipe, active, got)
            of_w2 = product((rows,), narrow, dtype, gradient)
            if adds_second and of_second is None:
                of_second = gradient.new_empty(rows, dtype=dtype)
            for one in active[:2]:
                free(one)
            of_first = None
            if recipe is None:
                # Fused with the product where not fused with the bias: the gradient is already the activation's.
                inward = through if fuses and not with_bias else torch.empty_like(inner)
                of_first = inner.new_empty(wide) if self.use_bias and with_bias else None
                came = Quantized(inward)
            elif recipe.delayed() and activation in _PLAIN:
                came, of_first = from_gradient(inner, recipe, True, dtype)
            else:
                inward = torch.empty_like(inner)
                came, of_first = from_gradient(inward, recipe, True, dtype)
                del inward
            free(inner)
            inwards = product((x.shape[0],), size, dtype, gradient)
            given, came = turned(recipe, given, came)
            of_w1 = product((wide,), size, dtype, gradient)
            if self.use_bias and of_first is None:
                of_first = gradient.new_empty(wide, dtype=dtype)
            for one in (*came[:2], *given[:2]):
                free(one)
            made, *of_norm = norms.backward(x, scale, is_rms)
            del through, inwards
            return (made.view(given_shape), of_w1, of_w2, of_first if self.use_bias else None, of_second, *of_norm)

        second = self.fc2_bias if adds_second else None
        out = kernel(forward_kernel, backward_kernel, inp, *weights, self.fc1_bias, second, *norm_tensors(self))
        return (out, cast(self.fc2_bias, dtype)) if self.return_bias else out
