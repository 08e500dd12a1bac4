"""Operators that CUDA and the CPU run as one kernel, and torch would take apart for meta tensors.

They are composites with a kernel of their own on both (native_functions.yaml); where a device has none, as meta, the
composite runs above the dispatch modes, which then see its pieces. While a virtual GPU is active these operators have
an autograd kernel for meta tensors that hands them on whole. Those with a derivative need none: autograd does so where
the device has a kernel, which for RMS norm is one of CUDA alone, and none for meta tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dispatch
from memprof.virtual.kernels.norms import HAS_FUSED_RMS_NORM, meta_rms_norm

_aten = torch.ops.aten
_WHOLE = ("mish_backward", "native_channel_shuffle")


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Inside, the dispatch modes see these operators."""
    library = torch.library.Library("aten", "IMPL", "AutogradMeta")
    # torch.library refuses a kernel for an operator that is taken apart.
    for_meta: Any = dispatch.dispatch_library("IMPL", "aten", "Meta", __file__, 0)
    try:
        if HAS_FUSED_RMS_NORM:
            for_meta.impl("_fused_rms_norm", "Meta", meta_rms_norm, False)
        for name in _WHOLE:
            library.impl(name, _below_autograd(getattr(_aten, name).default), "AutogradMeta")
        yield
    finally:
        for_meta.reset()
        library._destroy()


def _below_autograd(operator: Any) -> Callable[..., Any]:
    def hand_on(*args: Any) -> Any:
        with dispatch.AutoDispatchBelowAutograd():
            return operator(*args)

    return hand_on
