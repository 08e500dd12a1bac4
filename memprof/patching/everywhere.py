"""Names that modules import from elsewhere (`from safetensors import safe_open`): replaced wherever they are bound."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# Name -> modules that were seen not to have it: thousands, and looking again at each run's ends would cost more than
# all else that is done there.
_WITHOUT: defaultdict[str, set[str]] = defaultdict(set)


@contextlib.contextmanager
def bound_everywhere(name: str, original: Any, replacement: Any) -> Iterator[None]:
    """Bind `name` to `replacement` inside, in every module where it was `original`.

    A module that is imported inside takes the replacement; it is given the original afterwards.
    """
    without = _WITHOUT[name]
    changed = _rebind(sys.modules.keys() - without, name, original, replacement)
    without |= sys.modules.keys() - changed
    try:
        yield
    finally:
        _rebind(changed | (sys.modules.keys() - without), name, replacement, original)


def _rebind(modules: set[str], name: str, old: Any, new: Any) -> set[str]:
    changed = set()
    for module_name in modules:
        module = sys.modules.get(module_name)
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
            changed.add(module_name)
    return changed
