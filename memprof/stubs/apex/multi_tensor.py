"""apex.multi_tensor_apply and amp_C: one kernel over lists of tensors. They write what they are given, and allocate the
norms alone.

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

_ADAM = "lr beta1 beta2 epsilon step mode bias_correction weight_decay"
_PARTS = 320  # sums that blocks of threads write, in float32 (multi_tensor_l2norm_cuda)
_Lists = list[list[torch.Tensor]]
_FIRST = ("chunk_size", "noop_flag", "tensor_lists")


def _of_kernels(name: str, file: str, options: str) -> Callable[[Any], Any]:
    """Register what follows for a function that takes lists of tensors and then `options`, all by position."""
    names = (*_FIRST, *options.split())

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args):
            if len(args) != len(names):
                raise TypeError(f"amp_C.{name} takes {', '.join(names)}: {len(args)} arguments were given")
            return kernel(*args)

        positional = inspect.Parameter.POSITIONAL_ONLY
        call.__signature__ = inspect.Signature([inspect.Parameter(each, positional) for each in names])  # type: ignore[attr-defined]
        call.__doc__, call.__name__ = kernel.__doc__, name
        stub(f"amp_C.{name}", source=f"NVIDIA/apex@25.05:csrc/{file}")(call)
        return kernel

    return register


@stub(
    "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply", "apex.multi_tensor_apply.MultiTensorApply",
    source="NVIDIA/apex@25.05:apex/multi_tensor_apply/multi_tensor_apply.py",
)  # fmt: skip
class MultiTensorApply(fused_optimizers.MultiTensorApply):
    """Calls a kernel with a size of chunks: nothing is taken."""

    available = True
    warned = False

    def check_avail(self):
        """Do nothing: the kernels are there."""


multi_tensor_applier = stub(
    "apex.multi_tensor_apply.multi_tensor_applier",
    source="NVIDIA/apex@25.05:apex/multi_tensor_apply/__init__.py",
)(MultiTensorApply(fused_optimizers.CHUNK))


def norms(chunk: int, lists: _Lists, per_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """multi_tensor_l2norm_cuda: the norm of all, and, if requested, of each."""
    first = lists[0][0]
    sums = first.new_zeros(_PARTS, dtype=torch.float32)
    number = len(lists[0])
    of_chunks, of_each = None, first.new_empty(0, dtype=torch.float32)
    if per_tensor:
        most = max(-(-tensor.numel() // chunk) for tensor in lists[0])
        of_chunks = first.new_zeros(number * most, dtype=torch.float32)
        of_each = first.new_empty(number, dtype=torch.float32)
    norm = first.new_empty(1, dtype=torch.float32)
    del sums, of_chunks
    return norm, of_each


@_of_kernels("multi_tensor_l2norm", "multi_tensor_l2norm_kernel.cu", "per_tensor_python")
@_of_kernels("multi_tensor_l2norm_mp", "multi_tensor_l2norm_kernel_mp.cu", "per_tensor_python")
def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """A norm, with 320 sums of blocks of threads, and, if requested, one of each tensor."""
    check_on_gpu("amp_C.multi_tensor_l2norm", *tensor_lists[0])
    return norms(chunk_size, tensor_lists, bool(per_tensor))


@_of_kernels("multi_tensor_scale", "multi_tensor_scale_kernel.cu", "scale")
def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """The second list is written, and the flag where a number is not finite."""
    check_on_gpu("amp_C.multi_tensor_scale", *tensor_lists[0])
    mark_written(*tensor_lists[1])


@_of_kernels("multi_tensor_axpby", "multi_tensor_axpby_kernel.cu", "a b arg_to_check")
def multi_tensor_axpby(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """The third list is written."""
    check_on_gpu("amp_C.multi_tensor_axpby", *tensor_lists[0])
    mark_written(*tensor_lists[2])


@_of_kernels("multi_tensor_adam", "multi_tensor_adam.cu", _ADAM)
@_of_kernels("multi_tensor_adam_capturable", "multi_tensor_adam.cu", f"{_ADAM} inv_scale")
@_of_kernels("multi_tensor_adam_capturable_master", "multi_tensor_adam.cu", f"{_ADAM} inv_scale")
@_of_kernels(
    "multi_tensor_sgd", "multi_tensor_sgd_kernel.cu",
    "wd momentum dampening lr nesterov first_run wd_after_momentum scale",
)  # fmt: skip
@_of_kernels("multi_tensor_adagrad", "multi_tensor_adagrad.cu", "lr epsilon mode weight_decay")
def multi_tensor_step(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """All lists but the gradients, which come first, are written."""
    check_on_gpu("amp_C.multi_tensor_adam", *tensor_lists[0])
    for tensors in tensor_lists[1:]:
        mark_written(*tensors)


@_of_kernels(
    "multi_tensor_lamb", "multi_tensor_lamb.cu",
    "lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode global_grad_norm max_grad_norm "
    "use_nvlamb_python",
)  # fmt: skip
def multi_tensor_lamb(chunk_size, noop_flag, tensor_lists, *options) -> None:
    """Norms of each parameter and of each update; all lists are written, gradients too, which hold the updates."""
    check_on_gpu("amp_C.multi_tensor_lamb", *tensor_lists[0])
    of_parameters = norms(chunk_size, tensor_lists[1:2], True)
    of_updates = norms(chunk_size, tensor_lists[:1], True)
    for tensors in tensor_lists:
        mark_written(*tensors)
    del of_parameters, of_updates
