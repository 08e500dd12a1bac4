"""Objects that other ranks send: of one that does not run they are not known, and what the program has in their place
stays.

What a rank sends that runs, and what is gathered, goes through torch's own code: pickled, as bytes on the GPU.
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
from memprof.virtual.peers.alone import SingleRankBackend

_c10d: Any = getattr(dist, "distributed_c10d", None)


class ObjectsOfRanks(Extension):
    """Receipt of objects from other ranks; checkpoints and optimizer states that are spread over them."""

    imports = (distributed.validate_global_plan.module, distributed.map_param_key_to_optim_keys.module)

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace what receives an object of one other rank."""
        if _c10d is not None:
            yield from _of_objects(context.others)

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Replace what asks the other ranks for their parts of a checkpoint, or of an optimizer's state."""
        if module.__name__.endswith("default_planner"):
            yield from _of_checkpoints(context.others)
        else:
            yield from _of_optimizer_states()


def _of_objects(others: SingleRankBackend) -> Iterator[Patch]:
    received = {
        name: _from_one(getattr(dist, name), others) for name in ("broadcast_object_list", "scatter_object_list")
    }

    receive: Any = getattr(dist, "recv_object_list", None)

    def recv_object_list(*args: Any, **options: Any) -> Any:
        source, group = _sender(1, args, options)
        if others.has([source] if source is not None else dist.get_process_group_ranks(group)):
            return receive(*args, **options)
        raise unsupported_error(
            "receives objects of another rank, which one that runs alone does not know",
            "run the rank that sends them (--rank); give a PipelineStage its input_args and output_args",
        )

    for owner in (dist, _c10d):
        for name, replacement in received.items():
            yield owner, name, replacement
        if hasattr(owner, "recv_object_list"):
            yield owner, "recv_object_list", recv_object_list


def _of_checkpoints(others: SingleRankBackend) -> Iterator[Patch]:
    """Once distributed checkpoints are imported: they are of this rank's parts, without a plan of the others'."""
    original = distributed.init_dist_wrapper.get(None)
    validate = distributed.validate_global_plan.get(None)
    if original is None or validate is None:
        return

    def __init__(wrapper: Any, group: Any, *rest: Any) -> None:
        if dist.is_initialized() and others.has(dist.get_process_group_ranks(group)):
            original(wrapper, group, *rest)
        else:
            original(wrapper, None, False, 0)

    yield distributed.init_dist_wrapper.patch(__init__)
    # Parts of other ranks are missing: what it says of a plan without tensors.

    def of_all(*given: Any) -> Any:
        is_whole = dist.is_initialized() and others.has(range(dist.get_world_size()))
        return validate(*given) if is_whole else validate([], SimpleNamespace(state_dict_metadata={}))

    yield distributed.validate_global_plan.patch(of_all)


def _of_optimizer_states() -> Iterator[Patch]:
    """Once states of optimizers of FSDP1 are imported: those of other ranks' parts have the names of their parameters,
    which have no element on this one and so no state."""
    original = distributed.map_param_key_to_optim_keys.get(None)
    if original is None:
        return

    def keys(state: dict[str, Any], group: Any, parameters: dict[Any, Any], *rest: Any, **options: Any) -> Any:
        own = state["state"]
        theirs: dict[Any, Any] = {key: {} for key, one in parameters.items() if one.requires_grad and not one.numel()}
        # Names are gathered, not sent by the first rank, which may be another.
        known = original({**state, "state": {**theirs, **own}}, group, parameters, *rest[:2], merge_keys=True)
        return known[0], {name: key for name, key in known[1].items() if key in own}

    yield distributed.map_param_key_to_optim_keys.patch(keys)


_NOT_KNOWN = "Objects that a rank sends which does not run are not known: lists that take them stay as they are"


def _from_one(original: Callable[..., Any], others: SingleRankBackend) -> Callable[..., Any]:
    at = 2 if original.__name__ == "scatter_object_list" else 1

    def send(*args: Any, **options: Any) -> Any:
        source, group = _sender(at, args, options)
        if dist.get_rank() == (source or 0) or dist.get_rank(group) < 0 or others.has([source or 0]):
            return original(*args, **options)
        others.say("objects", _NOT_KNOWN)
        return None

    return send


def _sender(at: int, args: Any, options: Any) -> tuple[int | None, Any]:
    """Return the rank that sends, and the group, which follows it at this place of the arguments."""
    source = args[at] if len(args) > at else options.get("src")
    group = args[at + 1] if len(args) > at + 1 else options.get("group")
    if options.get("group_src") is not None:
        source = _c10d.get_global_rank(group or dist.group.WORLD, options["group_src"])
    return source, group
