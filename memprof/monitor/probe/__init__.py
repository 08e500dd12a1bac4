"""The probe in the Pythons that a program starts: `sitecustomize.py`, found by way of PYTHONPATH. It stands alone.

`memprof monitor` has it tell what the CUDA allocator holds; the virtual GPU, that no other process has a GPU.
"""

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))


def python_path(path: str | None) -> str:
    """A PYTHONPATH with the probe before `path`; an empty entry would mean the working directory."""
    return os.pathsep.join([FOLDER, path]) if path else FOLDER
