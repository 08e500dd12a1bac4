"""FlashInfer's log of the kernels that it compiles, whose level engines set; nothing is compiled here.

Source: flashinfer/jit/core.py of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

import logging

from memprof.stubs.registry import stub


class _Logger(logging.Logger):
    """Take the level that engines set, and log nothing: no kernel is compiled."""


logger = _Logger("flashinfer.jit")
stub("flashinfer.jit.core.logger", source="flashinfer-ai/flashinfer@v0.6.17:flashinfer/jit/core.py")(logger)
