"""Runs Python programs in processes of their own, forked after the libraries were imported, which takes most of a run.

    python -m tests.process_server [LIBRARY...]

A request is a line of JSON on stdin: arguments as for `python`, environment, folder, files for stdout and stderr,
seconds. At a process's end, threads are waited for, exit handlers called and buffers written. Its modules and objects
are not taken down, which would copy most of the memory that it shares with this process. The answer on stdout is a line
of JSON as well: exit code, seconds of the processor, most bytes of memory.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
import weakref
from typing import Any, NoReturn

# And what memprof and typer would import in nearly every program, later.
LIBRARIES = (
    "torch", "peft", "accelerate", "transformers.trainer", "typer._adapters", "memprof.api", "memprof.cli.main",
    "memprof.cli.run", "memprof.findings.rules", "memprof.flows.local_gpu", "memprof.flows.script",
    "memprof.report.terminal.report", "memprof.script.capture",
)  # fmt: skip
_end_process = os._exit  # memprof watches the one of os


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


def run_and_end(request: dict[str, Any]) -> NoReturn:
    """`run`, and what Python does at the end of a program, see above."""
    code: Any = 0
    try:
        run(request)
    except SystemExit as stopped:
        code = stopped.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream and not stream.closed:
            stream.flush()
    _end_process(code & 0xFF)


def main() -> None:
    logging.disable(logging.WARNING)
    for name in sys.argv[1:] or LIBRARIES:
        if "._" not in name or importlib.util.find_spec(name):  # not every release has what is its own
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # a process that forks has one
    for library in weakref.finalize._registry:  # type: ignore[attr-defined]
        library.atexit = False  # torch's operators would be unregistered one by one
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            run_and_end(request)
        print(json.dumps(wait(process, request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
