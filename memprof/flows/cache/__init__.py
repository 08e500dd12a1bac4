"""Answers of simulated runs, kept between two calls: where they lie (`store.py`), what they rest on (`inputs.py`)."""
