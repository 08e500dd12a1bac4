"""Processes that the program starts: they have no virtual GPU, and report unsupported operations to this process.

The probe (memprof/monitor/probe) is loaded into Python processes by environment variables. A program that replaces its
own process (os.exec) ends with an error: nothing would be left to report on.
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
_ENVIRONMENT_INDEX = {"posix_spawn": 2, "posix_spawnp": 2, "spawnve": 3, "spawnvpe": 3}
_SIGNAL = signal.SIGURG  # a signal with no other use
_MAX_WAIT_SECONDS = 5.0  # seconds that a program may wait after one of its processes had an unsupported operation
_MAX_IDLE_SECONDS = 0.05  # seconds of CPU time below which the program counts as waiting
_PYTHON = re.compile(r"(.*[/\\])?python[\d.]*(\.exe)?")
_NVIDIA_SMI = "nvidia-smi"
# Options of Python: letters without a value, then one with a value.
_OPTION = re.compile("-(?=[^-])([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)


class Subprocesses:
    """Context manager: processes that the program starts get the probe and the variables `environment`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.file = ""  # file in which the processes report unsupported operations
        self._process = 0
        self._run_ended = threading.Event()
        self._previous_handler: Any = None  # previous handler of the signal that ends an endless wait

    def __enter__(self) -> Subprocesses:
        descriptor, self.file = tempfile.mkstemp(prefix=probe.make_refusal_file_prefix(os.getpid()))
        os.close(descriptor)
        self._process = os.getpid()
        os.environ.update(self._add_probe(os.environ))
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._process:  # a forked child leaves the same blocks
            os.unlink(self.file)
            self._run_ended.set()
            if self._previous_handler is not None:
                signal.signal(_SIGNAL, self._previous_handler)
        for name in (REFUSALS, *self._environment):
            os.environ.pop(name, None)
        path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != probe.FOLDER]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        if path in ([], [""]):
            del os.environ["PYTHONPATH"]

    def read_refusals(self) -> list[tuple[str, str | None]]:
        """Return problem and hint of each unsupported operation that the processes have reported so far."""
        with open(self.file, encoding="utf-8") as lines:
            return [(problem, hint) for problem, hint in map(json.loads, lines)]

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) of functions that start processes."""
        popen = subprocess.Popen.__init__

        def __init__(process: Any, *args: Any, **options: Any) -> None:
            if options.get("env") is not None:
                options["env"] = self._add_probe(options["env"])
            command = args[0] if args else options.get("args")
            changed = None
            if command == [_NVIDIA_SMI] and shutil.which(_NVIDIA_SMI) is None:  # as programs do for their log
                changed = ["echo", f"{_NVIDIA_SMI} is not on this machine: memprof runs the program on a virtual GPU"]
            elif isinstance(command, (list, tuple)) and not options.get("shell"):
                stripped_command, environment = _drop_isolation_flags(command, options.get("env") or os.environ)
                if environment is not None:
                    changed, options["env"] = stripped_command, environment
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
        for name, index in _ENVIRONMENT_INDEX.items():
            yield os, name, self._wrap_spawn(getattr(os, name), index)
        for name in ("execv", "execve"):  # all other exec functions call these
            yield os, name, _wrap_exec(getattr(os, name))

    def _interrupt_endless_wait(self) -> None:
        """Raise MemprofError in the main thread if it waits too long after one of its processes reported an unsupported
        operation: queues, pipes and events wait without a timeout."""
        if self._previous_handler is not None or threading.current_thread() is not threading.main_thread():
            return

        def raise_refusal(signal_number: int, frame: Any) -> None:
            problem, hint = self.read_refusals()[0]
            raise MemprofError(problem, hint=hint)

        self._previous_handler = signal.signal(_SIGNAL, raise_refusal) or signal.SIG_DFL
        threading.Thread(target=self._watch_main_thread, name="memprof-waiting", daemon=True).start()

    def _watch_main_thread(self) -> None:
        thread = threading.main_thread().ident
        assert thread is not None
        clock = time.pthread_getcpuclockid(thread)
        last_cpu_time, idle_since = -1.0, time.monotonic()
        while not self._run_ended.wait(_MAX_WAIT_SECONDS / 5):
            cpu_time = time.clock_gettime(clock)
            if cpu_time - last_cpu_time > _MAX_IDLE_SECONDS or not os.stat(self.file).st_size:
                last_cpu_time, idle_since = cpu_time, time.monotonic()
            elif time.monotonic() - idle_since > _MAX_WAIT_SECONDS:
                signal.pthread_kill(thread, _SIGNAL)
                return

    def _wrap_spawn(self, original: Callable[..., Any], index: int) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            if len(args) <= index:
                return original(*args, **options)
            env = self._add_probe(args[index])
            command, environment = _drop_isolation_flags(args[index - 1], env)
            return original(*args[: index - 1], command, environment or env, *args[index + 1 :], **options)

        return start

    def _add_probe(self, environment: Mapping[Any, Any]) -> dict[str, str]:
        """Return `environment` with the variables by which a Python process finds the probe."""
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
        env |= {REFUSALS: self.file, **self._environment}
        path = env.get("PYTHONPATH")
        if path is None or probe.FOLDER not in path.split(os.pathsep):
            env["PYTHONPATH"] = probe.python_path(path)
        return env


def _wrap_exec(original: Callable[..., Any]) -> Callable[..., Any]:
    own_pid, execve = os.getpid(), os.execve

    def replace_process(path: Any, *args: Any) -> Any:
        if os.getpid() != own_pid:  # as in os.spawnv
            command, environment = _drop_isolation_flags(args[0], args[1] if len(args) > 1 else os.environ)
            return original(path, *args) if environment is None else execve(path, command, environment)
        raise unsupported_error(
            f"puts {os.fsdecode(path)} in its own place (os.exec)", "give memprof run that program itself"
        )

    return replace_process


def _drop_isolation_flags(
    command: Sequence[Any], environment: Mapping[Any, Any]
) -> tuple[list[Any], dict[str, str] | None]:
    """Return `command` without Python's isolation flags (-I, -E), which keep memprof's probe from being loaded, and an
    environment in which the probe hides the variables that the flags ignore; None if there is no such flag."""
    if not command or not _PYTHON.fullmatch(os.fsdecode(command[0])):
        return list(command), None
    new_command, index, all_letters = [command[0]], 1, ""
    while index < len(command) and (option := _OPTION.fullmatch(os.fsdecode(command[index]))):
        letters, value_letter, value = option.groups()
        all_letters += letters
        kept_flag = re.sub("[IE]", "", letters) + value_letter + value
        new_command += [f"-{kept_flag}"] if kept_flag else []
        index += 1
        if value_letter in ("c", "m"):
            break
        if value_letter and not value:
            new_command += command[index : index + 1]
            index += 1
    if not re.search("[IE]", all_letters):
        return list(command), None
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    hidden = {name: env.pop(name) for name in list(env) if name.startswith("PYTHON")}
    env |= {"PYTHONPATH": probe.FOLDER, HIDDEN: SEPARATOR.join(f"{name}={value}" for name, value in hidden.items())}
    if "I" in all_letters:
        env |= {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
    return [*new_command, *command[index:]], env
