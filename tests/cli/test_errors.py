"""Wrong use gives one clear error, exit code 2, nothing on stdout and no traceback."""

import gzip
import json

import pytest

from memprof.units import parse_integer


def assert_refused(result, *parts):
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--model", "gpt3"), ("unknown model", "did you mean 'gpt2'")),
        (("--model-size", "4Q"), ("4Q", "4B")),
        (("--model-size", "banana"), ("banana",)),
        (("--model", "gpt2", "--gpu", "h1000"), ("unknown GPU", "h100-80gb", "--gpu-vram")),
        (("--model", "gpt2", "--gpu-vram", "-1"), ("not an amount of memory",)),
        (("--model", "gpt2", "--gpu-vram", "99999999999"), ("no machine has so much memory", "1048576 (GiB)")),
        (("--model", "gpt2", "--gpu-vram", "0"), ("not an amount of memory",)),
        (("--model", "gpt2", "--dtype", "bf17"), ("unknown --dtype", "bfloat16")),
        (("--model", "vit-base", "--mode", "inference", "--new-tokens", "5"), ("for causal language models",)),
        (("--model", "gpt2", "--sdpa-backend", "flsh"), ("unknown --sdpa-backend", "flash")),
        (("--model", "vit-base", "--adapter", "lora"), ("PEFT cannot adapt", "--lora-targets")),
        (("--model", "gpt2", "--freeze", "layers.*"), ("--freeze names no parameter", "transformer.wte.weight")),
        (("--model", "gpt2", "--batch-size", "0"), ("--batch-size must be at least 1",)),
        (("--model", "vit-base", "--vocab-size", "10"), ("--vocab-size does not apply",)),
        (("--model", "gpt2", "--save", "/nowhere/run.memprof"), ("no such folder",)),
        (("--model", "gpt2", "--save", "/"), ("this is a folder",)),
        (("--model", "nowhere.py:factory"), ("no such file",)),
        (("--model", "no_such_package.module:factory"), ("cannot be imported",)),
        (("--model", "model.py"), ("needs the name of a factory",)),
        (("--model", "/nowhere/config.json"), ("no config.json",)),
        ((), ("--model or --model-size",)),
        (("--model", "gpt2", "--model-size", "4B"), ("not both",)),
        (("--model", "gpt2", "--gpu", "rtx-4090", "--gpu-vram", "10"), ("give --gpu or --gpu-vram, not both",)),
        (("--model", "gpt2", "--fix", "auto", "--ladder"), ("give --fix auto or --ladder, not both",)),
        (("--model", "gpt2", "--batch-size", "many"), ("--batch-size",)),
        (("--model", "gpt2", "--mode", "trian"), ("train",)),
    ],
)
def test_profile(memprof, arguments, parts):
    assert_refused(memprof("profile", *arguments), *parts)


@pytest.mark.parametrize(
    ("words", "problem", "value", "hint"),
    [
        (("frob",), "no such command", "frob", " --help lists what there is"),
        (("gsus",), "no such command", "gsus", "did you mean gpus?"),
        (("--frob",), "no such option", "--frob", " --help lists what there is"),
        (("profile", "--modle", "gpt2"), "no such option", "--modle", "did you mean --mode or --model"),
        (("recipes", "frob"), "no such command", "frob", "recipes --help lists what there is"),
        (("compare", "a.memprof"), "missing argument 'b'", None, "compare --help lists what there is"),
    ],
)
def test_what_cannot_be_parsed_has_the_form_of_every_error(memprof, words, problem, value, hint):
    result = memprof(*words, "--json")
    error = result.json["error"]
    assert (error["problem"], error["value"], error["exit_code"], result.exit_code) == (problem, value, 2, 2)
    assert hint in error["hint"]
    plain = memprof(*words)
    assert plain.stdout == "" and plain.exit_code == 2
    assert plain.stderr == "".join(
        f"{name}{text}\n"
        for name, text in (("memprof: ", problem), ("  value: ", value), ("  hint:  ", error["hint"]))
        if text is not None
    )


@pytest.mark.parametrize(
    ("written", "read"), [("128k", 128_000), ("1e3", 1000), ("131,072", 131_072), ("0.5M", 500_000), ("2_048", 2048)]
)
def test_counts_are_read_as_they_are_written(memprof, written, read):
    wrong = memprof("profile", "--model", "nobody", "--context-length", written)
    assert "nobody" in wrong.stderr  # and not the number
    assert parse_integer(written) == read


@pytest.mark.parametrize("written", ["1.5", "k", "12x", "1,5", "", "0x10"])
def test_what_is_no_count_names_its_option(memprof, written):
    assert_refused(memprof("profile", "--model", "gpt2", "--batch-size", written), "--batch-size: not a whole number")


@pytest.mark.parametrize("written", ["1e18", "1e30", "1e400"])
def test_a_count_without_end_is_out_of_range(memprof, written):
    assert_refused(memprof("profile", "--model", "gpt2", "--batch-size", written), "--batch-size: out of range")


@pytest.mark.parametrize("words", [("--interval", "x"), ("--interval=x",)])
def test_what_is_no_number_names_its_option_and_value(memprof, words):
    refused = memprof("monitor", *words, "--", "true")
    assert_refused(refused, "--interval: not a number")
    assert "value: 'x'" in refused.stderr


@pytest.mark.parametrize(("option", "written"), [("--model-size", "4"), ("--model-size", "1.2")])
def test_a_size_without_its_unit_is_asked_about(memprof, option, written):
    assert_refused(memprof("profile", option, written), f"did you mean {written}B?")


