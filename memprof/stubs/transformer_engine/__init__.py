"""NVIDIA's Transformer Engine (NVIDIA/TransformerEngine@v2.18) on one GPU, with matrix products in float8 or not.

Sources: transformer_engine/pytorch, transformer_engine/pytorch/csrc and transformer_engine/common.
"""

from memprof.stubs.transformer_engine import attention, linear, mlp, norms, precision, transformer

__all__ = ["attention", "linear", "mlp", "norms", "precision", "transformer"]
