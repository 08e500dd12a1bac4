"""flash-attn 2 (Dao-AILab/flash-attention@v2.8.3), and the modules that are built beside it."""

from memprof.stubs.flash_attn import attention, dense, extensions, layers, norms, padding

__all__ = ["attention", "dense", "extensions", "layers", "norms", "padding"]
