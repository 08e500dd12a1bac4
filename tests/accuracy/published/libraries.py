"""Other projects' published packages and repositories, each in a folder of its own, for releases exclude each other.

`.cache/accuracy/NAME-RELEASE` is filled by pip from the package index, without what the package depends on, or by git
from github.com, at one commit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "accuracy"
TRITON = ("triton", "3.9.0")  # Asked for by Liger-Kernel when it is imported; no kernel is compiled or launched.


@dataclass(frozen=True)
class Checkout:
    """A source's own code: a repository of github.com (OWNER/NAME) at one commit."""

    repository: str
    commit: str
    packages: tuple[tuple[str, str], ...] = ()  # Of the package index, which it imports: their names and releases.

    @property
    def folder(self) -> Path:
        return folder(self.repository.partition("/")[2], self.commit[:8])

    @property
    def title(self) -> str:
        """What a row says of its code."""
        return f"{self.repository} at {self.commit[:8]}"

    def fetch(self) -> None:
        """Get it and its packages, unless they are there; MissingLibraryError if git or pip could not."""
        for name, release in self.packages:
            fetch(name, release)
        if self.folder.is_dir():
            return
        made = self.folder.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        url = f"https://github.com/{self.repository}"
        for command in (
            ["init", "--quiet", str(made)],
            ["-C", str(made), "fetch", "--quiet", "--depth", "1", url, self.commit],
            ["-C", str(made), "checkout", "--quiet", "FETCH_HEAD"],
        ):
            done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise MissingLibraryError(
                    f"{self.title}: git says {(done.stderr.strip().splitlines() or ['nothing'])[-1]}"
                )
        made.rename(self.folder)

    @contextlib.contextmanager
    def imported(self, *below: str, names: frozenset[str] = frozenset()) -> Iterator[None]:
        """Inside, what lies in its folders `below`, and its packages, is imported first; afterwards it is forgotten.

        Args:
            below: folders of the repository.
            names: what is imported from there; empty: everything that is.

        Raises:
            MissingLibraryError: it is not there, or one of its packages is not.
        """
        places = [self.folder / path for path in below] + [folder(*package) for package in self.packages]
        for place in places:
            if not place.is_dir():
                raise MissingLibraryError(f"{place.relative_to(CACHE)} is not in {CACHE.parent.name}/{CACHE.name}")
        names = names or frozenset(found.stem for place in places for found in place.iterdir())
        before, path = {name: sys.modules.pop(name) for name in _modules(names)}, list(sys.path)
        sys.path[:0] = [str(place) for place in places]
        try:
            yield
        finally:
            sys.path[:] = path
            for name in _modules(names):
                del sys.modules[name]
            sys.modules.update(before)


def _modules(packages: frozenset[str]) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in packages]


class MissingLibraryError(Exception):
    """A package that is not here; the text says which."""


def folder(name: str, release: str) -> Path:
    return CACHE / f"{name}-{release}"


def fetch(name: str, release: str) -> None:
    """Install a release into its folder, unless it is there; MissingLibraryError if pip could not get it."""
    target = folder(name, release)
    if target.is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", str(target), f"{name}=={release}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MissingLibraryError(f"{name} {release}: pip says {(done.stderr.strip().splitlines() or ['nothing'])[-1]}")


@contextlib.contextmanager
def imported(name: str, release: str, package: str, *hollow: str) -> Iterator[None]:
    """Inside, `package` is that release of `name`, beside Triton; afterwards it is forgotten.

    Args:
        name: as the package index has it.
        release: its number.
        package: the name to import.
        hollow: packages below it whose own __init__ is not run: it may import what has changed since.

    Raises:
        MissingLibraryError: it, or Triton, is not there.
    """
    wanted = [folder(name, release)]
    if importlib.util.find_spec("triton") is None:
        wanted.append(folder(*TRITON))
    for place in wanted:
        if not place.is_dir():
            raise MissingLibraryError(f"{place.name} is not in {CACHE.parent.name}/{CACHE.name}")
    before = list(sys.path)
    sys.path[:0] = [str(place) for place in wanted]
    try:
        for path in hollow:
            module = types.ModuleType(path)
            module.__path__ = [str(wanted[0].joinpath(*path.split(".")))]
            sys.modules[path] = module
        yield
    finally:
        sys.path[:] = before
        for module_name in [key for key in sys.modules if key.partition(".")[0] == package]:
            del sys.modules[module_name]
