"""A fix is one file, with its entry in the table: nothing else in memprof lists fixes, and all reads that."""

import ast
import dataclasses
import importlib.util
import pkgutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memprof
import memprof.fixes
from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.findings.evidence import suggest_fixes
from memprof.fixes.catalog import ALL_FIXES, EXPANDABLE_SEGMENTS, FIXES, Fix, list_active_fixes, list_ladder, list_tiers
from memprof.fixes.catalog.table import read_fixes, sort_fixes
from memprof.fixes.chosen import edit_spec, parse_fixes
from memprof.fixes.script_fixes import ScriptFixes
from memprof.fixes.spec_fixes import apply_fixes
from memprof.flows.account import analyze
from memprof.flows.gpus import make_device_facts, resolve_settings
from memprof.flows.ladder.build import build_ladder
from memprof.flows.ladder.search import search_fixes
from memprof.spec import TargetSpec
from memprof.trace.facts import Facts
from tests.unit.fixes.models import MadeUpRuns
from tests.unit.traces import TraceBuilder

PACKAGE = Path(memprof.__file__).parent
ROOT = PACKAGE.parent
# A dtype's, an adapter's, a goal's, an option's name; rows that go through a model together.
ALSO_OTHER_WORDS = {"compile", "bfloat16", "float16", "lora", "qlora", "freeze", "micro-batch"}
MAY_NAME_THEM = {
    "flows/recommend/plans.py": "four fixes are dimensions of its search: each is a field of a plan",
    "estimate/methods.py": "a term of the closed form, with an option of its own",
    "doctor/room.py": "the part of the tensors that a fix frees at most, where no run is known",
    "cli/mcp_tools.py": "names of options",
    "__init__.py": "an example",
}
MAY_NAME_SETTINGS = {
    "fixes/expandable_segments.py": "its entry",
    "allocator/releases.py": "what torch's own message says",
    "spec.py": "an example",
    "cli/analyze.py": "likewise",
    "cli/show.py": "likewise",
}


def _implementation(fix: Fix) -> Path:
    return ROOT / (fix.install.partition(":")[0].replace(".", "/") + ".py")


def test_no_other_file_names_fixes():
    names = set(FIXES) - ALSO_OTHER_WORDS
    own = {name: _implementation(fix) for name, fix in FIXES.items()}
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        where = str(file.relative_to(PACKAGE))
        if where.startswith("fixes/catalog/") or where in MAY_NAME_THEM:
            continue
        text = file.read_text(encoding="utf-8")
        if not any(name in text for name in names):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        marks = [mark for node in nodes if isinstance(node, ast.FunctionDef) for mark in node.decorator_list]
        entries = {part for mark in marks for part in ast.walk(mark)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in entries:
                name = node.value.partition("=")[0]
                if name in names and own[name] != file:
                    found.append(f"{where}:{node.lineno}: {node.value}")
    assert not found, found


def test_no_other_file_spells_a_setting():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text))) if EXPANDABLE_SEGMENTS in text else []
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        if any(EXPANDABLE_SEGMENTS in str(text) for text in texts):
            found.add(str(file.relative_to(PACKAGE)))
    assert EXPANDABLE_SEGMENTS == "expandable_segments:True" and found == set(MAY_NAME_SETTINGS)


def test_what_an_entry_names_is_there():
    for name in FIXES:
        fix = FIXES[name]
        assert callable(pkgutil.resolve_name(fix.install))
        assert not fix.edit or callable(pkgutil.resolve_name(fix.edit))
        fields = {field.name for field in dataclasses.fields(TargetSpec)}
        assert {*fix.edits, *fix.useless_if} <= fields
        assert all(other in FIXES for other in fix.conflicts)
        assert not (fix.edits and fix.edit)
        # A set that is searched has a place for each of its members.
        assert bool(fix.tiers) == bool(fix.search_order)


def test_places_are_taken_once():
    for places in ("ladder_order", "script_order"):
        taken = [getattr(fix, places) for fix in FIXES.values() if getattr(fix, places) is not None]
        assert len(taken) == len(set(taken)) > 5
    for problem in {problem for fix in FIXES.values() for problem in fix.helps}:
        taken = [fix.helps[problem] for fix in FIXES.values() if problem in fix.helps]
        assert len(taken) == len(set(taken))


TOY = """
from torch import nn

from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import ALL_TIERS, Numerics, Fix

@Fix(
    name="toy", order=5, numerics=Numerics.EXACT, saves=("inputs",), changes="a layer is told", cost="none",
    options={"word": "what it is told"}, main_option="word", main_type=str,
    ladder_order=5, script_order=5, search_order=5, tiers=ALL_TIERS, helps={"fragmentation": 5},
)
def install(model: nn.Module, changes: Changes, *, word: str = "yes") -> None:
    changes.set_attribute(model, "told", word)
    changes.note(f"told {word}")
"""


