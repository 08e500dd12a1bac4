"""What stands for a layer's own number while the layer runs, so that it is seen whether its code looks at it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

Numbers = set[tuple[str, str]]
"""Attributes that hold a layer's own number: the path of a module below the layer, and the name."""


class Spy:
    """Stands for a layer's own number, and notes whether anybody looks at it."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.is_used = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        self.is_used = True
        return int


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: Spy, *args: Any) -> Any:
        self.is_used = True
        return getattr(self.value, name)(*args)

    return method


for _name in dir(int):
    if callable(getattr(int, _name)) and _name not in {
        "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__",
        "__delattr__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__", "__sizeof__", "__getnewargs__",
    }:  # fmt: skip
        setattr(Spy, _name, _passed_on(_name))
del _name


class Spies:
    """Those of one run."""

    def __init__(self) -> None:
        self._posted: list[tuple[dict[str, Any], str, Spy]] = []
        self.are_known = False
        """Whether torch has compiled in such a number. It is checked before the code is run, whatever stands for it."""
        self.have_compiled = False
        """Whether torch was about to compile anything."""
        self.before_compiling: Callable[[], None] = lambda: None
        """Takes down what else stands for something."""

    @contextlib.contextmanager
    def posted(self, layer: nn.Module, numbers: Numbers) -> Iterator[Callable[[], bool]]:
        """Inside, what is given says whether anybody has looked at the layer's own number."""
        spies: list[tuple[dict[str, Any], str, Spy]] = []
        for path, module in layer.named_modules() if numbers else ():
            held = vars(module)
            names = held.keys() & {name for where, name in numbers if where == (f".{path}" if path else "")}
            spies += [(held, name, Spy(held[name])) for name in names]
        before, self._posted = self._posted, spies
        _put_up(spies)
        try:
            yield lambda: self.are_known or any(spy.is_used for _, _, spy in spies)
        finally:
            _take_down(spies)
            self._posted = before

    @contextlib.contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Inside, the numbers themselves are there: torch compiles what looks at them, or not."""
        spies = self._posted
        self.have_compiled = True
        self.before_compiling()
        _take_down(spies)
        try:
            yield
        finally:
            _put_up(spies)

    def compiled(self, guards: Iterable[str]) -> None:
        """Torch has compiled something, which holds for values at these places (`L['self'].attention.layer_idx`)."""
        names = {name for _, name, _ in self._posted}
        if names:
            ends = re.compile(rf"""(?:\.|\[['"])(?:{"|".join(map(re.escape, names))})\b""")
            self.are_known |= any(map(ends.search, guards))


def _put_up(spies: list[tuple[dict[str, Any], str, Spy]]) -> None:
    for held, name, spy in spies:
        if held.get(name) is spy.value:
            held[name] = spy


def _take_down(spies: list[tuple[dict[str, Any], str, Spy]]) -> None:
    for held, name, spy in spies:
        if held.get(name) is spy:
            held[name] = spy.value
