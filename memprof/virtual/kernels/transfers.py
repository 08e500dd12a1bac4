"""Copies between host and GPU, values that the program reads, and collectives that DTensor calls.

Meta kernels of collectives allocate the same results as CUDA kernels. Waiting and wrapping allocate nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.torch_private import distributed
from memprof.trace.events import HOST, is_gpu
from memprof.virtual.device_state import REAL
from memprof.virtual.engine import is_called_by_engine
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import META, aten, kernel
from memprof.virtual.operator_call import MIN_VIRTUAL_BYTES


@kernel(aten._local_scalar_dense, on_host=True)
def local_scalar(launch: KernelContext) -> Any:
    """Return the value of a tensor of one element, for `item()`."""
    if launch.args[0].is_meta:
        launch.wait()
    return launch.values.policy.read(launch.args[0]).item()


@kernel(aten.lift_fresh, on_host=True)
def lift_fresh(launch: KernelContext) -> Any:
    """Record the host tensor that `torch.tensor` creates outside the dispatch mode; this is the call's last operator
    (utils/tensor_new.cpp). Memory of another library (torch.from_numpy) is not resizable, and is not counted."""
    result = launch.args[0]
    if not result.is_meta and result.dim() and result.device.type == "cpu" and result.untyped_storage().resizable():
        launch.record_real(result)
    return launch.func(*launch.args, **launch.kwargs)


@kernel(aten._to_copy, on_host=True)
def to_copy(launch: KernelContext) -> Any:
    """Copy a tensor to another device, with its values if they are known."""
    source = launch.args[0]
    device = launch.kwargs.get("device")
    non_blocking = launch.kwargs.get("non_blocking", False)
    to_host = device is not None and (device.type == "cpu" or launch.device_state.factory_device == HOST)
    if device is not None and launch.call.on_gpu == to_host and not non_blocking:
        launch.wait()  # for the current stream (native/cuda/Copy.cu, copy_kernel_cuda)
    if source.is_meta and device is not None and device.type == "meta" and launch.lacks_peer_access:
        result = launch.run()
        _allocate_peer_copy(launch, result, source, non_blocking)
        return result
    if device is None or (device.type == "cpu") == (not source.is_meta) or (device.type == "meta" and source.is_meta):
        return NotImplemented
    dtype = launch.kwargs.get("dtype") or source.dtype
    layout = launch.kwargs.get("memory_format") or torch.preserve_format
    if not source.is_meta:
        # Host to GPU: the values are known.
        result = torch.empty_like(source, dtype=dtype, device=META, memory_format=layout)
        if launch.device_state.factory_device == HOST:
            launch.device_state.record_copy(result)
        elif launch.device_state.factory_device != "meta":
            launch.record(result, device=HOST if launch.device_state.autograd_nodes.is_host_copy() else None)
        if launch.device_state.factory_device != "meta" and launch.values.store.is_trackable(result):
            launch.values.store.set(result, source.to(dtype))
        return result
    if copies_gradient_of_real_tensor(launch):
        # The gradient returns to the source's device.
        launch.device_state.autograd_nodes.note_copy(launch.device_state.device_of(source))
        return _read_to_host(launch, source, dtype, layout)
    is_large = source.numel() * dtype.itemsize >= MIN_VIRTUAL_BYTES
    # Several unknown elements stay unknown on the host (`scores.cpu() < 0.5` is an unknown mask), and so do chosen
    # tokens.
    is_array = source.numel() > 1
    is_unknown = launch.values.store.get(source) is None
    is_virtual = (is_unknown and (is_large or is_array)) or (is_large and launch.values.store.is_uniform(source))
    if is_virtual or launch.values.store.tokens.find_placeholders([source]):
        result = torch.empty_like(source, dtype=dtype, memory_format=layout)
        launch.record(result, device=HOST)
        launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
        return result
    return _read_to_host(launch, source, dtype, layout)


def copies_gradient_of_real_tensor(launch: KernelContext) -> bool:
    """Return whether autograd copies the gradient of a CPU tensor to the host in this call (host_kinds.py)."""
    return launch.device_state.factory_device == REAL or is_called_by_engine()


def _read_to_host(
    launch: KernelContext, source: torch.Tensor, dtype: torch.dtype, layout: torch.memory_format
) -> torch.Tensor:
    result = launch.values.policy.read(source).to(dtype, copy=True, memory_format=layout)
    launch.record_real(result)
    return result


@kernel(aten.copy_, on_host=True)
def copy_(launch: KernelContext) -> Any:
    """Copy values into a tensor, also between devices."""
    target, source = launch.args[0], launch.args[1]
    non_blocking = launch.argument(2, "non_blocking", False)
    if launch.call.on_gpu and (launch.call.on_host or launch.call.real) and not non_blocking:
        launch.wait()
    if target.is_meta and source.is_meta:
        if launch.lacks_peer_access:
            _allocate_peer_copy(launch, target, source, non_blocking)
        return NotImplemented
    if target.is_meta:
        launch.values.write(launch.func, (target, source), {}, target)
        return target
    if source.is_meta:
        target.copy_(launch.values.policy.read(source))
        return target
    return NotImplemented


def _allocate_peer_copy(launch: KernelContext, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Allocate the temporaries of a copy between GPUs without peer access (native/cuda/Copy.cu, copy_kernel_cuda). The
    transfer needs one dtype and contiguous memory on both GPUs."""
    gpus = launch.device_state.device_of(target), launch.device_state.device_of(source)
    has_same_dtype = target.dtype == source.dtype
    dense_source = torch.empty_like(source)
    has_same_strides = target.stride() == source.stride() == dense_source.stride()
    if gpus[0] == gpus[1] or not all(map(is_gpu, gpus)) or (has_same_dtype and has_same_strides):
        return
    sent_bytes = target.numel() * (target if non_blocking else source).element_size()
    is_received_in_place = target.is_contiguous() and (has_same_dtype or non_blocking)
    source_buffers = [] if source.is_contiguous() and source.shape == target.shape else [sent_bytes]
    if non_blocking and not has_same_dtype:
        source_buffers.append(sent_bytes)
    with launch.scratch(*([] if is_received_in_place else [sent_bytes]), gpu=gpus[0]):
        launch.transients(*source_buffers, gpu=gpus[1])


# None if torch was built without torch.distributed.
_AsyncCollectiveTensor: Any = distributed.AsyncCollectiveTensor.get(None)


@kernel("_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_to_all_single")
def run_collective(launch: KernelContext) -> Any:
    """Run a collective and keep its input alive until the program waits for the result, as NCCL's work object does
    (ProcessGroupNCCL.hpp, `stashed_for_allocator_safety_`; torch/csrc/distributed/c10d/Functional.cpp)."""
    result = launch.run()
    launch.device_state.pending_collectives[result.untyped_storage()] = launch.args[0]
    return result


@kernel("_c10d_functional.wait_tensor", on_host=True)
def wait_tensor(launch: KernelContext) -> Any:
    """Return the input tensor, and free the input of its collective (torch/csrc/distributed/c10d/Functional.cpp)."""
    if not launch.args[0].is_meta:
        return NotImplemented
    launch.device_state.pending_collectives.pop(launch.args[0].untyped_storage(), None)
    return launch.args[0]


@kernel("_c10d_functional._wrap_tensor_autograd", on_host=True)
def wrap_tensor(launch: KernelContext) -> Any:
    """Return a wrapper that waits for the tensor at its first use (torch/distributed/_functional_collectives.py)."""
    return _AsyncCollectiveTensor(launch.args[0])
