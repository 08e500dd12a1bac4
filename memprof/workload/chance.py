"""What models leave to chance (a layer that is dropped, a mask that is drawn) is the same in every run: runs with and
without a remedy are compared, and a run may be made again."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


def seed_rngs() -> None:
    """Let the generators of Python, numpy and torch's host begin at a fixed number."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@contextlib.contextmanager
def kept_chance() -> Iterator[None]:
    """Restore those generators afterwards, as if nothing had been drawn inside.

    Around a device: the state of torch's is a tensor, and none of the run's.
    """
    numpy = sys.modules.get("numpy")
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
