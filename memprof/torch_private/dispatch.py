"""Private names of the dispatcher: modes for functions and for operators, dispatch keys, and kernels by key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memprof.torch_private.names import PrivateName, bind

# -- modes ---------------------------------------------------------------------------------------------------------

TorchDispatchMode: Any = bind("torch.utils._python_dispatch:TorchDispatchMode")
disable_current_modes: Callable[[], AbstractContextManager[Any]] = bind(
    "torch.utils._python_dispatch:_disable_current_modes"
)
get_current_dispatch_mode: Callable[[], Any] = bind("torch.utils._python_dispatch:_get_current_dispatch_mode")
pop_dispatch_mode: Callable[..., Any] = bind("torch.utils._python_dispatch:_pop_mode")
push_dispatch_mode: Callable[..., None] = bind("torch.utils._python_dispatch:_push_mode")
get_dispatch_mode: Callable[[Any], Any] = bind("torch._C:_get_dispatch_mode")
TorchDispatchModeKey: Any = bind("torch._C:_TorchDispatchModeKey")
len_torch_dispatch_stack: Callable[[], int] = bind("torch._C:_len_torch_dispatch_stack")
DisableTorchDispatch: Any = bind("torch._C:_DisableTorchDispatch")
disabled_torch_dispatch_impl: Any = bind("torch._C:_disabled_torch_dispatch_impl")

get_current_function_mode_stack: Callable[[], list[Any]] = bind("torch.overrides:_get_current_function_mode_stack")
pop_function_mode: Callable[[], Any] = bind("torch.overrides:_pop_mode")
push_function_mode: Callable[[Any], None] = bind("torch.overrides:_push_mode")
len_torch_function_stack: Callable[[], int] = bind("torch._C:_len_torch_function_stack")
get_function_stack_at: Callable[[int], Any] = bind("torch._C:_get_function_stack_at")
is_torch_function_enabled: Callable[[], bool] = bind("torch._C:_is_torch_function_enabled")
is_torch_function_all_disabled: Callable[[], bool] = bind("torch._C:_is_torch_function_all_disabled")
EnableTorchFunction: Any = bind("torch._C:_EnableTorchFunction")
disabled_torch_function_impl: Any = bind("torch._C:_disabled_torch_function_impl")
has_torch_function: Callable[..., bool] = bind("torch._C:_has_torch_function")
has_torch_function_unary: Callable[..., bool] = bind("torch._C:_has_torch_function_unary")
has_torch_function_variadic: Callable[..., bool] = bind("torch._C:_has_torch_function_variadic")
register_builtin: Callable[..., None] = bind("torch.jit._builtins:_register_builtin")

# The module of torch.set_default_device: its CURRENT_DEVICE is read for each factory.
default_device = PrivateName("torch.utils._device")
device_constructors = PrivateName("torch.utils._device:_device_constructors")

# -- kernels by key ------------------------------------------------------------------------------------------------

dispatch_has_kernel_for_dispatch_key: Callable[[str, str], bool] = bind(
    "torch._C:_dispatch_has_kernel_for_dispatch_key"
)
dispatch_has_computed_kernel_for_dispatch_key: Callable[[str, str], bool] = bind(
    "torch._C:_dispatch_has_computed_kernel_for_dispatch_key"
)
dispatch_get_all_op_names: Callable[[], list[str]] = bind("torch._C:_dispatch_get_all_op_names")
dispatch_library: Any = bind("torch._C:_dispatch_library")
dispatch_tls_local_exclude_set: Callable[[], Any] = bind("torch._C:_dispatch_tls_local_exclude_set")
dispatch_tls_local_include_set: Callable[[], Any] = bind("torch._C:_dispatch_tls_local_include_set")
ForceDispatchKeyGuard: Any = bind("torch._C:_ForceDispatchKeyGuard")
AutoDispatchBelowAutograd: Any = bind("torch._C:_AutoDispatchBelowAutograd")
OPDEFS: Any = bind("torch._library.custom_ops:OPDEFS")

# -- operators that are Python (torch/_higher_order_ops) -----------------------------------------------------------

_NO_RULE = "the operator asks dispatch modes for a rule, finds none, and the run ends there with its name"
dispatch_cond = PrivateName("torch._higher_order_ops.cond:cond_op.dispatch", fallback=_NO_RULE)
dispatch_while_loop = PrivateName("torch._higher_order_ops.while_loop:while_loop_op.dispatch", fallback=_NO_RULE)
dispatch_scan = PrivateName("torch._higher_order_ops.scan:scan_op.dispatch", fallback=_NO_RULE)
generic_scan = PrivateName("torch._higher_order_ops.scan:generic_scan", fallback=_NO_RULE)
call_flex_attention = PrivateName("torch._higher_order_ops.flex_attention:FlexAttentionHOP.__call__", fallback=_NO_RULE)
create_sparse_block_from_block_mask = PrivateName(
    "torch.nn.attention.flex_attention:_create_sparse_block_from_block_mask",
    fallback="compiled create_block_mask ends the run",
)
