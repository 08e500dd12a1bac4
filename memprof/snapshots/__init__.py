"""Analysis of a recorded run: live blocks at each moment, the lines that allocated them, and the allocator's segments.

    snapshot (torch's, or made from a trace) -> Recording, one per device -> moments, leaks, failed allocations, what-if

Everything here is plain Python over `memprof.trace.snapshot`, so that the same code analyzes a snapshot of a real GPU
and the capture of a simulated run.
"""
