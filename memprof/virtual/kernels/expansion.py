"""Composite operators: those that run as one operator, and those that are expanded into their inner operators.

An operator with one C++ function for every device (CompositeExplicitAutograd in native_functions.yaml) has its own
derivative, so autograd passes it undivided to the dispatch mode, which does not see allocations inside its C++. Most
such operators allocate only their result (`zeros_like`, `sum`, `clone`) and are run as one. The operators listed below
also allocate temporaries and have no CUDA kernel: their C++ runs with the mode active, which sees every inner operator.
Operators that torch implements in Python run in the same way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private import dispatch
from memprof.torch_private.dispatch import OPDEFS
from memprof.virtual.kernels.registry import expanded_composites

_has_kernel = dispatch.dispatch_has_kernel_for_dispatch_key
_EXPLICIT_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_IMPLICIT_KEY = "CompositeImplicitAutograd"

# Operators without a CUDA kernel whose device-independent C++ allocates more than the result, by source file.
_EXPANDED_OPERATORS = (
    # native/Loss.cpp
    "binary_cross_entropy_with_logits", "soft_margin_loss", "soft_margin_loss_backward",
    # native/ReduceOps.cpp, native/Distance.cpp
    "logsumexp", "norm", "dist", "_euclidean_dist",
    # native/UnaryOps.cpp, native/TensorCompare.cpp, native/SummaryOps.cpp
    "isinf", "mvlgamma", "ldexp", "allclose", "_is_all_true", "_is_any_true", "count_nonzero",
    # native/TensorShape.cpp, native/TensorTransformations.cpp, native/AffineGridGenerator.cpp
    "repeat", "block_diag", "rot90", "diag_embed", "affine_grid_generator",
    # native/Activation.cpp
    "rrelu_with_noise_backward",
    # native/TensorAdvancedIndexing.cpp
    "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "masked_scatter_backward",
    # native/TensorShape.cpp: a clone and a copy into it, from any device
    "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter",
    # native/TensorFactories.cpp, native/RangeFactories.cpp
    "bartlett_window", "blackman_window", "hann_window", "hamming_window", "kaiser_window", "polar",
    # native/Linear.cpp, native/BatchLinearAlgebra.cpp, native/LinearAlgebra.cpp, native/SpectralOps.cpp
    "_trilinear", "cholesky_solve", "linalg_pinv", "fft_fftfreq", "fft_rfftfreq",
)  # fmt: skip
expanded_composites.mark(*(f"aten.{name}" for name in _EXPANDED_OPERATORS))
# Dispatch keys that torch excludes outside of autocast.
_DEFAULT_EXCLUDED_KEYS = dispatch.dispatch_tls_local_exclude_set()
_TORCH_NAMESPACE = "torch_nn"  # operators that torch implements in Python (nn/modules/linear_cross_entropy.py)
# memprof's operators: the Python body stands for one kernel, which allocates only results (workload/attention).
_MEMPROF_NAMESPACE = "memprof"


def find_python_body(func: Any) -> Callable[..., Any] | None:
    """Return the Python function that implements `func`, a torch.library.custom_op, on a GPU; None if there is none."""
    definition = OPDEFS.get(func._schema.name)
    if definition is None or func.namespace == _MEMPROF_NAMESPACE:
        return None
    init_fn: Callable[..., Any] = definition._init_fn
    if "cuda" in definition._backend_fns:
        cuda_kernel = inspect.unwrap(definition._backend_fns["cuda"])
        cells = zip(cuda_kernel.__code__.co_freevars, cuda_kernel.__closure__ or (), strict=True)
        return next((cell.cell_contents for name, cell in cells if name == "fn"), init_fn)
    return init_fn if None in definition._backend_fns or func.namespace == _TORCH_NAMESPACE else None


def set_python_dispatch() -> Any:
    """Return a guard that sets dispatch keys as in an operator written in Python, with grad mode off. A dispatch mode
    excludes all feature keys; torch then cannot compile code that creates a tensor of Python numbers."""
    excluded_keys, included_keys = dispatch.dispatch_tls_local_exclude_set(), dispatch.dispatch_tls_local_include_set()
    return dispatch.ForceDispatchKeyGuard(included_keys, excluded_keys & _DEFAULT_EXCLUDED_KEYS)


def find_expansion(func: Any) -> Callable[..., Any] | None:
    """Return a function that runs the inner operators of `func`; None if `func` runs as one operator.

    Composites without a derivative (CompositeImplicitAutograd) reach the dispatch mode under inference_mode and from
    C++ below autograd. They run their C++, not torch's Python decompositions (`func.decompose`), one of which clones in
    a dropout without effect. A composite that also has a CPU kernel (silu_backward) has a CUDA kernel and runs as one.
    """
    body = find_python_body(func)
    if body is not None:
        return body
    name = func.name()
    if func.namespace == "fsdp":
        # Operators of fully_shard: Python that calls torch's operators, for every device.
        return functools.partial(func._op_dk, torch.DispatchKey.CUDA)
    if _has_kernel(name, "CPU"):
        return None
    key = next((key for key in (*_EXPLICIT_KEYS, _IMPLICIT_KEY) if _has_kernel(name, key)), None)
    if key is None or (key != _IMPLICIT_KEY and func.overloadpacket not in expanded_composites):
        return None
    return functools.partial(func._op_dk, getattr(torch.DispatchKey, key))
