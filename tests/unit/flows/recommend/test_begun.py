"""A model that is built once for many runs: each is the run that would have been made by itself."""

import dataclasses

import pytest

from memprof.flows.profile import happened
from memprof.flows.recommend.begun import Begun, Run, requests_of
from memprof.flows.recommend.plans import Goal, Plan, base_spec
from memprof.spec import TargetSpec
from tests.lanes import by_day

BASE = TargetSpec(model="pythia-70m", context_length=32)
LORA = Plan(Goal.LORA, "half", "bfloat16", "adamw").leanest().spec(base_spec(Goal.LORA, BASE), 1)
QUANTIZED = Plan(Goal.INFER, "nf4", "bfloat16").spec(base_spec(Goal.INFER, BASE), 1)


def traced(run, trace):
    return trace


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    found = Begun(traced)
    found.is_warm = True
    yield found
    found.close()


def fields(trace):
    """Of a run, but for who asked it and when."""
    return {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}


@pytest.mark.parametrize("spec", by_day([LORA, QUANTIZED], LORA), ids=["lora", "quantized"])
def test_every_run_is_the_whole_run(begun, spec):
    others = [spec.edit(context_length=48), spec.edit(batch_size=2)]
    if spec is LORA:
        others.append(spec.edit(gradient_accumulation=2, zero_grad="zero"))
    by_themselves = {other: happened(other) for other in (spec, *others)}
    for other, alone in by_themselves.items():
        found, requests = begun.ask(Run(other, 1, True))
        assert fields(found) == fields(alone)
        assert fields(requests) == fields(requests_of(alone))
    assert len(begun._models) == 1


def test_what_is_built_otherwise_begins_by_itself(begun):
    assert begun.begin(LORA) is begun.begin(LORA.edit(context_length=64))
    assert begun.begin(LORA.edit(dtype="float32")) is not begun.begin(LORA)


@pytest.mark.parametrize(
    "change",
    [{"device": "cpu"}, {"parallel": "ddp", "gpus": 2}, {"model": "factory.py:make"}, {"compile": True}],
    ids=["measured", "several", "own code", "compiled"],
)
def test_what_may_not_be_shared_is_run_whole(begun, change):
    assert begun.ask(Run(LORA.edit(fixes=(), **change), 1, False)) is None and not begun._models


def test_one_process_forks_none(begun, monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "1")
    assert begun.begin(LORA) is None
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    begun.is_warm = False
    assert begun.begin(LORA) is None
