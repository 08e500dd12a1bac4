"""What models leave to chance (a layer that is dropped, a mask that is drawn) is the same in every run: runs with and
without a remedy are compared, and a run may be made again."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def same_chance() -> Iterator[None]:
    """Inside, the generators of Python, numpy and torch's host begin at a fixed number; afterwards they go on as if
    nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    with _beside_the_run():
        of_torch = torch.default_generator.get_state()
        torch.default_generator.manual_seed(0)
    of_python = random.getstate()
    random.seed(0)
    if numpy is not None:
        of_numpy = numpy.random.get_state()
        numpy.random.seed(0)
    try:
        yield
    finally:
        with _beside_the_run():
            torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def _beside_the_run() -> Iterator[None]:
    """Inside, tensors are not the run's."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
