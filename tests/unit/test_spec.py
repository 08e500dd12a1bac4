"""The target of a profile: what is refused, what is filled in, and how options are read from a dataclass's fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.errors import UsageError
from memprof.spec import HOST_BYTES, Mode, TargetSpec, get_options, option, parse_dtype, parse_layers, repeat_option

ADAPTER = {"adapter": "lora"}
INFERENCE = {"mode": "inference"}
NPT = {"npt": "chunked"}

# What is refused, a word of the message, and the change that makes it acceptable.
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"model": ""}, "give --model or --model-size", {"model": "gpt2"}),
    ({"dtype": "int8"}, "unknown --dtype\n  value: 'int8'\n  hint:  known: bfloat16, float16, float32",
     {"dtype": "float16"}),
    ({"mode": "serve"}, "unknown --mode\n", INFERENCE),
    ({"device": "tpu"}, "unknown --device\n", {"device": "cpu"}),
    ({"optimizer": "adamw", "optimizer_impl": "best"}, "unknown --optimizer-impl\n", {"optimizer_impl": "single"}),
    ({"optimizer": "rmsprop", "optimizer_impl": "fused"}, "no fused implementation", {"optimizer_impl": "foreach"}),
    ({"optimizer": "adagrad", "optimizer_impl": "fused"}, "no fused implementation", {"optimizer": "adamw"}),
    ({"optimizer": "adamw-8bit", "optimizer_impl": "foreach"}, "one implementation", {"optimizer_impl": None}),
    ({"double_quant": False}, "for 4-bit weights", {"quantize": "fp4", **ADAPTER}),
    ({"double_quant": False, "quantize": "int8", **ADAPTER}, "for 4-bit weights", {"quantize": "nf4"}),
    ({"lengths": "alpaca", "dataset_batches": 2}, "all of one length\n  value: --lengths alpaca", {"lengths": None}),
    ({"rank": 1}, "no such rank\n  value: --rank 1\n  hint:  0 to 0", {"rank": 0}),
    ({"rank": 4, "gpus": 4}, "0 to 3", {"rank": 3}),
    ({"rank": -1, "gpus": 4}, "0 to 3", {"rank": 0}),
    ({"parallel": "ddp", "device": "cuda"}, "ranks are virtual", {"device": "virtual"}),
    ({"compile_mode": "default"}, "nothing is to be compiled", {"compile": True}),
    ({"compile_layers": True}, "nothing is to be compiled", {"compile": True}),
    ({"compile": True, "parallel": "ddp"}, "spread over GPUs", {"compile": False}),
    ({"new_tokens": 8}, "--new-tokens is for inference\n  value: 8", INFERENCE),
    ({"amp": "bfloat16", "dtype": "bfloat16"}, "in float32\n  value: --dtype bfloat16", {"dtype": "float32"}),
    ({"amp": "float32"}, "unknown --amp\n", {"amp": "float16"}),
    ({"lora_rank": 8}, "--lora-rank needs an adapter\n  value: 8", ADAPTER),
    ({"lora_targets": "q_proj"}, "--lora-targets needs an adapter", ADAPTER),
    ({"lora_dropout": 0.1}, "--lora-dropout needs an adapter\n  value: 0.1", ADAPTER),
    ({"lora_dropout": 1.0, **ADAPTER}, "less than 1\n  value: 1.0", {"lora_dropout": 0.999}),
    ({"lora_dropout": -0.1, **ADAPTER}, "less than 1", {"lora_dropout": 0.0}),
    ({"lora_targets": "q_proj,,v_proj", **ADAPTER}, "--lora-targets has an empty name in it\n  value: 'q_proj,,v_proj'",
     {"lora_targets": "q_proj, v_proj"}),
    ({"freeze": "*.bias,"}, "--freeze has an empty name in it\n  value: '*.bias,'", {"freeze": "*.bias"}),
    ({"freeze": "*.bias", **ADAPTER}, "freezes the whole model", {"adapter": None}),
    ({"freeze": "*.bias", **INFERENCE}, "--freeze is for training\n  value: --mode inference", {"mode": "train"}),
    ({"evaluate": True, **INFERENCE}, "--evaluate is for training\n  value: --mode inference", {"evaluate": False}),
    ({"npt_num_ranks": 8},
     "--npt-num-ranks needs --npt\n  value: 8\n  hint:  add --npt dense|per-token|chunked|low-rank", NPT),
    ({"npt_init": "fast"}, "--npt-init needs --npt\n  value: fast", NPT),
    ({**NPT, **ADAPTER}, "freezes the whole model already\n  value: --adapter lora", {"adapter": None}),
    ({**NPT, "freeze": "*.bias"}, "freezes the whole model already\n  value: --freeze *.bias", {"freeze": None}),
    ({**NPT, "npt_combine": "batched"}, "several components", {"npt_num_ranks": 2}),
    ({**NPT, "npt_layers": "0,x"}, "no layer in it", {"npt_layers": "0,4-7"}),
    ({"quantize": "nf4"}, "not trained\n  value: --quantize nf4", ADAPTER),
    ({"quantize": "int8"}, "not trained", INFERENCE),
    ({"quantize": "fp4"}, "not trained", NPT),
    ({"quantize": "fp8", **NPT}, "bitsandbytes' layers alone", {"quantize": "int8"}),
    ({"quantize": "mxfp4", **ADAPTER}, "trained on int8, nf4, fp4, fp8, gptq-int8, gptq-int4, awq-int4",
     INFERENCE | {"adapter": None}),
    ({"quantize": "fp8", **ADAPTER, "device": "cuda"}, "value: --quantize fp8 --device cuda", {"device": "virtual"}),
]  # fmt: skip


def test_is_refused_and_the_change_is_not() -> None:
    for given, message, change in REFUSED:
        given = {"model": "gpt2", **given}
        with pytest.raises(UsageError) as error:
            TargetSpec(**given)
        assert f"\n{message}" in f"\n{error.value}" if message.startswith("--") else message in str(error.value)
        flags = {name: str(about.flag) for name, about in get_options(TargetSpec).items()}
        assert any(str(value) in str(error.value) or flags[name] in str(error.value) for name, value in given.items())
        hint = error.value.hint or ""
        if hint.startswith(("add --", "leave out --")):
            assert any(flags[name] in hint for name in (*given, *change))
        TargetSpec(**{**given, **change})


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ({}, {
            "steps": 2, "lora_rank": None, "mode": Mode.TRAIN, "npt_rank": None, "model_is_size": False,
            "batch_size": 1, "trust_remote_code": False, "double_quant": True, "optimizer": "adamw", "evaluate": False,
            "compile": False, "compile_layers": False, "workspaces": True, "activation_checkpointing": False,
            "gradient_accumulation": 1, "alloc_conf": None, "device": "virtual", "detail": False, "gpu": "h100-80gb",
            "gpu_vram_bytes": None, "gpus": 1, "host_memory_bytes": None,
        }),
        ({"lengths": "alpaca"}, {"steps": 200}),
        ({"lengths": "alpaca", "steps": 5}, {"steps": 5}),
        (ADAPTER, {"lora_rank": 8}),
        ({**ADAPTER, "lora_rank": 4}, {"lora_rank": 4}),
        (NPT, {"npt_rank": 16, "npt_chunk": 16, "npt_init": "orthogonal", "npt_combine": None}),
        ({**NPT, "npt_num_ranks": 4}, {"npt_rank": 16, "npt_init": "fast", "npt_combine": "merged"}),
        ({**NPT, "npt_num_ranks": 4, "npt_combine": "batched"}, {"npt_combine": "batched"}),
        ({"mode": "inference", "fixes": ["compile"]}, {"mode": Mode.INFERENCE, "fixes": ("compile",)}),
    ],
)  # fmt: skip
def test_what_is_not_given_is_filled_in(given: dict[str, Any], filled: dict[str, Any]) -> None:
    spec = TargetSpec(model="gpt2", **given)
    assert {name: getattr(spec, name) for name in filled} == filled


# A choice that a program or a saved run has may not go.
CHOICES = {
    "dtype": "float32 float16 bfloat16",
    "amp": "float16 bfloat16",
    "quantize": "int8 nf4 fp4 fp8 gptq-int8 gptq-int4 awq-int4 mxfp4 gguf-q4_0 gguf-q4_k gguf-q5_k gguf-q6_k gguf-q8_0",
    "optimizer": "adamw adam sgd sgd-momentum adafactor adagrad rmsprop adamw-8bit paged-adamw-8bit torchao-adamw-8bit "
    "torchao-adamw-4bit none",
    "zero_grad": "none zero",
    "adapter": "lora",
    "npt": "dense per-token chunked low-rank",
    "npt_combine": "sequential batched merged",
    "npt_init": "orthogonal fast",
    "mode": "train inference",
    "attention": "sdpa eager flash_attention_2 flash_attention_3 flex_attention "
    "nsa nsa-eager sliding block-sparse linear",
    "sdpa_backend": "flash efficient math",
    "compile_mode": "default reduce-overhead max-autotune",
    "optimizer_impl": "foreach fused single",
    "device": "virtual cpu cuda",
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_can_be_given(name: str) -> None:
    assert set(CHOICES[name].split()) <= set(get_options(TargetSpec)[name].choices)


@pytest.mark.parametrize(
    ("optimizer", "implementations"),
    [
        *((name, "foreach fused single") for name in ("adamw", "adam", "sgd", "sgd-momentum")),
        *((name, "foreach single") for name in ("adafactor", "adagrad", "rmsprop")),
        *((name, "") for name in ("adamw-8bit", "paged-adamw-8bit", "torchao-adamw-8bit", "torchao-adamw-4bit")),
    ],
)
def test_implementations_that_an_optimizer_has(optimizer: str, implementations: str) -> None:
    for name in ("foreach", "fused", "single"):
        if name in implementations:
            TargetSpec(model="gpt2", optimizer=optimizer, optimizer_impl=name)
        else:
            with pytest.raises(UsageError, match=rf"^{optimizer} has .*\n  value: --optimizer-impl {name}"):
                TargetSpec(model="gpt2", optimizer=optimizer, optimizer_impl=name)


STORED_GGUF = ("gguf-q4_0", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-q8_0")


@pytest.mark.parametrize(
    ("name", "trains", "is_measured"),
    [
        *((name, True, True) for name in ("int8", "nf4", "fp4")),
        *((name, True, False) for name in ("fp8", "gptq-int8", "gptq-int4", "awq-int4")),
        *((name, False, False) for name in ("mxfp4", *STORED_GGUF)),
    ],
)
def test_formats_that_are_trained_and_measured(name: str, trains: bool, is_measured: bool) -> None:
    assert TargetSpec(model="gpt2", quantize=name, **INFERENCE).quantize == name
    for given, is_accepted in ((ADAPTER, trains), ({**INFERENCE, "device": "cuda"}, is_measured)):
        if is_accepted:
            TargetSpec(model="gpt2", quantize=name, **given)
        else:
            with pytest.raises(UsageError, match=f"--quantize {name}"):
                TargetSpec(model="gpt2", quantize=name, **given)


NUMBERS = [field.name for field in dataclasses.fields(TargetSpec) if field.type in ("int", "int | None")]


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "rank" and not name.endswith("_bytes")])
def test_what_is_counted_is_at_least_one(name: str) -> None:
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} must be at least 1\n  value: 0"):
        TargetSpec(model="gpt2", **{name: 0})


def test_an_edit_is_checked() -> None:
    spec = TargetSpec(model="gpt2")
    assert spec.edit(batch_size=4).batch_size == 4 and spec.batch_size == 1
    with pytest.raises(UsageError, match="at least 1"):
        spec.edit(batch_size=0)


@pytest.mark.parametrize(("text", "dtype"), [("bf16", "bfloat16"), ("FP16", "float16"), ("f16", "float16"),
                                             ("half", "float16"), ("float", "float32"), ("f32", "float32"),
                                             ("fp32", "float32"), ("int4", "int4")])  # fmt: skip
def test_abbreviations_of_dtypes(text: str, dtype: str) -> None:
    assert parse_dtype(text) == dtype


@pytest.mark.parametrize(
    ("text", "count", "layers"),
    [
        ("3", 4, [3]),
        ("-1", 4, [3]),
        ("-4", 4, [0]),
        ("1-3,2,0", 4, [0, 1, 2, 3]),
        ("2--1", 4, [2, 3]),
        (" 1 ", 4, [1]),
        ("7,7", None, [7]),
        ("5,-1", None, [-1, 5]),
        ("2-5", None, [2, 5]),  # without a count only the syntax matters
    ],
)
def test_layers(text: str, count: int | None, layers: list[int]) -> None:
    assert parse_layers(text, count) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [("4", "names no layer\n  value: 4\n  hint:  they are 0 to 3"),
     ("-5", "0 to 3"), ("0-4", "0 to 3"), ("3-1", "a range that is empty"), ("", "no layer in it"),
     ("1-", "no layer in it"), ("1,,2", "no layer in it")],
)  # fmt: skip
def test_layers_that_there_are_not(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_layers(text, 4)
    assert message in str(error.value)


@dataclasses.dataclass
class Example:
    plain: int = 3
    number: int = option(2, "Panel", "How many.", is_count=True)
    quick: bool = option(True, "Panel", "Leave it.")
    slow_start: bool = option(False, "Panel", "Begin slowly.")
    named: str = option("a", "Panel", "{choices}.", flag="--called", metavar="NAME", choices=("a", "b"))
    batch_size: int = repeat_option("batch_size", note="Of each run.", unset="what fits")
    gpu: str = repeat_option("gpu", default="a100-80gb")


def test_options_are_fields_with_flags() -> None:
    options = get_options(Example)
    assert {name: about.flag for name, about in options.items()} == {
        "number": "--number", "quick": "--no-quick", "slow_start": "--slow-start", "named": "--called",
        "batch_size": "--batch-size", "gpu": "--gpu",
    }  # fmt: skip
    assert (options["number"].panel, options["number"].help) == ("Panel", "How many.")
    assert options["number"].metavar == "COUNT" and options["number"].parse is not None
    assert options["number"].parse("2k") == 2000


def test_options_of_a_target() -> None:
    options = get_options(TargetSpec)
    assert {name: (about.flag, about.instead_of) for name, about in options.items() if about.instead_of} == {
        "model_is_size": ("--model-size", "model"), "gpu_vram_bytes": ("--gpu-vram", "gpu"),
    }  # fmt: skip
    assert [options[name].parse("bf16") for name in ("dtype", "amp")] == ["bfloat16", "bfloat16"]
    assert [options[name].flag for name in ("gpu_vram_bytes", "host_memory_bytes")] == ["--gpu-vram", "--host-memory"]
    for name, about in options.items():
        assert bool(about.choices) >= ("{choices}" in about.help)
        assert about.help.endswith(".")
        if name.endswith("_bytes"):
            assert about.parse("2") == 2 << 30
    assert {about.panel for about in options.values()} == {
        "Model", "Batch", "Precision", "Training", "Adapters", "NPT", "Compiling", "Memory", "GPU",
    }  # fmt: skip


def test_a_default_is_as_it_is_described() -> None:
    unset = {name: about.unset for name, about in get_options(TargetSpec).items()}
    npt, updates = TargetSpec(model="gpt2", **NPT), TargetSpec(model="gpt2", npt_num_ranks=2, **NPT)
    assert (unset["npt_rank"], unset["npt_chunk"]) == (str(npt.npt_rank), str(npt.npt_chunk)) == ("16", "16")
    assert unset["npt_init"] == f"{npt.npt_init}; {updates.npt_init} with --npt-num-ranks"
    assert unset["npt_combine"] == updates.npt_combine
    assert unset["lora_rank"] == str(TargetSpec(model="gpt2", **ADAPTER).lora_rank)
    assert unset["steps"] == "2; 200 with --lengths"
    assert unset["context_length"] == "2048, or the model's limit"
    assert str(unset["gpu"]).endswith(TargetSpec(model="gpt2").gpu)
    assert HOST_BYTES == 256 << 30 and str(unset["host_memory_bytes"]).startswith("256 ")


def test_an_option_is_repeated_with_changes() -> None:
    about, original = get_options(Example)["batch_size"], get_options(TargetSpec)["batch_size"]
    assert about == dataclasses.replace(original, help=f"{original.help} Of each run.", unset="what fits")
    assert (Example().batch_size, Example().gpu) == (1, "a100-80gb")