def test_unreachable_hub(memprof, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    result = memprof("profile", "--model", "nobody/nothing-1b")
    assert_refused(result, "could not be had from the model hub", "config.json")


def test_broken_configurations(memprof, tmp_path):
    file = tmp_path / "config.json"
    for text, part in (("{", "cannot read"), ("[]", "not a model configuration"), ("{}", "model_type")):
        file.write_text(text)
        assert_refused(memprof("profile", "--model", file), part)
    file.write_text(json.dumps({"model_type": "no-such-type"}))
    assert_refused(memprof("profile", "--model", file), "unknown model type")
    file.write_text(json.dumps({"model_type": "gpt2", "architectures": ["NoSuchForCausalLM"]}))
    assert_refused(memprof("profile", "--model", file), "does not have the model's class")
    for size in ("abc", -64, 0, 1e6, True):
        file.write_text(json.dumps({"model_type": "llama", "hidden_size": size}))
        assert_refused(memprof("profile", "--model", file), f"hidden_size is {size!r}", "whole number from 1 to")
    for key, value in (
        ("num_hidden_layers", 1_000_000), ("architectures", -1), ("architectures", [7]), ("quantization_config", [[]]),
        ("auto_map", "x"),
    ):  # fmt: skip
        file.write_text(json.dumps({"model_type": "llama", key: value}))
        assert_refused(memprof("profile", "--model", file), f"{key} is {value!r}")
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}))
    assert_refused(memprof("profile", "--model", file), "not valid for its model type", "65", "4")


def test_what_a_configuration_leaves_out(memprof, tmp_path):
    """The model type's own default holds: BERT has 512 positions."""
    file = tmp_path / "config.json"
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    file.write_text(json.dumps({"model_type": "bert", **small}))
    result = memprof("profile", "--model", file, "--json")
    assert result.exit_code == 0
    assert result.json["target"]["context_length"] == 512
    assert result.json["target"]["vocab_size"] == 30522


def test_a_python_file_without_a_factory(memprof, tmp_path):
    file = tmp_path / "model.py"
    file.write_text("")
    assert_refused(memprof("profile", "--model", file), "needs the name of a factory", "model.py:build_model")


@pytest.mark.parametrize("code", ["raise GeneratorExit", "raise BaseException('no')", "raise SystemExit(0)"])
def test_a_file_that_cannot_be_imported(memprof, tmp_path, code):
    """Whatever it raises; what is no Exception as well."""
    (tmp_path / "leaves.py").write_text(f"{code}\ndef build(): ...\n")
    assert_refused(memprof("profile", "--model", f"{tmp_path}/leaves.py:build"), "leaves.py")


@pytest.mark.parametrize("architectures", [{}, {"architectures": ["M"]}], ids=["unnamed", "named"])
@pytest.mark.parametrize("command", [("profile",), ("recommend",), ("recommend", "--mode", "train")], ids=" ".join)
def test_a_models_own_code_is_refused_alike(memprof, tmp_path, command, architectures):
    own = {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zzz", **architectures, **own}))
    assert_refused(
        memprof(*command, "--model", tmp_path), "not run unasked", f"c.M of {tmp_path}", "--trust-remote-code"
    )


def test_more_repetitions_than_anybody_waits_for(memprof):
    assert_refused(
        memprof("verify", "chunked-loss", "--seeds", 99999999999), "--seeds is out of range", "at most 1,000"
    )


def test_the_program_is_not_written_over(memprof, tmp_path):
    file = tmp_path / "m.py"
    file.write_text("def build(): raise SystemExit('run')")
    for command in (("profile", "--model", f"{file}:build"), ("run",)):
        target = (file,) if command == ("run",) else ()
        assert_refused(memprof(*command, "--save", file, *target), "no capture of memprof", "--force")
        assert "def build" in file.read_text()


def test_captures_that_are_none(memprof, tmp_path):
    assert_refused(memprof("show", tmp_path / "none"), "No such file or directory")
    file = tmp_path / "file"
    file.write_bytes(b"not a capture")
    assert_refused(memprof("show", file), "not a memprof capture")
    file.write_bytes(gzip.compress(b'{"format": "other"}'))
    assert_refused(memprof("show", file), "not a memprof capture")
    file.write_bytes(gzip.compress(b'{"format": "memprof capture", "schema": 99}'))
    assert_refused(memprof("show", file), "newer memprof", "schema 99")
    file.write_bytes(gzip.compress(b'{"format": "memprof capture", "schema": 1}'))
    assert_refused(memprof("show", file), "damaged")


def test_a_truncated_capture(memprof, tmp_path):
    file = tmp_path / "run.memprof"
    memprof("profile", "--model", "pythia-70m", "--context-length", 64, "--save", file)
    whole = file.read_bytes()
    for length in (5, 100, len(whole) // 2, len(whole) - 4):
        file.write_bytes(whole[:length])
        result = memprof("show", file)
        assert result.exit_code == 2, length
        assert "Traceback" not in result.stderr


def test_beyond_positions_is_a_warning(memprof):
    result = memprof("profile", "--model", "pythia-70m", "--context-length", 4096, "--json")
    assert result.exit_code == 0
    assert "beyond-positions" in {finding["id"] for finding in result.json["findings"]}


def test_what_fits_and_fails_all_the_same_is_said_beside_the_verdict(memprof):
    result = memprof("profile", "--model", "gpt2", "--context-length", 1500)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    verdict = next(number for number, line in enumerate(lines) if line.startswith("Fits: "))
    assert lines[verdict - 1].startswith("Fails on a real GPU: Context of 1,500 tokens")
