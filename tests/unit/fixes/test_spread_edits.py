"""Steps that spread a run over more of its GPUs: the plan after each, and what cannot be."""

from __future__ import annotations

import json

import pytest

from memprof.errors import UsageError
from memprof.fixes.catalog import ALL_FIXES, FIXES, PARALLEL_FIXES, find_fixes, list_active_fixes, list_ladder
from memprof.fixes.chosen import edit_spec, parse_fixes
from memprof.spec import TargetSpec
from memprof.workload.plan import parse_plan

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return TargetSpec(model=str(tmp_path), context_length=64, gpus=8)


def after(spec: TargetSpec, fixes: str) -> str | None:
    for fix in parse_fixes(fixes, ALL_FIXES):
        spec = edit_spec(spec, fix, {})
    return spec.parallel


@pytest.mark.parametrize(
    ("fixes", "plan"),
    [
        ("fsdp", "fsdp"),
        ("ulysses", "ulysses=2"),  # six heads are not divided by eight, nor four: four replicas are left
        ("ulysses=2,fsdp", "ulysses=2,fsdp"),
        ("fsdp,ulysses=2", "ulysses=2,fsdp"),
        ("ring-attention", "cp=8"),
        ("ring-attention=4,fsdp", "cp=4,fsdp"),
        ("tensor-parallel", "tp=2,fsdp"),  # torch has no replicas of it
        ("fsdp,tensor-parallel=2,ring-attention=2", "cp=2,tp=2,fsdp"),
    ],
)
def test_the_plan_after_steps(spec, fixes, plan):
    expected = plan if plan != "ulysses=2" else "ulysses=2,ddp"
    assert after(spec, fixes) == expected
    assert parse_plan(expected, 8).size == 8


@pytest.mark.parametrize(
    "text", ["ddp", "fsdp", "fsdp:shard_grad_op", "hsdp:2x4", "tp=2,fsdp", "cp=8", "pp=4:gpipe:microbatches=8,ddp"]
)
def test_a_plan_as_it_is_said(text):
    assert parse_plan(text, 8).text() == text


def test_what_cannot_be(spec):
    for fixes, parallel, problem in (
        ("fsdp,fsdp", None, "named twice"),
        ("ulysses,ring-attention", None, "do not go together"),
        ("fsdp", "fsdp", "already on"),
        ("tensor-parallel", "tp=2,fsdp", "already on"),
        ("ulysses=3", None, "does not apply"),
        ("ulysses=4", None, "cannot be divided by 4"),
        ("ulysses", "cp=8", "do not go together"),
        ("tensor-parallel", "ulysses=2,tp=2,ddp=2", "already on"),
    ):
        with pytest.raises(UsageError, match=problem):
            after(spec.edit(parallel=parallel), fixes)
    with pytest.raises(UsageError, match="does not apply") as refused:
        after(spec.edit(gpus=1), "fsdp")
    assert "--gpus 2" in str(refused.value.hint)
    with pytest.raises(UsageError, match="is no fix of a script"):
        find_fixes("fsdp")


def test_they_are_steps_of_a_ladder_over_several_gpus(spec):
    assert not PARALLEL_FIXES.keys() & {*list_ladder()} and PARALLEL_FIXES.keys() <= {*list_ladder(8)}
    assert not PARALLEL_FIXES.keys() & FIXES.keys()
    assert list_active_fixes(spec.edit(parallel="hsdp:2x4")) == ["fsdp"]
    assert {*list_active_fixes(spec.edit(parallel="tp=2,cp=2,fsdp:shard_grad_op"))} >= {"fsdp", "ring-attention"}
