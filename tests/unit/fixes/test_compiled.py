"""compile as a fix: what it saves and costs is its own run's, and where it cannot be, or does harm, that is said."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from torch import nn

import memprof
from memprof.errors import UsageError
from memprof.findings.evidence import is_applicable
from memprof.fixes.catalog import FIXES
from memprof.fixes.chosen import parse_fixes
from memprof.flows.account import analyze
from memprof.flows.ladder.build import build_ladder
from memprof.flows.ladder.runs import SpecRuns, apply_fixes
from memprof.report.terminal.console import to_text
from memprof.report.terminal.ladder import render_ladder
from memprof.spec import TargetSpec
from memprof.trace.events import CompileStats
from tests.unit.fixes.models import MadeUpRuns
from tests.unit.traces import TraceBuilder
from tests.unit.workload.test_compile import MODEL


def _stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
    file = tmp_path_factory.mktemp("model") / "model.py"
    file.write_text(MODEL)
    spec = TargetSpec(model=f"{file}:Model", batch_size=8, context_length=512, gpu="a100-80gb")
    return apply_fixes(SpecRuns(spec), parse_fixes("cpu-offload-activations=1000000,compile"), row_per_fix=True)


@pytest.mark.nightly
def test_what_it_saves_and_costs_is_of_its_own_run(ladder: Any) -> None:
    trace, document = ladder
    before, offloads, compiled = document.ladder
    assert trace.compiling is not None and trace.compiling.kernels > 2
    assert (before.cost.compile_seconds, offloads.cost.compile_seconds) == (None, None)
    assert compiled.cost.compile_seconds == trace.compiling.seconds > 0
    assert compiled.cost.extra_operations == 0 and compiled.cost.step_seconds < offloads.cost.step_seconds
    assert compiled.peak_allocated_bytes < offloads.peak_allocated_bytes
    said = " ".join(to_text(render_ladder(document), 110).split())
    assert f"that took {trace.compiling.seconds:.1f} s on this machine" in said
    assert f"making its {trace.compiling.kernels} kernels takes is not known" in said
    assert compiled.cost.note in said


def test_it_applies_until_something_is_compiled() -> None:
    b = TraceBuilder()
    b.new(1 << 20)
    assert is_applicable(b.context(), FIXES["compile"])
    b.trace.compiling = CompileStats(1.0, 5)
    assert not is_applicable(b.context(), FIXES["compile"])


def test_without_triton_it_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    with memprof.virtual_gpu("a100-80gb"):
        model = _stack().cuda()
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
        with pytest.raises(UsageError, match="Inductor cannot run here") as raised:
            memprof.apply(model, "compile")
    assert (raised.value.value, raised.value.hint) == ("no Triton", "pip install triton")


def test_on_a_cpu_it_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    memprof.apply(_stack(), "compile").undo()
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        monkeypatch.delenv("CXX", raising=False)
        with pytest.raises(UsageError, match="Inductor cannot run here") as raised:
            memprof.apply(_stack(), "compile")
    assert raised.value.value == "no compiler of C++"


@pytest.mark.parametrize("how", ["layer", "fix"])
def test_it_is_on_once(how: str) -> None:
    model = _stack()
    if how == "layer":
        model[1].compile(backend="eager")
    else:
        memprof.apply(model[:], "compile")
    with pytest.raises(UsageError, match="already on"):
        memprof.apply(model, "compile")


class _Runs(MadeUpRuns):
    """With a fix on, a run takes a quarter more."""

    def _run(self, fixes: Any) -> Any:
        b = TraceBuilder()
        b.new((5 if fixes else 4) << 28)  # float32
        return b.trace, analyze(b.trace)


def test_a_fix_that_makes_it_worse_is_left_out_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memprof.flows.ladder.build._order_candidates", lambda run, left: list(left))
    _, document = build_ladder(_Runs(), ["compile"])
    assert [rung.added for rung in document.ladder] == [None]
    assert document.ladder_left_out == {"compile": "takes 1.00 GiB more"}
