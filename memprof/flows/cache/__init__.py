"""Cached results of simulated runs: the files (`store.py`), and the inputs that a result depends on (`inputs.py`)."""
