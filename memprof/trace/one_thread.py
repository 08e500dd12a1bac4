"""numpy with one BLAS thread: the memory of more threads, which nothing here uses, would count as memory for a file.

If numpy has been imported before, its threads stay.
"""

from __future__ import annotations

import os

_THREADS = "OPENBLAS_NUM_THREADS"

_previous_threads = os.environ.get(_THREADS)
os.environ[_THREADS] = "1"
try:
    import numpy as np
finally:
    del os.environ[_THREADS]
    if _previous_threads is not None:
        os.environ[_THREADS] = _previous_threads

__all__ = ["np"]
