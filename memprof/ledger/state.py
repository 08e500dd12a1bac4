"""Model state of a run: the peaks of parameters, gradients, optimizer state, and of all tensors.

These do not depend on kernels or on an allocator, so that a run on a CPU and one on a GPU agree to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.events import EventKind, Role, Trace


@dataclass(frozen=True, slots=True)
class ModelState:
    """The peak of each kind of state, in bytes requested of the GPU (or of the CPU, in a run measured there)."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    buffers_bytes: int
    tensors_bytes: int  # Of all tensors: without memory that kernels and libraries allocate for themselves.


def model_state(trace: Trace) -> ModelState:
    """Return the peak of each kind of state over a whole run."""
    roles = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.BUFFER)
    now, most = dict.fromkeys(roles, 0), dict.fromkeys(roles, 0)
    tensors = most_tensors = 0
    storages, owners = trace.storages, trace.owners
    alloc, free, device = EventKind.ALLOC, EventKind.FREE, trace.device
    for kind, ref in trace.events:
        if kind is not alloc and kind is not free:
            continue
        storage = storages[ref]
        if storage.device != device or storage.hidden:
            continue
        change = storage.num_bytes if kind is alloc else -storage.num_bytes
        tensors += change
        if tensors > most_tensors:
            most_tensors = tensors
        owner = owners.get(ref)
        if owner is not None and owner.role in now:
            now[owner.role] += change
            most[owner.role] = max(most[owner.role], now[owner.role])
    return ModelState(
        parameters_bytes=most[Role.PARAMETER],
        gradients_bytes=most[Role.GRADIENT],
        optimizer_state_bytes=most[Role.OPTIMIZER_STATE],
        buffers_bytes=most[Role.BUFFER],
        tensors_bytes=most_tensors,
    )
