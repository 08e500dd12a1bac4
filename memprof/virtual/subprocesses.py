"""Processes that the program starts: each Python process sees no GPU, and reports unsupported operations to this one.

The probe (memprof/monitor/probe) reaches the processes by environment variables. A program that replaces its own
process (os.exec) is stopped: no process would be left to report on.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memprof.errors import MemprofError
from memprof.monitor import probe
from memprof.monitor.probe.sitecustomize import HIDDEN, REFUSALS, SEPARATOR
from memprof.patching import Patch
from memprof.virtual.limits import unsupported_error

# Function of `os` with an environment -> index of that argument; the command is the argument before.
_ENVIRONMENT_AT = {"posix_spawn": 2, "posix_spawnp": 2, "spawnve": 3, "spawnvpe": 3}
_SIGNAL = signal.SIGURG  # a signal with no other use
_LONGEST_WAIT = 5.0  # seconds that a program may wait after one of its processes had an unsupported operation
_IDLE = 0.05  # seconds of CPU time below which the program counts as waiting
_PYTHON = re.compile(r"(.*[/\\])?python[\d.]*(\.exe)?")
_NVIDIA_SMI = "nvidia-smi"
# Options of Python: letters without a value, then one with a value.
_OPTION = re.compile("-(?=[^-])([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)


def refusal_file_prefix(process: int) -> str:
    """Return the prefix of the name of a process's report file, which a killed process leaves behind."""
    return f"memprof-refusals-{process}-"


class Subprocesses:
    """A context manager: processes started under it inherit `environment` and the probe."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.file = ""  # file in which the processes report unsupported operations
        self._process = 0
        self._ended = threading.Event()
        self._handler: Any = None  # previous handler of the signal that ends an endless wait

    def __enter__(self) -> Subprocesses:
        opened, self.file = tempfile.mkstemp(prefix=refusal_file_prefix(os.getpid()))
        os.close(opened)
        self._process = os.getpid()
        os.environ.update(self._add_probe(os.environ))
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._process:  # a forked child leaves the same blocks
            os.unlink(self.file)
            self._ended.set()
            if self._handler is not None:
                signal.signal(_SIGNAL, self._handler)
        for name in (REFUSALS, *self._environment):
            os.environ.pop(name, None)
        path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != probe.FOLDER]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        if path in ([], [""]):
            del os.environ["PYTHONPATH"]

    def refused(self) -> list[tuple[str, str | None]]:
        """Return the unsupported operations of the processes so far: the problem, and the hint."""
        with open(self.file, encoding="utf-8") as lines:
            return [(problem, hint) for problem, hint in map(json.loads, lines)]

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) of functions that start processes with an environment."""
        popen = subprocess.Popen.__init__

        def __init__(process: Any, *args: Any, **options: Any) -> None:
            if options.get("env") is not None:
                options["env"] = self._add_probe(options["env"])
            command = args[0] if args else options.get("args")
            changed = None
            if command == [_NVIDIA_SMI] and shutil.which(_NVIDIA_SMI) is None:  # as programs do for their log
                changed = ["echo", f"{_NVIDIA_SMI} is not on this machine: memprof runs the program on a virtual GPU"]
            elif isinstance(command, (list, tuple)) and not options.get("shell"):
                kept_command, environment = _drop_isolation_flags(command, options.get("env") or os.environ)
                if environment is not None:
                    changed, options["env"] = kept_command, environment
            if changed is not None:
                args = (changed, *args[1:])
                options.pop("args", None)
            popen(process, *args, **options)

        yield subprocess.Popen, "__init__", __init__
        start = multiprocessing.process.BaseProcess.start

        def start_and_watch(process: Any) -> None:
            start(process)
            self._interrupt_endless_wait()

        yield multiprocessing.process.BaseProcess, "start", start_and_watch
        flags: Any = getattr(subprocess, "_args_from_interpreter_flags")  # noqa: B009 - not in its stubs
        # multiprocessing starts Python processes with these flags.
        yield subprocess, flags.__name__, lambda: [flag for flag in flags() if flag not in ("-I", "-E")]
        for name, at in _ENVIRONMENT_AT.items():
            yield os, name, self._wrap_spawn(getattr(os, name), at)
        for name in ("execv", "execve"):  # all other exec functions call these
            yield os, name, _wrap_exec(getattr(os, name))

    def _interrupt_endless_wait(self) -> None:
        """End the program's endless wait for a process that had an unsupported operation and will never answer: the
        program's queues, pipes and events wait without a timeout."""
        if self._handler is not None or threading.current_thread() is not threading.main_thread():
            return

        def give_up(number: int, frame: Any) -> None:
            problem, hint = self.refused()[0]
            raise MemprofError(problem, hint=hint)

        self._handler = signal.signal(_SIGNAL, give_up) or signal.SIG_DFL
        threading.Thread(target=self._watch_main_thread, name="memprof-waiting", daemon=True).start()

    def _watch_main_thread(self) -> None:
        thread = threading.main_thread().ident
        assert thread is not None
        clock = time.pthread_getcpuclockid(thread)
        last, since = -1.0, time.monotonic()
        while not self._ended.wait(_LONGEST_WAIT / 5):
            used = time.clock_gettime(clock)
            if used - last > _IDLE or not os.stat(self.file).st_size:
                last, since = used, time.monotonic()
            elif time.monotonic() - since > _LONGEST_WAIT:
                signal.pthread_kill(thread, _SIGNAL)
                return

    def _wrap_spawn(self, original: Callable[..., Any], at: int) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            if len(args) <= at:
                return original(*args, **options)
            env = self._add_probe(args[at])
            command, environment = _drop_isolation_flags(args[at - 1], env)
            return original(*args[: at - 1], command, environment or env, *args[at + 1 :], **options)

        return start

    def _add_probe(self, environment: Mapping[Any, Any]) -> dict[str, str]:
        """Return the environment with the variables by which a Python process finds the probe."""
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        env |= {REFUSALS: self.file, **self._environment}
        path = env.get("PYTHONPATH")
        if path is None or probe.FOLDER not in path.split(os.pathsep):
            env["PYTHONPATH"] = probe.python_path(path)
        return env


