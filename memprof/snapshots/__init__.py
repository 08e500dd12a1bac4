"""A recorded run taken apart: what was live when, made by which line, and what the allocator held beside it.

    snapshot (torch's, or made of a trace) -> Recording, one per device -> moments, leaks, refusals, what-if

Everything here is plain Python over `memprof.trace.snapshot`, so that a snapshot of a real GPU and the capture of a
simulated run are answered by the same lines.
"""
