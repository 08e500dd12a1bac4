"""Names that modules import from elsewhere (`from safetensors import safe_open`): replaced wherever they are bound."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def bound_everywhere(name: str, original: Any, replacement: Any) -> Iterator[None]:
    """Inside, `name` is `replacement` in every module where it was `original`.

    A module that is imported inside takes the replacement; it is given the original afterwards.
    """
    _rebind(name, original, replacement)
    try:
        yield
    finally:
        _rebind(name, replacement, original)


def _rebind(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
