"""A package, so that no `tests` of another library is found in its place where `python -m tests...` runs."""
