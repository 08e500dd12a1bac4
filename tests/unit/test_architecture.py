"""The layering holds, and what must start fast imports nothing heavy."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "pandas", "numpy")

HELP = """
from memprof.cli.main import run
try:
    run(["--help"])
except SystemExit as done:
    assert not done.code, done.code
"""


SILENT = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)"


def _modules(code: str) -> set[str]:
    """Everything that a fresh interpreter has imported after `code`."""
    report = "\nimport json, sys\nsys.stderr.write(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


def _imported(code: str) -> set[str]:
    """The same, top-level packages alone."""
    return {name.partition(".")[0] for name in _modules(code)}


IMPORTED = (
    "memprof", "memprof.flows.profile", "memprof.device.catalog", "memprof.workload.catalog", "memprof.trace.io",
    "memprof.ledger.ledger", "memprof.findings", "memprof.fixes.catalog", "memprof.allocator",
    "memprof.trace.snapshot_file", "memprof.report.documents.report", "memprof.device.nvml",
    "memprof.device.environment", "memprof.report.terminal.monitor", "memprof.flows.compare", "memprof.pytest_plugin",
    "memprof.report.documents.estimate", "memprof.report.terminal.estimate",
)  # fmt: skip
COMMANDS = (
    "--help", "models", "gpus", "profile --help", "verify --help", "compare --help", "recipes ls", "monitor",
    "estimate --params 1.2B --dtype float16 --explain",
)  # fmt: skip


def test_imports_nothing_heavy():
    """One after the other in one process: whatever one imports is there at the end."""
    code = [f"import {name}" for name in IMPORTED] + [
        HELP.replace('["--help"]', repr(words.split())).replace(
            "not done.code",
            "done.code in (0, 1)" if words == "monitor" else "not done.code",  # 1: there is no driver
        )
        for words in COMMANDS
    ]
    report = f"\nheavy = [name for name in {HEAVY} if name in sys.modules]\nassert not heavy, heavy"
    imported = _imported("import sys\n" + "".join(f"{each}{report}\n" for each in code))
    assert "memprof" in imported and not imported & set(HEAVY)


def _rooms(modules: set[str]) -> set[str]:
    """What of memprof is there, its command line apart: rooms, and files beside them."""
    names = {name for name in modules if name.startswith("memprof.") and not name.startswith("memprof.cli")}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


# What options are made of.
BASE = {
    "errors",
    "run_spec",
    "spec",
    "units",
    "version",
    "device.ceiling",
    "device.host",
    "estimate.methods",
    "estimate.options",
}


def test_help_imports_little():
    """No room beside what options are made of, and no library that takes longer than it."""
    modules = _modules(HELP)
    assert _rooms(modules) == {f"memprof.{name}" for name in BASE}
    assert not modules & {"pydantic", "rich", "tomllib", "argparse", "importlib.metadata", "asyncio", "pynvml"}


def test_a_command_imports_no_other():
    """Nor does `estimate` anything that runs, replays or measures."""
    modules = _modules(HELP.replace('"--help"', '"estimate", "--params", "1.2B", "--dtype", "float16"'))
    commands = {path.stem for path in (ROOT / "memprof/cli").glob("*.py") if "EXAMPLES" in path.read_text()} - {"main"}
    assert {name for name in commands if f"memprof.cli.{name}" in modules} == {"estimate"}
    rooms = {name.split(".")[1] for name in _rooms(modules)}
    assert rooms == {name.partition(".")[0] for name in BASE} | {"estimate", "report", "trace", "workload"}
    assert {name for name in _rooms(modules) if ".report." in name} == {
        "memprof.report.documents.estimate", "memprof.report.terminal.estimate", "memprof.report.terminal.layout",
    }  # fmt: skip
    assert not modules & {"rich", "argparse", "asyncio", "pynvml"}


@pytest.mark.slow
def test_an_eager_profile_imports_no_compiler():
    """Beyond what transformers' own modules do, nor a library that takes no part."""
    profile = '"profile", "--model", "gpt2", "--context-length", "64", "--no-cache", "--quiet"'
    _check_eager(_modules(SILENT + HELP.replace('"--help"', profile)))


