"""The budget for computing tensors' numbers: bounds on memory and work, so that no run waits for them."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.values import unknown_values

# Shadows take up to this much each (a routing mask of 131,072 tokens, 8 choices and 128 experts in int64)...
MAX_TENSOR_BYTES = 1 << 30
MAX_SHADOW_BYTES = 1 << 31  # ... and this much together.
MAX_TRIANGLE_BYTES = 1 << 26  # a mask up to this size is kept for the next layer that makes the same
MAX_WORK = 1 << 33  # elements visited in computing large tensors over a run (some ten seconds of one core)

SMALL_INTEGER_ELEMENTS = 1 << 20
SMALL_FLOAT_ELEMENTS = 1 << 12  # tensors up to these sizes are computed by any operator and at no charge
# Integers up to this size are computed by any operator; what is larger, and floats, by those of linear work.
MODERATE_ELEMENTS = 1 << 24


def is_cheap_to_compute(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is computed without a second thought."""
    return tensor.numel() <= (SMALL_INTEGER_ELEMENTS if is_integer(tensor) else SMALL_FLOAT_ELEMENTS)


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether its elements are whole numbers or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def is_linear(func: Any) -> bool:
    """Return whether the work grows with the number of elements, or is known to be that of a product."""
    packet = func.overloadpacket
    return torch.Tag.pointwise in func.tags or packet in unknown_values.LINEAR or packet in unknown_values.PRODUCTS


def work_of(func: Any, tensors: list[torch.Tensor]) -> int:
    """Elements visited by `func`, of its inputs and output in order."""
    each = tensors[-2].shape[-2] if func.overloadpacket in unknown_values.PRODUCTS else 1
    return each * max(tensor.numel() for tensor in tensors)
