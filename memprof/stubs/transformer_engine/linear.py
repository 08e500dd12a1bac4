"""transformer_engine's Linear and LayerNormLinear, on one GPU.

Sources: pytorch/module/linear.py (_linear_forward_impl, _linear_backward), layernorm_linear.py, base.py,
cpp_extensions/gemm.py and csrc/extensions/gemm.cpp, bias.cpp; common/transpose/cast_transpose_fusion.cu. float8
products save the transposed input and both forms of the weight, unless the GPU multiplies any layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memprof.stubs.tools import autocast_dtype, check_on_gpu, kernel, refuse_if, reserve_workspace
from memprof.stubs.transformer_engine import norms, precision
from memprof.stubs.transformer_engine.precision import Quantized, Recipe, quantize, register, transpose

_WORKSPACE = 4 * 1024 * 1024
_WORKSPACE_HOPPER = 32 * 1024 * 1024 + 1024
# Rows per partial sum of a bias gradient: on GPUs that multiply any float8 layout, and on others.
_PARTS_ROWS = {True: 128, False: 256}
_NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def allocate_product(rows, columns: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return the result [*rows, columns] of a matrix product (general_gemm); its workspace is kept for the run."""
    is_hopper = torch.cuda.get_device_capability() >= (9, 0)
    reserve_workspace("transformer_engine workspace", _WORKSPACE_HOPPER if is_hopper else _WORKSPACE)
    return torch.empty((*rows, columns), dtype=dtype, device=like.device)


def cast(tensor, dtype: torch.dtype):
    """Return `tensor` cast to `dtype` if needed; None for None."""
    return None if tensor is None else tensor.to(dtype)


def free_data(*tensors: torch.Tensor | None) -> None:
    """Free the storages of `tensors` now, although references to them exist (clear_tensor_data)."""
    for tensor in tensors:
        if tensor is not None:
            tensor.untyped_storage().resize_(0)


def quantize_gradient(gradient: torch.Tensor, recipe: Recipe | None, has_bias: bool, dtype: torch.dtype):
    """Return `gradient`, in float8 if there is a recipe, and then also the bias gradient (grad_output_preprocess)."""
    has_bias = has_bias and recipe is not None
    bias_gradient = gradient.new_empty(gradient.shape[-1], dtype=dtype) if has_bias else None
    result = quantize(gradient, recipe, transposes=True)
    if has_bias and isinstance(recipe, precision.DelayedScaling):
        rows = -(-gradient.shape[0] // _PARTS_ROWS[precision.supports_any_layout()])
        parts = gradient.new_empty((rows, gradient.shape[-1]), dtype=torch.float32)
        del parts
    return result, bias_gradient


class BaseLayer(nn.Module):
    """The base of layers (TransformerEngineBaseModule), with dtype of products, float8 scales and cached weights."""

    num_gemms = 1
    is_rms: bool
    normalization: str

    def _initialize(self, name: str | None, tp_size: int, tp_group, **refused_options: Any) -> None:
        super().__init__()
        self.name = name
        self._scales: Any = None
        self._weights: dict[str, Quantized] = {}
        options = {f"{option}={value}": value for option, value in refused_options.items()}
        refuse_if(self._public_name, {"tensor parallelism": tp_size != 1 or tp_group is not None, **options})

    @property
    def _public_name(self) -> str:
        return f"transformer_engine.pytorch.{type(self).__name__}"

    def _prepare(self, x: torch.Tensor, **refused_options: Any) -> tuple[torch.Tensor, torch.dtype, Recipe | None]:
        """Check a call; return the contiguous input, the dtype of products and the float8 recipe (prepare_forward)."""
        refuse_if(self._public_name, refused_options)
        check_on_gpu(self._public_name, x)
        dtype = autocast_dtype(x.dtype)
        if not torch.is_autocast_enabled():
            for name, parameter in self.named_parameters():
                if parameter.dtype != dtype:
                    raise TypeError(
                        "Data types for parameters must match when outside of autocasted region. Found input dtype: "
                        f"{dtype} and {name!r} dtype: {parameter.dtype}"
                    )
        recipe = precision.get_active_recipe()
        if isinstance(recipe, precision.DelayedScaling) and self._scales is None:
            self._scales = [
                (torch.ones(n, device=x.device), torch.zeros(recipe.amax_history_len, n, device=x.device))
                for n in (3 * self.num_gemms, 2 * self.num_gemms)
            ]
        if recipe is not None and (x[..., 0].numel() % 8 or x.shape[-1] % 16):
            raise AssertionError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the "
                f"last dimension to be divisible by 16, but got tensor with dims={list(x.shape)}"
            )
        return x.contiguous(), dtype, recipe

    def _quantize_weight(
        self, name: str, weight: torch.Tensor, dtype: torch.dtype, recipe: Recipe | None, is_first, transposes: bool
    ) -> Quantized:
        """Return a weight as products need it: cast in each forward, or once for all micro-batches if the program says
        which is the first (quantize_weight)."""
        if recipe is None or is_first is None:
            return quantize(weight, recipe, transposes=transposes, dtype=dtype)
        if name not in self._weights:
            self._weights[name] = quantize(weight, recipe, transposes=transposes)
        return self._weights[name]


