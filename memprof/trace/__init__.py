"""The trace of a run (its events and phases), the capture file that stores it, and torch's memory snapshots."""
