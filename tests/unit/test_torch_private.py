"""Private names of torch: in one place, there in the releases that are said, and refused where one is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memprof.errors import MemprofError
from memprof.torch_private import check, names
from memprof.torch_private.names import PrivateName, bind

PACKAGE = Path(__file__).resolve().parents[2] / "memprof"
ROOM = PACKAGE / "torch_private"
NAMED_ALONE = {
    ("cli/options.py", "torch.utils._pytree"),  # loggers
    ("workload/quantization.py", "torch.utils._pytree"),
    ("watch/modules.py", "torch._dynamo"),  # what the modules of its classes begin with
    ("findings/compiled_saved_tensors.py", "torch._functorch.config"),  # what users are told
    ("virtual/integrations/cuda_interop.py", "torch.cuda._compile_kernel"),
    ("virtual/integrations/graph_backwards.py", "torch._functorch"),  # what the modules of its functions begin with
    ("virtual/interchange/checkpoints.py", "torch._tensor"),  # in a pickle of an old release
}
ELSEWHERE = {"monitor/probe/sitecustomize.py"}  # What runs in the program's own Python, without memprof.


def is_private(path: str) -> bool:
    parts = path.split(".")
    hidden = [part for part in parts[1:] if part.startswith("_") and part.strip("_") and not part.endswith("__")]
    return parts[0] == "torch" and parts[1:2] != ["ops"] and bool(hidden)


class Finder(ast.NodeVisitor):
    """Dotted paths from torch in one file, by what its names were imported as or assigned."""

    def __init__(self, tree: ast.AST) -> None:
        self.means: dict[str, str] = {}
        self.found: list[tuple[int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.means |= {alias.asname: alias.name} if alias.asname else {top: top}
                    self.found.append((node.lineno, alias.name))
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.means |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                self.found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if isinstance(targets[0], ast.Name) and value is not None:
                path = self.path(value) or self.by_name(value)
                if path:
                    self.means.setdefault(targets[0].id, path)

    def path(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            owner = self.path(node.value)
            return owner and f"{owner}.{node.attr}"
        return self.means.get(node.id) if isinstance(node, ast.Name) else None

    def by_name(self, node: ast.AST) -> str | None:
        """`getattr(torch._C, "_x")`, and the owner and the name of a patch."""
        parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        owner = self.path(parts[0]) if len(parts) > 1 else None
        if owner and isinstance(parts[1], ast.Constant) and isinstance(parts[1].value, str):
            return f"{owner}.{parts[1].value}"
        return None

    def visit(self, node: ast.AST) -> None:
        path = self.path(node) or self.by_name(node)
        if isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w*)+", str(node.value)):
            path = str(node.value)
        if path:
            self.found.append((node.lineno, path))
        self.generic_visit(node)


def private_names(source: str) -> list[str]:
    tree = ast.parse(source)
    finder = Finder(tree)
    finder.visit(tree)
    return [path for _, path in sorted(set(finder.found)) if is_private(path)]


def files() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.is_relative_to(ROOM) and path.relative_to(PACKAGE).as_posix() not in ELSEWHERE:
            yield path


def test_no_other_file_has_one():
    sources = ((path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in files())
    found = {(name, private) for name, text in sources if "torch" in text for private in private_names(text)}
    assert sorted(found - NAMED_ALONE) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._scatter()", "torch._C._scatter"),
        ("import torch._dynamo.config as c", "torch._dynamo.config"),
        ("from torch import nn\nnn.Module._apply", "torch.nn.Module._apply"),
        ("from torch.overrides import _pop_mode as pop", "torch.overrides._pop_mode"),
        ("import torch\nowner = torch.serialization\nowner._save", "torch.serialization._save"),
        ('import torch.distributed as d\nc = getattr(d, "c10d", None)\nc._world', "torch.distributed.c10d._world"),
        ('import torch\nhasattr(torch._C, "_gather")', "torch._C._gather"),
        ('import torch\ndef f():\n  yield torch.cuda, "_initialized", True', "torch.cuda._initialized"),
        ('import sys\nsys.modules.get("torch._prims")', "torch._prims"),
        ('name = "scan"\nf"torch._higher_order_ops.{name}"', "torch._higher_order_ops."),
    ],
)
def test_they_are_found(source: str, name: str):
    assert name in private_names(source)


def test_operators_and_dunders_are_none():
    assert private_names("import torch\ntorch.ops.aten._softmax, torch.__version__, torch.Tensor.__init__") == []


def test_each_is_in_the_releases_that_are_said():
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    wrong = [
        str(name)
        for name in check.list_expected_names()
        if name.exists() != (release >= tuple(int(part) for part in (name.since or "0").split(".")))
    ]
    assert wrong == []


def test_each_is_named_once():
    paths = [str(name) for name in names.PRIVATE_NAMES if "test" not in str(name)]
    assert len(paths) == len(set(paths))


def test_importing_them_and_looking_for_what_is_needed_imports_little():
    code = (
        "import torch, sys; before = set(sys.modules); from memprof.torch_private.check import check_required_names\n"
        "check_required_names(); print(*sorted(name for name in set(sys.modules) - before if name.startswith('torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "torch.utils._device",
        "torch.distributed._functional_collectives", "torch.distributed._functional_collectives_impl",
    }  # fmt: skip


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module to look in; what is declared is not listed afterwards."""
    monkeypatch.setattr(names, "PRIVATE_NAMES", list(names.PRIVATE_NAMES))
    monkeypatch.setattr(check, "PRIVATE_NAMES", names.PRIVATE_NAMES)
    module = types.ModuleType("test_private")
    module.inner = types.SimpleNamespace(_there=len)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_name_is_looked_up_when_it_is_used(listed: types.ModuleType):
    name, whole = PrivateName("test_private:inner._there"), PrivateName("test_private")
    assert (str(name), str(whole), whole.get()) == ("test_private.inner._there", "test_private", listed)
    assert name.exists()
    assert name([1, 2]) == 2
    setattr(*name.patch(sum))
    assert name.get() is sum
    assert name([1, 2]) == 3