def join_adjacent(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one tensor with the rows of all `tensors`: a view if they are adjacent in memory, else a copy."""
    if len(tensors) == 1:
        return tensors[0]
    sizes = [tensor.shape[0] for tensor in tensors]

    def forward(*parts: torch.Tensor):
        first, end = parts[0], parts[0].storage_offset()
        for part in parts:
            is_adjacent = part.storage_offset() == end and part.is_contiguous() and part.dtype == first.dtype
            if not is_adjacent or part.untyped_storage()._cdata != first.untyped_storage()._cdata:
                return torch.cat(parts), ()
            end += part.numel()
        return first.as_strided([sum(sizes), *first.shape[1:]], first.stride()), ()

    def backward(saved, gradient: torch.Tensor):
        return gradient.split(sizes)

    return kernel(forward, backward, *tensors)


class _WeightedLayer(BaseLayer):
    """The base of linear layers, whose weight may be split into several parameters of one buffer."""

    out_features: int
    in_features: int

    def _make_weights(
        self, bias: bool, split, dtype: torch.dtype, device, init_method: Callable[..., Any] | None
    ) -> None:
        sizes: dict[str, int] = {"": self.out_features}
        if isinstance(split, dict):
            sizes = {f"{name.rstrip('_')}_": size for name, size in split.items()}
        elif split is not None:
            sizes = {f"{name.rstrip('_')}_": self.out_features // len(split) for name in split}
        if sum(sizes.values()) != self.out_features:
            raise ValueError(f"Trying to split weight buffer (out_features={self.out_features}) with {sizes}")
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        weights = torch.empty(self.out_features, self.in_features, **options).split(list(sizes.values()))
        biases = torch.empty(self.out_features, **options).split(list(sizes.values())) if bias else ()
        self.weight_names = [f"{name}weight" for name in sizes]
        self.bias_names = [f"{name}bias" for name in sizes]
        self.use_bias = bias
        for name, tensor in zip(self.weight_names + self.bias_names, (*weights, *biases), strict=False):
            self.register_parameter(name, nn.Parameter(tensor))
        if torch.device(device).type == "meta":
            return
        for name in self.weight_names:
            (init_method or initialize_normal)(getattr(self, name))
        for name in self.bias_names if bias else ():
            nn.init.zeros_(getattr(self, name))

    def _join_weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return all weights in one tensor, and all biases in one tensor (None without bias)."""
        weight = join_adjacent([getattr(self, name) for name in self.weight_names])
        return weight, join_adjacent([getattr(self, name) for name in self.bias_names]) if self.use_bias else None


def initialize_normal(weight: torch.Tensor):
    """Fill `weight` from Transformer Engine's default normal distribution."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


@register("module.linear", "module")
class Linear(_WeightedLayer):
    """A linear layer: saves input and weight in the dtype of products; in float8 with transposed copies."""

    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        self._initialize(
            name, tp_size, tp_group, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute, save_original_input=save_original_input,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.return_bias, self.parallel_mode = return_bias, parallel_mode
        self._make_weights(bias, parameters_split, params_dtype or torch.get_default_dtype(), device, init_method)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Return the layer's output; saves input and weight in the dtype of products, or in float8."""
        inp, dtype, recipe = self._prepare(inp, fp8_output=fp8_output, fp8_grad=fp8_grad)
        weight, bias = self._join_weights()
        if inp.shape[-1] != weight.shape[1]:
            raise AssertionError(f"GEMM not possible: an input of {inp.shape[-1]}, weights of {weight.shape[1]}")
        adds_bias = bias is not None and not self.return_bias and self.parallel_mode != "row"
        needs_d_input, needs_d_weight, has_grad = inp.requires_grad, weight.requires_grad, torch.is_grad_enabled()
        shape, (rows, columns) = inp.shape, weight.shape

        def forward_kernel(x, w, b):
            x = quantize(x, recipe, transposes=has_grad and needs_d_weight, dtype=dtype)
            w = self._quantize_weight("weight", w, dtype, recipe, is_first_microbatch, has_grad and needs_d_input)
            b = cast(b, dtype)
            out = allocate_product(shape[:-1], rows, dtype, inp)
            return out, (*(x.select_for_backward() if needs_d_weight else Quantized()), *w, b)

        def backward_kernel(saved, gradient: torch.Tensor):
            x = Quantized(*saved[:3])
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            d_out, d_bias = quantize_gradient(gradient, recipe, adds_bias, dtype)
            d_input = allocate_product(shape[:-1], shape[-1], dtype, gradient) if needs_d_input else None
            if not needs_d_weight:
                return d_input, None, d_bias
            x, d_out = transpose(recipe, x, d_out)
            d_weight = allocate_product((rows,), columns, dtype, gradient)
            if adds_bias and d_bias is None:
                d_bias = gradient.new_empty(rows, dtype=dtype)
            return d_input, d_weight, d_bias

        out = kernel(forward_kernel, backward_kernel, inp, weight, bias if adds_bias else None)
        if bias is not None and self.parallel_mode == "row" and not self.return_bias:
            out = out + cast(bias, dtype)
        return (out, cast(bias, dtype)) if self.return_bias else out


@register("module.layernorm_linear", "module")
class LayerNormLinear(_WeightedLayer):
    """A norm and a linear layer: saves the input, the norm's statistics and output, and the weight."""

    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ):  # fmt: skip
        self._initialize(
            name, tp_size, tp_group, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute, return_layernorm_output_gathered=return_layernorm_output_gathered,
        )  # fmt: skip
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.return_bias, self.parallel_mode = return_bias, parallel_mode
        self.return_layernorm_output = return_layernorm_output
        dtype = params_dtype or torch.get_default_dtype()
        create_norm_parameters(self, in_features, normalization, zero_centered_gamma, dtype, device)
        self._make_weights(bias, parameters_split, dtype, device, init_method)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Return the layer's output; saves input, norm's statistics and output, and weight (maybe in float8)."""
        inp, dtype, recipe = self._prepare(inp, fp8_output=fp8_output, fp8_grad=fp8_grad)
        weight, bias = self._join_weights()
        adds_bias = bias is not None and not self.return_bias
        needs_d_weight, has_grad, is_rms = weight.requires_grad, torch.is_grad_enabled(), self.is_rms
        returns_normed = self.return_layernorm_output
        shape, (rows, columns) = inp.shape, weight.shape

        def forward_kernel(x: torch.Tensor, w, b, *norm_parameters: torch.Tensor):
            x = cast(x.view(-1, x.shape[-1]), dtype)
            norm_weight, *_norm_bias = [cast(t, dtype) for t in norm_parameters]
            transposes = has_grad and needs_d_weight
            norm_recipe = None if returns_normed else recipe
            normed, statistics = norms.run_forward(x, is_rms, norm_recipe, transposes=transposes)
            product_input = quantize(normed, recipe, transposes=transposes) if norm_recipe is None else normed
            w = self._quantize_weight("weight", w, dtype, recipe, is_first_microbatch, has_grad)
            b = cast(b, dtype)
            out = allocate_product(shape[:-1], rows, dtype, x)
            saved = product_input.select_for_backward() if needs_d_weight else Quantized()
            outputs = (out, normed.view(shape)) if returns_normed else out
            return outputs, (x, *saved, *w, *statistics, b, norm_weight)

        def backward_kernel(saved, gradient: torch.Tensor, *normed_gradient: torch.Tensor):
            x, product_input, norm_weight = saved[0], Quantized(*saved[1:4]), saved[-1]
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            d_out, d_bias = quantize_gradient(gradient, recipe, adds_bias, dtype)
            d_normed = allocate_product(x.shape[:-1], x.shape[-1], dtype, gradient)
            d_weight = None
            if needs_d_weight:
                product_input, d_out = transpose(recipe, product_input, d_out)
                d_weight = allocate_product((rows,), columns, dtype, gradient)
                if adds_bias and d_bias is None:
                    d_bias = gradient.new_empty(rows, dtype=dtype)
                if not returns_normed:
                    free_data(product_input.data if product_input.transposed is None else product_input.transposed)
            if normed_gradient:
                d_normed = d_normed + normed_gradient[0].view_as(d_normed)
            d_x, *norm_gradients = norms.run_backward(x, norm_weight, is_rms)
            return (d_x.view(shape), d_weight, d_bias, *norm_gradients)

        inputs = (inp, weight, bias if adds_bias else None, *get_norm_parameters(self))
        outputs = kernel(forward_kernel, backward_kernel, *inputs)
        out, normed = outputs if returns_normed else (outputs, None)
        results = (out, *((cast(bias, dtype),) if self.return_bias else ()), *((normed,) if returns_normed else ()))
        return results if len(results) > 1 else out


def create_norm_parameters(
    module, size: int, normalization: str, is_zero_centered: bool, dtype: torch.dtype, device
) -> None:
    """Create the parameters of a layer's norm, layer_norm_weight and layer_norm_bias, as attributes of `module`."""
    assert normalization in _NORMALIZATIONS, "Unsupported normalization type!"
    module.normalization, module.is_rms = normalization, normalization == "RMSNorm"
    module.layer_norm_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
    module.layer_norm_bias = None
    if not module.is_rms:
        module.layer_norm_bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
    if torch.device(device).type != "meta":
        (nn.init.zeros_ if is_zero_centered else nn.init.ones_)(module.layer_norm_weight)
        if module.layer_norm_bias is not None:
            nn.init.zeros_(module.layer_norm_bias)


def get_norm_parameters(module) -> list[torch.Tensor]:
    """Return the weight of the norm of `module`, and its bias if it has one."""
    return [parameter for parameter in (module.layer_norm_weight, module.layer_norm_bias) if parameter is not None]
