"""apex.multi_tensor_apply and amp_C: one kernel over lists of tensors. The kernels write their arguments, and allocate
only norms.

Sources: apex/multi_tensor_apply/multi_tensor_apply.py, csrc/amp_C_frontend.cpp, multi_tensor_l2norm_kernel.cu and
multi_tensor_lamb.cu of NVIDIA/apex@25.05.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from memprof.stubs import fused_optimizers
from memprof.stubs.registry import stub
from memprof.stubs.tools import check_on_gpu, mark_written

_ADAM_OPTIONS = "lr beta1 beta2 epsilon step mode bias_correction weight_decay"
_NUM_PARTIAL_SUMS = 320  # partial sums of thread blocks, in float32 (multi_tensor_l2norm_cuda)


def _register_kernel(name: str, file: str, options: str) -> Callable[[Any], Any]:
    """Return a decorator for the kernel amp_C.`name`, whose positional arguments end with the words of `options`."""
    names = ("chunk_size", "noop_flag", "tensor_lists", *options.split())

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args):
            if len(args) != len(names):
                raise TypeError(f"amp_C.{name} takes {', '.join(names)}: {len(args)} arguments were given")
            return kernel(*args)

        positional = inspect.Parameter.POSITIONAL_ONLY
        call.__signature__ = inspect.Signature([inspect.Parameter(arg, positional) for arg in names])  # type: ignore[attr-defined]
        call.__doc__, call.__name__ = kernel.__doc__, name
        stub(f"amp_C.{name}", source=f"NVIDIA/apex@25.05:csrc/{file}")(call)
        return kernel

    return register


@stub(
    "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply", "apex.multi_tensor_apply.MultiTensorApply",
    source="NVIDIA/apex@25.05:apex/multi_tensor_apply/multi_tensor_apply.py",
)  # fmt: skip
class MultiTensorApply(fused_optimizers.MultiTensorApply):
    """A callable that calls a kernel over lists of tensors with its chunk size; nothing is allocated."""

    available = True
    warned = False

    def check_avail(self):
        """Do nothing, since the kernels are available."""


multi_tensor_applier = stub(
    "apex.multi_tensor_apply.multi_tensor_applier",
    source="NVIDIA/apex@25.05:apex/multi_tensor_apply/__init__.py",
)(MultiTensorApply(fused_optimizers.CHUNK_SIZE))


def _compute_norms(chunk_size: int, tensors: list[torch.Tensor], per_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, and if `per_tensor` the norm of each, in float32 (multi_tensor_l2norm_cuda)."""
    first = tensors[0]
    sums = first.new_zeros(_NUM_PARTIAL_SUMS, dtype=torch.float32)
    chunk_sums, tensor_norms = None, first.new_empty(0, dtype=torch.float32)
    if per_tensor:
        max_chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors)
        chunk_sums = first.new_zeros(len(tensors) * max_chunks, dtype=torch.float32)
        tensor_norms = first.new_empty(len(tensors), dtype=torch.float32)
    norm = first.new_empty(1, dtype=torch.float32)
    del sums, chunk_sums
    return norm, tensor_norms


@_register_kernel("multi_tensor_l2norm", "multi_tensor_l2norm_kernel.cu", "per_tensor_python")
@_register_kernel("multi_tensor_l2norm_mp", "multi_tensor_l2norm_kernel_mp.cu", "per_tensor_python")
def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """Return the norm of all tensors and optionally of each, in float32; scratch: 320 partial sums."""
    check_on_gpu("amp_C.multi_tensor_l2norm", *tensor_lists[0])
    return _compute_norms(chunk_size, tensor_lists[0], bool(per_tensor))


@_register_kernel("multi_tensor_scale", "multi_tensor_scale_kernel.cu", "scale")
def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """Write the first list, scaled, into the second; nothing is allocated."""
    check_on_gpu("amp_C.multi_tensor_scale", *tensor_lists[0])
    mark_written(*tensor_lists[1])


@_register_kernel("multi_tensor_axpby", "multi_tensor_axpby_kernel.cu", "a b arg_to_check")
def multi_tensor_axpby(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """Write a * x + b * y of the first two lists into the third; nothing is allocated."""
    check_on_gpu("amp_C.multi_tensor_axpby", *tensor_lists[0])
    mark_written(*tensor_lists[2])


@_register_kernel("multi_tensor_adam", "multi_tensor_adam.cu", _ADAM_OPTIONS)
@_register_kernel("multi_tensor_adam_capturable", "multi_tensor_adam.cu", f"{_ADAM_OPTIONS} inv_scale")
@_register_kernel("multi_tensor_adam_capturable_master", "multi_tensor_adam.cu", f"{_ADAM_OPTIONS} inv_scale")
@_register_kernel(
    "multi_tensor_sgd", "multi_tensor_sgd_kernel.cu",
    "wd momentum dampening lr nesterov first_run wd_after_momentum scale",
)  # fmt: skip
@_register_kernel("multi_tensor_adagrad", "multi_tensor_adagrad.cu", "lr epsilon mode weight_decay")
def multi_tensor_step(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """Write all lists of tensors except the first, the gradients; nothing is allocated."""
    check_on_gpu("amp_C.multi_tensor_adam", *tensor_lists[0])
    for tensors in tensor_lists[1:]:
        mark_written(*tensors)


@_register_kernel(
    "multi_tensor_lamb", "multi_tensor_lamb.cu",
    "lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode global_grad_norm max_grad_norm "
    "use_nvlamb_python",
)  # fmt: skip
def multi_tensor_lamb(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """Write all lists of tensors, the updates into the gradients; scratch: norms of each parameter and update."""
    check_on_gpu("amp_C.multi_tensor_lamb", *tensor_lists[0])
    parameter_norms = _compute_norms(chunk_size, tensor_lists[1], True)
    update_norms = _compute_norms(chunk_size, tensor_lists[0], True)
    for tensors in tensor_lists:
        mark_written(*tensors)
    del parameter_norms, update_norms
