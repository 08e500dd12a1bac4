"""torch's error messages for an operator whose tensors are on different devices."""

from __future__ import annotations

from memprof.trace.events import HOST, Operand, is_gpu

# Names of the tensors of matrix products; torch checks these in order against the first (common_device_check_failure in
# c10), and says which one differs.
_ARGUMENTS = {
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.addmm": ("self", "mat1", "mat2"),
    "aten.baddbmm": ("self", "batch1", "batch2"),
}
_INDEX_OPERATORS = ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")
_MESSAGE_START = "Expected all tensors to be on the same device, but"


def format_mismatch_error(op: str, operands: tuple[Operand, ...]) -> str:
    """Return torch's message for operator `op`: matrix products name an argument, others the devices."""
    names = _ARGUMENTS.get(op, ())
    first_device = operands[0].device
    for name, operand in zip(names, operands, strict=False):
        if len(names) == len(operands) and operand.device != first_device:
            method = f"wrapper_CUDA_{op.removeprefix('aten.')}"
            difference = f"{name} is on {operand.device}, different from other tensors on {first_device}"
            return f"{_MESSAGE_START} got {difference} (when checking argument in method {method})"
    if op in _INDEX_OPERATORS and any(operand.device not in (first_device, HOST) for operand in operands):
        return f"indices should be either on cpu or on the same device as the indexed tensor ({first_device})"
    misplaced, reference = find_misplaced_operand(operands)
    return f"{_MESSAGE_START} found at least two devices, {reference.device} and {misplaced.device}!"


def find_misplaced_operand(operands: tuple[Operand, ...]) -> tuple[Operand, Operand]:
    """Return the operand on the wrong device (a host tensor, if there is one), and one on the right device."""
    # A 0-dimensional host tensor may be mixed with GPU tensors: another host tensor is the wrong one, if there is one.
    host_operands = sorted((o for o in operands if not is_gpu(o.device)), key=lambda o: not o.shape)
    gpu_operands = [o for o in operands if is_gpu(o.device)]
    if host_operands and gpu_operands:
        return host_operands[0], gpu_operands[0]
    first_operand = operands[0]
    return next((o for o in operands if o.device != first_operand.device), first_operand), first_operand
