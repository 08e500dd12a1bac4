"""What is watched is searched for in the heap, in nearly every test here."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _heap(small_heap: None) -> None:
    """Use `small_heap` in every module."""
