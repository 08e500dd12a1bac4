"""CUDA code that a program compiles itself, by torch.utils.cpp_extension: neither its compiler nor a GPU is here.

`load` and `load_inline` give what the sources say they bind: functions of a Python module (pybind11), and operators in
`torch.ops` (TORCH_LIBRARY). One that returns nothing can only have written into its arguments, and is passed over, as a
Triton kernel is. Of one that returns something memory is not known: `memprof.stub` can say it under its name, and
without that the run ends where it is called. Extensions without CUDA code are built and run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from memprof.patching import Patch
from memprof.stubs import registry
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.virtual.operator_call import find_tensors

PASSED = (
    "Functions of {}, CUDA code that the program compiles, are not run: what they write is unknown, and what their C++ "
    "code allocates is not counted."
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_JOINED = re.compile(r'"\s*\n\s*"')  # between two literals that C++ makes one
_BLOCK = re.compile(r"\b(PYBIND11_MODULE|TORCH_LIBRARY|TORCH_LIBRARY_FRAGMENT)\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)\s*\{")
_NO_TYPES = frozenset({"return", "else", "new", "throw", "case", "goto", "co_return", "typename"})


class Binding(NamedTuple):
    """A function that an extension has."""

    library: str | None  # of torch.ops; None: it is the Python module's
    name: str
    is_void: bool  # it returns nothing, as far as the sources say


def bindings(name: str, source: str, functions: Sequence[str] = ()) -> Iterator[Binding]:
    """Return what the C++ `source` of the extension `name` binds, and `functions`, which torch binds for it."""
    source = _JOINED.sub("", _COMMENT.sub("", source))
    for function in functions:
        yield Binding(None, function, _is_void(function, source))
    for block in _BLOCK.finditer(source):
        macro, owner, variable = block.groups()
        library = None if macro == "PYBIND11_MODULE" else name if owner == "TORCH_EXTENSION_NAME" else owner
        define = rf'\b{variable}\s*\.\s*def\s*\(\s*"([^"]+)"\s*(?:,\s*(?:TORCH_FN\s*\(\s*)?&?\s*([\w:]+))?'
        for own in re.finditer(define, source[block.end() : _end(source, block.end())]):
            schema, _, returns = own[1].partition("->")
            function = schema.partition("(")[0].strip()
            is_void = returns.strip() == "()" if returns else _is_void((own[2] or "").rpartition("::")[2], source)
            yield Binding(library, function.rpartition("::")[2], is_void)


def _end(source: str, begin: int) -> int:
    """Return where the block that begins there ends."""
    depth = 1
    for brace in re.finditer(r"[{}]", source[begin:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return begin + brace.start()
    return len(source)


def _is_void(function: str, source: str) -> bool:
    """Return whether every declaration of a C++ function says that it returns nothing; False where there is none."""
    if not function:
        return False
    declared = re.findall(rf"([\w:]+)(?:<[^;{{}}()]*>)?(?:\s*[&*]+\s*|\s+){function}\s*\(", source)
    types = set(declared) - _NO_TYPES
    return types == {"void"}


class _Extension(ModuleType):
    """The Python module; of what its sources do not show nothing is known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refused(f"{self.__name__}.{name}")


def patches(module: Any, context: InstallContext) -> Iterator[Patch]:
    """Replace what builds extensions in `module`, torch.utils.cpp_extension."""
    written, assume, replace = context.forget_values, context.assume, context.run_patches.set
    build, build_inline = module.load, module.load_inline

    def load(name: str, sources: str | Sequence[str], *args: Any, **options: Any) -> Any:
        paths = [Path(source) for source in _listed(sources)]
        if not (options.get("with_cuda") or any(path.suffix in (".cu", ".cuh") for path in paths)):
            return build(name, sources, *args, **options)
        return extension(name, [path.read_text(encoding="utf-8", errors="replace") for path in paths], (), options)

    def load_inline(
        name: str, cpp_sources: Any, cuda_sources: Any = None, functions: Any = None, *args: Any, **options: Any
    ) -> Any:
        if not (options.get("with_cuda") or cuda_sources):
            return build_inline(name, cpp_sources, cuda_sources, functions, *args, **options)
        return extension(name, [*_listed(cpp_sources), *_listed(cuda_sources)], _listed(functions), options)

    yield module, "load", load
    yield module, "load_inline", load_inline

    def extension(name: str, texts: Sequence[str], functions: Sequence[str], options: dict[str, Any]) -> Any:
        made = _Extension(name)
        for library, function, is_void in bindings(name, "\n".join(texts), functions):
            full = f"{library or name}.{function}"
            known = registry.stubs_in(library or name).get(function)
            call = known or (passed(full) if is_void else _refused(full))
            if library is None:
                setattr(made, function, call)
            else:
                replace(getattr(torch.ops, library), function, call)
        return made if options.get("is_python_module", True) else None

    def passed(full: str) -> Callable[..., None]:
        def function(*args: Any, **named: Any) -> None:
            assume(PASSED.format(full.rpartition(".")[0]))
            for tensor in find_tensors([*args, *named.values()]):
                written(tensor)

        return function


def _listed(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _refused(full: str) -> Callable[..., Any]:
    def function(*args: Any, **named: Any) -> Any:
        raise unsupported_error(
            f"calls {full}, CUDA code that the program compiles, of whose results nothing is known",
            hint=f'say what it allocates: @memprof.stub("{full}", source="its C++ file") above a function that '
            "returns tensors of the shapes, types and strides that the real one returns",
        )

    return function
