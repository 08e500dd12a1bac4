"""Copies of weights: a moving average, a loaded checkpoint, the fast weights of MAML, a copy of a model's state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from memprof.trace.events import NONE, EventKind, ModuleRole, PhaseKind, Role, Storage, Trace

_PHASES_OUTSIDE_MODEL = (PhaseKind.MODEL, PhaseKind.OTHER, PhaseKind.OPTIMIZER, PhaseKind.OPTIMIZER_STEP)
# They last until the next one begins, so that what a program does after its evaluation is in them too.
_PHASES_OF_CALLS = (PhaseKind.FORWARD, PhaseKind.EVALUATION)


def find_weight_copies(trace: Trace, deaths: list[int]) -> set[int]:
    """Return the indices of the storages without an owner that are copies of weights, or of states as large as these.

    One source line allocates the copies, outside the modules of a model; in phases in which these are called, by
    `clone`. Their shapes are those of parameters or buffers, at least half of the shapes occur, and there are at least
    half as many copies as parameters that were not freed before. Storages of a checkpoint, or of a `state_dict` that
    was copied, are flat: only their numbers of elements are those of parameters. What an optimizer has may be copied
    with them.
    """
    shapes: dict[Role, list[tuple[int, ...]]] = {Role.PARAMETER: [], Role.BUFFER: [], Role.OPTIMIZER_STATE: []}
    for index, owner in trace.owners.items():
        if owner.role in shapes and trace.storages[index].device == trace.device:
            shapes[owner.role].append(trace.storages[index].shape)
    weights = set(shapes[Role.PARAMETER])
    parameters = [
        index
        for index, owner in trace.owners.items()
        if owner.role is Role.PARAMETER and trace.storages[index].device == trace.device
    ]
    births, _ = trace.lifetimes()
    flat = flatten_shapes([*shapes[Role.BUFFER], *shapes[Role.OPTIMIZER_STATE], ()])  # copy.deepcopy copies storages
    others = {*shapes[Role.BUFFER], *flat, ()}
    phase_ends: dict[int, int] = {}
    phase_index = NONE
    for time, (kind, ref) in enumerate(trace.events):
        if kind is EventKind.PHASE:
            phase_ends[phase_index], phase_index = time, ref
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    num_events = len(trace.events)
    refused = len(trace.storages) - 1 if trace.ended_out_of_memory else NONE  # one that would have been a copy
    for index, storage in enumerate(trace.storages):
        if (
            _is_made_outside_modules(trace, storage)
            and storage.source != NONE
            and not storage.hidden
            and index not in trace.owners
            and (index == refused or deaths[index] > phase_ends.get(storage.phase, num_events - 1))
        ):
            groups[storage.source, storage.op, storage.phase].append(index)
    copies: set[int] = set()
    for (_, op, _), members in groups.items():
        group_shapes = {trace.storages[index].shape for index in members}
        possible = {"torch.load": [flatten_shapes(weights)], "aten.clone": [weights, flatten_shapes(weights)]}
        is_alike = any(
            group_shapes <= expected | others and 2 * len(group_shapes & expected) >= len(expected)
            for expected in possible.get(trace.ops[op], [weights])
        )
        if is_alike and len(members) >= max(2, sum(deaths[index] > births[members[0]] for index in parameters) / 2):
            copies.update(members)
    return copies


def flatten_shapes(shapes: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return the shapes of storages that have the elements of `shapes` in one dimension."""
    return {(math.prod(shape),) for shape in shapes}


def _is_made_outside_modules(trace: Trace, storage: Storage) -> bool:
    kind = trace.phases[storage.phase].kind
    if kind in _PHASES_OF_CALLS:
        return storage.module == NONE and trace.op(storage) == "aten.clone"
    is_in_part = storage.module != NONE and trace.modules[storage.module].role is not ModuleRole.ROOT
    return kind in _PHASES_OUTSIDE_MODEL and not is_in_part
