"""Numbers of fewer bytes: autocast, weights and state of optimizers, float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memprof.findings import Context
from memprof.findings.proposals import autocast, double, optimizer, weights
from memprof.findings.suggestions import Proposal
from memprof.spec import TargetSpec
from memprof.trace.events import ModuleRole, PhaseKind, Role
from memprof.trace.facts import DeviceFacts
from memprof.units import MIB
from tests.unit.findings.proposals.proposed import listed, only
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(("other_mib", "is_told"), [(180, True), (181, False)])
def test_a_quarter_of_float64_may_be_float32(other_mib: int, is_told: bool) -> None:
    b = TraceBuilder()
    data = [b.new(MIB // 8, mib, dtype="float64", op="aten._to_copy", line="data.py:3 load") for mib in (20, 40)]
    b.alloc(other_mib * MIB)
    found = listed(double.propose(b.context()))
    assert bool(found) == is_told
    for one in found:
        assert [one.trace.storages[index].num_bytes for index in data] == [10 * MIB, 20 * MIB]
        assert one.change.endswith("[131072 x 40] at data.py:3")


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_gpu_without_bfloat16_is_told_float16(has_bfloat16: bool) -> None:
    b = TraceBuilder()
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts(has_bfloat16=has_bfloat16))
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.enter("net")
    b.new(64, 512, op="aten.addmm")
    b.leave()
    context = b.context()
    assert bool(list(autocast.propose_bfloat16(context))) == has_bfloat16
    assert bool(list(autocast.propose_float16(context))) != has_bfloat16
    assert bool(list(weights.propose_bfloat16(context))) == has_bfloat16


def test_products_and_what_follows_from_them_alone_are_halved() -> None:
    b = TraceBuilder()
    b.parameter("weight", 256, 100)
    b.phase(PhaseKind.FORWARD)
    b.enter("net")
    stream = b.new(64, 256, op="aten.native_layer_norm")
    product = b.new(64, 512, op="aten.addmm")
    follows = b.new(64, 512, op="aten.gelu")
    back = b.new(64, 256, op="aten.mm")
    added = b.new(64, 256, op="aten.add")  # to the stream, which is in float32
    scores = b.new(64, 512, op="aten._softmax")
    b.leave()
    sizes = [storage.num_bytes for storage in only(autocast.propose_bfloat16(b.context())).trace.storages]
    assert sizes[0] == 6 * 256 * 100  # the weight, and its copy
    halved = {index for index in (stream, product, follows, back, added, scores)
              if sizes[index] < b.trace.storages[index].num_bytes}  # fmt: skip
    assert halved == {product, follows, back}


def step(*names: str, ends: bool = False) -> Context:
    """An optimizer's step with a temporary of 4 MiB; or one that `ends` while it makes the last of its state."""
    b = TraceBuilder()
    b.parameter("weight", 1024, 1024)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    for position, name in enumerate(names):
        is_known = not ends or position < len(names) - 1
        b.new(1024, 1024, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, name) if is_known else None)
    if not ends:
        b.new(1024, 1024, op="aten._foreach_sqrt")
    return b.context()


def test_state_in_8_bits_has_a_scale_for_256_elements() -> None:
    changed = only(optimizer.propose_8_bit(step("exp_avg", "exp_avg_sq"))).trace
    assert [storage.num_bytes for storage in changed.storages] == [4 * MIB, *[MIB + 4 * 4096] * 2, 0]
    assert not list(optimizer.propose_8_bit(step("momentum_buffer")))


def test_what_an_optimizer_makes_as_memory_runs_out_is_its_state() -> None:
    context = step("exp_avg", "exp_avg_sq", "max_exp_avg_sq", ends=True)
    assert [one.num_bytes for one in only(optimizer.propose_on_host(context)).trace.storages] == [4 * MIB, 0, 0, 0]
    assert not list(optimizer.propose_fused(context))  # there are no temporaries


def test_a_fused_step_has_no_temporaries() -> None:
    for names in (("exp_avg", "exp_avg_sq"), ("momentum_buffer",)):
        sizes = [one.num_bytes for one in only(optimizer.propose_fused(step(*names))).trace.storages]
        assert sizes == [*[4 * MIB] * (1 + len(names)), 0]
    assert not list(optimizer.propose_fused(step("exp_inf")))  # an optimizer without such a kernel


