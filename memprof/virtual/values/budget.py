"""Limits of host memory and of computation for the values of tensors."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.values.unknown_values import LINEAR_COST, MATRIX_PRODUCTS

# Limit of one shadow: a routing mask of 131,072 tokens, 8 choices and 128 experts in int64.
MAX_TENSOR_BYTES = 1 << 30
MAX_SHADOW_BYTES = 1 << 31  # limit of all shadows together
MAX_TRIANGLE_BYTES = 1 << 26  # limit of a triangular mask that is cached for the next layer
MAX_VISITED_ELEMENTS = 1 << 33  # limit of elements visited on large tensors in a run (ten seconds of one core)

SMALL_INTEGER_ELEMENTS = 1 << 20
SMALL_FLOAT_ELEMENTS = 1 << 12  # tensors up to these sizes are computed by any operator, and not charged to the budget
# Integer tensors up to this size are computed by any operator; larger ones, and floats, by operators of linear work.
MODERATE_ELEMENTS = 1 << 24


def is_cheap_to_compute(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is so small that computing it is not charged to the budget of visited elements."""
    return tensor.numel() <= (SMALL_INTEGER_ELEMENTS if is_integer(tensor) else SMALL_FLOAT_ELEMENTS)


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` are integers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def has_linear_cost(func: Any) -> bool:
    """Return whether `func` visits each element about once, or is a matrix product."""
    packet = func.overloadpacket
    return torch.Tag.pointwise in func.tags or packet in LINEAR_COST or packet in MATRIX_PRODUCTS


def count_visited_elements(func: Any, tensors: list[torch.Tensor]) -> int:
    """Return the number of elements that `func` visits; `tensors` are the inputs, then the output."""
    # A product of [n, k] and [k, m] visits k elements for each of the output.
    visits_per_element = tensors[-2].shape[-2] if func.overloadpacket in MATRIX_PRODUCTS else 1
    return visits_per_element * max(tensor.numel() for tensor in tensors)
