"""Operators of sgl_kernel that return other tensors than their arguments.

Sources: sgl-kernel/csrc/memory/weak_ref_tensor.cpp of sgl-project/sglang@v0.5.13; FlashAttention 3 is the fork of it
whose arguments vLLM's has too (sgl-project/sgl-attn, hopper/flash_api.cpp).
"""

from __future__ import annotations

from memprof.stubs.vllm.attention import make_scheduler_metadata, run_hopper_forward
from memprof.stubs.vllm.binaries import meta
from memprof.stubs.vllm.operators import make_weak_reference, refer_weakly
from memprof.virtual.kernels import registry

meta("sgl_kernel.weak_ref_tensor")(refer_weakly)
registry.kernel("sgl_kernel.weak_ref_tensor")(make_weak_reference)
registry.kernel("sgl_kernel.fwd")(run_hopper_forward)
registry.kernel("sgl_kernel.get_scheduler_metadata")(make_scheduler_metadata)