def _wrap_exec(original: Callable[..., Any]) -> Callable[..., Any]:
    process, execve = os.getpid(), os.execve

    def replace(path: Any, *args: Any) -> Any:
        if os.getpid() != process:  # as in os.spawnv
            command, environment = _drop_isolation_flags(args[0], args[1] if len(args) > 1 else os.environ)
            return original(path, *args) if environment is None else execve(path, command, environment)
        raise unsupported_error(
            f"puts {os.fsdecode(path)} in its own place (os.exec)", "give memprof run that program itself"
        )

    return replace


def _drop_isolation_flags(
    command: Sequence[Any], environment: Mapping[Any, Any]
) -> tuple[list[Any], dict[str, str] | None]:
    """Return the command and environment of a Python process without its isolation flags (-I, -E), but with the probe;
    for any other program the environment is None. The process's own children get the hidden variables back."""
    if not command or not _PYTHON.fullmatch(os.fsdecode(command[0])):
        return list(command), None
    words, at, given = [command[0]], 1, ""
    while at < len(command) and (option := _OPTION.fullmatch(os.fsdecode(command[at]))):
        letters, last, value = option.groups()
        given += letters
        kept = re.sub("[IE]", "", letters) + last + value
        words += [f"-{kept}"] if kept else []
        at += 1
        if last in ("c", "m"):
            break
        if last and not value:
            words += command[at : at + 1]
            at += 1
    if not re.search("[IE]", given):
        return list(command), None
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    hidden = {name: env.pop(name) for name in list(env) if name.startswith("PYTHON")}
    env |= {"PYTHONPATH": probe.FOLDER, HIDDEN: SEPARATOR.join(f"{name}={value}" for name, value in hidden.items())}
    if "I" in given:
        env |= {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
    return [*words, *command[at:]], env
