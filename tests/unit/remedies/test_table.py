"""A remedy is one entry of the table: nothing else in memprof lists remedies, and all that knows them reads it."""

import ast
import dataclasses
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import memprof
from memprof.catalog import find_gpu
from memprof.findings.evidence import would_help
from memprof.flows.account import analyze
from memprof.flows.cards import allocator_settings, device_facts
from memprof.flows.ladder.climb import climb
from memprof.flows.ladder.runs import Runs
from memprof.flows.ladder.search import search
from memprof.remedies.fixes import edit_spec, parse_fixes
from memprof.remedy_catalog import REMEDIES, Numerics, Remedy, Tier, in_force, ladder, tiers
from memprof.spec import TargetSpec
from memprof.trace.facts import Facts
from tests.unit.findings.builder import Builder

PACKAGE = Path(memprof.__file__).parent
ROOT = PACKAGE.parent
ALSO_OTHER_WORDS = {"bfloat16", "float16", "lora", "qlora", "freeze", "micro-batch"}
"""A dtype's, an adapter's, a goal's, an option's name; rows that go through a model together."""
MAY_NAME_THEM = {
    "flows/recommend/plans.py": "four remedies are dimensions of its search: each is a field of a plan",
    "__init__.py": "an example",
}


def _implementation(remedy: Remedy) -> Path:
    return ROOT / (remedy.install.partition(":")[0].replace(".", "/") + ".py")


def test_no_other_file_names_remedies():
    names = set(REMEDIES) - ALSO_OTHER_WORDS
    own = {name: _implementation(remedy) for name, remedy in REMEDIES.items()}
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        where = str(file.relative_to(PACKAGE))
        if where.startswith("remedy_catalog/") or where in MAY_NAME_THEM:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.partition("=")[0]
                if name in names and own[name] != file:
                    found.append(f"{where}:{node.lineno}: {node.value}")
    assert not found, found


@pytest.mark.parametrize("name", REMEDIES)
def test_what_an_entry_names_is_there(name):
    remedy = REMEDIES[name]
    assert callable(pkgutil.resolve_name(remedy.install))
    assert not remedy.edit or callable(pkgutil.resolve_name(remedy.edit))
    fields = {field.name for field in dataclasses.fields(TargetSpec)}
    assert {*remedy.edits, *remedy.useless_if} <= fields
    assert all(other in REMEDIES for other in remedy.conflicts)
    assert not (remedy.edits and remedy.edit)
    # A set that is searched has a place for each of its members.
    assert bool(remedy.tiers) == bool(remedy.search)


def test_places_are_taken_once():
    for places in ("ladder", "outside"):
        taken = [getattr(remedy, places) for remedy in REMEDIES.values() if getattr(remedy, places) is not None]
        assert len(taken) == len(set(taken)) > 5
    for problem in {problem for remedy in REMEDIES.values() for problem in remedy.helps}:
        taken = [remedy.helps[problem] for remedy in REMEDIES.values() if problem in remedy.helps]
        assert len(taken) == len(set(taken))


TOY = Remedy(
    name="toy",
    numerics=Numerics.EXACT,
    saves=("inputs",),
    changes="steps are fewer",
    cost="none",
    edits={"steps": 1},
    ladder=5,
    search=5,
    tiers=(Tier.EXACT,),
    helps={"fragmentation": 5},
)


class _Runs(Runs):
    """With the toy a run takes a tenth of the memory, and fits."""

    def __init__(self) -> None:
        super().__init__(find_gpu("rtx-4090"))

    def _run(self, fixes):
        b = Builder()
        b.new((1 << 28) if fixes else 10 << 28)  # float32
        gpu = find_gpu("rtx-4090")
        device = dataclasses.replace(device_facts(gpu), usable_bytes=8 << 30, total_bytes=(8 << 30) + (1 << 29))
        b.trace.facts = Facts(command="profile", device=device, allocator=allocator_settings("").facts)
        return b.trace, analyze(b.trace)

    def _alloc_conf(self, fixes):
        return None

    def check(self, fixes):
        spec = TargetSpec(model="gpt2")
        for fix in fixes:
            spec = edit_spec(spec, fix, {})

    def on_now(self):
        return frozenset()


def test_an_entry_is_all_that_a_spec_edit_takes(monkeypatch):
    monkeypatch.setitem(REMEDIES, TOY.name, TOY)
    (fix,) = parse_fixes("toy")
    spec = edit_spec(TargetSpec(model="gpt2"), fix, {})
    assert spec == TargetSpec(model="gpt2", steps=1)
    assert in_force(spec) == ["toy"]
    assert ladder()[0] == "toy" and tiers()[0][1][0] == "toy"
    b = Builder()
    b.new(1 << 20)
    assert would_help(b.context(), "fragmentation") == ("toy", "expandable-segments")
    assert would_help(b.context(spec=spec), "fragmentation") == ("expandable-segments",)
    _, document = climb(_Runs())
    assert [rung.added for rung in document.ladder] == [None, "toy"] and document.ladder[-1].fits
    monkeypatch.setattr(_Runs, "check", lambda self, fixes: None)
    _, document = search(_Runs(), [("the same numbers", ["toy"])])
    assert document.ladder[-1].remedies == ("toy",) and "toy is enough" in document.ladder_reason


def test_the_documentation_has_it_too(monkeypatch):
    monkeypatch.setitem(REMEDIES, TOY.name, TOY)
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert "| `toy` | steps are fewer | none | exact |" in generate.table_of_remedies()
