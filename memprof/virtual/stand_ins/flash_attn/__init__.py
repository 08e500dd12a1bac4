"""flash-attn 2 (Dao-AILab/flash-attention@v2.8.3)."""

from memprof.virtual.stand_ins.flash_attn import attention, layers, padding

__all__ = ["attention", "layers", "padding"]
