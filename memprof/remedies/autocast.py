"""amp-bfloat16 and amp-float16: the forward under autocast, the parameters in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.remedies.applied import Changes, Forward
from memprof.remedies.optimizers import refuse_gradients


def install(model: nn.Module, changes: Changes) -> None:
    """Switch it on; for float16 the result is a `torch.amp.GradScaler` for the model's device.

    Parameters in half precision become float32 masters.

    Raises:
        UsageError: the model has no parameters, or there are gradients of another dtype.
    """
    dtype: torch.dtype = getattr(torch, changes.remedy.removeprefix("amp-"))
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if not parameters:
        raise UsageError(f"{changes.remedy} does not apply: the model has no parameters", value=type(model).__name__)
    halves = [parameter for parameter in parameters if parameter.dtype in (torch.float16, torch.bfloat16)]
    refuse_gradients(halves, changes.remedy, type(model).__name__, "of another dtype")
    for parameter in halves:
        changes.set_data(parameter, parameter.detach().float())
    if halves:
        changes.note(f"{len(halves)} parameters became float32")
    changes.set_attribute(model, "forward", _Autocast(model, dtype))
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float16:
        changes.result(torch.amp.GradScaler(parameters[0].device.type))
        changes.note(f"forward under autocast to {name}; scale the loss with the GradScaler in the results")
    else:
        changes.note(f"forward under autocast to {name}")


class _Autocast(Forward):
    """The forward of a model under autocast, for the device that its parameters are on when it is called."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self._module.parameters()).device.type
        with torch.autocast(device, dtype=self._dtype):
            return self._forward(*args, **kwargs)
