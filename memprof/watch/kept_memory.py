"""Watch over the memory that a program keeps: what accumulates, what is no longer used, what caught errors hold,
gradients that no optimizer has, and settings of models that decide what autograd keeps."""

from __future__ import annotations

from torch import nn

from memprof.trace.events import PhaseKind
from memprof.watch.caught_errors import CaughtErrorWatch
from memprof.watch.growth import GrowthWatch
from memprof.watch.idle import IdleWatch
from memprof.watch.model_settings import ModelSettingsWatch
from memprof.watch.phases import Phases
from memprof.watch.recorder import Recorder
from memprof.watch.untrained import UntrainedDetector

MAX_ERRORS = 2  # out-of-memory errors at which objects are searched: a program that catches them may raise any number


class KeptMemoryWatch:
    """The searches for what a program keeps, each at the moments at which its objects can show it."""

    def __init__(self, recorder: Recorder, phases: Phases) -> None:
        self._num_errors = 0  # out-of-memory errors at which objects were searched
        self.growth = GrowthWatch(recorder)
        self._idle = IdleWatch(recorder, self.growth.search)
        self.caught_errors = CaughtErrorWatch(recorder, self.growth.search)
        self.untrained = UntrainedDetector(recorder, phases)
        self.settings = ModelSettingsWatch(recorder)

    def record_call(self, module: nn.Module, index: int) -> None:
        """Record an outermost call, outside backward passes, of `module`, which has `index` in the trace."""
        self.settings.record_call(module, index)
        self.growth.record_call(module, index)

    def record_phase_begin(self, kind: PhaseKind, *, in_step: bool) -> None:
        """Record that a phase of `kind` begins; `in_step`: whether it is in the closure of an optimizer's step."""
        self.growth.record_phase_begin(kind, in_step=in_step)
        self._idle.record_phase_begin(kind)
        if kind.computes:  # other phases begin while an error passes, too
            self.caught_errors.find_holders()

    def record_out_of_memory(self, error: RuntimeError, *, has_phases: bool) -> None:
        """Record that `error` is about to be raised; `has_phases`: whether the program's phases are recognized."""
        self.caught_errors.record_error(error)
        if has_phases:
            self.growth.record_out_of_memory()
            if self._num_errors < MAX_ERRORS:
                self._num_errors += 1
                self._idle.record_out_of_memory()
                self.untrained.record_out_of_memory()
                self.growth.find_sums_of_calls()

    def record_run_end(self) -> None:
        """Record the end of the program, with its variables still alive."""
        self.growth.record_run_end()
        self._idle.record_run_end()
        self.untrained.record_run_end()
        self.caught_errors.find_holders()
