"""Where a script is stopped that has started an inference engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memprof.script import capture
from memprof.script.capture import _StopRecord
from memprof.script.stop import EndReason, StopRule, StopRun
from memprof.serving.budget import EngineBudget


def make_record(*optimizers: Any, stops: bool = True) -> _StopRecord:
    trace = SimpleNamespace(events=[], storages=[])
    device: Any = SimpleNamespace(phases=SimpleNamespace(optimizers=set(optimizers)), trace=trace)
    return _StopRecord(device, StopRule(2, stops_at_ready=stops), None)


@pytest.fixture(autouse=True)
def code_that_trains(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One item: whether the program's own code has names of training; False."""
    answer = [False]
    monkeypatch.setattr(capture, "has_training", lambda frame: answer[0])
    return answer


def test_a_server_ends_when_its_engine_is_ready():
    with pytest.raises(StopRun) as stop:
        make_record().record_engine(EngineBudget(engine="vllm"))
    assert stop.value.reason is EndReason.READY


def test_a_script_that_trains_beside_its_engine_goes_on():
    record = make_record("adamw")
    record.record_engine(EngineBudget(engine="vllm"))
    assert record.engine is not None
    make_record(stops=False).record_engine(EngineBudget(engine="vllm"))
    make_record().record_engine(EngineBudget(engine="vllm", refusal="No available memory"))


def test_a_script_that_will_train_goes_on(code_that_trains):
    code_that_trains[0] = True
    make_record().record_engine(EngineBudget(engine="vllm"))
