"""Truth captures: the cases of tests/accuracy/cases recorded on a real GPU, and compared with their simulation.

`python -m tests.accuracy.truth` (or `make truth`) records; a folder here for each GPU and torch keeps what it found.
"""
