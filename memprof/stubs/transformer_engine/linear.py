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

from memprof.stubs.tools import autocast_dtype, check_on_gpu, kernel, refuse, reserve_workspace
from memprof.stubs.transformer_engine import norms, precision
from memprof.stubs.transformer_engine.precision import Quantized, Recipe, quantized, te, turned

_WORKSPACE = 4 * 1024 * 1024
_WORKSPACE_HOPPER = 32 * 1024 * 1024 + 1024
# Rows per partial sum of a bias gradient: on GPUs that multiply any float8 layout, and on others.
_PARTS_ROWS = {True: 128, False: 256}
_NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def product(rows, columns: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return the result of a matrix product (general_gemm); its workspace is allocated once and kept."""
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    reserve_workspace("transformer_engine workspace", _WORKSPACE_HOPPER if hopper else _WORKSPACE)
    return torch.empty((*rows, columns), dtype=dtype, device=like.device)


def cast(tensor, dtype: torch.dtype):
    """Return `tensor` in `dtype`, as cast_if_needed does."""
    return None if tensor is None else tensor.to(dtype)


def free(tensor: torch.Tensor | None) -> None:
    """Free the tensor's memory before the function ends, as clear_tensor_data does."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


def from_gradient(gradient: torch.Tensor, recipe: Recipe | None, has_bias: bool, dtype: torch.dtype):
    """Return the output's gradient, in float8 with a recipe, and then the bias gradient (grad_output_preprocess)."""
    if recipe is None:
        return Quantized(gradient), None
    if not has_bias:
        return quantized(gradient, columns=True, current_scaling=recipe.float8_current_scaling()), None
    of_bias = gradient.new_empty(gradient.shape[-1], dtype=dtype)
    made = quantized(gradient, columns=True, current_scaling=recipe.float8_current_scaling())
    if recipe.delayed():
        rows = -(-gradient.shape[0] // _PARTS_ROWS[precision.takes_any_layout()])
        parts = gradient.new_empty((rows, gradient.shape[-1]), dtype=torch.float32)
        del parts
    return made, of_bias


class Base(nn.Module):
    """The base of layers (TransformerEngineBaseModule): compute dtype, scales of its tensors, and float8 weights."""

    gemms = 1
    is_rms: bool
    normalization: str

    def _begin(self, name: str | None, tp_size: int, tp_group, **refused: Any) -> None:
        super().__init__()
        self.name = name
        self._scales: Any = None
        self._weights: dict[str, Quantized] = {}
        reasons = {"tensor parallelism": tp_size != 1 or tp_group is not None}
        refuse(self._real_name, reasons | {f"{option}={value}": value for option, value in refused.items()})

    @property
    def _real_name(self) -> str:
        return f"transformer_engine.pytorch.{type(self).__name__}"

    def _prepare(self, given: torch.Tensor, **refused: Any) -> tuple[torch.Tensor, torch.dtype, Recipe | None]:
        """Return the input, the dtype of products, and the float8 recipe, as prepare_forward does."""
        refuse(self._real_name, refused)
        check_on_gpu(self._real_name, given)
        dtype = autocast_dtype(given.dtype)
        if not torch.is_autocast_enabled():
            for name, parameter in self.named_parameters():
                if parameter.dtype != dtype:
                    raise TypeError(
                        "Data types for parameters must match when outside of autocasted region. Found input dtype: "
                        f"{dtype} and {name!r} dtype: {parameter.dtype}"
                    )
        recipe = precision.in_force()
        if isinstance(recipe, precision.DelayedScaling) and self._scales is None:
            numbers = (3 * self.gemms, 2 * self.gemms)
            self._scales = [
                (torch.ones(n, device=given.device), torch.zeros(recipe.amax_history_len, n, device=given.device))
                for n in numbers
            ]
        if recipe is not None and (given[..., 0].numel() % 8 or given.shape[-1] % 16):
            raise AssertionError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the "
                f"last dimension to be divisible by 16, but got tensor with dims={list(given.shape)}"
            )
        return given.contiguous(), dtype, recipe

    def _weight_for_products(
        self, name: str, weight: torch.Tensor, dtype: torch.dtype, recipe: Recipe | None, first, columns: bool
    ) -> Quantized:
        """Return a weight as products need it (quantize_weight), cast in each forward or once per micro-batches."""
        if recipe is None:
            return Quantized(weight.to(dtype))
        found = self._weights.get(name) if first is not None else None
        if found is None:
            found = quantized(weight, columns=columns, current_scaling=recipe.float8_current_scaling())
            if first is not None:
                self._weights[name] = found
        return found


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one tensor for adjacent parts, else a copy of them, as noop_cat does."""
    if len(tensors) == 1:
        return tensors[0]
    sizes = [tensor.shape[0] for tensor in tensors]

    def forward(*parts: torch.Tensor):
        whole = [sum(part.shape[0] for part in parts), *parts[0].shape[1:]]
        end = parts[0].storage_offset()
        for part in parts:
            same = part.untyped_storage()._cdata == parts[0].untyped_storage()._cdata
            if not same or part.storage_offset() != end or not part.is_contiguous() or part.dtype != parts[0].dtype:
                return torch.cat(parts), ()
            end += part.numel()
        return parts[0].as_strided(whole, parts[0].stride()), ()

    def backward(saved, gradient: torch.Tensor):
        return gradient.split(sizes)

    return kernel(forward, backward, *tensors)


class _Weights(Base):
    """The base of layers with one weight, or with several adjacent weights in one buffer."""

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
        of: dict[str, Any] = {"device": device, "dtype": dtype}
        weights = torch.empty(self.out_features, self.in_features, **of).split(list(sizes.values()))
        biases = torch.empty(self.out_features, **of).split(list(sizes.values())) if bias else ()
        self.weight_names = [f"{name}weight" for name in sizes]
        self.bias_names = [f"{name}bias" for name in sizes]
        self.use_bias = bias
        for name, weight in zip(self.weight_names, weights, strict=True):
            self.register_parameter(name, nn.Parameter(weight))
        for name, one in zip(self.bias_names, biases, strict=False):
            self.register_parameter(name, nn.Parameter(one))
        if torch.device(device).type == "meta":
            return
        for name in self.weight_names:
            (init_method or _initialize_normal)(getattr(self, name))
        for name in self.bias_names if bias else ():
            nn.init.zeros_(getattr(self, name))

    def _weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = joined([getattr(self, name) for name in self.weight_names])
        return weight, joined([getattr(self, name) for name in self.bias_names]) if self.use_bias else None


def _initialize_normal(weight: torch.Tensor):
    return nn.init.normal_(weight, mean=0.0, std=0.023)


@te("module.linear", "module")
class Linear(_Weights):
    """A linear layer: saves its input (in float8 transposed) and both forms of the weight."""

    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        self._begin(
            name, tp_size, tp_group, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute, save_original_input=save_original_input,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.return_bias, self.parallel_mode = return_bias, parallel_mode
        self._make_weights(bias, parameters_split, params_dtype or torch.get_default_dtype(), device, init_method)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Run the layer: saves the input (in float8 transposed) and the weight in the dtype of products."""
        inp, dtype, recipe = self._prepare(inp, fp8_output=fp8_output, fp8_grad=fp8_grad)
        weight, bias = self._weight_and_bias()
        if inp.shape[-1] != weight.shape[1]:
            raise AssertionError(f"GEMM not possible: an input of {inp.shape[-1]}, weights of {weight.shape[1]}")
        inside = bias is not None and not self.return_bias and self.parallel_mode != "row"
        to_input, to_weight, grads = inp.requires_grad, weight.requires_grad, torch.is_grad_enabled()
        shape, (wide, narrow) = inp.shape, weight.shape

        def forward_kernel(x: torch.Tensor, w: torch.Tensor, b):
            if recipe is None:
                given = Quantized(cast(x, dtype))
            else:
                given = quantized(x, columns=grads and to_weight, current_scaling=recipe.float8_current_scaling())
            matrix = self._weight_for_products("weight", w, dtype, recipe, is_first_microbatch, grads and to_input)
            shift = cast(b, dtype)
            out = product(x.shape[:-1], w.shape[0], dtype, x)
            kept_input = given.for_backward() if to_weight else Quantized()
            return out, (*kept_input, *matrix, shift)

        def backward_kernel(saved, gradient: torch.Tensor):
            given = Quantized(*saved[:3])
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            got, of_bias = from_gradient(gradient, recipe, inside, dtype)
            of_input = product(shape[:-1], shape[-1], dtype, gradient) if to_input else None
            if not to_weight:
                return of_input, None, of_bias
            given, got = turned(recipe, given, got)
            of_weight = product((wide,), narrow, dtype, gradient)
            if inside and of_bias is None:
                of_bias = gradient.new_empty(wide, dtype=dtype)
            return of_input, of_weight, of_bias

        out = kernel(forward_kernel, backward_kernel, inp, weight, bias if inside else None)
        if bias is not None and self.parallel_mode == "row" and not self.return_bias:
            out = out + cast(bias, dtype)
        return (out, cast(bias, dtype)) if self.return_bias else out


@te("module.layernorm_linear", "module")
class LayerNormLinear(_Weights):
    """A norm and a linear layer: saves the input, the norm's statistics and its output."""

    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ):  # fmt: skip
        self._begin(
            name, tp_size, tp_group, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute, return_layernorm_output_gathered=return_layernorm_output_gathered,
        )  # fmt: skip
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.return_bias, self.parallel_mode = return_bias, parallel_mode
        self.return_layernorm_output = return_layernorm_output
        dtype = params_dtype or torch.get_default_dtype()
        norm_parameters(self, in_features, normalization, zero_centered_gamma, dtype, device)
        self._make_weights(bias, parameters_split, dtype, device, init_method)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        """Run the layer: saves the input, the norm's output (in float8 transposed) and statistics, and the weight."""
        inp, dtype, recipe = self._prepare(inp, fp8_output=fp8_output, fp8_grad=fp8_grad)
        weight, bias = self._weight_and_bias()
        inside = bias is not None and not self.return_bias
        to_weight, grads, is_rms = weight.requires_grad, torch.is_grad_enabled(), self.is_rms
        gives_both = self.return_layernorm_output
        shape, (wide, narrow) = inp.shape, weight.shape

        def forward_kernel(x: torch.Tensor, w: torch.Tensor, b, *of_norm: torch.Tensor):
            x = cast(x.view(-1, x.shape[-1]), dtype)
            scales = [cast(one, dtype) for one in of_norm]
            columns = grads and to_weight
            made, statistics = norms.forward(x, is_rms, None if gives_both else recipe, columns=columns)
            normed = made if isinstance(made, torch.Tensor) else None
            if recipe is None:
                given = Quantized(made)
            else:
                current_scaling = recipe.float8_current_scaling()
                given = made if normed is None else quantized(made, columns=columns, current_scaling=current_scaling)
            matrix = self._weight_for_products("weight", w, dtype, recipe, is_first_microbatch, grads)
            shift = cast(b, dtype)
            out = product(inp.shape[:-1], w.shape[0], dtype, x)
            saved = given.for_backward() if to_weight else Quantized()
            outputs = (out, normed.view(inp.shape)) if gives_both and normed is not None else out
            return outputs, (x, *saved, *matrix, *statistics, shift, scales[0])

        def backward_kernel(saved, gradient: torch.Tensor, *of_normed: torch.Tensor):
            x, given, scale = saved[0], Quantized(*saved[1:4]), saved[-1]
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            got, of_bias = from_gradient(gradient, recipe, inside, dtype)
            through = product(x.shape[:-1], x.shape[-1], dtype, gradient)
            of_weight = None
            if to_weight:
                given, got = turned(recipe, given, got)
                of_weight = product((wide,), narrow, dtype, gradient)
                if inside and of_bias is None:
                    of_bias = gradient.new_empty(wide, dtype=dtype)
                if not gives_both:
                    free(given.rows if given.columns is None else given.columns)
            if of_normed:
                through = through + of_normed[0].view_as(through)
            made, *of_norm = norms.backward(x, scale, is_rms)
            return (made.view(shape), of_weight, of_bias, *of_norm)

        made = kernel(forward_kernel, backward_kernel, inp, weight, bias if inside else None, *norm_tensors(self))
        out, normed = made if gives_both else (made, None)
        results = (out, *((cast(bias, dtype),) if self.return_bias else ()), *((normed,) if gives_both else ()))
        return results if len(results) > 1 else out


def norm_parameters(module, size: int, normalization: str, zero_centered: bool, dtype: torch.dtype, device) -> None:
    """Create the parameters of the norm at the beginning of a layer."""
    assert normalization in _NORMALIZATIONS, "Unsupported normalization type!"
    module.normalization, module.is_rms = normalization, normalization == "RMSNorm"
    module.layer_norm_weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
    module.layer_norm_bias = None
    if not module.is_rms:
        module.layer_norm_bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
    if torch.device(device).type != "meta":
        (nn.init.zeros_ if zero_centered else nn.init.ones_)(module.layer_norm_weight)
        if module.layer_norm_bias is not None:
            nn.init.zeros_(module.layer_norm_bias)


def norm_tensors(module) -> list[torch.Tensor]:
    """Return the norm's weight, and its bias if it has one."""
    both = (module.layer_norm_weight, module.layer_norm_bias)
    return [one for one in both if one is not None]