@pytest.mark.nightly
@pytest.mark.slow
def test_nor_does_a_search_over_eager_runs():
    words = '"recommend", "--model", "gpt2", "--mode", "inference", "--context-length", "64", "--gpu-vram", "8"'
    search = HELP.replace('"--help"', f'{words}, "--no-cache", "--quiet"')
    _check_eager(_modules(f"{SILENT}; os.environ['MEMPROF_PROCESSES'] = '1'{search}"))


def _check_eager(modules):
    assert not modules & {"torch._inductor.compile_fx", "pandas", "sklearn", "torchvision", "bitsandbytes", "peft"}


def test_the_command_line_uses_no_private_name_of_typer():
    """Nor click, of which typer has a copy of its own that another release may change."""
    wrong = []
    for path in (ROOT / "memprof/cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = [f"{getattr(node, 'module', '')}.{name.name}.".removeprefix(".") for name in node.names]
                of_typer = [name for name in imported if name.startswith(("click.", "typer."))]
                wrong += [(path.name, name) for name in of_typer if name.startswith("click.") or "._" in name]
            elif isinstance(node, ast.Attribute) and not ast.unparse(node.value).startswith(("self", "os", "_parent")):
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                wrong += [(path.name, node.attr)] if is_private or node.attr in ("__bases__", "make_parser") else []
    assert not wrong


def test_heavy_imports_would_be_noticed():
    assert "numpy" in _imported("import numpy")


def test_imports_point_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed beside this Python: pip install -e '.[dev]'")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _imported_at_load(code: ast.AST, modules: Mapping[str, Path]) -> set[str]:
    """Which of `modules` a module imports when it is loaded: not in functions, and not for types alone."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{name.name}" for name in node.names}
            found |= inside & modules.keys() or {str(node.module)} & modules.keys()
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names} & modules.keys()
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_for_types(node):
            found |= _imported_at_load(node, modules)
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_no_module_is_loaded_in_a_circle():
    found = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "memprof").rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for path, name in found.items()}
    loads = {
        name: _imported_at_load(ast.parse(path.read_text(encoding="utf-8")), modules) for name, path in modules.items()
    }
    assert len(list(graphlib.TopologicalSorter(loads).static_order())) == len(modules) > 200


# -- who replaces what ------------------------------------------------------------------------------------------------

_OF_THE_PROCESS = {"sys"}  # Its own state, which a program sets: arguments, streams, the hook for what nobody catches.
_STANDS_ALONE = "memprof/monitor/probe/"  # What runs in other processes, where there is no memprof.


def _foreign(tree: ast.Module) -> set[str]:
    """Names in a file that are modules, classes or functions of others."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.asname or name.name.partition(".")[0] for name in node.names if "memprof" not in name.name}
        elif isinstance(node, ast.ImportFrom) and "memprof" not in (node.module or ""):
            found |= {name.asname or name.name for name in node.names}
    return found - _OF_THE_PROCESS


def _replaced(tree: ast.Module) -> list[str]:
    """Attributes of these that the file sets or deletes."""
    foreign = _foreign(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner: ast.expr = node
            while isinstance(owner, (ast.Attribute, ast.Subscript)):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in foreign:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            owner = node.args[0]
            while isinstance(owner, (ast.Attribute, ast.Subscript)):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in foreign:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            found.append(ast.unparse(node))
    return found


def test_attributes_of_others_are_replaced_by_a_patch_set_alone() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {what}"
        for file in sorted((ROOT / "memprof").rglob("*.py"))
        if not str(file.relative_to(ROOT)).startswith((_STANDS_ALONE, "memprof/patching.py"))
        for what in _replaced(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "line", ["torch.empty = None", "del torch.empty", "torch.nn.Module.x = 1", "setattr(torch, 'empty', None)"]
)
def test_a_replacement_by_hand_is_seen(line: str) -> None:
    assert _replaced(ast.parse(f"import torch\n{line}"))


def test_the_virtual_gpu_is_a_loop_over_its_parts() -> None:
    tree = ast.parse((ROOT / "memprof/virtual/gpu.py").read_text(encoding="utf-8"))
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "memprof" in (node.module or "")]
    assert len(own) <= 15


def test_the_virtual_gpu_knows_no_stub() -> None:
    for file in (ROOT / "memprof/virtual").rglob("*.py"):
        assert "stubs." not in file.read_text(encoding="utf-8"), file
