"""Runs of one model that begin as one: it is built once, in a process that is forked for each length and batch."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from memprof.errors import MemprofError
from memprof.flows.ahead import own_code
from memprof.flows.profile import compiles, happened
from memprof.spec import TargetSpec
from memprof.trace.events import Trace

if TYPE_CHECKING:
    from memprof.workload.beginning import Beginning

_Outcome = TypeVar("_Outcome")
_MOST = 8
"""Built models that are kept: each is a process."""


class Run(NamedTuple):
    """What is asked."""

    spec: TargetSpec
    micro_batches: int
    traced: bool
    """Whether the requests of its trace are wanted, too."""


class Begun(Generic[_Outcome]):
    """The models that were built.

    Args:
        outcome: what is to be known of a run; called in the process that has made it.
        worth: whether a model takes longer to build than a process to fork, for as often as it will be asked for.
    """

    def __init__(
        self,
        outcome: Callable[[Run, Trace], _Outcome],
        worth: Callable[[TargetSpec], bool] = lambda spec: True,
    ) -> None:
        self._outcome, self._worth = outcome, worth
        self._models: dict[tuple[object, ...], Beginning[Run, tuple[_Outcome, Trace | None]]] = {}
        weakref.finalize(self, _close, self._models)
        self.is_warm = False
        """Whether torch and the libraries are imported, so that a process that is forked now has them."""

    def begin(self, spec: TargetSpec) -> Beginning[Run, tuple[_Outcome, Trace | None]] | None:
        """The process that builds the model of `spec`, once it is asked; None where it is to be run here."""
        one_process = spec.device == "virtual" and spec.parallel is None and spec.gpus == 1
        if not self.is_warm or not one_process or own_code(spec) or compiles(spec) or not self._worth(spec):
            return None
        from memprof.virtual.edges.processes import taken_along
        from memprof.workload.beginning import Beginning
        from memprof.workload.side_by_side import may_fork
        from memprof.workload.step import AFTER_BUILDING

        fields = (field.name for field in dataclasses.fields(spec))
        key = tuple(getattr(spec, name) for name in fields if name not in AFTER_BUILDING)
        model = self._models.pop(key, None)
        if model is None:
            if not may_fork():
                return None
            if len(self._models) == _MOST:
                self._models.pop(next(iter(self._models))).close()
            model = Beginning(functools.partial(self._run, spec), taken_along)
        self._models[key] = model  # the last that was asked for is the last to be closed
        return model

    def ask(self, run: Run) -> tuple[_Outcome, Trace | None] | None:
        """What comes of it, and its requests if they are wanted; None where it is to be run here.

        Raises:
            MemprofError: it cannot be run.
        """
        model = self.begin(run.spec)
        found = None if model is None else model.ask(run)
        if isinstance(found, MemprofError):
            raise found
        return found

    def close(self) -> None:
        """End them all."""
        _close(self._models)

    def _run(self, spec: TargetSpec, part: Callable[[], Run]) -> tuple[_Outcome, Trace | None]:
        asked: list[Run] = []

        def built() -> TargetSpec:
            if not asked:  # else it is run again
                asked.append(part())
            return asked[0].spec

        trace = happened(spec, built=built)
        return self._outcome(asked[0], trace), requests_of(trace) if asked[0].traced else None


def _close(models: dict[tuple[object, ...], Beginning[Run, Any]]) -> None:
    while models:
        models.popitem()[1].close()


def requests_of(trace: Trace) -> Trace:
    """What `likely_needs` asks of a run, and nothing else."""
    kept = ("source", "device", "events", "storages", "ops", "uses", "waits", "refused", "facts")
    return Trace(**{name: getattr(trace, name) for name in kept})
