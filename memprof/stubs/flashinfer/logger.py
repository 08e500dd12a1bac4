"""FlashInfer's log of the kernels that it compiles, whose level engines set; nothing is compiled here.

Source: flashinfer/jit/core.py of flashinfer-ai/flashinfer@v0.6.17.
"""

from __future__ import annotations

import logging

from memprof.stubs.registry import stub

logger = logging.Logger("flashinfer.jit")
stub(
    "flashinfer.jit.core.logger",
    "flashinfer.jit.logger",
    source="flashinfer-ai/flashinfer@v0.6.17:flashinfer/jit/core.py",
)(logger)
