"""The trace of a run (memory events, phases, storages), its capture file, and torch's snapshots."""
