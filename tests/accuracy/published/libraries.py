"""Other projects' published packages, each in a folder of its own, for several releases of one exclude each other.

`.cache/accuracy/NAME-RELEASE` is filled by pip from the package index, without what the package depends on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "accuracy"
TRITON = ("triton", "3.9.0")
"""Asked for by Liger-Kernel when it is imported; no kernel is compiled or launched."""


class MissingLibraryError(Exception):
    """A package that is not here; the text says which."""


def folder(name: str, release: str) -> Path:
    """Where a release lies, or would lie."""
    return CACHE / f"{name}-{release}"


def fetch(name: str, release: str) -> None:
    """Install a release into its folder, unless it is there.

    Raises:
        MissingLibraryError: pip could not get it.
    """
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
