"""Fixes as edits of the spec."""

import pytest

from memprof.errors import UsageError
from memprof.fixes.catalog import FIXES, Numerics
from memprof.fixes.chosen import combine_numerics, edit_spec, make_apply_options, parse_fixes
from memprof.spec import Mode, TargetSpec

SPEC = TargetSpec(model="gpt2", batch_size=4)
TARGET = {"dtype": "float32", "vocab_size": 50257, "alloc_conf": None}


def edited(text, spec=SPEC, target=TARGET):
    for fix in parse_fixes(text):
        spec = edit_spec(spec, fix, target)
    return spec


def test_model_fixes_are_named_in_the_spec():
    spec = edited("chunked-loss=512,activation-checkpointing")
    assert spec.fixes == ("chunked-loss=512", "activation-checkpointing")
    assert make_apply_options(parse_fixes("chunked-loss=512,activation-checkpointing=2")) == {
        "chunk_size": 512,
        "every": 2,
    }


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("bfloat16", {"dtype": "bfloat16"}),
        ("vocabulary-cap=32000", {"vocab_size": 32000}),
        ("freeze=*wte*+*wpe*", {"freeze": "*wte*,*wpe*"}),
        ("lora=4", {"adapter": "lora", "lora_rank": 4}),
    ],
)
def test_other_fixes_replace_fields(text, changes):
    assert edited(text) == SPEC.edit(**changes)


def test_a_word_stands_for_other_options():
    assert make_apply_options(parse_fixes("chunked-loss=auto,micro-batch=2")) == {
        "threshold": "auto",
        "micro_batch_size": 2,
    }
    assert edited("chunked-loss=auto") == SPEC.edit(fixes=("chunked-loss=auto",))
    for fix in FIXES.values():
        for options in fix.named_values.values():
            assert options.keys() <= fix.options.keys()


def test_options_are_those_of_the_catalog():
    with_value = [fix for fix in FIXES.values() if fix.main_option]
    assert len(with_value) == 8
    for fix in with_value:
        assert fix.main_option in fix.options
        assert not fix.required or fix.required == (fix.main_option,)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("chunked-los", "unknown fix", "chunked-loss"),
        ("", "no fix", "chunked-loss"),
        ("chunked-loss,chunked-loss", "twice", None),
        ("chunked-loss=many", "whole number", "chunk_size"),
        ("sdpa-attention=3", "no value", "sdpa-attention"),
        ("float16,bfloat16", "do not go together", "one dtype"),
        ("vocabulary-cap", "needs a value", "vocabulary-cap="),
        ("vocabulary-cap=60000", "does not apply", "50,257"),
        ("freeze", "needs a value", "patterns"),
    ],
)
def test_what_cannot_be_is_said(text, problem, hint):
    with pytest.raises(UsageError, match=problem) as caught:
        edited(text)
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "changes", "problem"),
    [
        ("bfloat16", {}, "does not apply"),
        ("activation-checkpointing", {"activation_checkpointing": True}, "already on"),
        ("chunked-loss", {"fixes": ("chunked-loss=5",)}, "already on"),
        ("lora", {"adapter": "lora"}, "already on"),
        ("freeze=*", {"adapter": "lora"}, "do not go together"),
        ("chunked-loss", {"mode": Mode.INFERENCE}, "does not apply"),
        ("optimizer-in-backward", {"gradient_accumulation": 2}, "does not apply"),
        ("optimizer-in-backward", {"amp": "float16"}, "do not go together"),
        ("optimizer-in-backward", {"optimizer": "none"}, "does not apply"),
        ("cpu-offload-weights", {"activation_checkpointing": True}, "do not go together"),
    ],
)
def test_what_the_run_rules_out_is_said(text, changes, problem):
    with pytest.raises(UsageError, match=problem):
        edited(text, SPEC.edit(**changes), {**TARGET, "dtype": "bfloat16"})


def test_micro_batches_are_no_other_way_to_compute_statistics_of_a_batch():
    of_the_batch = {**TARGET, "classes": {"Conv2d", "BatchNorm2d"}}
    with pytest.raises(UsageError, match="does not apply"):
        edited("micro-batch", target=of_the_batch)
    assert edited("micro-batch", SPEC.edit(mode=Mode.INFERENCE), of_the_batch).batch_size == 1
    assert edited("micro-batch", target={**TARGET, "classes": {"FrozenBatchNorm2d"}}).batch_size == 1


def test_numerics_of_several_are_the_worst():
    assert combine_numerics([]) is Numerics.EXACT
    assert combine_numerics(["chunked-loss", "bfloat16"]) is Numerics.APPROXIMATE
    assert combine_numerics(["lora", "bfloat16", "chunked-loss"]) is Numerics.DIFFERENT


def test_a_spec_from_json_has_its_fixes_again():
    assert TargetSpec(model="gpt2", fixes=["chunked-loss"]).fixes == ("chunked-loss",)
