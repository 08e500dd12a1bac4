"""Runs Python modules as processes of their own, forked after the libraries were imported, which takes most of a run.

    python -m tests.scripts.server

A request is a line of JSON on stdin: module, arguments, folder, seconds. The process runs in the folder, its output
goes to files `stdout` and `stderr` there, and its exit code to this program's stdout.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback

LIBRARIES = ("torch", "memprof.cli.run", "memprof.flows.script", "peft", "accelerate", "transformers.trainer")


def run(module: str, arguments: list[str], folder: str) -> int:
    """As `python -m module`, in a process that was forked for it; returns the exit code."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def wait(process: int, seconds: float) -> int:
    """The exit code of a process, which is killed if it takes longer."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)  # a process that forks has one
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            os._exit(run(request["module"], request["arguments"], request["folder"]))
        print(wait(process, request["seconds"]), flush=True)


if __name__ == "__main__":
    main()
