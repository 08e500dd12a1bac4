"""Private names of torch: where each is, which releases have it, and what memprof does where it is missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn

from memprof.errors import MemprofError

PRIVATE_NAMES: list[PrivateName] = []  # names of all imported files


class PrivateName:
    """A private name of torch, which is looked up on each use.

    Args:
        path: module and name in it, as entry points are written: "torch._C:_autograd._get_sequence_nr". Without a name,
            the module itself.
        fallback: memprof's behaviour where torch lacks the name. Empty: memprof refuses that torch; then `path` is in a
            module that `import torch` imports, or that every watched program needs.
        since: the first release with the name; empty: all releases that memprof supports.
        build: "CUDA" or "distributed": only a torch built with that has the name; "CUDA, once initialized": and only
            after the first use of a GPU.
    """

    def __init__(self, path: str, *, fallback: str = "", since: str = "", build: str = "") -> None:
        self.module, _, self.attribute = path.partition(":")
        self._parts = self.attribute.split(".") if self.attribute else []
        self.fallback = fallback
        self.since = since
        self.build = build
        PRIVATE_NAMES.append(self)

    def __str__(self) -> str:
        """Return the full dotted name, such as "torch._C._autograd._get_sequence_nr"."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module

    def get(self, *default: Any) -> Any:
        """Return the object with this name, or `default` if given and torch lacks the name.

        Raises ImportError if torch lacks the module; AttributeError if the module lacks the name.
        """
        try:
            value = self._import_module()
            for part in self._parts:
                value = getattr(value, part)
        except (ImportError, AttributeError):
            if default:
                return default[0]
            raise
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object with this name, and return its result."""
        return self.get()(*args, **kwargs)

    def exists(self) -> bool:
        """Return whether the installed torch has the name; its module is imported."""
        return self.get(self) is not self

    def is_imported(self) -> bool:
        """Return whether the module of the name has been imported."""
        return self.module in sys.modules

    def patch(self, replacement: Any) -> tuple[Any, str, Any]:
        """Return a patch (owner, attribute, replacement) of the name; the owner must exist, the name need not."""
        owner = self._import_module()
        *path, name = self._parts
        for part in path:
            owner = getattr(owner, part)
        return owner, name, replacement

    def _import_module(self) -> Any:
        return sys.modules.get(self.module) or importlib.import_module(self.module)


def bind(path: str, *, fallback: str = "", since: str = "") -> Any:
    """Return the object with a private name, looked up now: for functions that are called often and never replaced.

    Arguments are as in PrivateName; `path` is in a module that `import torch` imports. If torch lacks the name: None if
    `fallback` is given, else an object that raises MemprofError on use.
    """
    name = PrivateName(path, fallback=fallback, since=since)
    return name.get(None if fallback else _MissingName(name))


class _MissingName:
    """Placeholder for a required name that torch lacks: it can be imported, and raises MemprofError on use."""

    def __init__(self, name: PrivateName) -> None:
        self._name = name

    def _raise_error(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise make_missing_error([self._name])

    __call__ = __getattr__ = __mro_entries__ = _raise_error


def make_missing_error(missing: list[PrivateName]) -> MemprofError:
    """Return the MemprofError for an installed torch that lacks the names `missing`."""
    import torch

    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return MemprofError(
        "this release of torch lacks private names that memprof needs",
        value=f"torch {torch.__version__}: {missing[0]}{more}",
        hint="install a release that `memprof help releases` lists; `memprof doctor --env` names all that are missing",
    )