def weighty(weight_mib: int = 30, other_mib: int = 60, *, steps: bool = True) -> TraceBuilder:
    """Two layers with a weight and a gradient each, state of the first, a head; and other tensors in the forward."""
    b = TraceBuilder()
    for layer in range(2):
        b.enter(f"layers.{layer}", role=ModuleRole.LAYER)
        b.leave()
        b.parameter(f"module.layers.{layer}.mlp.weight", 10 * (1 + layer), MIB // 4)
    b.parameter("head.weight", weight_mib - 30, MIB // 4)
    b.inputs(1, 8)
    b.new(other_mib, MIB // 4)
    b.new(1, MIB // 4, hidden=True)
    b.new(1, MIB // 2, dtype="bfloat16")
    b.phase(PhaseKind.BACKWARD)
    if steps:
        for layer in range(2):
            b.new(10 * (1 + layer), MIB // 4, owner=(Role.GRADIENT, f"layers.{layer}.mlp.weight"))
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.new(10, MIB // 4, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        b.new(30, MIB // 4, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        b.new(10, MIB // 4, op="aten.sqrt")
    return b


def mib_of(proposal: Proposal) -> list[float]:
    return [storage.num_bytes / MIB for storage in proposal.trace.storages]


def test_all_but_logits_may_be_in_bfloat16() -> None:
    b = weighty()
    sizes = mib_of(only(weights.propose_bfloat16(b.context(vocab_size=MIB // 2))))
    # Two weights, the head, token ids, activations, a workspace, what is in half precision, and the step's.
    assert sizes == [5, 10, 0, 64 / MIB, 30, 1, 1, 5, 10, 5, 15, 5]
    sizes = mib_of(only(weights.propose_bfloat16(b.context(vocab_size=MIB // 4))))
    assert sizes[4] == 60  # [60 x words]: losses compute in float32


@pytest.mark.parametrize(("other_mib", "is_told"), [(86, True), (88, False)])
def test_weights_that_take_a_quarter_of_the_peak(other_mib: int, is_told: bool) -> None:
    """30 of 118 MiB, or of 120 and the token ids."""
    b = weighty(other_mib=other_mib, steps=False)
    assert bool(list(weights.propose_bfloat16(b.context()))) == is_told
    assert bool(list(weights.propose_on_host(b.context()))) == is_told


def test_with_lora_no_weight_has_a_gradient_or_state() -> None:
    b = weighty()
    b.parameter("embed.weight", 100, 64)
    context = b.context(spec=TargetSpec(model="x"))
    assert mib_of(only(weights.propose_lora(context)))[:-1] == [10, 20, 0, 64 / MIB, 60, 1, 1, 0, 0, 0, 0, 0]
    assert not list(weights.propose_lora(b.context()))  # of a script, it is not the fix that says what is trained
    assert not list(weights.propose_lora(weighty(steps=False).context(spec=TargetSpec(model="x"))))


def test_one_layer_at_a_time_has_its_weights_on_the_gpu() -> None:
    """The larger one; state and temporaries of the other's shape are gone too."""
    sizes = mib_of(only(weights.propose_on_host(weighty().context())))
    assert sizes == [0, 20, 0, 64 / MIB, 60, 1, 1, 0, 20, 0, 30, 0]
    b = TraceBuilder()
    b.enter("layers.0", role=ModuleRole.LAYER)
    b.leave()
    b.parameter("layers.0.weight", 10, MIB // 4)
    assert not list(weights.propose_on_host(b.context()))


@pytest.mark.parametrize(("frozen_mib", "is_told"), [(18, False), (20, True), (22, True)])
def test_frozen_weights_may_be_in_float16_on_a_gpu_that_is_slow_in_bfloat16(frozen_mib: int, is_told: bool) -> None:
    """A quarter of the peak is of a frozen weight, beside an adapter with its gradient."""
    b = TraceBuilder()
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts("", None, has_bfloat16=False))
    frozen = b.parameter("base", frozen_mib, MIB // 4)
    adapter = b.parameter("adapter", MIB // 4)
    b.phase(PhaseKind.FORWARD)
    b.alloc(58 * MIB)
    b.phase(PhaseKind.BACKWARD)
    b.new(MIB // 4, owner=(Role.GRADIENT, "adapter"))
    found = listed(weights.propose_frozen(b.context()))
    assert bool(found) == is_told
    assert all(mib_of(one)[frozen] == frozen_mib / 2 and mib_of(one)[adapter] == 1 for one in found)
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts("", None))
    assert not list(weights.propose_frozen(b.context()))


def test_frozen_weights_are_known_where_something_is_trained_or_nothing() -> None:
    """In an inference all are frozen; before any gradient and optimizer, none is known to be."""
    b = TraceBuilder()
    b.trace.facts = replace(b.trace.facts, device=DeviceFacts("", None, has_bfloat16=False))
    b.parameter("base", 20, MIB // 4)
    assert not list(weights.propose_frozen(b.context()))
    b.phase(PhaseKind.FORWARD)
    assert len(list(weights.propose_frozen(b.context()))) == 1