def test_an_entry_that_is_written_otherwise_is_read_too(tmp_path: Path) -> None:
    found = []
    for form in (TOY, TOY.replace(")\ndef install", ")\n@another\ndef install"), TOY.replace("\n)\ndef", ")\ndef")):
        (tmp_path / "toy.py").write_text(form)
        found += read_fixes(tmp_path)
    assert found[0] == found[1] == found[2] and found[0].install == "memprof.fixes.toy:install"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fix]:
    """A file more in `memprof/fixes`."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(memprof.fixes, "__path__", [*memprof.fixes.__path__, str(tmp_path)])
    (entry,) = read_fixes(tmp_path)
    for table in (FIXES, ALL_FIXES):
        monkeypatch.setitem(table, entry.name, entry)
    yield entry
    sys.modules.pop("memprof.fixes.toy", None)


class _Runs(MadeUpRuns):
    """With the toy a run takes a tenth of the memory, and fits."""

    def _run(self, fixes):
        b = TraceBuilder()
        b.new((1 << 28) if fixes else 10 << 28)  # float32
        gpu = find_gpu("rtx-4090")
        device = dataclasses.replace(make_device_facts(gpu), usable_bytes=8 << 30, total_bytes=(8 << 30) + (1 << 29))
        b.trace.facts = Facts(command="profile", device=device, allocator=resolve_settings("").facts)
        return b.trace, analyze(b.trace)

    def check_fixes(self, fixes):
        spec = TargetSpec(model="gpt2")
        for fix in fixes:
            spec = edit_spec(spec, fix, {})


def test_one_file_is_all_that_a_fix_takes(toy, monkeypatch):
    (fix,) = parse_fixes("toy=no")
    spec = edit_spec(TargetSpec(model="gpt2"), fix, {})
    assert spec == TargetSpec(model="gpt2", fixes=("toy=no",)) and list_active_fixes(spec) == ["toy"]
    assert list_ladder()[0] == "toy" and list_tiers()[0][1][0] == "toy"
    b = TraceBuilder()
    b.new(1 << 20)
    assert suggest_fixes(b.context(), "fragmentation") == ("toy", "expandable-segments")
    assert suggest_fixes(b.context(spec=spec), "fragmentation") == ("expandable-segments",)
    _, document = build_ladder(_Runs())
    assert [rung.added for rung in document.ladder] == [None, "toy"] and document.ladder[-1].fits
    monkeypatch.setattr(_Runs, "check_fixes", lambda self, fixes: None)
    _, document = search_fixes(_Runs(), [("the same numbers", ["toy"])])
    assert document.ladder[-1].fixes == ("toy",) and "toy is enough" in document.ladder_reason


def test_it_changes_models_wherever_fixes_do(toy):
    model = nn.Linear(2, 2)
    with memprof.apply(model, "toy", word="maybe") as applied:
        assert model.told == "maybe" and [str(change) for change in applied.changes] == ["toy: told maybe"]
    assert not hasattr(model, "told")
    apply_fixes(model, TargetSpec(model="gpt2", fixes=("toy=no",)), lambda parameters: None, "cpu")
    assert model.told == "no"
    other, switch = nn.Linear(2, 2), ScriptFixes(["toy"])
    switch.before_forward(other, [])
    assert other.told == "yes" and switch.changes == ["toy: told yes"]


def test_without_gradients_it_changes_models_that_no_optimizer_has(toy):
    model, switch = nn.Linear(2, 2), ScriptFixes(["toy"])
    with torch.no_grad():
        switch.before_forward(model, [torch.optim.SGD(model.parameters())])
        assert not switch.changes  # it is trained, and this is an evaluation before
        switch.before_forward(model, [])
    assert switch.changes == ["toy: told yes"]
    switch.before_forward(model, [])
    assert len(switch.changes) == 1


def test_one_for_training_alone_changes_no_inference(toy, monkeypatch):
    monkeypatch.setitem(FIXES, "toy", dataclasses.replace(toy, training_only=True))
    model, switch = nn.Linear(2, 2), ScriptFixes(["toy"])
    with torch.no_grad():
        switch.before_forward(model, [])
    assert not switch.changes
    switch.before_forward(model, [])
    assert switch.changes == ["toy: told yes"]


def test_the_documentation_has_it_too(toy):
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert "| `toy` | a layer is told | none | exact |" in generate.table_of_fixes()


@pytest.mark.parametrize("change", [{"name": "other"}, {"order": 6}])
def test_two_fixes_have_two_names_and_places(toy, change):
    with pytest.raises(ValueError, match="two fixes"):
        sort_fixes([toy, dataclasses.replace(toy, **change)])


def test_a_package_in_a_zip_file_has_them_and_one_without_sources_says_so(tmp_path):
    folder = Path(memprof.fixes.__file__).parent
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as package:
        package.writestr("compiled/__init__.pyc", b"")
        for file in folder.glob("*.py"):
            package.write(file, f"fixes/{file.name}")
    root = zipfile.Path(tmp_path / "package.zip")
    found = sort_fixes(read_fixes(root / "fixes"))
    assert {name: one.install for name, one in found.items()} == {name: one.install for name, one in FIXES.items()}
    with pytest.raises(MemprofError, match="without its source files"):
        sort_fixes(read_fixes(root / "compiled"))