def test_a_name_that_is_missing(listed: types.ModuleType):
    name, lost = PrivateName("test_private:inner._gone"), PrivateName("test_private_gone:_x")
    assert (name.exists(), lost.exists(), name.get(7), lost.get(7)) == (False, False, 7, 7)
    assert name.patch(len) == (listed.inner, "_gone", len)
    with pytest.raises(AttributeError):
        name.get()
    with pytest.raises(ImportError):
        lost.get()


def test_a_module_that_nobody_imported_is_not_imported_to_ask(listed: types.ModuleType):
    assert PrivateName("test_private:inner").is_imported()
    assert not PrivateName("test_private_gone:inner").is_imported()


def test_what_is_bound(listed: types.ModuleType):
    assert bind("test_private:inner._there") is len
    assert bind("test_private:inner._gone", fallback="nothing") is None
    missing = bind("test_private:inner._gone")
    for use in (lambda: missing(), lambda: missing.part, lambda: type("Of", (), {}) and _class_of(missing)):
        with pytest.raises(MemprofError, match=r"value: torch .*: test_private\.inner\._gone\n"):
            use()


def _class_of(base: object) -> type:
    class Of(base):  # type: ignore[misc, valid-type]
        pass

    return Of


def test_a_torch_that_lacks_one_is_refused_where_a_virtual_gpu_is_entered(
    listed: types.ModuleType, monkeypatch: pytest.MonkeyPatch
):
    from memprof.device.catalog import find_gpu
    from memprof.virtual.gpu import VirtualGpu

    PrivateName("test_private:_optional", fallback="nothing")
    PrivateName("test_private:_of_cuda", build="CUDA")
    monkeypatch.setattr(torch.version, "cuda", None)
    check.check_required_names()
    PrivateName("test_private:_first")
    PrivateName("test_private:_second")
    with pytest.raises(MemprofError) as refused, VirtualGpu(find_gpu("rtx-4090")):
        pass
    assert refused.value.line.endswith("test_private._first and 1 more)")
    assert refused.value.problem == "this release of torch lacks private names that memprof needs"
