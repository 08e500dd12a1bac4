"""transformer_engine's float8: the regions in which it is active, and the memory of a float8 tensor.

Sources: common/recipe/__init__.py, pytorch/quantization.py, pytorch/csrc/quantizer.cpp (Float8Quantizer and
Float8CurrentScalingQuantizer) and common/transformer_engine.cpp (nvte_is_non_tn_fp8_gemm_supported).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from memprof.stubs.registry import register_in
from memprof.stubs.tools import refuse_if

_SOURCE = "NVIDIA/TransformerEngine@v2.18:transformer_engine/"


def register(*modules: str) -> Callable[[Any], Any]:
    """Return a decorator that registers a stub in transformer_engine.pytorch, and in its submodules `modules`."""
    full_names = (f"transformer_engine.pytorch.{module}" for module in modules)
    source = f"{_SOURCE}pytorch/{modules[0].replace('.', '/')}.py, pytorch/csrc"
    return register_in(*full_names, "transformer_engine.pytorch", source=source)


_register_recipe = register_in("transformer_engine.common.recipe", source=f"{_SOURCE}common/recipe/__init__.py")


class _Range(NamedTuple):
    """The largest values of a float8 format in forward and backward."""

    max_fwd: float
    max_bwd: float


@_register_recipe
class Format(Enum):
    """The low-precision formats of tensors in forward and backward, by their largest values."""

    E2M1 = _Range(6, 6)
    E4M3 = _Range(448, 448)
    E5M2 = _Range(57344, 57344)
    HYBRID = _Range(448, 57344)


@_register_recipe
class Recipe:
    """The base of recipes, which say how tensors are scaled for float8."""

    @classmethod
    def delayed(cls):
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls):
        return issubclass(cls, Float8CurrentScaling)


@_register_recipe
@dataclass
class DelayedScaling(Recipe):
    """The recipe with one scale per tensor, computed from the tensor's maxima in previous steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@_register_recipe
@dataclass
class Float8CurrentScaling(Recipe):
    """The recipe with one scale per tensor, computed from the tensor itself before it is cast."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


class Quantized(NamedTuple):
    """A float8 tensor: data, transposed copy and inverse scale; without a scale, a tensor that is not quantized."""

    data: torch.Tensor | None = None
    transposed: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def select_for_backward(self) -> Quantized:
        """Return what the product for a weight's gradient needs: the transposed copy if there is one, else the data."""
        return self if self.transposed is None else Quantized(None, self.transposed, self.scale)


def supports_any_layout() -> bool:
    """Return whether the GPU multiplies float8 matrices in any layout, so that transposed copies are not needed."""
    capability = torch.cuda.get_device_capability()
    return 100 <= 10 * capability[0] + capability[1] < 120


def quantize(x: torch.Tensor, recipe: Recipe | None, *, transposes: bool, dtype: Any = None) -> Quantized:
    """Return `x` cast to float8, with a transposed copy if `transposes`; without a recipe, cast to `dtype`."""
    if recipe is None:
        return Quantized(x if dtype is None else x.to(dtype))
    scale, data = x.new_empty(1, dtype=torch.float32), torch.empty_like(x, dtype=torch.uint8)
    result = Quantized(data, _make_transposed(data) if transposes and not supports_any_layout() else None, scale)
    if recipe.float8_current_scaling():
        maxima = [x.new_empty(1, dtype=torch.float32) for _ in range(2)]
        del maxima
    return result


def quantize_output(x: torch.Tensor, recipe: Recipe, *, transposes: bool) -> Quantized:
    """Return a kernel's float8 output with the shape of `x`; current scaling also allocates it unquantized."""
    result = quantize(x, DelayedScaling(), transposes=transposes)
    if recipe.float8_current_scaling():
        output, maxima = torch.empty_like(x), x.new_empty(2, dtype=torch.float32)
        del output, maxima
    return result


def _make_transposed(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[-1], *x.shape[:-1]))


def transpose(recipe: Recipe | None, *tensors: Quantized) -> Iterator[Quantized]:
    """Yield `tensors`, each with a transposed copy if a weight gradient's float8 product needs it."""
    for x in tensors:
        if recipe is None or x.transposed is not None or supports_any_layout() or x.data is None:
            yield x
        else:
            yield Quantized(x.data, _make_transposed(x.data), x.scale)


_active_recipe: Recipe | None = None


def get_active_recipe() -> Recipe | None:
    """Return the recipe of the innermost enabled `autocast` region; None outside such regions."""
    return _active_recipe


@register("quantization")
class autocast:  # noqa: N801
    """A context manager in which layers compute products in float8, with scales and maxima in float32."""

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        name = "transformer_engine.pytorch.autocast"
        recipe = DelayedScaling() if recipe is None else recipe
        is_known = isinstance(recipe, (DelayedScaling, Float8CurrentScaling))
        is_unsupported = not is_known or recipe.fp8_dpa or recipe.fp8_mha or recipe.backward_override
        if enabled:
            refuse_if(name, {"calibrating=True": calibrating, f"the recipe {recipe}": is_unsupported})
        self._recipe, self._outer_recipe = recipe if enabled else None, _active_recipe

    def __enter__(self):
        global _active_recipe
        if self._recipe is not None and not is_fp8_available():
            raise AssertionError(is_fp8_available(True)[1])
        self._outer_recipe, _active_recipe = _active_recipe, self._recipe
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        global _active_recipe
        _active_recipe = self._outer_recipe


@register("quantization")
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """Return `autocast` with these arguments, by its deprecated name."""
    warnings.warn("fp8_autocast is deprecated: use autocast", category=DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@register("quantization")
def is_fp8_available(return_reason=False):
    """Return whether the GPU has compute capability 8.9 or higher."""
    return _check_availability("FP8", (8, 9), return_reason)


@register("utils")
def is_bf16_available(return_reason=False):
    """Return whether the GPU has compute capability 8.0 or higher."""
    return _check_availability("BF16", (8, 0), return_reason)


def _check_availability(name: str, minimum: tuple[int, int], return_reason):
    is_available = torch.cuda.get_device_capability() >= minimum
    required = "{}.{}".format(*minimum)
    reason = "" if is_available else f"Device compute capability {required} or higher required for {name} execution."
    return (is_available, reason) if return_reason else is_available


@register("utils")
def get_device_compute_capability():
    """Return the major and minor compute capability of the current GPU; nothing is allocated."""
    return torch.cuda.get_device_capability()
