"""Truth captures: the cases of tests/accuracy/cases recorded on a real card, and compared with their simulation.

`python -m tests.accuracy.truth` (or `make truth`) records; a folder here for each card and torch keeps what it found.
"""
