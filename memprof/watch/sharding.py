"""Owners of memory that `torch.distributed` allocates, found from the call stack, and a model's FSDP and DDP groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from memprof.trace.events import Owner, Role
from memprof.trace.facts import ShardedGroup
from memprof.watch.program_code import MEMPROF_DIR, TORCH_DIR

_TRANSPARENT_PATHS = (
    MEMPROF_DIR,
    *(f"{TORCH_DIR}/{name}" for name in ("_ops.py", "_library/", "storage.py", "utils/_contextlib.py")),
)
_COMMUNICATION_PATHS = (TORCH_DIR + "/distributed/", TORCH_DIR + "/nn/parallel/distributed.py")
_DTENSOR_PATH = TORCH_DIR + "/distributed/tensor/"  # runs the program's operators on this rank's shards
# Functions of torch.distributed that move or cast a model's inputs.
_INPUT_FUNCTIONS = frozenset({"to_map", "cast_fn", "_cast_fp_tensor"})
# Function of torch -> purpose of the memory that the function allocates.
_PURPOSE_BY_FUNCTION = {
    "_ddp_init_helper": "gradient bucket",
    "_pre_forward": "gradient bucket",
    "foreach_all_gather": "all-gather",
    "foreach_reduce": "reduce-scatter",
    "_reduce_grad": "reduce-scatter",
    "_post_backward_hook": "reduce-scatter",
}
# Functions of torch's FSDPParam and FlatParamHandle that allocate unsharded parameters.
_GATHER_FUNCTIONS = frozenset({
    "init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param", "_alloc_padded_unsharded_flat_param",
})  # fmt: skip
_MAX_FRAMES = 12


def find_communication_owner(frame: FrameType | None, get_name: Callable[[torch.Tensor], str]) -> Owner | None:
    """Return the owner of memory that is being allocated by torch.distributed, DDP or FSDP; None for other code.

    `frame` is the innermost frame of the stack. `get_name` returns a parameter's name.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_TRANSPARENT_PATHS):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name in _INPUT_FUNCTIONS:
        return None
    file = frame.f_code.co_filename
    if not file.startswith(_COMMUNICATION_PATHS) or file.startswith(_DTENSOR_PATH):
        return None
    for _ in range(_MAX_FRAMES):
        name = frame.f_code.co_name
        if name in _GATHER_FUNCTIONS:
            parameter_handle = frame.f_locals["self"]  # an FSDPParam or a FlatParamHandle
            flat = getattr(parameter_handle, "flat_param", None)
            name = parameter_handle._param_fqn if flat is None else get_name(flat._local_shard)
            return Owner(Role.UNSHARDED, strip_wrapper_names(name or "") or "a parameter")
        if name in _PURPOSE_BY_FUNCTION:
            return Owner(Role.COMMUNICATION, _PURPOSE_BY_FUNCTION[name])
        if frame.f_back is None or not frame.f_back.f_code.co_filename.startswith(TORCH_DIR):
            break
        frame = frame.f_back
    return Owner(Role.COMMUNICATION, "")


def strip_wrapper_names(path: str) -> str:
    """Return the module or parameter `path` without the names that wrappers insert (`_fsdp_wrapped_module`, ...)."""
    for wrapper in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        path = path.replace(f"{wrapper}.", "").removesuffix(wrapper)
    return path.rstrip(".")


def describe_sharded_groups(root: nn.Module) -> Iterator[ShardedGroup]:
    """Yield the parameter groups that DDP, FSDP or fully_shard have formed in `root`, known after its first forward."""
    seen = set()
    for path, module in root.named_modules():
        path = strip_wrapper_names(path)
        if type(module).__name__ == "DistributedDataParallel":
            yield _describe_ddp(path, module)
        elif type(module).__name__ == "FullyShardedDataParallel":
            if getattr(module, "_handle", None) is not None:
                yield _describe_fsdp1(path, module)
        elif any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            if state not in seen:
                seen.add(state)
                yield from _describe_fsdp2(path, state)


def iterate_unreduced_gradients(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, gradient) for the unsharded gradients that fully_shard keeps to reduce later, because of
    `set_requires_gradient_sync(False)`."""
    for module in root.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            for p in (p for group in _get_param_groups(module._get_fsdp_state()) for p in group.fsdp_params):  # type: ignore[operator]
                unsharded = getattr(p, "_unsharded_param", None)
                for gradient in (p.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
                    if gradient is not None:
                        yield strip_wrapper_names(p._param_fqn or ""), gradient


def _get_param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of `state`, torch's FSDPState: at most one before torch 2.11."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def _describe_ddp(path: str, wrapper: Any) -> ShardedGroup:
    named = [(strip_wrapper_names(name), p) for name, p in wrapper.module.named_parameters() if p.requires_grad]
    return ShardedGroup(
        api="DistributedDataParallel",
        module=path,
        ranks=wrapper.process_group.size(),
        parameters=tuple(name for name, _ in named),
        shapes=tuple(tuple(p.shape) for _, p in named),
        dtype=_get_dtype_name(named[0][1].dtype) if named else "",
        views=bool(wrapper.gradient_as_bucket_view),
    )


def _describe_fsdp1(path: str, wrapper: Any) -> ShardedGroup:
    handle = wrapper._handle
    flat_param = handle.flat_param
    strategy = handle._sharding_strategy.name
    prefix = f"{path}." if path else ""
    return ShardedGroup(
        api="FullyShardedDataParallel",
        module=path,
        ranks=handle.world_size if handle.uses_sharded_strategy else 1,
        parameters=tuple(prefix + strip_wrapper_names(name) for name in flat_param._fqns),
        shapes=tuple(tuple(shape) for shape in flat_param._shapes),
        dtype=_get_dtype_name(handle._fwd_bwd_param_dtype if handle._uses_param_mixed_precision else flat_param.dtype),
        kept=strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"),
        unlimited=not wrapper.limit_all_gathers,
    )


def _describe_fsdp2(path: str, state: Any) -> Iterator[ShardedGroup]:
    prefix = f"{path}." if path else ""
    for group in _get_param_groups(state):
        if not group.fsdp_params:
            continue
        first = group.fsdp_params[0]
        mesh = group.mesh_info.mesh
        shard_dim = getattr(group.mesh_info, "shard_mesh_dim", None)
        names = [p._param_fqn or prefix + p._module_info.param_name for p in group.fsdp_params]
        yield ShardedGroup(
            api="fully_shard",
            module=path,
            ranks=1 if shard_dim is None else mesh.size(shard_dim),
            parameters=tuple(map(strip_wrapper_names, names)),
            shapes=tuple(tuple(p._orig_size) for p in group.fsdp_params),
            dtype=_get_dtype_name(first.param_dtype or first.orig_dtype),
            # By default the root stays unsharded: the backward needs the root's parameters first.
            kept=group.post_forward_mesh_info is None and not (state._is_root and state._auto_reshard_after_forward),
            ahead=max(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)),
        )


def _get_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
