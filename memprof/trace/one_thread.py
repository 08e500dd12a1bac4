"""numpy with one thread: those of its BLAS, which nothing here asks for, would count as memory that a file takes.

Where numpy has been imported before, it stays as it is.
"""

from __future__ import annotations

import os

_THREADS = "OPENBLAS_NUM_THREADS"

_before = os.environ.get(_THREADS)
os.environ[_THREADS] = "1"
try:
    import numpy as np
finally:
    del os.environ[_THREADS]
    if _before is not None:
        os.environ[_THREADS] = _before

__all__ = ["np"]
