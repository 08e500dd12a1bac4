"""Operators that meta tensors run as a C++ composite, with other strides or inner operators than CUDA's kernels.

Some composites have kernels of their own on CUDA and the CPU (native_functions.yaml). On a device without such kernels,
such as meta, torch decomposes them above the dispatch modes, which see only the inner operators. During a run these
operators have an autograd kernel for meta tensors that passes them on undecomposed. Operators with a derivative need
none: autograd does this if the device has a kernel. RMS norm has a kernel only on CUDA, so it gets one for meta here.
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


class MetaKernels(Extension):
    """Kernels for meta tensors, registered with torch's dispatcher during the run."""

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: register the kernels, and remove them on exit."""
        autograd_library = torch.library.Library("aten", "IMPL", "AutogradMeta")
        # torch.library refuses a kernel for a composite operator.
        meta_library: Any = dispatch.dispatch_library("IMPL", "aten", "Meta", __file__, 0)
        try:
            if HAS_FUSED_RMS_NORM:
                meta_library.impl("_fused_rms_norm", "Meta", meta_rms_norm, False)
            for name in ("mish_backward", "native_channel_shuffle"):
                autograd_library.impl(name, _wrap_below_autograd(getattr(torch.ops.aten, name).default), "AutogradMeta")
            with register_cpp_results():
                yield
        finally:
            meta_library.reset()
            autograd_library._destroy()


def _wrap_below_autograd(operator: Any) -> Callable[..., Any]:
    def call_below_autograd(*args: Any) -> Any:
        with dispatch.AutoDispatchBelowAutograd():
            return operator(*args)

    return call_below_autograd
