"""Autocast on the virtual GPU: torch's lists of operators and its cache of cast weights, for torch functions.

torch's own autocast casts only tensors on the device, and ignores meta tensors. Here the function mode casts the
arguments of a call before the call, by the lists of torch's documentation (Automatic Mixed Precision, "CUDA Ops that
can autocast to ..."); torch's dispatcher says which operators of the lists this release has.

Differences from torch: a C++ function that calls a listed operator is itself listed here (`_COMPOSITE_POLICIES`,
kernels/losses.py), since the function mode does not see the inner call. Functions outside that list
(matrix_power, cov, corrcoef, trapezoid) run in the dtype of their input, and so does an overload called by its full
name (torch.ops.aten.mm.default).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import dispatch, kernels
from memprof.torch_private.pytree import tree_leaves

_LOWER_PRECISION = frozenset(
    [
        "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "prelu",
        "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
        "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
        "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    ]
)  # fmt: skip
_FLOAT32 = frozenset(
    [
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "frobenius_norm",
        "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
        "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
        "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
        "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
        "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
        "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
        "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "linalg_matrix_sqrth",
    ]
)  # fmt: skip
# Operators that compute and return float32 from the half input itself: autocast sets `dtype`, and casts nothing.
_FLOAT32_RESULT = frozenset(
    ["prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm"]
)
_WIDEST_DTYPE = frozenset(
    [
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
        "scatter_add",
    ]
)  # fmt: skip
_REJECTED = frozenset({"binary_cross_entropy"})
# Recurrent functions, cast where cuDNN does not run them; with cuDNN, recurrent.py casts their weights to one buffer.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_COMPOSITE_POLICIES = {
    "lstm": _RECURRENT, "gru": _RECURRENT, "rnn_tanh": _RECURRENT, "rnn_relu": _RECURRENT, "nll_loss_nd": _FLOAT32,
    "linalg_norm": _FLOAT32_RESULT, "inner": _WIDEST_DTYPE,
}  # fmt: skip
# Other names of listed operators -> name of the operator.
_OPERATOR_BY_ALIAS = {
    "__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "__rpow__": "pow", "arccos": "acos",
    "arcsin": "asin", "linalg_matmul": "matmul", "special_erfinv": "erfinv", "special_expm1": "expm1",
    "special_log1p": "log1p", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
    "special_softmax": "softmax",
}  # fmt: skip
POLICIES = {
    op: policy for policy in (_LOWER_PRECISION, _FLOAT32, _FLOAT32_RESULT, _WIDEST_DTYPE, _REJECTED) for op in policy
}
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def find_autocast_operators(device_type: str = "cuda") -> frozenset[str]:
    """Return the names of the operators that this torch release autocasts on devices of this type."""
    key = f"Autocast{device_type.upper()}"
    return frozenset(
        name.removeprefix("aten::").partition(".")[0]
        for name in dispatch.dispatch_get_all_op_names()
        if name.startswith("aten::") and dispatch.dispatch_has_kernel_for_dispatch_key(name, key)
    )


class Autocast:
    """Casts of the arguments of torch functions under `torch.autocast` for the GPU's device type."""

    def __init__(self, device_type: str, is_on_gpu: Callable[[torch.Tensor], bool]) -> None:
        self._device_type = device_type
        self._is_on_gpu = is_on_gpu
        self._autocast_operators: frozenset[str] | None = None
        self._policies: dict[Any, frozenset[str] | None] = {}
        # id of a weight -> the weight, which the reference keeps alive, and its half-precision copy.
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._caches_with_gradient = _caches_with_gradient()

    def list_copies(self) -> list[torch.Tensor]:
        """Return the half-precision copies of weights in the cache."""
        return [copy for _, copy in self._cache.values()]

    def clear_cache(self) -> None:
        """Drop the half-precision copies of weights, at the end of the outermost autocast region."""
        self._cache.clear()

    def cast(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with which torch's autocast would call `func`."""
        if func not in self._policies:
            self._policies[func] = self._find_policy(func)
        policy = self._policies[func]
        if policy is None:
            return args, kwargs
        kwargs = kwargs or {}
        if "out" in kwargs:  # out= variants and in-place operators are in no list
            return args, kwargs
        if policy is _RECURRENT:
            has_cudnn = self._device_type == "cuda" and kernels.get_cudnn_enabled()
            if has_cudnn and args[0].dtype is not torch.bfloat16:
                return args, kwargs
            policy = _LOWER_PRECISION
        if policy is _LOWER_PRECISION:
            return self.cast_to(args, kwargs, torch.get_autocast_dtype(self._device_type))
        if policy is _FLOAT32:
            return self.cast_to(args, kwargs, torch.float32)
        if policy is _FLOAT32_RESULT:
            data = args[0] if args else kwargs.get("input")
            has_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
            if has_dtype or not self._is_castable(data):
                return args, kwargs
            return args, {**kwargs, "dtype": torch.float32}
        if policy is _WIDEST_DTYPE:
            return self.cast_to(args, kwargs, self._find_widest_dtype(args, kwargs))
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
            "use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
        )

    def _find_policy(self, func: Any) -> frozenset[str] | None:
        name = getattr(func, "__name__", "")
        name = _OPERATOR_BY_ALIAS.get(name, name)
        if name in _COMPOSITE_POLICIES:
            return _COMPOSITE_POLICIES[name]
        if self._autocast_operators is None:
            self._autocast_operators = find_autocast_operators(self._device_type)
        return POLICIES.get(name) if name in self._autocast_operators else None

    def _find_widest_dtype(self, args: Any, kwargs: Any) -> torch.dtype:
        """Return the widest floating-point dtype of the arguments, by `promote_type` of aten/src/ATen/autocast_mode.h.

        Raises:
            RuntimeError: an argument has another half-precision dtype than the autocast region.
        """
        widest = region_dtype = torch.get_autocast_dtype(self._device_type)
        for tensor in tree_leaves((args, kwargs)):
            if not self._is_castable(tensor) or widest is torch.float32:
                continue
            if tensor.dtype not in (torch.float32, region_dtype):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
            widest = tensor.dtype
        return widest

    def _is_castable(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and self._is_on_gpu(value)
        )

    def cast_to(self, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return the arguments cast to `dtype`, the last argument first.

        C++ leaves open in which order `WrapFunction_` of aten/src/ATen/autocast_mode.h evaluates the casts; GCC, which
        builds torch's packages for Linux, goes from right to left. Elements of a list are cast in their order.
        """
        kwargs = {name: self._cast_nested(kwargs[name], dtype) for name in reversed(kwargs)}
        return tuple(reversed([self._cast_nested(arg, dtype) for arg in reversed(args)])), kwargs

    def _cast_nested(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, (list, tuple)):
            return type(value)(self._cast_nested(item, dtype) for item in value)
        if isinstance(value, dict):
            return {name: self._cast_nested(item, dtype) for name, item in value.items()}
        return value

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `tensor`, cast as by `cached_cast` of ATen/autocast_mode.cpp: copies of float32 leaves are cached."""
        if tensor.dtype is dtype or not self._is_castable(tensor):
            return tensor
        is_cacheable = (
            dtype in _HALF_DTYPES
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and not tensor._is_view()  # before is_leaf, which may raise for a view where the C++ function does not
            and tensor.is_leaf
            and torch.is_autocast_cache_enabled()
            and not (self._caches_with_gradient and torch.is_inference_mode_enabled())
        )
        if not is_cacheable:
            return tensor.to(dtype)
        entry = self._cache.get(id(tensor))
        if entry is None:
            is_grad_enabled = torch.is_grad_enabled()
            with torch.set_grad_enabled(is_grad_enabled or self._caches_with_gradient):
                entry = self._cache[id(tensor)] = tensor, tensor.to(dtype)
        return entry[1]


@functools.cache
def _caches_with_gradient() -> bool:
    """Return whether a weight first cast under no_grad gets a gradient later in the same autocast region, which
    depends on the torch release.

    Releases in which it does cache nothing in inference mode (torch issue 158232). The CPU has the same cache.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    data = torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        with torch.no_grad():
            data @ weight
        return (data @ weight).requires_grad
