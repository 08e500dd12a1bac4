"""Recognition of optimizer steps that a program codes itself, without `torch.optim.Optimizer`, from their operators.

In the window between a backward pass and the next forward,

* an *update* writes a value that was computed from a gradient into a parameter;
* *optimizer state* is a tensor from before the backward pass, from which an update is computed, and which is written:
  in place, or as a new tensor that the next step reads.

So these are not updates, since no gradient is read: clipping or initializing weights, a momentum encoder, a target
network. And these are not state: moving averages of weights (no update reads them), buffers in which gradients are
accumulated (set to zero), masks and reference weights (never written). Parameters of torch optimizers are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from memprof.trace.events import NONE, Owner, PhaseKind, Role
from memprof.watch.phases import Phases
from memprof.watch.recorder import Recorder

_UPDATE_PHASES = (PhaseKind.OTHER, PhaseKind.OPTIMIZER_STEP)
# (operator, source line, shape): equal for the counterparts of an optimizer state in all steps.
_StateKind = tuple[int, int, tuple[int, ...]]


class UpdateDetector:
    """Detector of optimizer steps and optimizer state, from the operators between a backward and the next forward.

    `name_parameters` is called to set the roles of the program's parameters.

    Most attributes are sets of storages (indices in the trace) with one property each.
    """

    def __init__(self, recorder: Recorder, phases: Phases, name_parameters: Callable[[], None]) -> None:
        self._recorder = recorder
        self._phases = phases
        self._name_parameters = name_parameters
        # Called when the running phase is recognized as an optimizer step.
        self.on_step: Callable[[], None] = lambda: None
        self.is_watching = False  # whether operators are to be reported
        self._window_start = NONE  # index of the first storage of the current window; NONE outside windows
        self._torch_parameters: set[int] | None = None  # parameters of torch's optimizers, once computed
        # Storages with values computed from gradients, also in earlier windows.
        self._computed_from_gradients: set[int] = set()
        # Storage written or allocated in this window -> older storages from which the value was computed.
        self._sources: dict[int, frozenset[int]] = {}
        self._written_storages: set[int] = set()  # older storages that were written in this window
        self._cleared_storages: set[int] = set()  # storages last filled with a constant, such as zero
        self._parameter_shapes: set[tuple[int, ...]] = set()  # of parameters
        self._update_sources: set[int] = set()  # storages from which an update was computed
        self._live_results: set[int] = set()  # computed from gradients in an earlier window, live at its end
        self._renewed_kinds: set[_StateKind] = set()  # optimizer state that each step allocates again

    def record_phase_begin(self, kind: PhaseKind) -> None:
        """Record that a phase of `kind` is about to begin. It may begin or end a window; a checkpoint does neither."""
        awaits_update = self._phases.is_awaiting_update
        self.is_watching = awaits_update and kind in _UPDATE_PHASES
        if self._window_start != NONE and not awaits_update:
            self._look_for_new_parameters()
            self._end_window()
        if self.is_watching and self._window_start == NONE:
            self._window_start = len(self._recorder.trace.storages)

    def record_run_end(self) -> None:
        """Record that the program has ended, which ends the current window."""
        if self._window_start != NONE:
            self._end_window()

    def record_operator_begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Record that an operator on the GPU is about to read `inputs`. An operator that reads no tensor of the update,
        or that builds an autograd graph, ends the optimizer step."""
        if self._recorder.writer.phase.kind is not PhaseKind.OPTIMIZER_STEP:
            return
        builds_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        if builds_graph or not any(map(self._belongs_to_step, self._find_known_indices(inputs))):
            self._phases.end_update()

    def record_operator_end(
        self,
        inputs: Iterable[torch.Tensor],
        mutated_tensors: Iterable[torch.Tensor],
        new_tensors: Iterable[torch.Tensor],
    ) -> None:
        """Record that an operator has read `inputs`, written `mutated_tensors` in place, and returned `new_tensors`."""
        sources: set[int] = set()
        reads_gradients = False
        for index in self._find_known_indices(inputs):
            role = self._get_role(index)
            if role is Role.PARAMETER:
                continue  # values computed from a weight are not computed from gradients
            reads_gradients |= (
                role is Role.GRADIENT or index in self._computed_from_gradients or self._is_new_gradient(index)
            )
            sources |= self._sources.get(index, {index} if index < self._window_start else set())
        for index in {*self._find_known_indices(mutated_tensors), *self._find_known_indices(new_tensors)}:
            role = self._get_role(index)
            if role is Role.PARAMETER:
                if reads_gradients and index not in self._find_torch_parameters():
                    self._update_sources |= sources
                    self._begin_optimizer_step()
            elif role is not Role.GRADIENT:
                self._sources[index] = frozenset(sources)
                (self._computed_from_gradients.add if reads_gradients else self._computed_from_gradients.discard)(index)
                (self._cleared_storages.discard if sources or reads_gradients else self._cleared_storages.add)(index)
                if index < self._window_start:
                    self._written_storages.add(index)

    def _begin_optimizer_step(self) -> None:
        if self._recorder.writer.phase.kind is PhaseKind.OTHER:
            self._recorder.writer.rename_phase(PhaseKind.OPTIMIZER_STEP)
            trace = self._recorder.trace
            owners = trace.owners.items()
            self._parameter_shapes = {
                trace.storages[index].shape for index, owner in owners if owner.role is Role.PARAMETER
            }
            self._phases.record_manual_update()
            self.on_step()

    def _look_for_new_parameters(self) -> None:
        """Detect updates that replace the tensor of a parameter, without a write (`p.data = p.data - 0.1 * p.grad`)."""
        if self._phases.optimizers or self._recorder.writer.phase.kind is PhaseKind.OPTIMIZER_STEP:
            return
        new_results = {
            index
            for index in self._computed_from_gradients
            if index >= self._window_start and self._recorder.storages.is_live(index)
        }
        if new_results:
            self._name_parameters()
            if any(self._get_role(index) is Role.PARAMETER for index in new_results):
                self._begin_optimizer_step()

    def _end_window(self) -> None:
        """End the window. Storages that updates read, and that have values for the next step, are optimizer state."""
        trace, begin = self._recorder.trace, self._window_start
        renewed_storages = (self._update_sources & self._live_results) - self._cleared_storages
        self._renewed_kinds |= {self._make_state_kind(index) for index in renewed_storages}
        live_results = {index for index in self._computed_from_gradients if self._recorder.storages.is_live(index)}
        state_storages = (self._update_sources & self._written_storages - self._cleared_storages) | renewed_storages
        state_storages |= {
            index for index in live_results if index >= begin and self._make_state_kind(index) in self._renewed_kinds
        }
        for index in state_storages:
            trace.owners.setdefault(index, Owner(Role.OPTIMIZER_STATE, ""))
        self._computed_from_gradients = live_results
        self._live_results |= {index for index in live_results if index >= begin}
        self._live_results &= live_results
        self._window_start, self._torch_parameters = NONE, None
        self._sources.clear()
        self._written_storages.clear()
        self._cleared_storages.clear()
        self._update_sources.clear()

    def _make_state_kind(self, index: int) -> _StateKind:
        storage = self._recorder.trace.storages[index]
        return storage.op, storage.source, storage.shape

    def _belongs_to_step(self, index: int) -> bool:
        return (
            index in self._sources
            or self._get_role(index) in (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
            or self._recorder.trace.storages[index].shape
            in self._parameter_shapes  # a mask, a state before its first use
        )

    def _is_new_gradient(self, index: int) -> bool:
        """Return whether storage `index` is a gradient that `torch.autograd.grad` returned to the program."""
        trace = self._recorder.trace
        return index not in trace.owners and trace.phases[trace.storages[index].phase].kind is PhaseKind.BACKWARD

    def _get_role(self, index: int) -> Role | None:
        owner = self._recorder.trace.owners.get(index)
        return None if owner is None else owner.role

    def _find_torch_parameters(self) -> set[int]:
        if self._torch_parameters is None:
            groups = (group for optimizer in self._phases.optimizers for group in optimizer.param_groups)
            self._torch_parameters = set(self._find_known_indices(p for group in groups for p in group["params"]))
        return self._torch_parameters

    def _find_known_indices(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        return [index for index in map(self._recorder.storages.get_index, tensors) if index != NONE]
