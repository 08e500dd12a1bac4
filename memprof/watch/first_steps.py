"""First steps of optimizers to which a run did not come, because memory ended it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer

from memprof.trace.events import NONE, FirstStep
from memprof.workload.optimizer_states import OPTIMIZER_STATES


def list_first_steps(optimizers: Iterable[Optimizer], get_index: Callable[[torch.Tensor], int]) -> Iterator[FirstStep]:
    """Yield what the first step of each optimizer has and still makes; `get_index` returns a tensor's storage, or NONE.

    State is that of torch's own optimizers: of others it is not known, and none is expected.
    """
    for optimizer in optimizers:
        parameters, gradients, states = [], [], []
        for group in optimizer.param_groups:
            num_states = _count_states(optimizer, group.get("momentum", 0))
            for parameter in group["params"]:
                index = get_index(parameter)
                if index == NONE or not parameter.requires_grad:
                    continue
                made = [one for one in optimizer.state.get(parameter, {}).values() if isinstance(one, torch.Tensor)]
                parameters.append(index)
                gradients.append(NONE if parameter.grad is None else get_index(parameter.grad))
                states.append(max(num_states - sum(one.shape == parameter.shape for one in made), 0))
        if parameters:
            yield FirstStep(tuple(parameters), tuple(gradients), tuple(states))


def _count_states(optimizer: Optimizer, momentum: float) -> int:
    """Return how many tensors of a parameter's size the state of one of torch's optimizers has; 0 if not known."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return 0
    name = "sgd-momentum" if kind is torch.optim.SGD and momentum else kind.__name__.lower()
    return OPTIMIZER_STATES.get(name, (0, 0))[0]
