"""`--fix`, `--fix auto` and `--ladder` end to end."""

import itertools
import json

import pytest

from memprof.fixes.catalog import FIXES
from tests.lanes import by_day

MODEL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 3, "n_head": 12,
    "n_positions": 1024, "vocab_size": 200_000,
}  # fmt: skip
SMALL = ("profile", "--model", "config.json", "--batch-size", 4, "--context-length", 512)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """With the configuration of gpt2's first three layers under a large vocabulary."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(memprof, *arguments, vram="6GiB"):
    return memprof(*SMALL, "--gpu-vram", vram, "--json", *arguments)


def test_fix_gives_the_report_of_the_fixed_run(memprof):
    plain = run(memprof, vram="40GiB").json
    result = run(memprof, "--fix", "chunked-loss=64,activation-checkpointing", vram="40GiB")
    report = result.json
    assert result.exit_code == 0
    assert report["target"]["fixes"] == ["chunked-loss=64", "activation-checkpointing"]
    before, after = report["ladder"]
    assert before["fixes"] == []
    assert before["peak_allocated_bytes"] == plain["peak"]["allocated_bytes"]
    assert after["fixes"] == ["chunked-loss=64", "activation-checkpointing"]
    assert after["peak_allocated_bytes"] == report["peak"]["allocated_bytes"] < before["peak_allocated_bytes"]
    assert after["saved_bytes"] == before["device_used_bytes"] - after["device_used_bytes"] > 0
    assert after["cost"]["numerics"] == "exact"
    assert 0 < after["cost"]["extra_operations"] < before["cost"]["operations"]


@pytest.mark.parametrize("on", [(), ("--fix", "chunked-loss=2048"), ("--activation-checkpointing",)])
def test_what_is_on_is_not_recommended(memprof, on):
    # A chunk of all tokens: the logits stay what they were.
    report = run(memprof, *on, vram="3GiB").json
    (finding,) = [finding for finding in report["findings"] if finding["id"] == "model-state"]
    assert ("chunked-loss" in finding["fixes"]) is ("--fix" not in on)
    assert "micro-batch" in finding["fixes"]
    if "--activation-checkpointing" in on:
        assert "activation-checkpointing" not in finding["fixes"]


def test_ladder_of_named_fixes_has_a_row_each(memprof):
    result = run(memprof, "--fix", "activation-checkpointing,chunked-loss", "--ladder", vram="40GiB")
    rungs = result.json["ladder"]
    assert [rung["added"] for rung in rungs] == [None, "activation-checkpointing", "chunked-loss"]
    extra = [rung["cost"]["extra_operations"] for rung in rungs]
    assert extra == sorted(extra)
    assert all(rung["next_bottleneck"]["text"] for rung in rungs)


@pytest.mark.parametrize("layers", by_day([1, 3], 1))  # of one there is nothing to recompute or to compile
def test_ladder_goes_from_what_does_not_fit_to_what_does(memprof, folder, layers):
    (folder / "config.json").write_text(json.dumps(MODEL | {"n_layer": layers}))
    result = run(memprof, "--ladder")
    report = result.json
    (folder / "ladder.json").write_text(result.stdout)
    shown = memprof("show", "--full", "ladder.json")
    assert "The ladder" in shown.stdout and "then: out of memory in" in shown.stdout
    for column in ("peak", "reserved", "saved", "verdict", "compute", "bus", "step", "numbers"):
        assert column in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 110
    assert result.exit_code == 3  # of the run as it is, whose report this is
    rungs = report["ladder"]
    assert not rungs[0]["fits"]
    assert rungs[0]["next_bottleneck"]["text"].startswith("out of memory in")
    assert rungs[-1]["fits"]
    for above, below in itertools.pairwise(rungs):
        assert below["fixes"][:-1] == above["fixes"]
        assert below["saved_bytes"] == above["device_used_bytes"] - below["device_used_bytes"] > 0
        compiling = ("compile_seconds", "compiled_kernels")
        assert None not in {key: value for key, value in below["cost"].items() if key not in compiling}.values()
        assert all((below["cost"][key] is not None) is ("compile" in below["fixes"]) for key in compiling)
    # What trains another model is no row where the same model can be made to fit.
    assert not any(FIXES[rung["added"]].numerics.value == "different" for rung in rungs[1:])
    fixed = run(memprof, "--fix", ",".join(rungs[-1]["fixes"]))  # what the row says is so
    assert fixed.exit_code == 0 and fixed.json["verdict"]["required_bytes"] == rungs[-1]["device_used_bytes"]


def test_auto_finds_a_set_that_fits_and_needs_each_of_it(memprof):
    result = run(memprof, "--fix", "auto")
    report = result.json
    assert result.exit_code == 0
    assert report["verdict"]["fits"]
    chosen = report["ladder"][-1]["fixes"]
    assert report["target"]["fixes"] or chosen
    assert report["ladder_reason"]
    for left_out in chosen:
        rest = [name for name in chosen if name != left_out]
        if not rest:
            continue
        without = run(memprof, "--fix", ",".join(rest)).json
        slower = without["ladder"][-1]["cost"]["step_seconds"] >= report["ladder"][-1]["cost"]["step_seconds"]
        assert not without["verdict"]["fits"] or slower


def test_auto_changes_nothing_that_fits(memprof):
    result = run(memprof, "--fix", "auto", vram="60GiB")
    assert result.exit_code == 0
    assert [rung["fixes"] for rung in result.json["ladder"]] == [[]]
    assert "without fixes" in result.json["ladder_reason"]


@pytest.mark.nightly
def test_auto_says_when_nothing_helps(memprof, folder):
    (folder / "config.json").write_text(json.dumps(MODEL | {"n_layer": 1}))
    result = run(memprof, "--fix", "auto", vram="0.6GiB")
    assert result.exit_code == 3
    assert result.json["ladder_reason"].startswith("nothing fits")


@pytest.mark.parametrize(
    ("fix", "problem"),
    [
        ("chunked-los", "unknown fix"),
        ("vocabulary-cap", "needs a value"),
        ("chunked-loss=0", "chunk_size"),
        ("activation-checkpointing,chunked-loss=-3", "chunk_size"),
    ],
)
def test_wrong_fixes_are_errors(memprof, fix, problem):
    result = memprof(*SMALL, "--fix", fix)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


def test_saved_capture_is_of_the_fixed_run(memprof, tmp_path):
    file = tmp_path / "run.json.gz"
    fixed = run(memprof, "--fix", "chunked-loss", "--save", file, vram="40GiB").json
    shown = memprof("show", file, "--json")
    assert json.loads(shown.stdout)["peak"] == fixed["peak"]
    assert json.loads(shown.stdout)["target"]["fixes"] == ["chunked-loss"]


def test_inference_says_what_is_of_no_use(memprof):
    result = memprof("profile", "--model", "gpt2", "--mode", "inference", "--fix", "chunked-loss")
    assert result.exit_code == 2
    assert "does not apply" in result.stderr


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.nightly
def test_a_ladder_over_gpus_has_a_row_for_each_step_that_spreads(memprof, folder):
    """Priced with what goes between GPUs; of as many sequences in each row, where GPUs share them."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    arguments = ("profile", "--model", "config.json", "--context-length", 1024, "--gpu-vram", 4, "--gpus", 4)
    result = memprof(*arguments, "--fix", "fsdp,ulysses=2,chunked-loss", "--ladder", "--json")
    assert result.exit_code == 0, result.stderr
    rows = result.json["ladder"]
    assert [row["parallel"] for row in rows] == ["ddp", "fsdp", "ulysses=2,fsdp", "ulysses=2,fsdp"]
    assert [row["added"] for row in rows] == [None, "fsdp", "ulysses=2", "chunked-loss"]
    costs = [row["cost"] for row in rows]
    assert 0 < costs[0]["link_bytes"] < costs[1]["link_bytes"] < costs[2]["link_bytes"]
    assert costs[1]["operations"] == costs[0]["operations"]
    # Two GPUs on a sequence, one sequence after another: its products are done as often, and half on each GPU.
    assert costs[2]["operations"] == pytest.approx(costs[0]["operations"], rel=0.02)
    assert all(below["saved_bytes"] > 0 for below in rows[1:3])
    (folder / "ladder.json").write_text(result.stdout)
    shown = memprof("show", "ladder.json").stdout
    assert "baseline (ddp)" in shown and "Where GPUs share sequences" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 110
    for fix, plan in (("tensor-parallel", "tp=4"), ("ring-attention", "cp=4")):
        last = memprof(*arguments, "--fix", fix, "--json").json["ladder"][-1]
        assert last["parallel"] == plan and last["saved_bytes"] > 0
        assert last["cost"]["link_bytes"] > costs[0]["link_bytes"]


def test_a_script_is_not_spread(memprof, folder):
    (folder / "train.py").write_text("")
    for arguments in (("run", "--fix", "fsdp", "train.py"), ("profile", "--model", "gpt2", "--fix", "fsdp")):
        result = memprof(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.stderr
        assert "--gpus 2" in result.stderr
