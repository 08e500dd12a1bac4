"""Composite operators that reach the allocation tracker whole, and those of them that are looked into.

An operator whose kernel is the same for every device (CompositeExplicitAutograd in native_functions.yaml) has its own
derivative, so autograd hands it on undivided; what its C++ allocates inside would go unseen. Most of them make their
result and nothing else (`zeros_like`, `sum`, `clone`) and are run as one. Those below have temporaries and no kernel of
their own on CUDA: their C++ is run with the mode active, which then sees every operator of it. So is the Python of the
operators that torch has in Python.
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
_EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_IMPLICIT = "CompositeImplicitAutograd"

# Operators without a CUDA kernel whose device-independent C++ allocates more than the result, by source file.
_OPERATORS = (
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
expanded_composites.mark(*(f"aten.{name}" for name in _OPERATORS))
# What torch leaves out of every dispatch outside of autocast.
_AUTOCAST_IS_OFF = dispatch.dispatch_tls_local_exclude_set()
_TORCHS_OWN = "torch_nn"  # the namespace of operators that torch has in Python (nn/modules/linear_cross_entropy.py)
# That of memprof's own, whose bodies compute what one kernel would (workload/attention): it allocates results.
_KERNELS = "memprof"


def in_python(func: Any) -> Callable[..., Any] | None:
    """Return what a GPU runs of an operator written in Python (torch.library.custom_op), with autograd apart."""
    known = OPDEFS.get(func._schema.name)
    if known is None or func.namespace == _KERNELS:
        return None
    default: Callable[..., Any] = known._init_fn
    if "cuda" in known._backend_fns:
        chosen = inspect.unwrap(known._backend_fns["cuda"])
        cells = zip(chosen.__code__.co_freevars, chosen.__closure__ or (), strict=True)
        return next((cell.cell_contents for name, cell in cells if name == "fn"), default)
    return default if None in known._backend_fns or func.namespace == _TORCHS_OWN else None


def dispatch_of_python() -> Any:
    """Dispatch as it is inside an operator that is Python: under a mode all keys of features are off, and torch then
    compiles nothing that makes a tensor of numbers. What differentiates is off by grad mode, which is off there."""
    excluded, included = dispatch.dispatch_tls_local_exclude_set(), dispatch.dispatch_tls_local_include_set()
    return dispatch.ForceDispatchKeyGuard(included, excluded & _AUTOCAST_IS_OFF)


def expansion(func: Any) -> Callable[..., Any] | None:
    """Runs the operators inside of `func`; None if it runs as one.

    Composites without a derivative of their own (CompositeImplicitAutograd) arrive under inference_mode and from C++
    below autograd. Their C++ is run, and not what torch's compiler has in Python for some of them (`func.decompose`):
    that clones in a dropout that does nothing. Those with a kernel as well (silu_backward) run as one: what has one on
    the CPU is taken to have one on CUDA.
    """
    body = in_python(func)
    if body is not None:
        return body
    name = func.name()
    if func.namespace == "fsdp":
        # fully_shard's own: Python, the same on every device, which calls torch's operators.
        return functools.partial(func._op_dk, torch.DispatchKey.CUDA)
    if _has_kernel(name, "CPU"):
        return None
    key = next((key for key in (*_EXPLICIT, _IMPLICIT) if _has_kernel(name, key)), None)
    if key is None or (key != _IMPLICIT and func.overloadpacket not in expanded_composites):
        return None
    return functools.partial(func._op_dk, getattr(torch.DispatchKey, key))
