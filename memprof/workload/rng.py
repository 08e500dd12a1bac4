"""Fixed random seeds for models that draw random numbers (layer drop, random masks), so that runs with and without a
fix can be compared, and a run can be repeated."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_DRAWN_AT_ONCE = 1 << 22  # numbers: 16 MiB in float32


def seed_rngs() -> None:
    """Seed the generators of Python, numpy and torch's CPU with a fixed number."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
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


class NormalsInSinglePrecision(TorchFunctionMode):
    """A mode in which tensors of the host in half precision are filled with normal numbers of float32, rounded.

    torch draws half precision number by number, in 22 ns each, and float32 in 4 (torch 2.11, x86-64): with 8 billion
    parameters, drawn twice by most models, that is six minutes and one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.nn.init.normal_, torch.Tensor.normal_):
            tensor = kwargs.get("tensor", args[0] if args else None)
            if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.dtype in _HALF and tensor.is_contiguous():
                rest = args[1:] if "tensor" not in kwargs else args
                kwargs.pop("tensor", None)
                with torch.no_grad():
                    for part in tensor.view(-1).split(_DRAWN_AT_ONCE):
                        part.copy_(torch.empty(part.shape, dtype=torch.float32).normal_(*rest, **kwargs))
                return tensor
        return func(*args, **kwargs)
