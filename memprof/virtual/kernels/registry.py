"""The registry of the virtual GPU's kernels: what an operator does beyond its meta kernel, a family a file.

    @kernel(aten.geqrf)              what runs in place of the operator: takes a `KernelContext`, gives its result, or
    def geqrf(launch): ...           NotImplemented for a call that is ordinary after all

    @scratch(aten.topk)              bytes that the kernel takes beside its result and releases when it returns
    def topk(args, gpu): ...

    @input_copies(aten.roll)         bytes taken before the result: copies of inputs, mostly
    def roll(args): ...

    @composite(torch.dropout)        what CUDA runs for a function that chooses by device in C++, above all operators;
    def dropout(machine, input, ..): NotImplemented where the function itself is to run

A new file in this folder is found by itself. An operator that some releases of torch lack, or that a library defines,
is named by a string, `"torchvision.nms"`, and passed over until it is there.

Beside each constant or formula stands the file of PyTorch that it is from; `SOURCE_TAG` says of which release.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import memprof.virtual.kernels as families

Function = TypeVar("Function", bound=Callable[..., Any])

aten: Any = torch.ops.aten
META = torch.device("meta")

# The release of PyTorch whose files are named, here and in all of memprof; those below native/ lie in aten/src/ATen.
# That each is a file of this release was seen in its wheels, for the CPU and for CUDA 13.0: the tests list how, in
# sources_of_v2.13.0.txt. Headers were read there. The text of all others (.cpp, .cu) was not at hand as of the tag: it
# was read in single versions from the repository's history. What differs between releases is said beside it; recordings
# under 2.6, 2.11 and 2.13 bear the formulas out.
SOURCE_TAG = "v2.13.0"

ABSENT: dict[str, list[tuple[Table, Any]]] = {}  # operators that were named by a string and are not there -> entries


class Table:
    """Operator -> what is registered for it."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._entries: dict[Any, Any] = {}
        self.get = self._entries.get
        self.items = self._entries.items

    def __contains__(self, operator: Any) -> bool:
        return operator in self._entries

    def add(self, operator: Any, entry: Any) -> None:
        """Register one operator, or torch function.

        Raises:
            ValueError: it is registered already.
        """
        found = _named(operator) if isinstance(operator, str) else operator
        if found is None:
            ABSENT.setdefault(operator, []).append((self, entry))
        elif found in self._entries:
            names = [getattr(each, "__qualname__", str(each)) for each in (self._entries[found], entry)]
            raise ValueError(f"{found} has two entries as {self._role}: {names[0]} and {names[1]}")
        else:
            self._entries[found] = entry

    def mark(self, *operators: Any) -> None:
        """Register operators of which nothing else is registered."""
        for operator in operators:
            self.add(operator, True)

    def __call__(self, *operators: Any) -> Callable[[Function], Function]:
        """A decorator: the function is registered for these operators."""

        def register(function: Function) -> Function:
            for operator in operators:
                self.add(operator, function)
            return function

        return register


_kernels = Table("kernel")
# Function of (args, gpu): sizes, taken one after the other once the result is there.
scratch = Table("scratch formula")
input_copies = Table("input copies")  # function of (args): sizes, taken before the result, or before cuBLAS's workspace
composite = Table("composite")  # function of (machine, *arguments)
uses_cublas = Table("user of cuBLAS")
uses_cublaslt = Table("user of cuBLASLt")  # function of (args): whether the call is cuBLASLt's
expanded_composites = Table("composite that is looked into")  # see expansion.py
anywhere = Table("kernel for any device")


def kernel(*operators: Any, on_host: bool = False) -> Callable[[Function], Function]:
    """Register the kernel of these operators, or of one overload where the others are made of it.

    It runs where some input is on the GPU; with `on_host` always, also on real tensors and without any.
    """
    if on_host:
        anywhere.mark(*operators)
    return _kernels(*operators)


kernel_of = _kernels.get


def composites(machine: Any) -> dict[Any, Callable[..., Any]]:
    """Torch function -> its replacement on this machine, for the function mode."""

    def chosen(function: Callable[..., Any], entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = entry(machine, *args, **kwargs)
            return function(*args, **kwargs) if result is NotImplemented else result

        return run

    return {function: chosen(function, entry) for function, entry in composite.items()}


def load() -> None:
    """Import every file of the folder, each of which registers what it holds."""
    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def register_library(namespace: str) -> None:
    """Register the operators of a library that has been imported."""
    for name in [name for name in ABSENT if name.startswith(f"{namespace}.") and _named(name) is not None]:
        for table, entry in ABSENT.pop(name):
            table.add(name, entry)


def _named(name: str) -> Any:
    """The operator called `namespace.name`, None if torch has none."""
    namespace, _, operator = name.partition(".")
    return getattr(getattr(torch.ops, namespace), operator, None)
