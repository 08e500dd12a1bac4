"""Stubs held against the sources of what they stand for: names of parameters, their order, their defaults.

    python -m tests.accuracy.stub_signatures flash_attn FOLDER           # what differs
    python -m tests.accuracy.stub_signatures flash_attn FOLDER --write   # and the lists that are kept

FOLDER is the package's own folder (or its one file) in a checkout of what memprof/stubs/packages.py names:
`git clone --branch v2.8.3 https://github.com/Dao-AILab/flash-attention`, then flash-attention/flash_attn. For
torchvision and torchaudio it is the installed package, or a checkout: operators are read in C++, in Python that gives
their shapes, and in compiled libraries.

Two lists are kept: the public names of each module (memprof/stubs/names), and the parameters of all that is
replaced by a stub, beside this file. The unit tests hold stubs against the second, so without any source.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memprof.stubs import registry, torchaudio, torchvision
from memprof.stubs.packages import INSTALLED_PACKAGES, PACKAGES

OPERATORS = {"torchvision": torchvision.SCHEMAS, "torchaudio": torchaudio.SCHEMAS}
PARAMETERS = Path(__file__).with_suffix(".txt")
# Of a name that its package binds to what it makes then: there are no parameters to read.
IMPORTED = "made when it is imported"
NAMES = Path(registry.__file__).parent / "names"
# Folders without what a training script imports.
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
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: str, at: Path) -> dict[str, ast.Module]:
    """Module -> its source, parsed."""
    if at.suffix == ".cpp":  # a compiled module: the names that it binds
        text = re.sub(r"//.*", "", at.read_text(encoding="utf-8"))
        bound = re.findall(r'm\.def\(\s*"(\w+)",\s*&(\w+)', text)
        return {package: ast.parse("\n".join(_declared(text, *names) for names in bound))}
    if at.is_file():
        return {package: ast.parse(at.read_text(encoding="utf-8"))}
    found = {}
    for file in sorted(at.rglob("*.py")):
        parts = file.relative_to(at).with_suffix("").parts
        if not set(parts) & set(LEFT_OUT) and not any(part.startswith("test_") for part in parts):
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def _declared(text: str, name: str, function: str) -> str:
    """A function of C++ as one of Python: what it takes by position."""
    found = re.search(rf"\b{function}\(([^)]*)\)\s*[;{{]", text)
    if found is None:
        return f"{name} = None"
    names = [parameter.split()[-1].lstrip("&*") for parameter in found[1].split(",") if parameter.strip()]
    names = [name.replace("=false", "=False").replace("=true", "=True") for name in names]
    return f"def {name}({', '.join(names)}): ..."


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
    if hasattr(function, "__signature__"):
        return list(inspect.signature(function).parameters)
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


def own_rows(package: str) -> dict[str, str]:
    """What stands in, by its name: its parameters; of a class those of its methods."""
    if package in OPERATORS:
        return {f"{package}::{name}": _of_schema(schema) for name, schema in OPERATORS[package].items()}
    found: dict[str, str] = {}
    for module, held in sorted(registry.find_modules(package).items()):
        for name, one in sorted(held.items()):
            found[f"{module}.{name}"] = "class" if isinstance(one.value, type) else IMPORTED
            if isinstance(one.value, type):
                found |= {f"{module}.{name}.{method}": text for method, text in _methods(one.value)}
            elif inspect.isfunction(one.value):
                found[f"{module}.{name}"] = ", ".join(own_parameters(one.value))
    return found


def _methods(ours: type) -> Iterator[tuple[str, str]]:
    own = [vars(kind) for kind in reversed(ours.__mro__) if "torch" not in kind.__module__.split(".")]
    for method, function in {name: value for each in own for name, value in each.items()}.items():
        plain = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
        written_out = inspect.isfunction(plain) and not plain.__code__.co_filename.startswith("<")  # else a dataclass's
        if written_out and (method in ("__init__", "forward") or not method.startswith("_")):
            yield method, ", ".join(own_parameters(plain, skip=1))


def real_rows(package: str, trees: dict[str, ast.Module], names: Iterable[str]) -> dict[str, str]:
    """The same of the real package, as far as it has these names."""
    found: dict[str, str] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        real = _find(trees, module, last)
        if real == ast.Constant:
            found[name] = IMPORTED
        elif isinstance(real, ast.ClassDef):
            found[name] = "class"
            methods = {node.name: node for node in real.body if isinstance(node, _Function)}
            found |= {f"{name}.{method}": ", ".join(parameters(node, skip=1)) for method, node in methods.items()}
            if "apply" not in methods and "forward" in methods and "Function" in map(_last, real.bases):
                found[name] = found[f"{name}.forward"]
        elif real is not None:
            found[name] = ", ".join(parameters(real))
    return found


def _last(base: ast.expr) -> str:
    return ast.unparse(base).rpartition(".")[2]


def operators(package: str, at: Path, own: dict[str, str]) -> dict[str, str]:
    """Names of what each operator takes: as C++ defines it, or else as a library has it, or Python that gives shapes.

    Libraries keep texts in pieces, and that Python has names of its own: of these two one reading has to agree.
    """
    schema = re.compile(rf"(?:{package}::)?(\w+)(\((?:[^()]|\(\w!\))*\)) ?-> ")
    readings: dict[str, list[str]] = {}
    for library in sorted(at.rglob("*.so")):
        for name, taken in schema.findall(library.read_bytes().decode("latin-1")):
            readings.setdefault(f"{package}::{name}", []).append(_of_schema(taken))
    for file in sorted(at.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                match decorator:
                    case ast.Call(func=function, args=[ast.Constant(value=str(name))]) if _last(function) in _SHAPES:
                        name = f"{package}::{name.removeprefix(package + '::')}"
                        readings.setdefault(name, []).append(", ".join(parameters(node)))
    found = {name: own[name] if own.get(name) in each else each[0] for name, each in readings.items()}
    for file in sorted(at.rglob("*.cpp")):
        text = re.sub(r'"\s*"', "", file.read_text(encoding="utf-8"))
        found |= {f"{package}::{name}": _of_schema(taken) for name, taken in schema.findall(text)}
    return found


_SHAPES = ("register_meta", "register_fake")


def _of_schema(schema: str) -> str:
    """The names in `(Tensor logits, int blank) -> Tensor`."""
    inside = re.sub(r"\(\w!\)", "", schema).partition("(")[2].partition(")")[0]
    return ", ".join(part.split()[-1] for part in inside.split(",") if part.strip())


def differences(own: dict[str, str], real: dict[str, str]) -> Iterator[str]:
    """One line for each stub that is called otherwise than what it stands for."""
    for name, ours in own.items():
        theirs = real.get(name)
        if theirs == "class" and ours not in ("class", IMPORTED):  # a function that makes what the class makes
            theirs = real.get(f"{name}.__init__", theirs)
        elif ours == "class" and theirs not in (None, "class", IMPORTED):  # and the other way about
            ours = own.get(f"{name}.__init__", ours)
        if theirs is None:
            if own.get(name.rpartition(".")[0]) != "class":  # a method of ours alone is nobody's
                yield f"{name}: not in the source"
        elif IMPORTED in (theirs, ours):
            continue
        elif "class" in (theirs, ours) and theirs != ours:
            yield f"{name}: a class on one side"
        elif theirs != ours:
            yield f"{name}: ({theirs}) there, ({ours}) here"


def kept() -> dict[str, dict[str, str]]:
    """The list beside this file: package -> name -> parameters there."""
    found: dict[str, dict[str, str]] = {}
    for line in PARAMETERS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = found.setdefault(line[1:].split()[0], {})
        elif line and not line.startswith("#"):
            name, _, taken = line.partition(": ")
            rows[name] = "" if taken == "-" else taken
    return found


def keep(package: str, own: dict[str, str], real: dict[str, str]) -> None:
    """Put a package's rows into it."""
    sources = {one.name: one.source for one in (*PACKAGES.values(), *INSTALLED_PACKAGES)}
    rows = {
        **kept(),
        package: {name: real[name] for name in real if name in own or name.removesuffix(".__init__") in own},
    }
    lines = [
        "# What each function takes for which something stands in, as it was read in its source: made, and compared,",
        "# by tests/accuracy/stub_signatures.py.",
    ]
    for each in sorted(rows):
        lines += ["", f"[{each} {sources[each]}]", *(f"{name}: {taken or '-'}" for name, taken in rows[each].items())]
    PARAMETERS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def written(package: str, trees: dict[str, ast.Module]) -> str:
    lines = (f"{module}: {' '.join(sorted(public_names(package, tree)))}" for module, tree in trees.items())
    return "".join(f"{line.strip()}\n" for line in lines)


def main(package: str, folder: str, *options: str) -> int:
    """Print what differs; the exit code says whether anything does."""
    own = own_rows(package)
    if package in OPERATORS:
        real = operators(package, Path(folder), own)
    else:
        trees = modules(package, Path(folder))
        real = real_rows(package, trees, [name for name in own if own.get(name.rpartition(".")[0]) != "class"])
        if "--write" in options:
            (NAMES / f"{package}.txt").write_text(written(package, trees), encoding="utf-8")
    if "--write" in options:
        keep(package, own, real)
    found = list(differences(own, real))
    number = sum(own.get(name.rpartition(".")[0]) != "class" for name in own)
    print(*found, f"{package}: {number} names replaced by a stub, {len(found)} differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
