"""Stacks of layers, of which a pass may run a few and repeat what they did for the others.

Of layers that are alike (alike.py), the first are run until two behind each other do the same (slices.py); what these
did is written for the next ones, which are not run. With gradients, the last two are run as well, as their backward
comes first: it is what is repeated for the others (backward.py). The backward of the first ones is run again, and must
turn out to be the same. If it does not, or anything happens on the way that was not seen before, the run is run again,
and nothing is repeated (`RunAgain`): a run tells nothing that it would not have told without.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_torch

from memprof.virtual.engine import in_backward
from memprof.virtual.recording import RecordingMode
from memprof.virtual.repeat import rounds
from memprof.virtual.repeat.backward import RunAgain
from memprof.virtual.repeat.functions import Functions
from memprof.virtual.repeat.passes import FEWEST, Pass
from memprof.virtual.repeat.spies import Spies
from memprof.watch.modules import ModuleTracker

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Repeats:
    """Repeats what it can of one run on one card.

    Args:
        machine: it runs on this.
        modules: knows the run's modules.
        assumptions: how many there are.
    """

    def __init__(self, machine: RecordingMode, modules: ModuleTracker, assumptions: Callable[[], int]) -> None:
        self._machine = machine
        self._modules = modules
        self._assumptions = assumptions
        self._places: dict[int, tuple[weakref.ref[nn.Module], _Stack, int]] = {}
        """By the `id` of a layer."""
        self.times = 0
        """How often a layer was not run."""
        self.spies = Spies()
        self._layers_inside = 0
        self._owed: list[Pass] = []
        self.functions = Functions(machine, assumptions, lambda: not self._is_inside and self._is_ordinary())

    @property
    def is_used(self) -> bool:
        """Whether anything was repeated."""
        return bool(self.times or self.functions.times)

    def adopt(self, root: nn.Module) -> None:
        """`root` is a model of this run."""
        for members in _stacks(root):
            stack = _Stack(root, members)
            for place, member in enumerate(members):
                self._places.setdefault(id(member), (weakref.ref(member), stack, place))

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What calls a module in the place of `nn.Module.__call__`."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            known = self._places.get(id(module))
            if known is None or known[0]() is not module or in_backward():
                return original(module, *args, **kwargs)
            return self._called(known[1], known[2], original, module, args, kwargs)

        return call

    def rounds(self, parts: Sequence[slice]) -> Iterator[slice]:
        """Those of a loop's `parts` that need to be run.

        Raises:
            RunAgain: the others were not like these.
        """
        if len(parts) < rounds.FEWEST or torch.is_grad_enabled() or self._is_inside or not self._is_ordinary():
            return iter(parts)
        return rounds.run(parts, self._machine, self._assumptions, self._count)

    def _count(self, rounds: int) -> None:
        self.times += rounds

    @property
    def _is_inside(self) -> bool:
        """Whether what is done now is being looked at as a layer's."""
        return self._layers_inside > 0 or any(one.is_in_backward for one in self._owed)

    def settle(self) -> None:
        """The run is over.

        Raises:
            RunAgain: of a layer that was repeated there was no backward, or it was another one.
        """
        if any(one.owes for one in self._owed):
            raise RunAgain("a graph was not differentiated, or a copy of a weight lived longer than was thought")

    def _called(
        self, stack: _Stack, place: int, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if place == 0:
            stack.running = None
            root = stack.root()
            if root is not None and self._is_ordinary():
                members = [member for ref in stack.members if (member := ref()) is not None]
                if len(members) == len(stack.members):
                    between = functools.partial(self._is_trained_between, stack.root)
                    stack.running = Pass(
                        self._machine, self._modules, self._assumptions, root, members, between, self.spies
                    )
                    self._owed = [one for one in self._owed if one.owes]
                    self._owed.append(stack.running)
        if stack.running is None:
            return original(module, *args, **kwargs)
        if not self._is_ordinary():
            stack.running.stop()
        self._layers_inside += 1
        try:
            result, repeated = stack.running.called(place, original, module, args, kwargs)
        finally:
            self._layers_inside -= 1
        self.times += repeated
        return result

    def _is_trained_between(self, root: weakref.ref[nn.Module]) -> bool:
        """Whether any of a model's parameters is trained that is in no layer of a stack."""
        model = root()
        layers = [layer for ref, _, _ in self._places.values() if (layer := ref()) is not None]
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        parameters = [] if model is None else list(model.parameters())
        return any(parameter.requires_grad and id(parameter) not in inside for parameter in parameters)

    def _is_ordinary(self) -> bool:
        """Whether nothing is going on that has effects which are not looked at."""
        with torch._C.DisableTorchFunction():
            return (
                self._machine.recorder.is_plain
                and not self._machine.cards.several
                and not self.spies.are_known
                and (torch.is_grad_enabled() or not torch.is_autocast_enabled("cuda"))
                and not torch.is_autocast_enabled("cpu")
                and not torch.is_inference_mode_enabled()
                and not torch.is_anomaly_enabled()
                and (_saved_tensor_hooks(True) is None or not torch.is_grad_enabled())
                and torch._C._len_torch_dispatch_stack() == 1
                and not torch._C._are_functorch_transforms_active()
                and not any(getattr(hooks_of_torch, name, None) for name in _GLOBAL_HOOKS)
            )


class _Stack:
    """Layers of one list, in their order; it keeps neither these nor their model."""

    def __init__(self, root: nn.Module, members: list[nn.Module]) -> None:
        self.root = weakref.ref(root)
        self.members = [weakref.ref(member) for member in members]
        self.running: Pass | None = None


def _stacks(root: nn.Module) -> Iterator[list[nn.Module]]:
    """The outermost lists of so many modules that repeating may be worth it."""
    for child in root.children():
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        if len(members) >= FEWEST and len(set(map(id, members))) == len(members):
            yield members
        else:
            yield from _stacks(child)
