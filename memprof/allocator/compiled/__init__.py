"""The usual case of the allocator's replay, compiled: for runs and recordings of so many events that it pays.

A stretch of events is played from one state of the allocator to a later one, which is the one that plain Python would
have come to; or not at all. Where numba is not installed or does not work, plain Python plays all events.
"""
