"""flash-attn 2 (Dao-AILab/flash-attention@v2.8.3), and the extension modules of its repository."""

from memprof.stubs.flash_attn import attention, dense, extensions, layers, norms, padding

__all__ = ["attention", "dense", "extensions", "layers", "norms", "padding"]
