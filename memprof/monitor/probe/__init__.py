"""Probe that Python imports in each process that a program starts: `sitecustomize.py`, found through PYTHONPATH.

For `memprof monitor`, the probe reports the CUDA allocator's memory; for the virtual GPU, it makes GPU use in other
processes an error.
"""

import contextlib
import glob
import os
import tempfile

FOLDER = os.path.dirname(os.path.abspath(__file__))


def python_path(path: str | None) -> str:
    """Return a value of PYTHONPATH with the probe's folder before `path`."""
    return os.pathsep.join([FOLDER, path]) if path else FOLDER


def make_refusal_file_prefix(pid: int) -> str:
    """Return the prefix of the file in which the processes that process `pid` starts report unsupported operations."""
    return f"memprof-refusals-{pid}-"


def remove_refusal_files(pid: int) -> None:
    """Remove the file of process `pid`, which was killed: what ends by itself removes its own."""
    for file in glob.glob(os.path.join(tempfile.gettempdir(), f"{make_refusal_file_prefix(pid)}*")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
