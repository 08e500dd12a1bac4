"""Operators of torchaudio: RNN-T loss, forced alignment, and recursive filters.

Sources: src/libtorchaudio of pytorch/audio@v2.11.0 (rnnt/gpu/compute.cu, rnnt/workspace.h, forced_align/gpu/compute.cu,
iir_cuda.cu).
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import registry
from memprof.virtual.kernels.registry import aten

_BACK_POINTER_FRAMES = 100  # frames of back pointers on the GPU before a copy to the host (kBackPtrBufferSize)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


@registry.kernel("torchaudio.rnnt_loss_forward")
def rnnt_loss(launch: KernelContext) -> Any:
    """Return a loss for each sequence, and the gradient of the logits, which the forward computes. Scratch: five
    float32 values for each frame and target position, and two int32 counters for each target position."""
    logits, targets, *lengths = launch.args[:4]
    if not logits.is_meta:
        return NotImplemented
    _check(logits.dtype in (torch.float32, torch.float16), "logits must be float32 or float16 (half) type")
    for name, tensor in (("targets", targets), ("logit_lengths", lengths[0]), ("target_lengths", lengths[1])):
        _check(tensor.dtype == torch.int32, f"{name} must be int32 type")
    for name, tensor in (("logits", logits), ("targets", targets)):
        _check(tensor.is_contiguous(), f"{name} must be contiguous")
    _check(logits.dim() == 4, "logits must be 4-D (batch, time, target, class)")
    _check(targets.dim() == 2, "targets must be 2-D (batch, max target length)")
    _check(targets.shape[0] == logits.shape[0], "batch dimension mismatch between logits and targets")
    _check(targets.shape[1] + 1 == logits.shape[2], "target length mismatch")
    batch, time, target, _ = logits.shape
    with launch.inside():
        for length in lengths:
            aten.amax.default(length)
        costs = aten.new_empty.default(logits, [batch])
        gradients = torch.empty_like(logits)
        counters = aten.new_empty.default(logits, [2 * batch * target], dtype=torch.int32)
        cell_values = aten.new_empty.default(logits, [5 * batch * time * target], dtype=torch.float32)
    del counters, cell_values
    return costs, gradients


@registry.kernel("torchaudio.forced_align")
def forced_align(launch: KernelContext) -> Any:
    """Return the alignment path; scratch: scores of two frames, and two buffers of 100 frames' back pointers."""
    scores, targets, *lengths = launch.args[:4]
    if not scores.is_meta:
        return NotImplemented
    dtypes = (torch.float64, torch.float32, torch.float16)
    _check(scores.dtype in dtypes, "log_probs must be float64, float32 or float16 (half) type")
    _check(targets.dtype in (torch.int32, torch.int64), "targets must be int32 or int64 type")
    _check(scores.is_contiguous(), "log_probs must be contiguous")
    _check(scores.dim() == 3, "log_probs must be 3-D (batch_size, input length, num classes)")
    _check(targets.dim() == 2, "targets must be 2-D (batch_size, target length,)")
    is_single = scores.shape[0] == 1 and targets.shape[0] == 1
    _check(is_single, "The batch dimension must be 1 at the current version.")
    time, num_states = scores.shape[1], 2 * targets.shape[1] + 1
    with launch.inside():
        for length in lengths:
            aten.amax.default(length)
        back_pointers = aten.new_empty.default(scores, [min(_BACK_POINTER_FRAMES, time), num_states], dtype=torch.int8)
        alphas, copy = aten.new_empty.default(scores, [2, num_states]), None
        for _ in range(-(-time // _BACK_POINTER_FRAMES)):
            copy = aten.clone.default(back_pointers)
        del back_pointers, alphas, copy
        paths = aten.new_empty.default(scores, [1, time], dtype=targets.dtype)
    return paths, scores


@registry.kernel("torchaudio._lfilter_core_loop")
def lfilter_core_loop(launch: KernelContext) -> Any:
    """Write the filtered signal in place; nothing is allocated."""
    signal, coefficients, output = launch.args[:3]
    if not output.is_meta:
        return NotImplemented
    _check(signal.is_contiguous() and coefficients.is_contiguous() and output.is_contiguous(), "expected contiguous")
    _check(signal.shape[2] + coefficients.shape[1] - 1 == output.shape[2], "lengths do not match")
    return output
