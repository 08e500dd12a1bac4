"""Arguments of a function that is to run on the virtual GPU: copies of the caller's arguments, moved to the GPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from memprof.errors import UsageError, error_text


def copy_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return deep copies of the arguments; references between the arguments stay (an optimizer refers to its model).

    Raises:
        UsageError: some argument cannot be copy_arguments.
    """
    try:
        return copy.deepcopy(arguments)
    except Exception as error:  # any error of the program's own `__deepcopy__` or `__reduce__`
        raise UsageError(
            "the arguments cannot be copied",
            value=f"{type(error).__name__}: {error_text(error)}",
            hint="let the function make them itself, or refer to them as globals: then they are not copied",
        ) from error


def move_to_gpu(value: Any) -> Any:
    """Return `value` with its modules and tensors on the GPU, also those in lists, tuples and dictionaries. Modules are
    moved in place. An optimizer's state follows its parameters, so that modules must come before optimizers."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return value.to("cuda")
    if isinstance(value, Optimizer):
        if value.state:
            value.load_state_dict(value.state_dict())
        return value
    if isinstance(value, dict) and type(value) is dict:
        return {name: move_to_gpu(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(move_to_gpu(item) for item in value)
    return value
