"""transformers' names of models, read from its files when one is asked for that no module was imported for.

`import transformers` reads every file of its models to learn what they define, and `import transformers.models` does so
again (`define_import_structure` in utils/import_utils.py): half of what importing one model's module takes. Only
somebody who asks the packages themselves for a name needs it, as `from transformers import AutoModel` does; a model's
own module is found by its path. And most names begin with that of the folder that defines them, which is read alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from memprof.watch.imports import watch_imports
from memprof.watch.patches import Patch, Patches

_UTILS = "transformers.utils.import_utils"


class _Unread(dict[Any, Any]):
    """What `define_import_structure` returns, without the names of the models; `read` returns all of it."""

    def __init__(self, read: Callable[[], dict[Any, Any]]) -> None:
        super().__init__({frozenset(): {}})
        self.read = read


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Inside, where no run has put these patches in place yet, they are."""
    if _UTILS in sys.modules:
        yield
        return
    own = Patches()
    try:
        with watch_imports({_UTILS: lambda: own.set_all(patches(sys.modules[_UTILS]))}):
            yield
    finally:
        own.undo()


def patches(import_utils: ModuleType) -> Iterator[Patch]:
    """For as long as the run lasts, what makes transformers' packages puts the reading off; none where a release of
    transformers makes them in another way."""
    read_names = getattr(import_utils, "define_import_structure", None)
    plain = getattr(import_utils, "_LazyModule", None)
    if read_names is None or not isinstance(plain, type):
        return
    if hasattr(sys.modules.get("transformers.utils"), "_LazyModule"):
        return  # its packages are there, and took the class: transformers/processing_utils.py makes them once more
    models = Path(str(import_utils.__file__)).parent.parent / "models"

    def define_import_structure(module_path: Any, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if Path(module_path) in (models, models / "__init__.py"):
            return _Unread(lambda: read_names(module_path, *args, **kwargs))
        names: dict[Any, Any] = read_names(module_path, *args, **kwargs)
        return names

    yield import_utils, "define_import_structure", define_import_structure
    yield import_utils, "_LazyModule", _postponing(plain)


def _postponing(plain: type) -> type:
    """The class of transformers' packages, of which one that is given an `_Unread` reads it when it must."""

    class LazyModule(plain):  # type: ignore[misc]
        """A package of transformers."""

        def __init__(self, name: str, module_file: str, names: dict[Any, Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(name, module_file, names, *args, **kwargs)
            if isinstance(names, _Unread):
                self.__dict__["_unread"] = (name, module_file, names, args, kwargs)
                del self.__all__  # `import *` and `dir` ask for it

        def __getattr__(self, name: str) -> Any:
            if "_unread" not in vars(self):
                return super().__getattr__(name)
            if name == "__all__":
                self._read()
                return self.__all__
            if not name.startswith("__") and not any(
                name in known for known in (self._modules, self._class_to_module, self._objects)
            ):
                path = os.path.join(os.path.dirname(self.__file__), name)
                if os.path.isfile(path + ".py") or os.path.isfile(os.path.join(path, "__init__.py")):
                    return importlib.import_module(f"{self.__name__}.{name}")
                package = _package_of(name)
                if package is not None:
                    return getattr(package, name)
                self._read()
            return super().__getattr__(name)

        def _read(self) -> None:
            name, module_file, known, args, kwargs = self.__dict__.pop("_unread")
            names = known.read()
            for backends, modules in known.items():
                names.setdefault(backends, {}).update(modules)
            super().__init__(name, module_file, names, *args, **kwargs)

    LazyModule.__name__, LazyModule.__qualname__, LazyModule.__module__ = "_LazyModule", "_LazyModule", plain.__module__
    return LazyModule


def _package_of(name: str) -> ModuleType | None:
    """The package of the model by whose name `name` begins, if that is defined there and can be had."""
    models = importlib.import_module("transformers.models")
    lower, folders = name.lower(), os.listdir(models.__path__[0])
    found = [folder for folder in folders if lower.startswith(folder.replace("_", ""))]
    if not found:
        return None
    package = importlib.import_module(f"{models.__name__}.{max(found, key=len)}")
    known = name in getattr(package, "_class_to_module", ()) and name not in getattr(
        package, "_object_missing_backend", (name,)
    )
    return package if known else None
