"""Model state of a run: the peaks of parameters, gradients, optimizer state, and of all tensors.

These do not depend on kernels or on an allocator, so that a run on a CPU and one on a GPU agree to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.events import EventKind, Role, Trace


@dataclass(frozen=True, slots=True)
class ModelState:
    """The peak of each kind of model state: bytes requested on the GPU, or on the CPU in a run measured there."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    buffers_bytes: int
    tensors_bytes: int  # Of all tensors: without memory that kernels and libraries allocate for themselves.


def compute_model_state(trace: Trace) -> ModelState:
    """Return the peak of each kind of state over a whole run."""
    roles = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.BUFFER)
    current_bytes, peak_bytes = dict.fromkeys(roles, 0), dict.fromkeys(roles, 0)
    tensor_bytes = peak_tensor_bytes = 0
    storages, owners = trace.storages, trace.owners
    alloc, free, device = EventKind.ALLOC, EventKind.FREE, trace.device
    for kind, ref in trace.events:
        if kind is not alloc and kind is not free:
            continue
        storage = storages[ref]
        if storage.device != device or storage.hidden:
            continue
        delta = storage.num_bytes if kind is alloc else -storage.num_bytes
        tensor_bytes += delta
        if tensor_bytes > peak_tensor_bytes:
            peak_tensor_bytes = tensor_bytes
        owner = owners.get(ref)
        if owner is not None and owner.role in current_bytes:
            current_bytes[owner.role] += delta
            peak_bytes[owner.role] = max(peak_bytes[owner.role], current_bytes[owner.role])
    return ModelState(
        parameters_bytes=peak_bytes[Role.PARAMETER],
        gradients_bytes=peak_bytes[Role.GRADIENT],
        optimizer_state_bytes=peak_bytes[Role.OPTIMIZER_STATE],
        buffers_bytes=peak_bytes[Role.BUFFER],
        tensors_bytes=peak_tensor_bytes,
    )
