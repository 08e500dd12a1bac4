"""The finder of stubs: the last on `sys.meta_path`, so that real packages come first, during a run.

The importing module decides. The program's own code finds stubs, also in try/except: it is written for a machine with
the package. A library that checks for a package (T5 of transformers 4 checks for apex) finds none, and does without;
once the program has chosen a package, by an import of its own or by an argument that names it
(`attn_implementation="flash_attention_2"`), every module finds it.
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
from memprof.stubs.packages import NO_STUBS_HINT, PACKAGES, PROGRAM_ONLY, WITHOUT_STUB
from memprof.virtual import limits

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_MEMPROF = str(Path(registry.__file__).parents[1]) + os.sep
# Modules that cache, in functions, which packages are available.
_CACHE_MODULES = ("transformers.utils.import_utils", "peft.import_utils")


class NoStub(MemprofError, ModuleNotFoundError):
    """The error for an import of a package that cannot be built here and has no stub.

    The program may catch the error, as it would where the package is missing.
    """


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder of the stubs of one run, or of a process that a program starts anew.

    Args:
        assume: called once for each package that is replaced by a stub, with a sentence.
        note_write: called with each tensor that a stub writes in place.
        keep_workspace: called with the bytes and the name of each workspace that a package keeps during the run.
    """

    def __init__(
        self,
        assume: Callable[[str], None],
        note_write: Callable[[Any], None],
        keep_workspace: Callable[[int, str], None],
    ) -> None:
        self._assume = assume
        self._note_write = note_write
        self._keep_workspace = keep_workspace
        self._chosen_packages: set[str] = set()
        self._called_packages: set[str] = set()
        self._lookups: dict[str, str] = {}  # package -> the library module that did not find it
        self._is_searching_others = False  # whether the other finders are searched for the real package
        self._has_found_stubs = False

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Context manager: the program's imports find stubs; afterwards they are removed from `sys`."""
        sys.meta_path.append(self)
        try:
            with tools.activate(self._note_call, self._note_write, self._keep_workspace):
                yield
        finally:
            sys.meta_path.remove(self)
            for name, module in list(sys.modules.items()) if self._has_found_stubs else ():
                if getattr(getattr(module, "__spec__", None), "loader", None) is self:
                    del sys.modules[name]
            if self._chosen_packages:
                _clear_availability_caches()

    def choose(self, package: str) -> None:
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
        """Note the assumption of a stub at its first call, unless only the compiled part of a package is replaced."""
        if package in self._called_packages:
            return
        self._called_packages.add(package)
        if self._is_installed(package):
            return
        known = PACKAGES.get(package)
        release = f"allocating as its release {known.version} does" if known else "by what was registered for it"
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
        """Return whether the importing module may get the stub of `package`."""
        if package in self._chosen_packages and package not in PROGRAM_ONLY:
            return True
        frame = _importing_frame()
        if frame is None or not registry.has_stubs(package):
            return False
        if is_program_file(frame.f_code.co_filename):
            self.choose(package)
            return package in self._chosen_packages
        name = frame.f_globals.get("__name__", frame.f_code.co_filename)
        if not name.startswith(_CACHE_MODULES):
            self._lookups.setdefault(package, name)
        return False

    # -- methods that the import system calls ------------------------------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that no other finder has; None: not found."""
        package = name.partition(".")[0]
        if package in WITHOUT_STUB and not self._is_searching_others:
            self._refuse(package)
        if self._is_searching_others or not self._may_import(package) or not registry.has_module(name):
            return None
        parent = sys.modules.get(package)
        if parent is not None and getattr(parent.__spec__, "loader", None) is not self:
            return None  # a module that the installed package does not have
        self._has_found_stubs = True
        return importlib.machinery.ModuleSpec(name, self, origin="memprof's stub", is_package=True)

    def _refuse(self, package: str) -> None:
        """Raise NoStub for an import by the program's own code; a check for the package finds none instead."""
        frame = _importing_frame()
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
        """Return None: Python makes the module object itself."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with its stubs; every other name of the real module raises an error when it is used."""
        name = module.__name__
        vars(module).update(registry.stubs_in(name))
        known = PACKAGES.get(name)
        if known is not None:
            module.__version__ = known.version  # type: ignore[attr-defined]

        def __getattr__(attribute: str) -> Any:
            public = registry.is_public(name, attribute)
            if not attribute.startswith("__") and registry.has_module(f"{name}.{attribute}"):
                if public and registry.is_listed(name):
                    return importlib.import_module(f"{name}.{attribute}")  # the package itself imports it
                public = False  # `from package import module` reads the attribute first
            if attribute.startswith("__") or not public:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            made = vars(module)[attribute] = tools.make_placeholder(name, attribute)
            return made

        module.__getattr__ = __getattr__  # type: ignore[method-assign]

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Yield distributions of packages that are replaced by a stub, for `importlib.metadata`."""
        name = None if context is None or context.name is None else context.name.replace("_", "-").lower()
        for package in () if self._is_searching_others else PACKAGES.values():
            is_requested = name == package.distribution or (name is None and package.name in self._chosen_packages)
            if is_requested and self._may_import(package.name):
                yield _Distribution(package.name, package.distribution, package.version)


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, package: str, name: str, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """Return the text of a file of the distribution; None: no such file."""
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return a path without a file: a stub has no files."""
        return Path(os.devnull) / path


def is_program_file(file: str) -> bool:
    """Return whether a file is the program's own: not an installed package's, unless that one runs (`-m package`)."""
    if file.startswith((_MEMPROF, "<frozen")):
        return False
    if "-packages" + os.sep not in file:
        return not file.startswith(_STDLIB)
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    runs = spec.name.partition(".")[0] if spec is not None else ""
    return bool(runs) and f"-packages{os.sep}{runs}{os.sep}" in file


def _importing_frame() -> FrameType | None:
    """Return the frame that imports or checks for a module: the innermost outside Python's library and memprof."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith((_STDLIB, "<frozen", _MEMPROF)) or "-packages" in file.removeprefix(_MEMPROF):
            return frame
    return None


def _is_find_spec_call() -> bool:
    """Return whether the frame calls importlib.util.find_spec, and does not import."""
    frames = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_code is importlib.util.find_spec.__code__ for frame, _ in frames)


def _clear_availability_caches() -> None:
    """Clear libraries' caches of available packages, which have changed."""
    for name in _CACHE_MODULES:
        for value in list(vars(sys.modules.get(name, ModuleType(name))).values()):
            clear = getattr(value, "cache_clear", None)
            if clear is not None:
                clear()
