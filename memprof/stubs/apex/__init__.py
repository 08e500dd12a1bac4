"""NVIDIA's Apex (NVIDIA/apex@25.05, the last release that has amp), built with --cpp_ext and --cuda_ext."""

from memprof.stubs.apex import amp, casts, multi_tensor, norms, optimizers

__all__ = ["amp", "casts", "multi_tensor", "norms", "optimizers"]
