"""FlashInfer (flashinfer-ai/flashinfer@v0.6.17): attention over pages, sampling, norms and rotations of inference."""

from memprof.stubs.flashinfer import attention, layers, pages, sampling

__all__ = ["attention", "layers", "pages", "sampling"]
