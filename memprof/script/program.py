"""The user's program: a file or a module, as in `python file args` and `python -m module args`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
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
_PYTHON = re.compile(r"python(3(\.\d+)?)?(\.exe)?")
_OUTPUT_OPTIONS = ("-u", "-B")  # options of Python that change nothing here
_LAUNCH_FILES = (_MEMPROF_DIR, runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program and its arguments (`sys.argv[1:]`).
    `name` is a file, a folder or archive with a `__main__.py`, a command that a package has installed beside this
    Python (`vllm`), or, with `is_module`, an importable module."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        """Return the command line after `python`: program and arguments."""
        return [*(("-m",) if self.is_module else ()), self.name, *self.arguments]

    def check(self) -> None:
        """Raise UsageError if there is no such program."""
        if self._find_launcher():
            return
        if self.is_module:
            self._check_module()
            return
        path = self._find_file()
        if not path.exists():
            option = "; options of memprof stand before it" if self.name.startswith("-") else ""
            raise UsageError("no such script", value=self.name, hint=f"give the path of a Python file{option}")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError("this folder is no program", value=self.name, hint="it has no __main__.py: name a file")
        if path.is_file() and not os.access(path, os.R_OK):
            raise UsageError("the script cannot be read", value=self.name, hint="mind its permissions")

    def _find_file(self) -> Path:
        """Return the path of the program, which may not exist."""
        path = Path(self.name)
        command = Path(sys.executable).parent / self.name
        return command if not path.exists() and os.sep not in self.name and _is_python_command(command) else path

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
            spec = _find_spec(self.name)
        finally:
            sys.path.pop(0)
        if spec is None:
            raise UsageError("no such module", value=self.name, hint="-m takes a name as `python -m` does")
        search_locations = spec.submodule_search_locations
        if search_locations is not None and PathFinder.find_spec(f"{self.name}.__main__", search_locations) is None:
            raise UsageError(
                "this package is no program", value=self.name, hint="it has no __main__ module: name a module in it"
            )

    def start(self, selection: ProcessSelection | None = None) -> ProcessStart | ScriptOutcome:
        """Return how to start the selected process, or the outcome if the launcher ends by itself (`--help`).
        Raises UsageError if the rank does not exist, or there are too few GPUs."""
        from memprof.script import launchers

        selection = selection or launchers.ProcessSelection()
        launcher = self._find_launcher()
        if launcher is None:
            return launchers.start_without_launcher(self.name, self.arguments, self.is_module, selection)
        launch, arguments = launcher
        try:
            process: ProcessStart = launch(arguments, selection)
            Program(process.name, process.arguments, process.is_module).check()
            return process
        except UsageError:
            raise
        except BaseException as error:
            return _make_outcome(error)

    def run(
        self, rule: StopRule, handlers: ExitHandlers | None = None, start: ProcessStart | None = None
    ) -> ScriptOutcome:
        """Run the program in this process until it ends or `rule` stops it; all exceptions become outcomes.

        Exit `handlers` of the program run at its end; with None, they run at the end of this process. `start` is the
        process to run; None: `self.start` determines it.
        """
        previous_environment = dict(os.environ)
        try:
            process = start or self.start()
            if isinstance(process, ScriptOutcome):
                return process
            if start is None and self.has_launcher and process.size > 1:
                raise UsageError(
                    f"several processes are run together, or one of them on a virtual GPU: there are {process.size}",
                    value=" ".join(self.command),
                    hint="memprof run does both; or ask the launcher for one process",
                )
            os.environ.update(process.environment)
            return Program(process.name, process.arguments, process.is_module)._run(rule, handlers)
        except BaseException as error:
            return _make_outcome(error)
        finally:
            for name in os.environ.keys() - previous_environment.keys():
                del os.environ[name]
            os.environ.update(previous_environment)

    def _run(self, rule: StopRule, handlers: ExitHandlers | None) -> ScriptOutcome:
        pid = os.getpid()
        with self._set_up_main(handlers):
            try:
                with rule.limit_time():
                    if self.is_module:
                        variables = runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                    else:
                        variables = runpy.run_path(str(self._find_file()), run_name="__main__")
                outcome = ScriptOutcome(EndReason.EXIT, 0, live_state=variables)
            except BaseException as error:
                outcome = _make_outcome(error)
            exit_in_handler = None if handlers is None else handlers.run()
            if exit_in_handler is not None and outcome.ended is EndReason.EXIT:
                outcome = _make_outcome(exit_in_handler)
            if os.getpid() != pid:
                _exit_forked_process(outcome)
        return outcome

    @contextlib.contextmanager
    def _set_up_main(self, handlers: ExitHandlers | None) -> Iterator[None]:
        """Context manager: set `sys.argv` and `sys.path` for the program, and make `os._exit` raise SystemExit."""
        argv, search_path, original_exit = sys.argv, sys.path[:], os._exit
        pid = os.getpid()

        def exit_now(status: int) -> NoReturn:
            # No exception in a thread ends the process: its parent process reports the exit (cli/child.py).
            if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
                original_exit(status)
            if handlers is not None:
                handlers.discard()
            raise SystemExit(status)

        name = "-m" if self.is_module else str(self._find_file())  # "-m" while parent packages are imported
        sys.argv = [name, *self.arguments]
        folder = os.getcwd() if self.is_module else str(Path(name).resolve().parent)
        sys.path.insert(0, folder)
        try:
            with PatchSet() as patches:
                patches.set(os, "_exit", exit_now)
                yield
        finally:
            sys.argv, sys.path[:] = argv, search_path


def read_program(words: Sequence[str], *, is_module: bool) -> Program:
    """Return the program of a command line such as `train.py --epochs 1`, `python train.py` or `python -m train`; with
    `is_module` the first word is a module. Raises UsageError: `python` without a program, or with options of its own.
    """
    name, *arguments = words
    if is_module or not _PYTHON.fullmatch(Path(name).name):
        return Program(name, tuple(arguments), is_module)
    while arguments and arguments[0] in _OUTPUT_OPTIONS:
        del arguments[0]
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module:]
    if not program or program[0].startswith("-"):
        hint = "give a script, or -m and a module; memprof's own Python runs it, without other options of Python"
        raise UsageError("python runs no program here", value=" ".join(words), hint=hint)
    return Program(program[0], tuple(program[1:]), is_module)


def _is_python_command(path: Path) -> bool:
    """Return whether `path` is a script of Python, as pip installs the commands of packages."""
    try:
        with path.open("rb") as file:
            line = file.readline(1024)
    except OSError:
        return False
    return line.startswith(b"#!") and b"python" in line


def _exit_forked_process(outcome: ScriptOutcome) -> NoReturn:
    """Exit this process, which the program has forked, as Python would: print the error, and flush the streams."""
    if outcome.error is not None:
        print_error(outcome.error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program's own class, or a file that it closed
            stream.flush()
    os._exit(outcome.exit_code)


def _find_spec(name: str) -> ModuleSpec | None:
    """Return the import spec of module `name`, None if not found. Unlike importlib.util.find_spec, this does not import
    parent packages, which are program code that must run later, with its GPU and arguments."""
    top_level, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top_level)
    except (ImportError, ValueError, AttributeError):
        return None
    for depth, part in enumerate(parts, 1):
        search_locations = None if spec is None else spec.submodule_search_locations
        spec = (
            None
            if search_locations is None or not part
            else PathFinder.find_spec(".".join((top_level, *parts[:depth])), search_locations)
        )
    return spec


def _make_outcome(error: BaseException) -> ScriptOutcome:
    stop = _find_stop(error)
    if stop is not None:
        return ScriptOutcome(stop.reason, 0, live_state=error)
    if isinstance(error, SystemExit):
        return ScriptOutcome(EndReason.EXIT, _get_exit_code(error), live_state=error)
    if isinstance(error, KeyboardInterrupt):
        return ScriptOutcome(EndReason.INTERRUPTED, 130, error)
    return ScriptOutcome(EndReason.NOT_SIMULATED if isinstance(error, MemprofError) else EndReason.ERROR, 1, error)


def _find_stop(error: BaseException) -> StopRun | None:
    """Return the StopRun in the chain of `error` and its contexts, which a clean-up may have extended; else None."""
    seen_ids: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen_ids:
        if isinstance(current, StopRun):
            return current
        seen_ids.add(id(current))
        current = current.__context__
    return None


def _get_exit_code(error: SystemExit) -> int:
    """Return the exit code that Python would use for a SystemExit; a message is printed to stderr, with code 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(Exception):  # it may have no text
        print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def print_error(error: BaseException) -> None:
    """Print the traceback of `error` to stderr, without memprof's frames."""
    sys.stderr.write(format_traceback(error))


def format_traceback(error: BaseException) -> str:
    """Return the traceback of `error` as text, without memprof's frames.

    Where memory has run out those of libraries are left out too: the report has the operator, its shape and its line.
    """
    formatted = traceback.TracebackException.from_exception(error, compact=True)
    pending, seen_ids = [formatted], set()
    while pending:
        exception = pending.pop()
        if id(exception) in seen_ids:
            continue
        seen_ids.add(id(exception))
        exception.stack = traceback.StackSummary.from_list(
            [frame for frame in exception.stack if not frame.filename.startswith(_LAUNCH_FILES)]
        )
        pending += [related for related in (exception.__cause__, exception.__context__) if related is not None]
        pending += list(exception.exceptions or ()) if hasattr(exception, "exceptions") else []
    if _is_out_of_memory(error):
        from memprof.watch.program_code import is_own_file  # imports torch, as the program has

        own = [frame for frame in formatted.stack if is_own_file(frame.filename)]
        formatted.stack = traceback.StackSummary.from_list(own or formatted.stack)
    return "".join(formatted.format())


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:
        return False
    from memprof.watch.failure import OUT_OF_MEMORY_ERRORS

    return isinstance(error, OUT_OF_MEMORY_ERRORS)
