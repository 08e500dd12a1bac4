"""Copies between host and GPU, reads of values by the program, and collectives, as DTensor calls them.

Meta kernels of collectives make the results that CUDA's make. Waiting, and what hands a result on, makes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.torch_private import distributed
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_state import REAL
from memprof.virtual.engine import called_by_engine
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import META, aten, kernel
from memprof.virtual.operator_call import HOST_VIRTUAL_BYTES


@kernel(aten._local_scalar_dense, on_host=True)
def local_scalar(launch: KernelContext) -> Any:
    """Read a scalar, as `item()` does."""
    if launch.args[0].is_meta:
        launch.wait()
    return launch.values.policy.read(launch.args[0]).item()


@kernel(aten.lift_fresh, on_host=True)
def lift_fresh(launch: KernelContext) -> Any:
    """The last act of `torch.tensor` and its like (utils/tensor_new.cpp), which make the tensor where no mode sees it.

    Memory that belongs to another library (torch.from_numpy) cannot be resized: it is not counted.
    """
    made = launch.args[0]
    if not made.is_meta and made.dim() and made.device.type == "cpu" and made.untyped_storage().resizable():
        launch.record_real(made)
    return launch.func(*launch.args, **launch.kwargs)


@kernel(aten._to_copy, on_host=True)
def to_copy(launch: KernelContext) -> Any:
    """`to` another device: values go to the GPU as far as they are known, and come back as far as they are."""
    source = launch.args[0]
    device = launch.kwargs.get("device")
    non_blocking = launch.kwargs.get("non_blocking", False)
    to_host = device is not None and (device.type == "cpu" or launch.machine.factory_device == HOST)
    if device is not None and launch.call.on_gpu == to_host and not non_blocking:
        launch.wait()  # for the current stream (native/cuda/Copy.cu, copy_kernel_cuda)
    if source.is_meta and device is not None and device.type == "meta" and launch.lacks_peers:
        made = launch.run()
        _between_gpus(launch, made, source, non_blocking)
        return made
    if device is None or (device.type == "cpu") == (not source.is_meta) or (device.type == "meta" and source.is_meta):
        return NotImplemented
    dtype = launch.kwargs.get("dtype") or source.dtype
    layout = launch.kwargs.get("memory_format") or torch.preserve_format
    if not source.is_meta:
        # Host to GPU: the values travel along.
        result = torch.empty_like(source, dtype=dtype, device=META, memory_format=layout)
        if launch.machine.factory_device == HOST:
            launch.machine.record_copy(result)
        elif launch.machine.factory_device != "meta":
            launch.record(result, device=HOST if launch.machine.nodes.returns_to_host() else None)
        if launch.machine.factory_device != "meta" and launch.values.store.is_trackable(result):
            launch.values.store.set(result, source.to(dtype))
        return result
    if copies_gradient_of_real_tensor(launch):
        launch.machine.nodes.note_copy(launch.machine.device_of(source))  # its gradient goes back
        return _read(launch, source, dtype, layout)
    large = source.numel() * dtype.itemsize >= HOST_VIRTUAL_BYTES
    # What is not known of several elements stays so (`scores.cpu() < 0.5` is a mask like any other), and so does which
    # token was chosen.
    several = source.numel() > 1
    unknown = launch.values.store.get(source) is None
    virtual = (unknown and (large or several)) or (large and launch.values.store.is_uniform(source))
    if virtual or launch.values.store.tokens.find([source]):
        result = torch.empty_like(source, dtype=dtype, memory_format=layout)
        launch.record(result, device=HOST)
        launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
        return result
    return _read(launch, source, dtype, layout)


def copies_gradient_of_real_tensor(launch: KernelContext) -> bool:
    """Return whether a copy to the host is of a gradient whose tensor is real: the engine asks for the device of that
    (host_kinds.py)."""
    return launch.machine.factory_device == REAL or called_by_engine()


def _read(launch: KernelContext, source: torch.Tensor, dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
    result = launch.values.policy.read(source).to(dtype, copy=True, memory_format=layout)
    launch.record_real(result)
    return result


@kernel(aten.copy_, on_host=True)
def copy_(launch: KernelContext) -> Any:
    """`copy_` from one device to another."""
    target, source = launch.args[0], launch.args[1]
    non_blocking = launch.argument(2, "non_blocking", False)
    if launch.call.on_gpu and (launch.call.on_host or launch.call.real) and not non_blocking:
        launch.wait()
    if target.is_meta and source.is_meta:
        if launch.lacks_peers:
            _between_gpus(launch, target, source, non_blocking)
        return NotImplemented
    if target.is_meta:
        launch.values.write(launch.func, (target, source), {}, target)
        return target
    if source.is_meta:
        target.copy_(launch.values.policy.read(source))
        return target
    return NotImplemented


def _between_gpus(launch: KernelContext, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Temporaries of a copy between GPUs that do not read each other's memory (native/cuda/Copy.cu, copy_kernel_cuda):
    what is sent is of one type and contiguous at both ends."""
    ends = launch.machine.device_of(target), launch.machine.device_of(source)
    same_type = target.dtype == source.dtype
    dense = torch.empty_like(source)
    alike = target.stride() == source.stride() == dense.stride()
    if ends[0] == ends[1] or not all(map(is_gpu, ends)) or (same_type and alike):
        return
    sent = target.numel() * (target if non_blocking else source).element_size()
    received = target.is_contiguous() and (same_type or non_blocking)
    gathered = [] if source.is_contiguous() and source.shape == target.shape else [sent]
    if non_blocking and not same_type:
        gathered.append(sent)
    with launch.scratch(*([] if received else [sent]), gpu=ends[0]):
        launch.transients(*gathered, gpu=ends[1])


# None in a build of torch without torch.distributed.
_AsyncCollectiveTensor: Any = distributed.AsyncCollectiveTensor.get(None)


@kernel("_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_to_all_single")
def kept_collective(launch: KernelContext) -> Any:
    """Keep what it is given until its result is waited for: NCCL's work keeps it, and torch the work
    (ProcessGroupNCCL.hpp, `stashed_for_allocator_safety_`; torch/csrc/distributed/c10d/Functional.cpp)."""
    result = launch.run()
    launch.machine.pending_collectives[result.untyped_storage()] = launch.args[0]
    return result


@kernel("_c10d_functional.wait_tensor", on_host=True)
def wait_tensor(launch: KernelContext) -> Any:
    """Gives back the tensor that it is given (torch/csrc/distributed/c10d/Functional.cpp)."""
    if not launch.args[0].is_meta:
        return NotImplemented
    launch.machine.pending_collectives.pop(launch.args[0].untyped_storage(), None)
    return launch.args[0]


@kernel("_c10d_functional._wrap_tensor_autograd", on_host=True)
def wrap_tensor(launch: KernelContext) -> Any:
    """Return the same tensor, waited for where it is first used (torch/distributed/_functional_collectives.py)."""
    return _AsyncCollectiveTensor(launch.args[0])
