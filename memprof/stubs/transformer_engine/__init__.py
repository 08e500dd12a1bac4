"""NVIDIA's Transformer Engine (NVIDIA/TransformerEngine@v2.18) on one GPU, its products in float8 or not.

Python's part is transformer_engine/pytorch, that of C++ transformer_engine/pytorch/csrc and transformer_engine/common.
"""

from memprof.stubs.transformer_engine import attention, linear, mlp, norms, precision, transformer

__all__ = ["attention", "linear", "mlp", "norms", "precision", "transformer"]
