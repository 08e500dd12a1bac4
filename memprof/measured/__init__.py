"""Measured runs: real tensors on the CPU or on a CUDA GPU, seen by torch's profiler and by marks of our own.

No mode is active while the program runs, so that it allocates exactly as without memprof. What the profiler saw and
what was marked meet afterwards, by time (merge.py), in the same `Trace` that a simulated run gives.
"""

from memprof.measured.device import MeasuredDevice

__all__ = ["MeasuredDevice"]
