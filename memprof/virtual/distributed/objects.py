"""Patches of functions that receive Python objects from other ranks; a rank that does not run sends none.

A list into which such a rank would send does not change. Objects of running ranks, and gathered objects, are handled
by torch's code: pickled, as bytes on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from memprof.patching import Extension, Patch
from memprof.torch_private import distributed
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.virtual.peers.single_rank import SingleRankBackend

_c10d: Any = getattr(dist, "distributed_c10d", None)


class ObjectCollectives(Extension):
    """Patches for objects of other ranks, distributed checkpoints, and FSDP's optimizer states."""

    imports = (distributed.validate_global_plan.module, distributed.map_param_key_to_optim_keys.module)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the functions that receive objects from one rank."""
        if _c10d is not None:
            yield from _patch_object_lists(context.rank_backend)

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the functions that gather a checkpoint or an optimizer's state from all ranks."""
        if module.__name__.endswith("default_planner"):
            yield from _patch_checkpoints(context.rank_backend)
        else:
            yield from _patch_optimizer_states()


def _patch_object_lists(backend: SingleRankBackend) -> Iterator[Patch]:
    names = ("broadcast_object_list", "scatter_object_list")
    replacements = {name: _skip_unknown_objects(getattr(dist, name), backend) for name in names}

    original_receive: Any = getattr(dist, "recv_object_list", None)

    def recv_object_list(*args: Any, **options: Any) -> Any:
        source, group = _find_sender(1, args, options)
        if backend.are_running([source] if source is not None else dist.get_process_group_ranks(group)):
            return original_receive(*args, **options)
        raise unsupported_error(
            "receives objects of another rank, which one that runs alone does not know",
            "run the rank that sends them (--rank); give a PipelineStage its input_args and output_args",
        )

    for owner in (dist, _c10d):
        for name, replacement in replacements.items():
            yield owner, name, replacement
        if hasattr(owner, "recv_object_list"):
            yield owner, "recv_object_list", recv_object_list


def _patch_checkpoints(backend: SingleRankBackend) -> Iterator[Patch]:
    """Yield patches by which a distributed checkpoint has this rank's shards only, unless all ranks run."""
    original = distributed.init_dist_wrapper.get(None)
    validate = distributed.validate_global_plan.get(None)
    if original is None or validate is None:
        return

    def __init__(wrapper: Any, group: Any, *rest: Any) -> None:
        if dist.is_initialized() and backend.are_running(dist.get_process_group_ranks(group)):
            original(wrapper, group, *rest)
        else:
            original(wrapper, None, False, 0)

    yield distributed.init_dist_wrapper.patch(__init__)
    # Parts of other ranks are missing: validate an empty plan.

    def validate_if_complete(*args: Any) -> Any:
        has_all_ranks = dist.is_initialized() and backend.are_running(range(dist.get_world_size()))
        return validate(*args) if has_all_ranks else validate([], SimpleNamespace(state_dict_metadata={}))

    yield distributed.validate_global_plan.patch(validate_if_complete)


def _patch_optimizer_states() -> Iterator[Patch]:
    """Yield a patch for FSDP1, which gathers parameter names from optimizer states: parameters without elements on this
    rank get an empty state, so that their names are known."""
    original = distributed.map_param_key_to_optim_keys.get(None)
    if original is None:
        return

    def map_keys(state: dict[str, Any], group: Any, parameters: dict[Any, Any], *rest: Any, **options: Any) -> Any:
        local_states = state["state"]
        empty_states: dict[Any, Any] = {key: {} for key, p in parameters.items() if p.requires_grad and not p.numel()}
        # `merge_keys` gathers the names: by default the first rank, which may not run, would send them.
        full_state = {**state, "state": {**empty_states, **local_states}}
        names, keys_by_name = original(full_state, group, parameters, *rest[:2], merge_keys=True)
        return names, {name: key for name, key in keys_by_name.items() if key in local_states}

    yield distributed.map_param_key_to_optim_keys.patch(map_keys)


_UNKNOWN_OBJECTS = "Objects that a rank sends which does not run are not known: lists that take them stay as they are"


def _skip_unknown_objects(original: Callable[..., Any], backend: SingleRankBackend) -> Callable[..., Any]:
    """Return the object collective `original`, changed to have no effect if the sending rank does not run."""
    source_position = 2 if original.__name__ == "scatter_object_list" else 1

    def communicate(*args: Any, **options: Any) -> Any:
        source, group = _find_sender(source_position, args, options)
        if dist.get_rank() == (source or 0) or dist.get_rank(group) < 0 or backend.are_running([source or 0]):
            return original(*args, **options)
        backend.report_assumption("objects", _UNKNOWN_OBJECTS)
        return None

    return communicate


def _find_sender(position: int, args: Any, options: Any) -> tuple[int | None, Any]:
    """Return the sending rank (the argument at index `position`, None if absent) and the group (the next one)."""
    source = args[position] if len(args) > position else options.get("src")
    group = args[position + 1] if len(args) > position + 1 else options.get("group")
    if options.get("group_src") is not None:
        source = _c10d.get_global_rank(group or dist.group.WORLD, options["group_src"])
    return source, group
