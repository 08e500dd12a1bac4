"""Import of numpy with one BLAS thread: more are not used, and their memory would count as that of reading a file.

If numpy is already imported, its number of threads does not change.
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
