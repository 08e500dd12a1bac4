"""Measured runs: real tensors on the CPU or on a CUDA GPU, recorded by torch's profiler and by memprof's marks.

No mode is active while the program runs, so that the program allocates exactly as without memprof. The profiler's
events and the marks are merged afterwards by time (merge.py), into the same `Trace` as a simulated run's.
"""

from memprof.measured.device import MeasuredDevice

__all__ = ["MeasuredDevice"]
