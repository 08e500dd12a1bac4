"""Stand-ins held against the sources of what they stand for: names of parameters, their order, their defaults.

    python -m tests.accuracy.stand_in_signatures flash_attn FOLDER           # what differs
    python -m tests.accuracy.stand_in_signatures flash_attn FOLDER --write   # and the list of public names

FOLDER is the package's own folder (or its one file) in a checkout of what memprof/catalog/stand_ins.py names:
`git clone --branch v2.8.3 https://github.com/Dao-AILab/flash-attention`, then flash-attention/flash_attn.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memprof.virtual.stand_ins import registry

NAMES = Path(registry.__file__).parents[2] / "catalog" / "data" / "stand_ins"
LEFT_OUT = (
    "test",
    "_triton",
    "components",
    "tests",
    "testing",
    "benchmark",
    "benchmarks",
    "cute",
    "cute_dsl",
    "gdn_kernels",
    "moe_ep",
    "trace",
    "flash_attn_triton_amd",
    "_cpp_lib",
    "jax",
    "debug",
    "triton_kernels",
)
"""Folders without what a training script imports."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: str, at: Path) -> dict[str, ast.Module]:
    """Module -> its source, parsed."""
    if at.suffix == ".cpp":  # a compiled module: the names that it binds
        bound = re.findall(r'm\.def\(\s*"(\w+)"', at.read_text(encoding="utf-8"))
        return {package: ast.parse("\n".join(f"{name} = None" for name in bound))}
    if at.is_file():
        return {package: ast.parse(at.read_text(encoding="utf-8"))}
    found = {}
    for file in sorted(at.rglob("*.py")):
        parts = file.relative_to(at).with_suffix("").parts
        if not set(parts) & set(LEFT_OUT) and not any(part.startswith("test_") for part in parts):
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def public_names(package: str, tree: ast.Module) -> set[str]:
    """What a module defines, or imports from its own package."""
    names: set[str] = set()
    for node in _statements(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(module=module, names=imported, level=level):
                if level or (module or "").partition(".")[0] == package:
                    names |= {one.asname or one.name for one in imported}
                    inside = (module or "").removeprefix(f"{package}.").partition(".")[0]
                    names |= {inside} if inside and inside != package else set()
    return {name for name in names if name != "*" and not name.startswith("__")}


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module, also inside if, try and with."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from _statements(node)


def parameters(node: _Function, *, skip: int = 0) -> list[str]:
    """As `name`, or `name=default`, with stars as they are written."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_parameter(one.arg, default) for one, default in zip(positional, defaults, strict=True)][skip:]
    found += [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
    found += [
        _parameter(one.arg, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={_plain(ast.unparse(default))}"


def _plain(text: str) -> str:
    try:
        return repr(ast.literal_eval(text))
    except ValueError:
        return text.removeprefix("torch.")


def own_parameters(function: Any, *, skip: int = 0) -> list[str]:
    """Those of a stand-in."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = next(node for node in ast.walk(tree) if isinstance(node, _Function))
    return parameters(node, skip=skip)


def _find(trees: dict[str, ast.Module], module: str, name: str, seen: frozenset[str] = frozenset()) -> Any:
    """The definition of `module.name`, through assignments and imports."""
    if module not in trees or f"{module}.{name}" in seen:
        return None
    seen |= {f"{module}.{name}"}
    found: Any = None
    for node in _statements(trees[module]):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant() | ast.Call()) if target == name:
                found = ast.Constant  # bound by a compiled module, or made when the package is imported: no signature
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined) if defined == name:
                found = node
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=other)) if target == name:
                found = _find(trees, module, other, seen) or found
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Attribute(value=ast.Name(id=other), attr="apply")):
                if target == name:
                    found = _find(trees, module, other, seen) or found
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Attribute(attr=attribute)) if target == name:
                found = _find(trees, module, attribute, seen) or found  # torch.ops.namespace.operator
            case ast.ImportFrom(module=other, names=imported, level=level):
                for one in imported:
                    if (one.asname or one.name) == name:
                        base = module.rsplit(".", level)[0] if level and module.count(".") >= level else module
                        where = f"{base}.{other}" if level and other else (base if level else other or "")
                        found = _find(trees, where, one.name, seen) or _find(trees, f"{module}.{other}", one.name, seen)
    return found


def differences(package: str, trees: dict[str, ast.Module]) -> Iterator[str]:
    """One line for each stand-in that is called otherwise than what it stands for."""
    for module, held in sorted(registry.modules(package).items()):
        for name, one in sorted(held.items()):
            real = _find(trees, module, name)
            if real == ast.Constant:
                continue
            if real is None:
                yield f"{module}.{name}: not in the source"
            elif isinstance(real, ast.ClassDef) and isinstance(one.value, type):
                yield from _methods(f"{module}.{name}", real, one.value)
            elif callable(one.value) and not isinstance(one.value, type):
                skip = 0
                if isinstance(real, ast.ClassDef):  # its `apply`
                    real, skip = next(node for node in real.body if getattr(node, "name", "") == "forward"), 1
                theirs, ours = parameters(real, skip=skip), own_parameters(one.value)
                if theirs != ours:
                    yield f"{module}.{name}: ({', '.join(theirs)}) there, ({', '.join(ours)}) here"
            else:
                yield f"{module}.{name}: a class on one side"


def _methods(name: str, real: ast.ClassDef, ours: type) -> Iterator[str]:
    theirs = {node.name: node for node in real.body if isinstance(node, _Function)}
    for method, function in vars(ours).items():
        plain = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
        public = method in ("__init__", "forward") or not method.startswith("_")
        if not public or not inspect.isfunction(plain) or method not in theirs:
            continue
        there, here = parameters(theirs[method]), own_parameters(plain)
        if there[1:] != here[1:]:
            yield f"{name}.{method}: ({', '.join(there)}) there, ({', '.join(here)}) here"


def written(package: str, trees: dict[str, ast.Module]) -> str:
    """The list of names."""
    lines = (f"{module}: {' '.join(sorted(public_names(package, tree)))}" for module, tree in trees.items())
    return "".join(f"{line.strip()}\n" for line in lines)


def main(package: str, folder: str, *options: str) -> int:
    """Print what differs; the exit code says whether anything does."""
    trees = modules(package, Path(folder))
    if "--write" in options:
        (NAMES / f"{package}.txt").write_text(written(package, trees), encoding="utf-8")
    found = list(differences(package, trees))
    number = sum(map(len, registry.modules(package).values()))
    print(*found, f"{package}: {number} names stood in for, {len(found)} differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
