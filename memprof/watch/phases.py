"""Recognition of a program's phases and training steps, from its module calls, backward passes and optimizer steps.

| event | phase |
|---|---|
| start of the program; a module is moved (`.to`, `.cuda`, `.half`) | model |
| an outermost module call (not from inside another module) | forward |
| ... without gradients, in eval mode, of a module that is being trained | evaluation |
| ... inside `generate()`, after the first call | decode |
| a backward pass; an optimizer's step (without a torch optimizer: watch/updates.py) | backward; optimizer step |
| `torch.save`, `safetensors.torch.save_file` | checkpoint |
| everything else | other |

A closure of an optimizer's step interrupts the step, which is resumed after the closure's forward and backward.
Calls that raise do not count: the next forward belongs to the same step and micro-batch as the call that raised. After
an optimizer's step that raised, it is the first micro-batch of the same step.
A training step begins with a forward with gradients (if no module is called: with the backward pass), and ends with the
optimizer's step. With several optimizers it ends when those of the step before and all new ones have stepped, or when
one steps again; without an optimizer, at the next forward with gradients after a backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.patching import Patch
from memprof.torch_private import autograd, tensors
from memprof.trace.events import Phase, PhaseKind

_MICRO_BATCH_KINDS = (PhaseKind.FORWARD, PhaseKind.BACKWARD, PhaseKind.EVALUATION, PhaseKind.DECODE)


class Phases:
    """State machine that recognizes phases and training steps from a program's events.

    It calls `begin_phase` (kind, step, micro-batch) when a phase begins; `get_current_phase` returns the current one.
    """

    def __init__(
        self, begin_phase: Callable[[PhaseKind, int, int], None], get_current_phase: Callable[[], Phase]
    ) -> None:
        self._begin_phase = begin_phase
        self._get_current_phase = get_current_phase
        self.is_recognizing = True  # false while memprof's own workload sets the phases itself
        self.step = 0  # the training step that is running, or that ended last, from 1; 0 before the first
        self._has_step_ended = True  # whether step `step` has ended
        # Called at the end of an optimizer's step with the outermost optimizer; None if the program updates manually.
        self.on_step: Callable[[Optimizer | None], None] = lambda optimizer: None
        self.trains = False  # whether a model was called with gradients
        self.updates_parameters_manually = False  # whether the program has updated parameters without a torch optimizer
        # Models that were called with gradients in training mode.
        self._trained_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Called before a module with parameters is called from outside all others.
        self.before_forward: Callable[[nn.Module], None] = lambda module: None
        self.num_forwards = 0  # calls of models so far, from outside all others
        # Whether a model was called in eval mode, or behind a training step without gradients.
        self.has_evaluated = False
        self.num_backwards = 0  # backward passes that have begun so far
        self._micro_batch = 1
        self._has_run_backward = False
        self._has_manual_update = False  # whether the program itself has updated parameters in this step
        self._num_generate_calls = 0  # calls of the model within `generate()`; 0 outside
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that the program has made
        # Returns the outermost optimizer that is stepping, or None. A weak reference, so that the program can free an
        # optimizer even if the end of its step was not observed.
        self._get_stepping_optimizer: Callable[[], Any] = _return_no_optimizer
        # Called with the exception that is about to leave the running phase.
        self.on_error: Callable[[BaseException], None] = lambda error: None
        # Called with an optimizer that raised in its step; its state may be incomplete.
        self.on_step_error: Callable[[Optimizer], None] = lambda optimizer: None
        # Called to replace an attribute (owner, name, value) until the end of the run.
        self.set_patch: Callable[[Any, str, Any], None] = lambda owner, name, value: None
        # Classes of optimizers whose `step` was replaced.
        self._patched_step_classes: weakref.WeakSet[type] = weakref.WeakSet()
        self._stepped_optimizers: weakref.WeakSet[Optimizer] = (
            weakref.WeakSet()
        )  # optimizers that have stepped in this step
        self.num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # that have ended
        self._known_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that have ever stepped
        # Optimizers that have stepped before, and were not in the step that ended last: those of an earlier model.
        self._idle_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Optimizers that step within the step of another one, which wraps them.
        self._inner_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Whether a library steps optimizers only to allocate their state, before training.
        self._is_preparing_state = False

    def _begin(self, kind: PhaseKind) -> None:
        if self.is_recognizing:
            is_between_steps = self._has_step_ended and kind in (
                PhaseKind.FORWARD,
                PhaseKind.EVALUATION,
                PhaseKind.DECODE,
            )
            in_step = self.step and not is_between_steps
            self._begin_phase(
                kind, self.step if in_step else 0, self._micro_batch if in_step and kind in _MICRO_BATCH_KINDS else 0
            )

    def _begin_step(self) -> None:
        self.step += 1
        self._has_step_ended = False
        self._micro_batch = 1
        self._has_run_backward = self._has_manual_update = False

    def begin_model_building(self) -> None:
        """Begin the phase in which the program builds its model."""
        self._begin(PhaseKind.MODEL)

    def end_model_building(self) -> None:
        """End the phase in which the program builds its model, if that phase is running."""
        if self._get_current_phase().kind is PhaseKind.MODEL:
            self._begin(PhaseKind.OTHER)

    def record_forward_call(self, module: nn.Module) -> None:
        """Record an outermost call of `module` (not from inside another module)."""
        if not self.is_recognizing or autograd.current_graph_task_id() != -1:
            return
        if next(module.parameters(), None) is None:  # a loss, an activation: part of the running phase
            self.end_model_building()
            return
        self.num_forwards += 1
        trains = torch.is_grad_enabled()
        is_behind_step = not trains and self._has_step_ended and _has_trainable_parameters(module)
        self.has_evaluated = self.has_evaluated or not module.training or is_behind_step
        self.before_forward(module)
        if trains and _has_trainable_parameters(module):
            self.trains = True
            if module.training:
                self._trained_models.add(module)
        if trains and self._has_run_backward and not self.optimizers and not self._has_step_ended:
            self._end_step(None)
        if self._has_step_ended and (trains or (self.step == 0 and not self.optimizers)):
            self._begin_step()
        if self._num_generate_calls:
            kind = PhaseKind.FORWARD if self._num_generate_calls == 1 else PhaseKind.DECODE
            self._num_generate_calls += 1
            if self._get_current_phase().kind is PhaseKind.DECODE:
                return
        elif not trains and not module.training and (self._has_trained_parameters(module) or self._are_evaluated()):
            kind = PhaseKind.EVALUATION
        else:
            kind = PhaseKind.FORWARD
            if trains and self._has_run_backward:  # in the same step: gradients are accumulated
                self._has_run_backward = False
                self._micro_batch += 1
        self._begin(kind)

    def _has_trained_parameters(self, module: nn.Module) -> bool:
        """Return whether an optimizer has parameters of `module`; without optimizers, after a backward, whether any
        parameter requires gradients. False for the teacher of a distillation.
        """
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        stepped_parameter_ids = {id(parameter) for group in groups for parameter in group["params"]}
        if not stepped_parameter_ids:
            return bool(self.num_backwards and _has_trainable_parameters(module))
        return any(id(parameter) in stepped_parameter_ids for parameter in module.parameters())

    def _are_evaluated(self) -> bool:
        """Return whether all models that are trained in training mode are in eval mode: another one that is called then
        is part of their evaluation, as a teacher that is scored beside its student."""
        return bool(self._trained_models) and not any(model.training for model in self._trained_models)

    def record_backward_begin(self) -> None:
        """Record that a backward pass begins."""
        self.num_backwards += 1
        if self.is_recognizing and not self.num_forwards and self._has_manual_update and not self._has_step_ended:
            self._end_step(None)
        if self._has_step_ended and (self.optimizers or not self.num_forwards):  # no model: parameters without a module
            self._begin_step()
        elif self.is_recognizing and self._has_run_backward and not self.num_forwards:  # no call begins a micro-batch
            self._has_run_backward = False
            self._micro_batch += 1
        self._begin(PhaseKind.BACKWARD)

    def record_backward_end(self, *, accumulates: bool) -> None:
        """Record the end of a backward pass; `accumulates`: whether into `.grad`, unlike `torch.autograd.grad`."""
        self._has_run_backward = self._has_run_backward or accumulates or not self.optimizers
        self.resume_phase()

    def resume_phase(self) -> None:
        """Begin the phase OPTIMIZER_STEP if an optimizer's step is running, else the phase OTHER."""
        self._begin(PhaseKind.OPTIMIZER_STEP if self.is_stepping else PhaseKind.OTHER)

    @property
    def is_stepping(self) -> bool:
        """Return whether an optimizer's step is running, its closure included."""
        return self._get_stepping_optimizer() is not None

    def record_forward_error(self, error: BaseException) -> None:
        """Record that an outermost module call raised `error`."""
        if self.is_recognizing and autograd.current_graph_task_id() == -1:
            self.on_error(error)
            self.resume_phase()

    @property
    def is_awaiting_update(self) -> bool:
        """Return whether the program may now update parameters manually: after a backward, outside optimizer steps."""
        return self.is_recognizing and self._has_run_backward and not self._has_step_ended and not self.is_stepping

    def record_manual_update(self) -> None:
        """Record that the program updates parameters without an optimizer, in the current phase."""
        self._has_manual_update = self.updates_parameters_manually = True

    def end_update(self) -> None:
        """End the phase in which the program updates parameters without an optimizer."""
        self._begin(PhaseKind.OTHER)

    @contextlib.contextmanager
    def run_in_phase(self, kind: PhaseKind) -> Iterator[None]:
        """Context manager: run the body as a phase of `kind`, then resume the previous phase."""
        previous = self._get_current_phase()
        if not self.is_recognizing or previous.kind is kind:
            yield
            return
        self._begin_phase(kind, previous.step, previous.micro_batch)
        try:
            yield
        except BaseException as error:
            self.on_error(error)
            raise
        finally:
            self._begin_phase(previous.kind, previous.step, previous.micro_batch)

    def _handle_step_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_preparing_state:
            return
        if self._get_stepping_optimizer() not in (None, optimizer):
            self._inner_optimizers.add(optimizer)
            return
        self._get_stepping_optimizer = weakref.ref(optimizer)
        self._idle_optimizers.discard(optimizer)
        if optimizer in self._stepped_optimizers:
            self.step += 1
            self._forget_stepped_optimizers()
        elif self._has_step_ended and any(
            parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
        ):
            self._begin_step()  # gradients that the program has made itself, without a backward pass
        self._begin(PhaseKind.OPTIMIZER_STEP)

    def _handle_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._get_stepping_optimizer() is not optimizer:
            return
        self._get_stepping_optimizer = _return_no_optimizer
        self._stepped_optimizers.add(optimizer)
        self.num_steps[optimizer] = self.num_steps.get(optimizer, 0) + 1
        num_expected = len(self.optimizers) - len(self._idle_optimizers)
        self._end_step(optimizer, is_last=len(self._stepped_optimizers) >= num_expected)

    def _forget_stepped_optimizers(self) -> None:
        self._known_optimizers.update(self._stepped_optimizers)
        self._idle_optimizers = self._known_optimizers - self._stepped_optimizers
        self._stepped_optimizers.clear()

    def list_optimizers_without_step(self) -> list[Optimizer]:
        """Return the optimizers that have not come to the end of a step."""
        stepped = self._known_optimizers | self._stepped_optimizers | self._inner_optimizers
        return [optimizer for optimizer in self.optimizers if optimizer not in stepped]

    def wrap_preparation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `original`, which allocates optimizer state by a step before training."""

        def prepare(*args: Any, **kwargs: Any) -> Any:
            self._is_preparing_state = True
            try:
                with self.run_in_phase(PhaseKind.OPTIMIZER):
                    return original(*args, **kwargs)
            finally:
                self._is_preparing_state = False

        return prepare

    def wrap_composite_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `original`, the `step` of an optimizer that wraps torch optimizers."""

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._handle_step_begin(optimizer, args, kwargs)
            result = original(optimizer, *args, **kwargs)
            if self._get_stepping_optimizer() is optimizer:
                self._get_stepping_optimizer = _return_no_optimizer
                self._end_step(optimizer)
            return result

        return self._wrap_step(step)

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for `original`, an optimizer's `step`, which handles its exceptions."""

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            is_outermost = self._get_stepping_optimizer() is None
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self.on_error(error)
                optimizer = self._get_stepping_optimizer()
                if is_outermost and optimizer is not None:
                    if isinstance(optimizer, Optimizer):
                        self.on_step_error(optimizer)
                    self._get_stepping_optimizer = _return_no_optimizer
                    self._micro_batch, self._has_run_backward = 1, False
                    self.resume_phase()
                raise

        return step

    def _patch_step(self, kind: type) -> None:
        """Patch the `step` of the optimizer class `kind`, so that exceptions in it are handled."""
        owner: Any = next(base for base in kind.__mro__ if "step" in vars(base))
        if owner not in self._patched_step_classes:
            self._patched_step_classes.add(owner)
            self.set_patch(owner, "step", self._wrap_step(owner.step))

    def _end_step(self, optimizer: Optimizer | None, *, is_last: bool = True) -> None:
        if is_last:
            self._has_step_ended = True
            self._forget_stepped_optimizers()
        self._begin(PhaseKind.OTHER)
        self.on_step(optimizer)

    @property
    def num_completed_steps(self) -> int:
        """Return the number of training steps that have ended."""
        return self.step if self._has_step_ended else max(self.step - 1, 0)

    def register_optimizer_hooks(self) -> Iterator[Any]:
        """Register hooks for the steps of all torch optimizers; yield the hooks' handles (with a method `remove`)."""
        yield register_optimizer_step_pre_hook(self._handle_step_begin)
        yield register_optimizer_step_post_hook(self._handle_step_end)

    def patches(self) -> Iterator[Patch]:
        """Yield patches (owner, name, replacement) for events without a torch hook, except backward passes."""
        yield tensors.apply_of_module.patch(self._wrap_in_phase(tensors.apply_of_module.get(), PhaseKind.MODEL))
        yield torch, "save", self._wrap_in_phase(torch.save, PhaseKind.CHECKPOINT)
        yield Optimizer, "__init__", self._wrap_optimizer(Optimizer.__init__)
        for kind in _iterate_subclasses(Optimizer):
            if getattr(vars(kind).get("step"), "hooked", False):  # torch has hooked the class: it has instances
                self._patch_step(kind)

    def make_import_patches(self) -> Mapping[str, Callable[[ModuleType], Iterator[Patch]]]:
        """Return module name -> function that yields the patches to apply once that module is imported."""

        def generation_patches(module: ModuleType) -> Iterator[Patch]:
            mixin = module.GenerationMixin
            yield mixin, "generate", self._wrap_generate(mixin.generate)

        def saving_patches(module: ModuleType) -> Iterator[Patch]:
            yield module, "save_file", self._wrap_in_phase(module.save_file, PhaseKind.CHECKPOINT)

        return {"transformers.generation.utils": generation_patches, "safetensors.torch": saving_patches}

    def _wrap_in_phase(self, original: Callable[..., Any], kind: PhaseKind) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.run_in_phase(kind):
                return original(*args, **kwargs)

        call.__name__ = call.__qualname__ = original.__name__
        return call

    def _wrap_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            if self._num_generate_calls:
                return original(*args, **kwargs)
            self._num_generate_calls = 1
            try:
                return original(*args, **kwargs)
            finally:
                self._num_generate_calls = 0
                self._begin(PhaseKind.OTHER)

        return generate

    def _wrap_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.optimizers.add(optimizer)
            self._patch_step(type(optimizer))
            self.end_model_building()

        return __init__


def _return_no_optimizer() -> None:
    """Return None, meaning that no optimizer is stepping."""


def _iterate_subclasses(kind: type) -> Iterator[type]:
    subclass: type
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _iterate_subclasses(subclass)


def _has_trainable_parameters(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
