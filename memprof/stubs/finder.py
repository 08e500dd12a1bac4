"""The import finder of stubs, which during a run is the last on `sys.meta_path`, so that real packages come first.

Whether an import finds a stub depends on the importing code. The program's own code does, also in try/except: it is
written for a machine with the package. A library that checks for a package (T5 of transformers 4 checks for apex) does
not, until the program has chosen the package, by an import of its own or by an argument that names it
(`attn_implementation="flash_attention_2"`).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from memprof.errors import MemprofError
from memprof.stubs import registry, tools
from memprof.stubs.packages import NO_STUBS_HINT, PACKAGES, PACKAGES_WITHOUT_STUB, PROGRAM_ONLY_PACKAGES
from memprof.virtual import limits

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_MEMPROF_DIR = str(Path(registry.__file__).parents[1]) + os.sep
# Modules that cache, in functions, which packages are available.
_CACHE_MODULES = ("transformers.utils.import_utils", "peft.import_utils")


_ORIGIN = "memprof's stub"


class NoStub(MemprofError, ModuleNotFoundError):
    """The ModuleNotFoundError for an import of a package that needs a GPU to be built and has no stub."""


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The import finder and loader of stubs during one run.

    Args:
        assume: called once for each package that is replaced by a stub, with a sentence that says so.
        note_write: called with each tensor that a stub writes in place.
        keep_workspace: called with bytes and name of each workspace that a package keeps during the run.
    """

    def __init__(
        self,
        assume: Callable[[str], None],
        note_write: Callable[[Any], None],
        record_uses: Callable[[list[Any]], None],
        keep_workspace: Callable[[int, str], None],
    ) -> None:
        self._assume = assume
        self._note_write = note_write
        self._record_uses = record_uses
        self._keep_workspace = keep_workspace
        self._chosen_packages: set[str] = set()
        self._called_packages: set[str] = set()
        self._lookups: dict[str, str] = {}  # package -> the library module that did not find it
        self._is_searching_others = False  # whether the other finders are searched for the real package
        self._has_found_stubs = False

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager: imports by the program find stubs, which are removed from sys.modules afterwards."""
        sys.meta_path.append(self)
        try:
            with tools.activate(self._note_call, self._note_write, self._record_uses, self._keep_workspace):
                yield
        finally:
            sys.meta_path.remove(self)
            for name, module in list(sys.modules.items()) if self._has_found_stubs else ():
                if getattr(getattr(module, "__spec__", None), "loader", None) is self:
                    del sys.modules[name]
            if self._chosen_packages:
                _clear_availability_caches()

    def expose(self, package: str) -> None:
        """Make the stub of `package` available to libraries too, if the package is not installed."""
        if package in self._chosen_packages or not registry.has_stubs(package) or self._is_installed(package):
            return
        self._chosen_packages.add(package)
        _clear_availability_caches()
        if package in PACKAGES:
            self._assume(f"{package} is not installed: the program finds a stub of it.")
        else:  # a stub of another package, whose calls are not reported
            self._note_call(package)
        if package in self._lookups:
            self._assume(
                f"{self._lookups[package]} looked for {package} before the program did, and goes on without it; where "
                f"{package} is installed it finds it."
            )

    def _note_call(self, package: str) -> None:
        """Report at the first call of one of its functions that `package` is replaced by a stub."""
        if package in self._called_packages:
            return
        self._called_packages.add(package)
        if self._is_installed(package):
            return
        entry = PACKAGES.get(package)
        release = f"allocating as its release {entry.version} does" if entry else "by what was registered for it"
        self._assume(f"{package} is not installed: it is replaced by a stub, {release} {NO_STUBS_HINT}")

    def _is_installed(self, package: str) -> bool:
        if package in sys.modules:
            return getattr(sys.modules[package].__spec__, "loader", None) is not self
        self._is_searching_others = True
        try:
            return importlib.util.find_spec(package) is not None
        except (ImportError, ValueError):
            return False
        finally:
            self._is_searching_others = False

    def _may_import(self, package: str) -> bool:
        """Return whether the importing code gets the stub of `package`: the program does, libraries mostly do not."""
        if package in self._chosen_packages and package not in PROGRAM_ONLY_PACKAGES:
            return True
        frame = _find_importing_frame()
        if frame is None or not registry.has_stubs(package):
            return False
        if is_program_file(frame.f_code.co_filename):
            self.expose(package)
            return package in self._chosen_packages
        name = frame.f_globals.get("__name__", frame.f_code.co_filename)
        if not name.startswith(_CACHE_MODULES):
            self._lookups.setdefault(package, name)
        return False

    # -- methods that the import system calls ------------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that has a stub and that the importing code may get, else None."""
        package = name.partition(".")[0]
        if package in PACKAGES_WITHOUT_STUB and not self._is_searching_others:
            self._refuse_import(package)
        if self._is_searching_others or not self._may_import(package) or not registry.has_module(name):
            return None
        parent = sys.modules.get(package)
        if parent is not None and getattr(parent.__spec__, "loader", None) is not self:
            return None  # a module that the installed package does not have
        self._has_found_stubs = True
        return importlib.machinery.ModuleSpec(name, self, origin=_ORIGIN, is_package=True)

    def _refuse_import(self, package: str) -> None:
        """Raise NoStub if the program's own code imports `package`; for libraries and find_spec, do nothing."""
        frame = _find_importing_frame()
        if (
            frame is None
            or not is_program_file(frame.f_code.co_filename)
            or registry.has_stubs(package)
            or _is_find_spec_call()
        ):
            return
        self._assume(f"{package} is not installed and has no stub: the program was told that it is missing.")
        raise NoStub(
            f"{limits.find_program_line()} imports {package}, which is not installed and has no stub",
            value=package,
            hint="install it where the program runs, or add a stub for what it calls (memprof help stubs)",
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return None, so that Python creates the module object itself."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill `module` with its stubs; any other public name of the real module raises an error when it is used."""
        name = module.__name__
        vars(module).update(registry.get_stubs(name))
        entry = PACKAGES.get(name)
        if entry is not None:
            module.__version__ = entry.version  # type: ignore[attr-defined]

        def __getattr__(attribute: str) -> Any:
            is_public = registry.is_public(name, attribute)
            if not attribute.startswith("__") and registry.has_module(f"{name}.{attribute}"):
                if is_public and registry.has_public_names(name):
                    return importlib.import_module(f"{name}.{attribute}")  # the package itself imports it
                is_public = False  # `from package import module` reads the attribute first
            if attribute.startswith("__") or not is_public:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            placeholder = vars(module)[attribute] = tools.make_placeholder(name, attribute)
            return placeholder

        module.__getattr__ = __getattr__  # type: ignore[method-assign]

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Yield a distribution for each package that is replaced by a stub, so that importlib.metadata finds them."""
        name = None if context is None or context.name is None else context.name.replace("_", "-").lower()
        for package in () if self._is_searching_others else PACKAGES.values():
            is_requested = name == package.distribution or (name is None and package.name in self._chosen_packages)
            if is_requested and self._may_import(package.name):
                yield _Distribution(package.name, package.distribution, package.version)


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, package: str, name: str, version: str) -> None:
        self._text_by_file = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA or top_level.txt; None for any other file."""
        return self._text_by_file.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return a path below os.devnull, which never exists: a stub has no files."""
        return Path(os.devnull) / path


def is_stub(package: str) -> bool:
    """Return whether an import of `package` finds a stub."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin == _ORIGIN


def is_program_file(file: str) -> bool:
    """Return whether `file` is the program's own code: outside site-packages, or in the package run by `-m`."""
    if file.startswith((_MEMPROF_DIR, "<frozen")):
        return False
    if "-packages" + os.sep not in file:
        return not file.startswith(_STDLIB)
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    running_package = spec.name.partition(".")[0] if spec is not None else ""
    return bool(running_package) and f"-packages{os.sep}{running_package}{os.sep}" in file


def _find_importing_frame() -> FrameType | None:
    """Return the frame that imports or looks for a module: the innermost outside Python's library and memprof."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith((_STDLIB, "<frozen", _MEMPROF_DIR)) or "-packages" in file.removeprefix(_MEMPROF_DIR):
            return frame
    return None


def _is_find_spec_call() -> bool:
    """Return whether the current lookup is a call of importlib.util.find_spec, and not an import."""
    frames = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_code is importlib.util.find_spec.__code__ for frame, _ in frames)


def _clear_availability_caches() -> None:
    """Clear the caches in which transformers and peft remember which packages are available."""
    for name in _CACHE_MODULES:
        for value in list(vars(sys.modules.get(name, ModuleType(name))).values()):
            clear = getattr(value, "cache_clear", None)
            if clear is not None:
                clear()
