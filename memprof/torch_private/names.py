"""Private names: where each is, which releases of torch have it, and what is done without it."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn

from memprof.errors import MemprofError

PRIVATE_NAMES: list[PrivateName] = []  # those of the files that have been imported


class PrivateName:
    """A private name of torch.

    Args:
        path: module and name in it, as entry points are written: "torch._C:_autograd._get_sequence_nr". Without a name,
            the module itself.
        without: what memprof does where torch lacks it. Empty: it refuses that torch; then `path` is of a module that
            `import torch` imports, or that whatever is watched needs.
        since: the first release that has it; empty: all that memprof supports.
        build: "CUDA" or "distributed": only a torch that is built with it has the name.
    """

    def __init__(self, path: str, *, without: str = "", since: str = "", build: str = "") -> None:
        self.module, _, self.attribute = path.partition(":")
        self._parts = self.attribute.split(".") if self.attribute else []
        self.without = without
        self.since = since
        self.build = build
        PRIVATE_NAMES.append(self)

    def __str__(self) -> str:
        """Return the name with dots, as it is written in Python."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module

    def get(self, *default: Any) -> Any:
        """Return what it names now, or `default` if one is given and torch lacks it.

        Raises ImportError: torch lacks the module; AttributeError: the module lacks the name.
        """
        try:
            found = self._imported()
            for part in self._parts:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            if default:
                return default[0]
            raise
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what it names now."""
        return self.get()(*args, **kwargs)

    def exists(self) -> bool:
        """Return whether the installed torch has it, importing its module."""
        return self.get(self) is not self

    def is_imported(self) -> bool:
        """Return whether the module has been imported, by whomever."""
        return self.module in sys.modules

    def patch(self, replacement: Any) -> tuple[Any, str, Any]:
        """Return the patch (owner, name, replacement) of it. The owner must be there, and the name need not."""
        owner = self._imported()
        *path, name = self._parts
        for part in path:
            owner = getattr(owner, part)
        return owner, name, replacement

    def _imported(self) -> Any:
        return sys.modules.get(self.module) or importlib.import_module(self.module)


def bind(path: str, *, without: str = "", since: str = "") -> Any:
    """Return what a private name names, for good: for what is called often and is never replaced.

    `path` is as PrivateName's, of a module that `import torch` imports. Of a name that torch lacks: None if memprof
    does without, else what refuses this torch when it is used.
    """
    name = PrivateName(path, without=without, since=since)
    return name.get(None if without else _Missing(name))


class _Missing:
    """Stands for a name that memprof cannot do without, so that files in which it is bound can be imported."""

    def __init__(self, name: PrivateName) -> None:
        self._name = name

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal([self._name])

    __call__ = __getattr__ = __mro_entries__ = _refuse


def refusal(missing: list[PrivateName]) -> MemprofError:
    """Return the error for a torch that lacks these."""
    import torch

    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return MemprofError(
        "this release of torch lacks private names that memprof needs",
        value=f"torch {torch.__version__}: {missing[0]}{others}",
        hint="install a release that `memprof help releases` lists; `memprof doctor --env` names all that are missing",
    )
