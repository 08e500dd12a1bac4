"""Optimizer steps of optimizers that are no `torch.optim.Optimizer`, told by what their operators do.

Between a backward pass and the next forward,

* an *update* writes a parameter by a value that was computed from a gradient;
* *optimizer state* is older than the backward pass, feeds an update, and is written too: in place, or as a new tensor
  that the next step reads.

So these are no updates: weights that are clipped or drawn anew, a momentum encoder, a target network (no gradient goes
into them). And these are no state: moving averages of weights (they feed no update), buffers that gradients are
accumulated in (they are set to zero), masks and reference weights (nothing writes them). What a `torch.optim.Optimizer`
steps on is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from memprof.trace.events import NONE, Owner, PhaseKind, Role
from memprof.watch.phases import Phases
from memprof.watch.recorder import Recorder

_BETWEEN = (PhaseKind.OTHER, PhaseKind.OPTIMIZER_STEP)
# Operator, line and shape: what the states of one kind have in common from step to step.
_Kind = tuple[int, int, tuple[int, ...]]


class Updates:
    """Watches operators between a backward pass and what follows; `name_parameters` claims parameters as they are now.

    Its sets are what it knows of storages, each of another kind, so that it has more attributes than other classes.
    """

    def __init__(self, recorder: Recorder, phases: Phases, name_parameters: Callable[[], None]) -> None:
        self._recorder = recorder
        self._phases = phases
        self._name_parameters = name_parameters
        # The phase that is running has turned out to be an optimizer's step.
        self.on_step: Callable[[], None] = lambda: None
        self.looks = False  # whether operators are to be told
        self._begin = NONE  # storages made before the stretch that is watched; NONE: none is
        self._managed: set[int] | None = None  # what optimizers of torch's step on, once asked
        # Storages that hold what was computed from gradients, of earlier stretches too.
        self._of_gradients: set[int] = set()
        # Of what was written or made in this stretch: the older storages that its value comes from.
        self._sources: dict[int, frozenset[int]] = {}
        self._written: set[int] = set()  # older storages that this stretch has written
        self._cleared: set[int] = set()  # storages that were last set to what comes from no tensor, such as zero
        self._shapes: set[tuple[int, ...]] = set()  # of parameters
        self._fed: set[int] = set()  # storages that an update's value comes from
        self._left: set[int] = set()  # made of gradients in an earlier stretch, and live at its end
        self._kinds: set[_Kind] = set()  # of states that each step makes anew

    def phase_begins(self, kind: PhaseKind) -> None:
        """See a phase about to begin; checkpoints interrupt a stretch."""
        goes_on = self._phases.awaits_update
        self.looks = goes_on and kind in _BETWEEN
        if self._begin != NONE and not goes_on:
            self._look_for_new_parameters()
            self._close()
        if self.looks and self._begin == NONE:
            self._begin = len(self._recorder.trace.storages)

    def run_ends(self) -> None:
        """See the program come to its end."""
        if self._begin != NONE:
            self._close()

    def operator_runs(self, read: Sequence[torch.Tensor]) -> None:
        """See an operator on the GPU about to run, given these. One that has nothing to do with the update which
        was made comes after the step, and so does one that makes an autograd graph."""
        if self._recorder.writer.phase.kind is not PhaseKind.OPTIMIZER_STEP:
            return
        builds_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)
        if builds_graph or not any(map(self._is_of_step, self._indices(read))):
            self._phases.after_update()

    def operator_ran(
        self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor], made: Iterable[torch.Tensor]
    ) -> None:
        """See that an operator has computed what it has written into, and made, from what it `read`."""
        sources: set[int] = set()
        of_gradients = False
        for index in self._indices(read):
            role = self._role(index)
            if role is Role.PARAMETER:
                continue  # what comes from a weight is no update by a gradient, whatever the weight comes from
            of_gradients |= role is Role.GRADIENT or index in self._of_gradients or self._is_new_gradient(index)
            sources |= self._sources.get(index, {index} if index < self._begin else set())
        for index in {*self._indices(written), *self._indices(made)}:
            role = self._role(index)
            if role is Role.PARAMETER:
                if of_gradients and index not in self._stepped_by_torch():
                    self._fed |= sources
                    self._step()
            elif role is not Role.GRADIENT:
                self._sources[index] = frozenset(sources)
                (self._of_gradients.add if of_gradients else self._of_gradients.discard)(index)
                (self._cleared.discard if sources or of_gradients else self._cleared.add)(index)
                if index < self._begin:
                    self._written.add(index)

    def _step(self) -> None:
        if self._recorder.writer.phase.kind is PhaseKind.OTHER:
            self._recorder.writer.rename_phase(PhaseKind.OPTIMIZER_STEP)
            trace = self._recorder.trace
            owners = trace.owners.items()
            self._shapes = {trace.storages[index].shape for index, owner in owners if owner.role is Role.PARAMETER}
            self._phases.updated()
            self.on_step()

    def _look_for_new_parameters(self) -> None:
        """Look for parameters that were given new tensors (`p.data = p.data - 0.1 * p.grad`), which nothing writes."""
        if self._phases.optimizers or self._recorder.writer.phase.kind is PhaseKind.OPTIMIZER_STEP:
            return
        made = {
            index for index in self._of_gradients if index >= self._begin and self._recorder.storages.is_alive(index)
        }
        if made:
            self._name_parameters()
            if any(self._role(index) is Role.PARAMETER for index in made):
                self._step()

    def _close(self) -> None:
        """End a stretch: what fed its updates, and carries its value to the next step, is optimizer state."""
        trace, begin = self._recorder.trace, self._begin
        anew = (self._fed & self._left) - self._cleared
        self._kinds |= {self._kind(index) for index in anew}
        left = {index for index in self._of_gradients if self._recorder.storages.is_alive(index)}
        state = (self._fed & self._written - self._cleared) | anew
        state |= {index for index in left if index >= begin and self._kind(index) in self._kinds}
        for index in state:
            trace.owners.setdefault(index, Owner(Role.OPTIMIZER_STATE, ""))
        self._of_gradients = left
        self._left |= {index for index in left if index >= begin}
        self._left &= left
        self._begin, self._managed = NONE, None
        self._sources.clear()
        self._written.clear()
        self._cleared.clear()
        self._fed.clear()

    def _kind(self, index: int) -> _Kind:
        storage = self._recorder.trace.storages[index]
        return storage.op, storage.source, storage.shape

    def _is_of_step(self, index: int) -> bool:
        return (
            index in self._sources
            or self._role(index) in (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
            or self._recorder.trace.storages[index].shape in self._shapes  # a mask, a state before its first use
        )

    def _is_new_gradient(self, index: int) -> bool:
        """Return whether a backward pass has made it and given it to the program, as `torch.autograd.grad` does."""
        trace = self._recorder.trace
        return index not in trace.owners and trace.phases[trace.storages[index].phase].kind is PhaseKind.BACKWARD

    def _role(self, index: int) -> Role | None:
        owner = self._recorder.trace.owners.get(index)
        return None if owner is None else owner.role

    def _stepped_by_torch(self) -> set[int]:
        if self._managed is None:
            groups = (group for optimizer in self._phases.optimizers for group in optimizer.param_groups)
            self._managed = set(self._indices(one for group in groups for one in group["params"]))
        return self._managed

    def _indices(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        return [index for index in map(self._recorder.storages.index_of, tensors) if index != NONE]
