"""Probe that Python imports in each process that a program starts: `sitecustomize.py`, found through PYTHONPATH.

For `memprof monitor`, the probe reports the CUDA allocator's memory; for the virtual GPU, it makes GPU use in other
processes an error.
"""

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))


def python_path(path: str | None) -> str:
    """Return a value of PYTHONPATH with the probe's folder before `path`."""
    return os.pathsep.join([FOLDER, path]) if path else FOLDER
