"""Registry of the virtual GPU's kernels: functions that reproduce the allocations of operators, one file per family.

    @kernel(aten.geqrf)              replaces the operator: receives a `KernelContext` and returns the result, or
    def geqrf(launch): ...           NotImplemented for a call that torch's meta kernel simulates correctly

    @scratch(aten.topk)              returns the bytes of each temporary buffer that the operator allocates after
    def compute(args, gpu): ...      its result and frees before it returns

    @input_copies(aten.roll)         returns the bytes of each temporary buffer that the operator allocates before
    def compute(args): ...           its result, mostly copies of inputs

    @composite(torch.dropout)        replaces a torch function whose C++ chooses operators by device; returns
    def dropout(device_state, ...):  NotImplemented for a call that the function itself runs

Every file of the folder is imported. An operator that some releases of torch lack, or that a library defines, is named
by a string, `"torchvision.nms"`, and registered once it exists.

Comments at constants and formulas name source files of PyTorch, of the release `SOURCE_TAG`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import memprof.virtual.kernels as kernels

Function = TypeVar("Function", bound=Callable[..., Any])

aten: Any = torch.ops.aten
META = torch.device("meta")

# The release of PyTorch whose files memprof's comments name; files in native/ are in aten/src/ATen. The wheels of the
# release, for the CPU and CUDA 13.0, show that each file exists (list in the tests: sources_of_v2.13.0.txt). Headers
# were read from the wheels. Sources (.cpp, .cu) were not available as of the tag, and were read in other versions of
# the repository. Comments name differences between releases; recordings of 2.6, 2.11 and 2.13 confirm the formulas.
SOURCE_TAG = "v2.13.0"

MISSING_OPERATORS: dict[str, list[tuple[OperatorTable, Any]]] = {}  # name of a missing operator -> entries


class OperatorTable:
    """Table of operators and the entries registered for them; also a decorator that registers a function."""

    def __init__(self, entry_kind: str) -> None:
        self._entry_kind = entry_kind
        self._entries: dict[Any, Any] = {}
        self.get = self._entries.get
        self.items = self._entries.items

    def __contains__(self, operator: Any) -> bool:
        return operator in self._entries

    def add(self, operator: Any, entry: Any) -> None:
        """Register `entry` for `operator`: an operator, its name if it may not exist yet, or a torch function.

        Raises:
            ValueError: the operator has an entry already.
        """
        key = _find_operator(operator) if isinstance(operator, str) else operator
        if key is None:
            MISSING_OPERATORS.setdefault(operator, []).append((self, entry))
        elif key in self._entries:
            names = [getattr(value, "__qualname__", str(value)) for value in (self._entries[key], entry)]
            raise ValueError(f"{key} has two entries as {self._entry_kind}: {names[0]} and {names[1]}")
        else:
            self._entries[key] = entry

    def mark(self, *operators: Any) -> None:
        """Register the entry True for each of `operators`."""
        for operator in operators:
            self.add(operator, True)

    def __call__(self, *operators: Any) -> Callable[[Function], Function]:
        """Return a decorator that registers a function for `operators`."""

        def register(function: Function) -> Function:
            for operator in operators:
                self.add(operator, function)
            return function

        return register


_kernels = OperatorTable("kernel")
# Function of (args, gpu): bytes of each temporary, allocated in order after the result.
scratch = OperatorTable("scratch formula")
input_copies = OperatorTable("input copies")  # function of (args): bytes, allocated before the result
composite = OperatorTable("composite")  # function of (device_state, *arguments)
uses_cublas = OperatorTable("user of cuBLAS")
uses_cublaslt = OperatorTable("user of cuBLASLt")  # function of (args): whether cuBLASLt runs the call
expanded_composites = OperatorTable("composite that is looked into")  # see expansion.py
host_kernels = OperatorTable("kernel for any device")


def kernel(*operators: Any, on_host: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the kernel of `operators`.

    The kernel runs if an input is on the GPU; with `on_host`, also if all tensors are on the CPU or there are none.
    """
    if on_host:
        host_kernels.mark(*operators)
    return _kernels(*operators)


find_kernel = _kernels.get


def make_composites(device_state: Any) -> dict[Any, Callable[..., Any]]:
    """Return a dict from torch function to its replacement on the GPU, to which `device_state` is bound."""

    def make_replacement(function: Callable[..., Any], entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = entry(device_state, *args, **kwargs)
            return function(*args, **kwargs) if result is NotImplemented else result

        return run

    return {function: make_replacement(function, entry) for function, entry in composite.items()}


def import_kernels() -> None:
    """Import every module of this package, which registers its kernels."""
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")


def register_library_operators(namespace: str) -> None:
    """Register the kernels of a library's operators in `torch.ops.<namespace>`, once the library has been imported."""
    for name in [n for n in MISSING_OPERATORS if n.startswith(f"{namespace}.") and _find_operator(n) is not None]:
        for table, entry in MISSING_OPERATORS.pop(name):
            table.add(name, entry)


def _find_operator(name: str) -> Any:
    """Return the operator for a `name` such as "aten.topk"; None if torch has no such operator."""
    namespace, _, operator = name.partition(".")
    return getattr(getattr(torch.ops, namespace), operator, None)
