"""Private names below `torch.cuda` and `torch.accelerator`, which CUDA builds have and CPU builds partly lack.

The virtual GPU replaces them by its own functions, on either build: the owner must exist, the name need not.
"""

from __future__ import annotations

from functools import partial

from memprof.torch_private.names import PrivateName

_NOT_REPLACED = "memprof's own is put there all the same, and what torch calls instead is not replaced"
_cuda_name = partial(PrivateName, fallback=_NOT_REPLACED, build="CUDA")
_replaceable_name = partial(PrivateName, fallback=_NOT_REPLACED)

# -- devices -------------------------------------------------------------------------------------------------------

init = _cuda_name("torch._C:_cuda_init")
is_in_bad_fork = _cuda_name("torch._C:_cuda_isInBadFork")
has_primary_context = _cuda_name("torch._C:_cuda_hasPrimaryContext")
get_device_count = _cuda_name("torch._C:_cuda_getDeviceCount")
get_device = _cuda_name("torch._C:_cuda_getDevice")
set_device = _cuda_name("torch._C:_cuda_setDevice")
exchange_device = _cuda_name("torch._C:_cuda_exchangeDevice")
maybe_exchange_device = _cuda_name("torch._C:_cuda_maybeExchangeDevice")
can_device_access_peer = _cuda_name("torch._C:_cuda_canDeviceAccessPeer")
synchronize = _cuda_name("torch._C:_cuda_synchronize")
sleep = _cuda_name("torch._C:_cuda_sleep")
ipc_collect = _cuda_name("torch._C:_cuda_ipc_collect")
get_current_raw_stream = _cuda_name("torch._C:_cuda_getCurrentRawStream")
get_current_blas_handle = _cuda_name("torch._C:_cuda_getCurrentBlasHandle")
get_current_solver_handle = _cuda_name("torch._C:_cuda_getCurrentSolverHandle", since="2.13")
get_sync_debug_mode = _cuda_name("torch._C:_cuda_get_sync_debug_mode")
set_sync_debug_mode = _cuda_name("torch._C:_cuda_set_sync_debug_mode")
jiterator_compile_and_launch_kernel = _cuda_name("torch._C:_cuda_jiterator_compile_and_launch_kernel")
broadcast = _cuda_name("torch._C:_broadcast")
broadcast_coalesced = _cuda_name("torch._C:_broadcast_coalesced")
gather = _cuda_name("torch._C:_gather")
scatter = _cuda_name("torch._C:_scatter")

accelerator_get_accelerator = _replaceable_name("torch._C:_accelerator_getAccelerator")
get_accelerator = _replaceable_name("torch._C:_get_accelerator")
accelerator_get_device_index = _replaceable_name("torch._C:_accelerator_getDeviceIndex")
accelerator_set_device_index = _replaceable_name("torch._C:_accelerator_setDeviceIndex")
accelerator_exchange_device = _replaceable_name("torch._C:_accelerator_exchangeDevice")
accelerator_maybe_exchange_device = _replaceable_name("torch._C:_accelerator_maybeExchangeDevice")
accelerator_synchronize_device = _replaceable_name("torch._C:_accelerator_synchronizeDevice")

exchange_device_of_torch = _replaceable_name("torch.cuda:_exchange_device")
maybe_exchange_device_of_torch = _replaceable_name("torch.cuda:_maybe_exchange_device")
is_compiled = _replaceable_name("torch.cuda:_is_compiled")
initialized = _replaceable_name("torch.cuda:_initialized")
cached_device_count = _replaceable_name("torch.cuda:_cached_device_count")
get_device_properties = _replaceable_name("torch.cuda:_get_device_properties", build="CUDA, once initialized")
compile_kernel = _replaceable_name("torch.cuda:_compile_kernel")
nvtx = _replaceable_name("torch.cuda.nvtx:_nvtx")

# -- memory --------------------------------------------------------------------------------------------------------

get_allocator_backend = _cuda_name("torch._C:_cuda_getAllocatorBackend")
host_memory_stats = _cuda_name("torch._C:_cuda_hostMemoryStats")
reset_accumulated_host_memory_stats = _cuda_name("torch._C:_cuda_resetAccumulatedHostMemoryStats")
reset_peak_host_memory_stats = _cuda_name("torch._C:_cuda_resetPeakHostMemoryStats")
clear_cublas_workspaces = _cuda_name("torch._C:_cuda_clearCublasWorkspaces")
memory_snapshot = _cuda_name("torch._C:_cuda_memorySnapshot")
allocator_state = _cuda_name("torch._C:_cuda_CUDAAllocator_AllocatorState")
set_cached_tensors_enabled = _replaceable_name("torch._C:_set_cached_tensors_enabled")
host_empty_cache = _cuda_name("torch._C:_host_emptyCache", since="2.11")
accelerator_empty_host_cache = _replaceable_name("torch._C:_accelerator_emptyHostCache", since="2.12")

_PEAKS_LOST = "a program that resets its peaks by it takes memprof's with them"
memory_stats = PrivateName("torch._C:_cuda_memoryStats", fallback=_PEAKS_LOST, build="CUDA")
reset_peak_memory_stats = PrivateName("torch._C:_cuda_resetPeakMemoryStats", fallback=_PEAKS_LOST, build="CUDA")
accelerator_get_device_stats = PrivateName("torch._C:_accelerator_getDeviceStats", fallback=_PEAKS_LOST, since="2.9")
accelerator_reset_peak_stats = PrivateName("torch._C:_accelerator_resetPeakStats", fallback=_PEAKS_LOST, since="2.9")

_OLDER_NAME = "the allocator's settings are set by the older name, and read from the environment"
accelerator_get_allocator_settings = PrivateName(
    "torch._C:_accelerator_getAllocatorSettings", fallback=_OLDER_NAME, since="2.12"
)
accelerator_set_allocator_settings = PrivateName(
    "torch._C:_accelerator_setAllocatorSettings", fallback=_OLDER_NAME, since="2.10"
)
set_allocator_settings = PrivateName("torch.cuda.memory:_set_allocator_settings")

record_memory_history = PrivateName("torch.cuda.memory:_record_memory_history")
snapshot = PrivateName("torch.cuda.memory:_snapshot")
