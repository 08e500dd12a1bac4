"""Import of numpy with one BLAS thread: buffers of unused threads would count against the limit `--max-memory`.

If numpy was imported before, the number of its threads does not change.
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
