"""Runs that do not wait for each other, at once: what is likely to be asked for is run before it is."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from multiprocessing.connection import Pipe
from typing import Any

from memprof.errors import MemprofError
from memprof.flows.profile import COMPILER, compiles, profile
from memprof.report.documents.report import Document
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.watch.collection import look_through_no_more


def at_once(spec: TargetSpec) -> int:
    """How many runs like `spec` may be made at once, each in a process of its own.

    One after the other are made runs of code that is the user's own: it may write, and count on what a run before left.
    """
    from memprof.workload.side_by_side import number_of_processes  # needs torch

    return number_of_processes() if spec.device == "virtual" and not own_code(spec) and not spec.compile else 1


def own_code(spec: TargetSpec) -> bool:
    """Whether code is run that is the user's own."""
    _, colon, factory = spec.model.rpartition(":")
    return spec.trust_remote_code or bool(colon and factory.isidentifier())


def warm(spec: TargetSpec, progress: Callable[[str], None]) -> None:
    """Import what runs like `spec` need, once for all processes that are forked from this one, by a small one."""
    progress("importing torch and the model's code")
    small = spec.edit(
        model="pythia-70m", model_is_size=False, context_length=8, batch_size=1, steps=1, vocab_size=None, lengths=None,
        parallel=spec.parallel and "fsdp", rank=None, fixes=(),
    )  # fmt: skip
    with contextlib.suppress(MemprofError):  # whatever it is, the runs themselves will say it
        profile(small, explained=False)


Made = tuple[Trace, Document] | MemprofError
"""A run without its ledger, or why it cannot be made."""


class Ahead:
    """Runs that were made before they were asked for."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._is_warm = False
        self.has_compiled = False
        """Whether this process has: of what torch prepares for that, those that are forked from it have it all."""
        self._made: dict[TargetSpec, Made] = {}

    def run(self, specs: Iterable[TargetSpec], guess: Callable[[], dict[TargetSpec, Made]] | None = None) -> None:
        """Make these at once, each in a process of its own; nothing is done where that gains nothing.

        What compiles waits until this process has compiled.

        Args:
            guess: makes others, in one more process.
        """
        from memprof.workload.side_by_side import side_by_side

        left = [spec for spec in dict.fromkeys(specs) if spec not in self._made]
        works: list[Callable[[], Any]] = [functools.partial(_run, spec) for spec in left]
        if guess is not None:
            works.append(guess)
        if len(works) < 2 or at_once(left[0]) < 2:
            return
        if not self.has_compiled and any(map(compiles, left)):
            return
        self._warm(left[0])
        made = side_by_side(works, self._progress)
        self._made |= zip(left, made, strict=False)
        if guess is not None and not isinstance(made[-1], MemprofError):
            self._made |= made[-1]

    def first(self, spec: TargetSpec) -> None:
        """Make this in a process of its own, while this one imports the compiler for those that follow."""
        from memprof.workload.side_by_side import while_elsewhere

        if at_once(spec) > 1:
            self._warm(spec)
            compiler = functools.partial(importlib.import_module, COMPILER)
            self._made[spec] = while_elsewhere(functools.partial(_run, spec), compiler)

    def beside(self, spec: TargetSpec, others: Callable[[Ahead], None]) -> None:
        """Make this run, which compiles, in this process: those that are forked from it later are ready to compile.

        Args:
            others: asks a process of its own for runs meanwhile, of what is given to it; it is left when it asks for
                one that compiles, or for one more when this one is made.
        """
        from memprof.workload.side_by_side import while_elsewhere

        if at_once(spec) < 2:
            return
        self._warm(spec)
        is_over, say = Pipe(duplex=False)

        def ask() -> dict[TargetSpec, Made]:
            asked = _UntilCompiled(is_over.poll)
            with contextlib.suppress(_EnoughError):
                others(asked)
            return asked.made

        def here() -> None:
            try:
                self._made[spec] = _run(spec)
                self.has_compiled = True
            except MemprofError as error:
                error.__traceback__ = None  # its frames would keep the model
                self._made[spec] = error
            say.send(None)

        with is_over, say:
            made = while_elsewhere(ask, here)
        if not isinstance(made, MemprofError):
            self._made |= made

    def _warm(self, spec: TargetSpec) -> None:
        if not self._is_warm:
            warm(spec, self._progress)
            self._is_warm = True
        look_through_no_more()

    def take(self, spec: TargetSpec) -> tuple[Trace, Document] | None:
        """The run of `spec`, without its ledger; None: it was not made.

        Raises:
            MemprofError: it cannot be made.
        """
        made = self._made.pop(spec, None)
        if isinstance(made, MemprofError):
            raise made
        return made


class _EnoughError(Exception):
    """No more is asked for."""


class _UntilCompiled(Ahead):
    """Makes each run when it is asked for, up to the first that compiles, or until it `is_over`."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__(lambda doing: None)
        self._is_over = is_over
        self.made: dict[TargetSpec, Made] = {}

    def run(self, specs: Iterable[TargetSpec], guess: Callable[[], dict[TargetSpec, Made]] | None = None) -> None:
        """Nothing is made before it is asked for."""

    def take(self, spec: TargetSpec) -> tuple[Trace, Document]:
        """The run of `spec`, without its ledger.

        Raises:
            MemprofError: it cannot be made.
        """
        if compiles(spec) or self._is_over():
            raise _EnoughError
        try:
            made = self.made[spec] = _run(spec)
        except MemprofError as error:
            self.made[spec] = error
            raise
        return made


def _run(spec: TargetSpec) -> tuple[Trace, Document]:
    return profile(spec, explained=False)
