"""Probe in the Python processes that a program starts: `sitecustomize.py`, found through PYTHONPATH.

For `memprof monitor`, the probe reports the CUDA allocator's memory; for the virtual GPU, the probe refuses GPU use in
other processes.
"""

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))


def python_path(path: str | None) -> str:
    """Return a PYTHONPATH with the probe before `path`; an empty entry would mean the working directory."""
    return os.pathsep.join([FOLDER, path]) if path else FOLDER
