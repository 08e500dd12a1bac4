"""FlashInfer (flashinfer-ai/flashinfer@v0.6.17): paged attention, sampling, norms and rotary embeddings."""

from memprof.stubs.flashinfer import attention, layers, logger, pages, sampling

__all__ = ["attention", "layers", "logger", "pages", "sampling"]
