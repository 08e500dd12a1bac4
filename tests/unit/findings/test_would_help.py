"""What a finding recommends is not in force, goes with what is, and is of use in the run's mode."""

import pytest

from memprof.spec import Mode, TargetSpec
from memprof.trace.events import PhaseKind
from memprof.units import MIB
from tests.unit.findings.test_rules import head_and_loss, of, training
from tests.unit.traces import TraceBuilder

LOGITS = ("chunked-loss", "vocabulary-cap", "micro-batch")


def large_logits() -> TraceBuilder:
    b = training(8192, 50000)
    head_and_loss(b, 8192, 50000)
    return b


def recommended(identifier: str, b: TraceBuilder | None = None, **known: object) -> tuple[str, ...]:
    (finding,) = of((b or large_logits()).context(600 * MIB, vocab_size=50000, **known), identifier)
    return finding.fixes


@pytest.mark.parametrize(
    ("known", "left_out"),
    [
        ({}, ()),
        ({"spec": TargetSpec(model="x", batch_size=2)}, ()),
        ({"spec": TargetSpec(model="x")}, ("micro-batch",)),  # there is one sequence
        ({"spec": TargetSpec(model="x", batch_size=2, fixes=("chunked-loss=64",))}, ("chunked-loss",)),
        ({"fixes": ("chunked-loss",)}, ("chunked-loss",)),  # of `memprof run --fix`
        ({"fixes": ("chunked-loss=64", "expandable-segments")}, ("chunked-loss",)),
        ({"fixes": ("of-another-release",)}, ()),
        ({"fixes": ("optimizer-in-backward",)}, ("micro-batch",)),  # they do not go together
        ({"spec": TargetSpec(model="x", batch_size=2, mode=Mode.INFERENCE)}, ("chunked-loss",)),
    ],
)
def test_logits(known: dict[str, object], left_out: tuple[str, ...]) -> None:
    wanted = tuple(name for name in LOGITS if name not in left_out)
    assert recommended("logits-explosion", **known) == wanted
    assert recommended("does-not-fit", **known)[: len(wanted)] == wanted


def test_checkpointing_that_is_on() -> None:
    def asked(**changes: object) -> tuple[str, ...]:
        spec = TargetSpec(model="x", batch_size=2).edit(**changes)
        b = training(4096, 1000, layers=4)
        b.phase(PhaseKind.BACKWARD)
        (finding,) = of(b.context(50 * MIB, spec=spec), "does-not-fit")
        return finding.fixes

    assert asked()[:3] == ("activation-checkpointing", "compile", "micro-batch")
    assert "activation-checkpointing" not in asked(activation_checkpointing=True)
    assert "activation-checkpointing" not in asked(fixes=("activation-checkpointing",))
    assert "activation-checkpointing" not in asked(fixes=("cpu-offload-weights",))  # it runs layers again itself
    assert "lora" not in asked(adapter="lora")
