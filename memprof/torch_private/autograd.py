"""Private names of autograd: its engine, its profiler, the transformations of torch.func; and of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.torch_private.names import PrivateName, bind

# Called for each operator.
current_autograd_node: Callable[[], Any] = bind("torch._C:_current_autograd_node")
current_graph_task_id: Callable[[], int] = bind("torch._C:_current_graph_task_id")
get_sequence_nr: Callable[[], int] = bind("torch._C:_autograd._get_sequence_nr")
is_functorch_wrapped_tensor: Callable[[Any], bool] = bind("torch._C:_functorch.is_functorch_wrapped_tensor")
get_unwrapped: Callable[[Any], Any] = bind("torch._C:_functorch.get_unwrapped")
flat_vmap = PrivateName("torch._functorch.vmap:_flat_vmap", fallback="calls of torch.func.vmap are not recorded")
# What torch.autograd.grad(is_grads_batched=True) and torch.autograd.functional call with vectorize=True.
batched_grad_vmap = PrivateName("torch._vmap_internals:_vmap", fallback="is_grads_batched=True is not simulated")
functional_vmap = PrivateName("torch.autograd.functional:_vmap", fallback="vectorize=True is not simulated")

set_grad_enabled: Any = bind("torch._C:_set_grad_enabled")
profiler_enabled: Callable[[], bool] = bind("torch._C:_autograd._profiler_enabled")
ProfilerState: Any = bind("torch._C:_profiler.ProfilerState")

# Both name one function: torch.autograd calls the first, and tensors the second.
engine_run_backward = PrivateName("torch.autograd:_engine_run_backward")
engine_run_backward_of_graph = PrivateName("torch.autograd.graph:_engine_run_backward")
push_saved_tensors_default_hooks = PrivateName("torch._C:_autograd._push_saved_tensors_default_hooks")

strong_wolfe = PrivateName("torch.optim.lbfgs:_strong_wolfe", fallback="LBFGS evaluates 25 times a line search")
