"""Runs Python programs in processes of their own, forked after the libraries were imported, which takes most of a run.

    python -m tests.process_server [LIBRARY...]

A request is a line of JSON on stdin: arguments as for `python`, environment, folder, files for stdout and stderr,
seconds. The process ends as any process does: threads are waited for, what the program made is let go of, buffers are
written. The libraries alone stay as they are: to take them down took longer than most programs. The answer on stdout is
a line of JSON as well: exit code, seconds of the processor, most bytes of memory.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import logging
import os
import runpy
import signal
import sys
import time
from typing import Any

# And what memprof and typer would import in nearly every program, later.
LIBRARIES = (
    "torch", "peft", "accelerate", "transformers.trainer", "typer._adapters", "memprof.api", "memprof.cli.main",
    "memprof.cli.run", "memprof.findings.rules", "memprof.flows.local_gpu", "memprof.flows.script",
    "memprof.report.terminal.report", "memprof.script.capture",
)  # fmt: skip
_TAKEN_DOWN = ("sys", "builtins", "__main__", "memprof")
_C = ctypes.CDLL(None)


def run(request: dict[str, Any]) -> None:
    """What `python ARGUMENTS` does, in a process that was forked for it."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    first, *rest = request["arguments"]
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *others = rest
        sys.argv, sys.path[0] = ["-c", *others], ""
        program = type(sys)("__main__")
        sys.modules["__main__"] = program
        exec(compile(code, "<string>", "exec"), vars(program))
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def wait(process: int, seconds: float) -> dict[str, float]:
    """How a process ended, which is killed if it takes longer."""
    end = time.monotonic() + seconds
    while True:
        done, status, used = os.wait4(process, os.WNOHANG)
        if done:
            return {
                "exit_code": os.waitstatus_to_exitcode(status),
                "processor_seconds": used.ru_utime,
                "peak_bytes": used.ru_maxrss << 10,
            }
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def keep_libraries(kept: dict[str, Any]) -> None:
    """Python's end lets go of modules that it finds in `sys.modules`: there, `kept` ones are no more."""
    _C.fflush(None)
    for name, module in kept.items():
        if name.partition(".")[0] not in _TAKEN_DOWN and sys.modules.get(name) is module:
            sys.modules[name] = None  # type: ignore[assignment]


def main() -> None:
    kept: dict[str, Any] = {}
    atexit.register(keep_libraries, kept)  # the first of these functions is the last to be called
    logging.disable(logging.WARNING)
    for name in sys.argv[1:] or LIBRARIES:
        if "._" not in name or importlib.util.find_spec(name):  # not every release has what is its own
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a process that forks has one
    kept |= sys.modules
    for module in kept.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    if hasattr(_C, "on_exit"):  # glibc: the destructors of libraries' own C++ objects are left out, too
        _C.on_exit(_C._exit, None)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            run(request)
            break
        print(json.dumps(wait(process, request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
