"""Private names of tensors, storages and modules: for counting, swapping, printing, pickling and saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.torch_private.names import PrivateName, bind

TensorBase: Any = bind("torch._C:TensorBase")
BatchNorm: Any = bind("torch.nn.modules.batchnorm:_BatchNorm")
set_throw_on_mutable_data_ptr: Callable[[Any], None] = bind("torch._C:_set_throw_on_mutable_data_ptr")
storage_use_count: Callable[[int], int] = bind("torch._C:_storage_Use_Count")
use_count: Callable[[Any], int] = bind("torch:Tensor._use_count")
base_of_tensor: Any = bind("torch:Tensor._base")
swap_tensor_impl: Callable[[Any, Any], None] = bind("torch._C:_swap_tensor_impl")
flatten_dense_tensors: Callable[..., Any] = bind("torch._utils:_flatten_dense_tensors")
unflatten_dense_tensors: Callable[..., Any] = bind("torch._utils:_unflatten_dense_tensors")

make_subclass = PrivateName("torch:Tensor._make_subclass")
make_wrapper_subclass = PrivateName("torch:Tensor._make_wrapper_subclass")
apply_of_module = PrivateName("torch.nn:Module._apply")
group_tensors_by_device_and_dtype = PrivateName("torch._C:_group_tensors_by_device_and_dtype")
has_compatible_shallow_copy_type = PrivateName("torch:_has_compatible_shallow_copy_type")
str_of_tensor = PrivateName("torch._tensor_str:_str")

# -- files and pickles ---------------------------------------------------------------------------------------------

get_obj_state: Callable[[Any], Any] = bind("torch._utils:_get_obj_state")
rebuild_from_type_v2: Callable[..., Any] = bind("torch._tensor:_rebuild_from_type_v2")
validate_loaded_sparse_tensors: Callable[..., None] = bind("torch._utils:_validate_loaded_sparse_tensors")
get_allowed_globals: Any = bind("torch._weights_only_unpickler:_get_allowed_globals")
get_restore_location: Callable[[Any], Any] = bind("torch.serialization:_get_restore_location")
serialization_tls: Any = bind("torch.serialization:_serialization_tls")

save = PrivateName("torch.serialization:_save")
load = PrivateName("torch.serialization:_load")
legacy_load = PrivateName("torch.serialization:_legacy_load")
rebuild_device_tensor_from_cpu_tensor = PrivateName("torch._utils:_rebuild_device_tensor_from_cpu_tensor")
rebuild_meta_tensor_no_storage = PrivateName("torch._utils:_rebuild_meta_tensor_no_storage")
