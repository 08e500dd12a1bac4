"""transformer_engine's LayerNormMLP: a norm, two matrix products and an activation, as one autograd node.

Sources: pytorch/module/layernorm_mlp.py, jit.py (bias_gelu_fused_), csrc/extensions/activation.cpp and bias.cpp.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from memprof.stubs.tools import kernel, refuse_if
from memprof.stubs.transformer_engine import norms
from memprof.stubs.transformer_engine.linear import (
    BaseLayer,
    allocate_product,
    cast,
    create_norm_parameters,
    free_data,
    get_norm_parameters,
    initialize_normal,
    quantize_gradient,
)
from memprof.stubs.transformer_engine.precision import Quantized, quantize_output, register, transpose

# Activations whose backward under delayed scaling is one kernel with the bias gradient and the cast.
_PLAIN_ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED_ACTIVATIONS = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")


@register("module.layernorm_mlp", "module")
class LayerNormMLP(BaseLayer):
    """A norm and an MLP: saves the input, outputs of norm, first product and activation, and both weights."""

    num_gemms = 2

    def __init__(
        self, hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
        get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
        activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
        params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
        micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False,
        name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False,
    ):  # fmt: skip
        self._initialize(
            name, tp_size, tp_group, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute, return_layernorm_output=return_layernorm_output,
            checkpoint=checkpoint, return_layernorm_output_gathered=return_layernorm_output_gathered,
        )  # fmt: skip
        if activation not in (*_PLAIN_ACTIVATIONS, *_GATED_ACTIVATIONS):
            raise NotImplementedError(f"Activation type {activation} is not supported!")
        self.activation, self.eps, self.use_bias, self.return_bias = activation, eps, bias, return_bias
        options: dict[str, Any] = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        create_norm_parameters(self, hidden_size, normalization, zero_centered_gamma, options["dtype"], device)
        fc1_size = ffn_hidden_size * (2 if activation in _GATED_ACTIVATIONS else 1)
        self.fc1_weight = nn.Parameter(torch.empty(fc1_size, hidden_size, **options))
        self.fc1_bias = nn.Parameter(torch.empty(fc1_size, **options)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **options))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **options)) if bias else None
        if torch.device(device).type != "meta":
            (init_method or initialize_normal)(self.fc1_weight)
            (output_layer_init_method or initialize_normal)(self.fc2_weight)
            for parameter in (self.fc1_bias, self.fc2_bias) if bias else ():
                nn.init.zeros_(parameter)  # type: ignore[arg-type]

    def forward(self, inp, is_first_microbatch=None):
        """Return the MLP's output for an input [..., hidden_size]."""
        inp, dtype, recipe = self._prepare(inp)
        weights = (self.fc1_weight, self.fc2_weight)
        frozen = not all(weight.requires_grad for weight in weights) and torch.is_grad_enabled()
        refuse_if("transformer_engine.pytorch.LayerNormMLP", {"frozen weights": frozen})
        has_grad, is_rms, activation = torch.is_grad_enabled(), self.is_rms, self.activation
        adds_bias2 = self.use_bias and not self.return_bias
        fuses_gelu = activation == "gelu" and recipe is None
        fuses_bias = fuses_gelu and os.environ.get("NVTE_BIAS_GELU_NVFUSION", "1") == "1"
        shape = inp.shape
        (inner_size, size), (out_size, active_size) = (weight.shape for weight in weights)

        def forward_kernel(x: torch.Tensor, w1, w2, b1, b2, *norm_parameters: torch.Tensor):
            x = cast(x.view(-1, size), dtype)
            norm_weight, *_norm_bias = [cast(t, dtype) for t in norm_parameters]
            normed, statistics = norms.run_forward(x, is_rms, recipe, transposes=has_grad)
            normed = Quantized(normed) if recipe is None else normed
            w1 = self._quantize_weight("fc1_weight", w1, dtype, recipe, is_first_microbatch, has_grad)
            w2 = self._quantize_weight("fc2_weight", w2, dtype, recipe, is_first_microbatch, has_grad)
            biases = [cast(t, dtype) for t in (b1, b2)]
            fc1_out = allocate_product((x.shape[0],), inner_size, dtype, x)
            if recipe is None:
                active = Quantized(fc1_out.new_empty((x.shape[0], active_size)))
            else:
                active = quantize_output(fc1_out[:, :active_size], recipe, transposes=False)
            out = allocate_product(shape[:-1], out_size, dtype, x)
            return out, (x, *normed, fc1_out, *active, *w1, *w2, *statistics, *biases, norm_weight)

        def backward_kernel(saved, gradient: torch.Tensor):
            x, normed, fc1_out = saved[0], Quantized(*saved[1:4]), saved[4]
            active, norm_weight = Quantized(*saved[5:8]), saved[-1]
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            d_out, d_bias2 = quantize_gradient(gradient, recipe, adds_bias2, dtype)
            d_active = allocate_product((x.shape[0],), active_size, dtype, gradient)
            active, d_out = transpose(recipe, active, d_out)
            d_w2 = allocate_product((out_size,), active_size, dtype, gradient)
            if adds_bias2 and d_bias2 is None:
                d_bias2 = gradient.new_empty(out_size, dtype=dtype)
            free_data(*active[:2])
            d_bias1 = None
            if recipe is None:
                # Fused with the product where not fused with the bias: the gradient is already the activation's.
                d_inner = Quantized(d_active if fuses_gelu and not fuses_bias else torch.empty_like(fc1_out))
                d_bias1 = fc1_out.new_empty(inner_size) if self.use_bias and fuses_bias else None
            else:
                is_fused = recipe.delayed() and activation in _PLAIN_ACTIVATIONS
                unquantized = fc1_out if is_fused else torch.empty_like(fc1_out)
                d_inner, d_bias1 = quantize_gradient(unquantized, recipe, True, dtype)
                del unquantized
            free_data(fc1_out)
            d_normed = allocate_product((x.shape[0],), size, dtype, gradient)
            normed, d_inner = transpose(recipe, normed, d_inner)
            d_w1 = allocate_product((inner_size,), size, dtype, gradient)
            if self.use_bias and d_bias1 is None:
                d_bias1 = gradient.new_empty(inner_size, dtype=dtype)
            free_data(*d_inner[:2], *normed[:2])
            d_x, *norm_gradients = norms.run_backward(x, norm_weight, is_rms)
            del d_active, d_normed
            return (d_x.view(shape), d_w1, d_w2, d_bias1 if self.use_bias else None, d_bias2, *norm_gradients)

        bias2 = self.fc2_bias if adds_bias2 else None
        out = kernel(forward_kernel, backward_kernel, inp, *weights, self.fc1_bias, bias2, *get_norm_parameters(self))
        return (out, cast(self.fc2_bias, dtype)) if self.return_bias else out
