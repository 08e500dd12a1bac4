"""Operators of sgl_kernel that return other tensors than their arguments.

Source: sgl-kernel/csrc/memory/weak_ref_tensor.cpp of sgl-project/sglang@v0.5.13.
"""

from __future__ import annotations

from memprof.stubs.vllm.binaries import meta
from memprof.stubs.vllm.operators import make_weak_reference, refer_weakly
from memprof.virtual.kernels import registry

meta("sgl_kernel.weak_ref_tensor")(refer_weakly)
registry.kernel("sgl_kernel.weak_ref_tensor")(make_weak_reference)
