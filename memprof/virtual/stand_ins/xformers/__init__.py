"""xformers (facebookresearch/xformers@v0.0.32.post2): attention with its biases, SwiGLU, and a profiler that takes
nothing."""

from memprof.virtual.stand_ins.xformers import attention, biases, profiler, swiglu

__all__ = ["attention", "biases", "profiler", "swiglu"]
