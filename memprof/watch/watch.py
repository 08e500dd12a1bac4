"""The watch over a program, on whatever device it runs: its phases, models, backward passes and optimizer steps."""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from memprof.patching import PatchSet
from memprof.torch_private import autograd, tensors
from memprof.trace.events import Owner, Phase, PhaseKind, Role, Trace
from memprof.watch import zero
from memprof.watch.modules import ModuleTracker, own_name
from memprof.watch.phases import Phases
from memprof.watch.wrappers import has_memory

_BUILDS = (PhaseKind.MODEL, PhaseKind.OTHER, PhaseKind.OPTIMIZER)  # phases in which a program may make a model
# Attribute of an exception: the phase in which it was raised. Kept here, the exception would keep its tensors.
_PHASE = "_memprof_phase"


class Watch(ABC):
    """The program that runs on a device, as simulated and measured devices alike see it.

    A device says how it records: a phase that begins (`begin_phase`), and a tensor whose role is known (`claim`).
    Allocations are its own to see. Of its 26 methods a device overrides or calls half.
    """

    def __init__(self) -> None:
        self.modules = ModuleTracker()
        self.modules.on_root = self.adopt
        self.modules.on_outermost = self._outermost_call
        # Those of a program that does not name its own.
        self.phases = Phases(self._phase_recognised, lambda: self.current_phase)
        self._patches = PatchSet()
        self.phases.on_raise = self._note_failed
        self.phases.on_step_raise = self._name_optimizer_state
        self.phases.patch = self._patches.set
        self.modules.on_outermost_raise = self.phases.forward_raised
        self._stack = contextlib.ExitStack()
        self._assumptions: dict[str, None] = {}
        self._roots: list[weakref.ref[nn.Module]] = []  # the run's models; one that the program lets go of is gone
        # Modules that were given a weight, by their `id` and its name.
        self._registered: dict[tuple[int, str], tuple[weakref.ref[nn.Module], Role]] = {}

    @property
    @abstractmethod
    def current_phase(self) -> Phase:
        """Return the phase that is running."""

    @abstractmethod
    def begin_phase(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase, to which what happens from here on belongs."""

    @abstractmethod
    def claim(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Give `tensor` this role."""

    @abstractmethod
    def claim_input(self, tensor: torch.Tensor) -> None:
        """Note that `tensor` was given to a model: it is input, unless a model's own code made it."""

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that a quantized `tensor` keeps beside its own data, or instead of it."""
        return []

    def wrap_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `nn.Module.__call__`."""
        return self.modules.wrap_call(original)

    @contextlib.contextmanager
    def phase(self, kind: PhaseKind, step: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """Run what is inside as this phase; a workload that knows its phases names them, and none are guessed."""
        recognised, self.phases.recognizes = self.phases.recognizes, False
        before = self.current_phase
        self.begin_phase(kind, step, micro_batch)
        try:
            yield
        except BaseException as error:
            self._note_failed(error)
            raise
        finally:
            self.phases.recognizes = recognised
            self.begin_phase(*before)

    def adopt(self, root: nn.Module) -> None:
        """Name parameters and buffers after `root`, a model of this run."""
        if not any(known() is root for known in self._roots):
            self._roots.append(weakref.ref(root))
        self.modules.add_root(root)
        self._name_parameters()

    def assume(self, sentence: str) -> None:
        """Note once what the run rests on."""
        self._assumptions.setdefault(sentence)

    def phase_of(self, error: BaseException) -> Phase:
        """Return the phase in which `error` was raised; the one that is running where none was left by it."""
        found: Phase = vars(error).get(_PHASE, self.current_phase)
        return found

    def _tell(self, trace: Trace) -> None:
        """Write down what the run rests on, and whether it trained."""
        trace.assumptions = list(self._assumptions)
        trace.trains = self.phases.trains
        trace.updates_parameters_manually = self.phases.updates_parameters_manually

    def _watch_program(self) -> None:
        """Patch and hook whatever shows what the program does."""
        self._patches.set_all(self.phases.patches())
        for name, patches in {**self.phases.of_imports(), **zero.of_imports(self.phases, self.claim)}.items():
            self._patches.on_import(name, patches)
        self._patches.set(nn.Module, "__call__", self.wrap_module_call(nn.Module.__call__))
        self._patch_moves()
        for register, role in (
            (register_module_parameter_registration_hook, Role.PARAMETER),
            (register_module_buffer_registration_hook, Role.BUFFER),
        ):
            self._stack.callback(register(functools.partial(self._note_registered, role)).remove)
        self._patch_backward()
        # Before the phases' own: who is told that a step was made may end the run.
        self._stack.callback(register_optimizer_step_post_hook(self._name_optimizer_state).remove)
        for handle in self.phases.hooks():
            self._stack.callback(handle.remove)

    def _phase_recognised(self, kind: PhaseKind, step: int, micro_batch: int) -> None:
        """Begin a phase in a program that does not name its own."""
        self.begin_phase(kind, step, micro_batch)

    @property
    def _recognizes_calls(self) -> bool:
        """Return whether the program names no phases of its own, and no backward pass is running."""
        return self.phases.recognizes and autograd.current_graph_task_id() == -1

    def _outermost_call(self, module: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        self.phases.forward(module)
        if self._recognizes_calls and next(module.parameters(), None) is not None:  # a loss has none
            with torch.DisableTorchFunction():
                self._claim_inputs((*args, *kwargs.values()))

    def _claim_inputs(self, values: Iterable[Any]) -> None:
        """Claim as input what a program makes outside its models and gives to one; results of models are none."""
        for value in values:
            if isinstance(value, (list, tuple)):
                self._claim_inputs(value)
            elif isinstance(value, dict):
                self._claim_inputs(value.values())
            elif isinstance(value, torch.Tensor) and has_memory(value):
                is_made_of_weight = isinstance(value, nn.Parameter) or value.grad_fn is not None
                if not is_made_of_weight:
                    self.claim_input(value)

    def _note_failed(self, error: BaseException) -> None:
        vars(error).setdefault(_PHASE, self.current_phase)  # the innermost phase knows best

    def _patch_moves(self) -> None:
        """Claim weights of a module that is moved, be it called or not: an average, a model whose parts are called."""
        original = tensors.apply_of_module.get()
        inside = False

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return original(module, *args, **kwargs)
            inside = True
            try:
                return original(module, *args, **kwargs)
            finally:
                inside = False
                self._claim_unnamed(module.parameters(), Role.PARAMETER)
                self._claim_unnamed(module.buffers(), Role.BUFFER)

        self._patches.set(*tensors.apply_of_module.patch(_apply))

    def _note_registered(self, role: Role, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """Note a module's weight, by which it is known if the run ends before the module is called."""
        if tensor is not None and self.current_phase.kind in _BUILDS:
            # Not the tensor: torch swaps no weight that is referred to weakly, as it does to spread one over ranks.
            self._registered[id(module), name] = weakref.ref(module), role

    def _claim_registered(self) -> None:
        """Claim what modules have, be they called or not: the run may end here."""
        for (_, name), (known, role) in list(self._registered.items()):
            module = known()
            held = {} if module is None else module._parameters if role is Role.PARAMETER else module._buffers
            tensor = held[name] if name in held else None  # noqa: SIM401, a ScriptModule's are no dictionary
            if tensor is not None:
                self._claim_unnamed([tensor], role)

    def _patch_backward(self) -> None:
        original = autograd.engine_run_backward_of_graph.get()

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            nested = autograd.current_graph_task_id() != -1
            leaves: list[torch.Tensor] = []
            if not nested:
                self.phases.backward()
                if not self._roots and not self.phases.optimizers and kwargs.get("accumulate_grad"):
                    leaves = _leaves(args[0])
            ended = self.phases.go_on
            try:
                result = original(*args, **kwargs)
                accumulates = kwargs.get("accumulate_grad", False)
                ended = functools.partial(self.phases.after_backward, accumulates=accumulates)
                return result
            except BaseException as error:
                self._note_failed(error)
                raise
            finally:
                if not nested:
                    self._name_parameters()
                    self._claim_unnamed(leaves, Role.PARAMETER)
                    self._claim_unnamed((leaf.grad for leaf in leaves if leaf.grad is not None), Role.GRADIENT)
                    ended()

        self._patches.set(*autograd.engine_run_backward.patch(run_backward))

    def _claim_unnamed(self, tensors: Iterable[torch.Tensor], role: Role) -> None:
        """Claim tensors whose role is known, and their names not yet."""
        for tensor in tensors:
            for part in (tensor, *self.parts(tensor)):
                self.claim(part, Owner(role, ""))

    def _name_parameters(self) -> None:
        """Claim the parameters, gradients and buffers of the run's models, and what its optimizers step on."""
        with torch.DisableTorchFunction():  # each attribute that is read would pass through the program's modes
            for optimizer in self.phases.optimizers:
                for group in optimizer.param_groups:
                    self._claim_unnamed(group["params"], Role.PARAMETER)
                    self._claim_unnamed((p.grad for p in group["params"] if p.grad is not None), Role.GRADIENT)
            for root in [root for known in self._roots if (root := known()) is not None]:
                for full_name, parameter in root.named_parameters():
                    name = own_name(full_name)
                    for part in (parameter, *self.parts(parameter)):
                        self.claim(part, Owner(Role.PARAMETER, name))
                    if (own := getattr(parameter, "ds_tensor", None)) is not None:  # a rank's part (zero.py)
                        self.claim(own, Owner(Role.PARAMETER, ""))
                    if parameter.grad is not None:
                        self.claim(parameter.grad, Owner(Role.GRADIENT, name))
                for name, buffer in root.named_buffers():
                    self.claim(buffer, Owner(Role.BUFFER, own_name(name)))

    def _name_optimizer_state(self, optimizer: Optimizer, *of_step: Any) -> None:
        """Claim this optimizer's state, which has made a step or raised in it, and what it has stepped on.

        DeepSpeed shows it its own copies in float32, for as long as it steps.
        """
        for group in optimizer.param_groups:
            self._claim_unnamed(group["params"], Role.PARAMETER)
            self._claim_unnamed((p.grad for p in group["params"] if p.grad is not None), Role.GRADIENT)
        for state in optimizer.state.values():
            for key, value in state.items():
                for tensor in value if isinstance(value, list) else [value]:  # LBFGS keeps lists of directions
                    if isinstance(tensor, torch.Tensor):
                        for part in self.parts(tensor) or [tensor]:
                            self.claim(part, Owner(Role.OPTIMIZER_STATE, str(key)))

    def _unwatch(self) -> None:
        try:
            self._stack.close()
        finally:
            self._patches.undo()
            self._roots.clear()


def _leaves(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a backward of `results` gives gradients to: weights, in a program without modules."""
    waiting: list[Any] = [result.grad_fn for result in results]
    seen: set[Any] = {None}
    found = []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            waiting += [following for following, _ in node.next_functions]
    return found
