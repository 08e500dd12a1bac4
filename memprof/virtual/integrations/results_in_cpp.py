"""Operators whose results torch makes in C++, of other strides or in other pieces than CUDA's kernels do.

Some are composites with a kernel of their own on CUDA and the CPU (native_functions.yaml); where a device has none, as
meta, the composite runs above the dispatch modes, which then see its pieces. During a run these operators have an
autograd kernel for meta tensors that hands them on undecomposed. Those with a derivative need none: autograd does so
where the device has a kernel, which for RMS norm is one of CUDA alone, and none for meta tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.patching import Extension
from memprof.torch_private import dispatch
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels.normalization import HAS_FUSED_RMS_NORM, meta_rms_norm
from memprof.virtual.shapes import register_cpp_results


class ResultsInCpp(Extension):
    """Their kernels for meta tensors, which are registered with torch's dispatcher for the length of the run."""

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Have the operators registered inside."""
        library = torch.library.Library("aten", "IMPL", "AutogradMeta")
        # torch.library refuses a kernel for an operator that is taken apart.
        for_meta: Any = dispatch.dispatch_library("IMPL", "aten", "Meta", __file__, 0)
        try:
            if HAS_FUSED_RMS_NORM:
                for_meta.impl("_fused_rms_norm", "Meta", meta_rms_norm, False)
            for name in ("mish_backward", "native_channel_shuffle"):
                library.impl(name, _below_autograd(getattr(torch.ops.aten, name).default), "AutogradMeta")
            with register_cpp_results():
                yield
        finally:
            for_meta.reset()
            library._destroy()


def _below_autograd(operator: Any) -> Callable[..., Any]:
    def hand_on(*args: Any) -> Any:
        with dispatch.AutoDispatchBelowAutograd():
            return operator(*args)

    return hand_on
