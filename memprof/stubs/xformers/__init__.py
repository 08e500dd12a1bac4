"""xformers (facebookresearch/xformers@v0.0.32.post2): attention and its biases, SwiGLU, rows by an index, profiler."""

from memprof.stubs.xformers import attention, biases, indexing, profiler, swiglu

__all__ = ["attention", "biases", "indexing", "profiler", "swiglu"]
