"""The program to run: a file or a module, as in `python file args` and `python -m module args`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from memprof.errors import MemprofError, UsageError
from memprof.patching import PatchSet
from memprof.script.stop import EndReason, ScriptOutcome, StopRule, StopRun

if TYPE_CHECKING:
    from memprof.script.exits import ExitHandlers
    from memprof.script.launchers import ProcessSelection, ProcessStart

_MEMPROF_DIR = str(Path(__file__).resolve().parent.parent) + os.sep
_LAUNCH_FILES = (_MEMPROF_DIR, runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program and its arguments, its `sys.argv[1:]`.

    `name` is a file, a folder or archive with a `__main__.py`, or (`is_module`) a module that can be imported.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        """Return the program and arguments as typed after `python`."""
        return [*(("-m",) if self.is_module else ()), self.name, *self.arguments]

    def check(self) -> None:
        """Raise UsageError if there is no such program."""
        if self._find_launcher():
            return
        if self.is_module:
            self._check_module()
            return
        path = Path(self.name)
        if not path.exists():
            option = "; options of memprof stand before it" if self.name.startswith("-") else ""
            raise UsageError("no such script", value=self.name, hint=f"give the path of a Python file{option}")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError("this folder is no program", value=self.name, hint="it has no __main__.py: name a file")
        if path.is_file() and not os.access(path, os.R_OK):
            raise UsageError("the script cannot be read", value=self.name, hint="mind its permissions")

    @property
    def has_launcher(self) -> bool:
        """Return whether the program is a launcher (torchrun, accelerate, deepspeed)."""
        return self._find_launcher() is not None

    def _find_launcher(self) -> Any:
        from memprof.script.launchers import find_launcher  # imported here: `memprof --help` starts without argparse

        return find_launcher(self.name, self.arguments, is_module=self.is_module)

    def _check_module(self) -> None:
        sys.path.insert(0, os.getcwd())
        try:
            found = _find_spec(self.name)
        finally:
            sys.path.pop(0)
        if found is None:
            raise UsageError("no such module", value=self.name, hint="-m takes a name as `python -m` does")
        search_locations = found.submodule_search_locations
        if search_locations is not None and PathFinder.find_spec(f"{self.name}.__main__", search_locations) is None:
            raise UsageError(
                "this package is no program", value=self.name, hint="it has no __main__ module: name a module in it"
            )

    def start(self, selection: ProcessSelection | None = None) -> ProcessStart | ScriptOutcome:
        """Return the one process of the program to run, or the outcome of a launcher's own parser (`--help`).

        Raises UsageError where there is no such process, or too few GPUs for it.
        """
        from memprof.script import launchers

        selection = selection or launchers.ProcessSelection()
        launcher = self._find_launcher()
        if launcher is None:
            return launchers.start_without_launcher(self.name, self.arguments, self.is_module, selection)
        resolve, arguments = launcher
        try:
            found: ProcessStart = resolve(arguments, selection)
            Program(found.name, found.arguments, found.is_module).check()
            return found
        except UsageError:
            raise
        except BaseException as error:
            return _make_outcome(error)

    def run(
        self, rule: StopRule, handlers: ExitHandlers | None = None, start: ProcessStart | None = None
    ) -> ScriptOutcome:
        """Run the program in this process to its end, or until `rule` stops it; all exceptions become outcomes.

        The program's exit `handlers` run at its end; None leaves them to this process. `start` is the process to run,
        if it was resolved before.
        """
        environment = dict(os.environ)
        try:
            found = start or self.start()
            if isinstance(found, ScriptOutcome):
                return found
            if start is None and self.has_launcher and found.size > 1:
                raise UsageError(
                    f"several processes are run together, or one of them on a virtual GPU: there are {found.size}",
                    value=" ".join(self.command),
                    hint="memprof run does both; or ask the launcher for one process",
                )
            os.environ.update(found.environment)
            return Program(found.name, found.arguments, found.is_module)._run(rule, handlers)
        except BaseException as error:
            return _make_outcome(error)
        finally:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)

    def _run(self, rule: StopRule, handlers: ExitHandlers | None) -> ScriptOutcome:
        process = os.getpid()
        with self._set_up_main(handlers):
            try:
                with rule.limit_time():
                    if self.is_module:
                        left = runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                    else:
                        left = runpy.run_path(self.name, run_name="__main__")
                outcome = ScriptOutcome(EndReason.EXIT, 0, kept=left)
            except BaseException as error:
                outcome = _make_outcome(error)
            exit_in_handler = None if handlers is None else handlers.run()
            if exit_in_handler is not None and outcome.ended is EndReason.EXIT:
                outcome = _make_outcome(exit_in_handler)
            if os.getpid() != process:
                _exit_forked_process(outcome)
        return outcome

    @contextlib.contextmanager
    def _set_up_main(self, handlers: ExitHandlers | None) -> Iterator[None]:
        """Context manager: set `sys.argv`, `sys.path` and `os._exit` as the program expects them."""
        argv, path, leave = sys.argv, sys.path[:], os._exit
        process = os.getpid()

        def exit_now(status: int) -> NoReturn:
            # No exception in a thread ends the process: its parent process reports the exit (cli/child.py).
            if os.getpid() != process or threading.current_thread() is not threading.main_thread():
                leave(status)
            if handlers is not None:
                handlers.discard()
            raise SystemExit(status)

        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]  # "-m" while parent packages are imported
        folder = os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)
        sys.path.insert(0, folder)
        try:
            with PatchSet() as patches:
                patches.set(os, "_exit", exit_now)
                yield
        finally:
            sys.argv, sys.path[:] = argv, path


def _exit_forked_process(outcome: ScriptOutcome) -> NoReturn:
    """Exit a process that the program has forked, as Python would at the program's end, without a report."""
    if outcome.error is not None:
        print_error(outcome.error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program's own class, or a file that it closed
            stream.flush()
    os._exit(outcome.exit_code)


def _find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of the module `name`, None if not found. Unlike importlib.util.find_spec, this does not import
    parent packages: these are program code, which must run with its GPU and arguments."""
    first, *parts = name.split(".")
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError, AttributeError):
        return None
    for number, part in enumerate(parts, 1):
        search_locations = None if found is None else found.submodule_search_locations
        found = (
            None
            if search_locations is None or not part
            else PathFinder.find_spec(".".join((first, *parts[:number])), search_locations)
        )
    return found


def _make_outcome(error: BaseException) -> ScriptOutcome:
    stop = _find_stop(error)
    if stop is not None:
        return ScriptOutcome(stop.why, 0, kept=error)
    if isinstance(error, SystemExit):
        return ScriptOutcome(EndReason.EXIT, _get_exit_code(error), kept=error)
    if isinstance(error, KeyboardInterrupt):
        return ScriptOutcome(EndReason.INTERRUPTED, 130, error)
    return ScriptOutcome(EndReason.NOT_SIMULATED if isinstance(error, MemprofError) else EndReason.ERROR, 1, error)


def _find_stop(error: BaseException) -> StopRun | None:
    """Return the StopRun that `error` is, or that was being handled when the program's clean-up raised `error`."""
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        if isinstance(step, StopRun):
            return step
        seen.add(id(step))
        step = step.__context__
    return None


def _get_exit_code(end: SystemExit) -> int:
    """Return the exit code as the interpreter would: a message goes to stderr, with code 1."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with contextlib.suppress(Exception):  # it may have no text
        print(end.code, file=sys.stderr)  # noqa: T201
    return 1


def print_error(error: BaseException) -> None:
    """Print the program's own traceback on stderr."""
    sys.stderr.write(format_traceback(error))


def format_traceback(error: BaseException) -> str:
    """Return the program's own traceback, without memprof's frames."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    pending, seen = [shown], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list(
            [frame for frame in one.stack if not frame.filename.startswith(_LAUNCH_FILES)]
        )
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        pending += list(one.exceptions or ()) if hasattr(one, "exceptions") else []
    return "".join(shown.format())
