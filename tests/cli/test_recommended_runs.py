"""One truth in one answer: what `memprof recommend` prints in one place holds in every other, and in its commands."""

import json
import shlex
from pathlib import Path

import pytest

import memprof as library
from memprof.errors import UsageError
from memprof.fixes.chosen import edit_spec, parse_fixes
from memprof.flows.recommend.plans import Goal
from memprof.flows.recommend.recommendation import recommend
from memprof.flows.recommend.search import SearchRequest
from memprof.report.terminal.recommendation import print_recommendation
from memprof.spec import TargetSpec
from memprof.units import GIB, MIB
from memprof.workload.catalog import find_model
from tests.lanes import by_day
from tests.processes import python

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 2000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 3000, "n_embd": 64, "n_layer": 1,
    "n_head": 4, "n_positions": 700,
}  # fmt: skip
# Model, goal, precision, capacity, host memory, tokens, sequences in a step: the last three are beyond the model's
# positions, with a host that is full, and where nothing fits.
CASES = {
    "llama-lora": (LLAMA, "lora", None, 560 * MIB, None, 300, 2),
    "llama-infer": (LLAMA, "infer", None, 530 * MIB, None, 900, 2),
    "gpt2-full": (GPT2, "full", "amp", 600 * MIB, None, 600, 2),
    "beyond": (LLAMA, "full", "half", 640 * MIB, None, 3000, 1),
    "host": (LLAMA, "full", "amp", 700 * MIB, 3 * MIB, 200, 1),
    "none": (LLAMA, "full", "half", 500 * MIB, None, 900, 1),
}


@pytest.fixture
def spec_of_command(monkeypatch):
    """The spec that `memprof profile` makes of a printed command, its fixes included."""
    from memprof.cli import main
    from memprof.cli import profile as command

    taken = []

    def take(spec, how, progress, **others):
        taken.append((spec, how))
        raise UsageError("taken")

    monkeypatch.setattr(command, "_run", take)

    def parse(line, target):
        words = shlex.split(line)
        assert words[:2] == ["memprof", "profile"]
        with pytest.raises(SystemExit):
            main.run(words[1:])
        spec, how = taken.pop()
        for fix in parse_fixes(how.fix) if how.fix else ():
            spec = edit_spec(spec, fix, target)
        return spec

    return parse


@pytest.mark.slow
@pytest.mark.parametrize("case", by_day(CASES, "beyond"))
def test_one_answer(case, tmp_path, spec_of_command, capsys):
    config, goal, precision, capacity, host, length, sequences = CASES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    base = TargetSpec(
        model=str(folder), context_length=length, gpu_vram_bytes=capacity, host_memory_bytes=host or 256 * GIB
    )
    answer, search, found = recommend(base, SearchRequest(Goal(goal), sequences, precision), lambda doing: None)
    ran = {profile.outcome.spec for profile in (*found.runs, *([found.chosen] if found.chosen else []))}
    for row in answer.choices:
        target = {"dtype": "bfloat16", "vocab_size": config["vocab_size"], "classes": set()}
        assert spec_of_command(row.command, target) in ran, row.command
        _row(row, capacity, host)
    assert answer.runs == len(search.simulator)
    print_recommendation(answer)
    said = " ".join(capsys.readouterr().out.split())
    if answer.chosen is None:
        assert case == "none" and not any(row.fits for row in answer.choices) and "Nothing fits" in said
        return
    _headlines(answer, said, config)
    if case == "beyond":
        assert answer.context.largest >= 3000 > answer.max_positions and "the model was made for 1,000" in said
    if case == "host":
        dead = [row for row in answer.choices if row.oom_stage == "host memory"]
        assert dead and all(row.headroom_bytes >= 0 for row in dead)


def _row(row, capacity, host):
    """A row against itself."""
    assert row.needed_bytes + row.headroom_bytes == capacity
    assert bool(row.oom_stage) != row.fits
    if not row.fits:
        assert row.headroom_bytes < 0 or row.oom_stage == "host memory"
    if row.oom_stage == "host memory":
        assert row.host_bytes > host
    assert row.micro_batch == int(_option(row.command, "--batch-size", 1))
    assert f"--host-memory {256 if host is None else '3MiB'}" in row.command


def _headlines(answer, said, config):
    """What stands above the table, against the rows."""
    chosen, rows = answer.chosen, answer.choices
    assert chosen == rows[0] and chosen.fits
    assert chosen.micro_batch * chosen.accumulation == answer.effective_batch or answer.goal == "infer"
    alike = [row for row in rows if row.fits and row.given_up == chosen.given_up]
    assert all(row.step_seconds >= chosen.step_seconds * 0.995 for row in alike)
    assert answer.batch.largest >= chosen.micro_batch
    same = [row for row in rows if row.settings == chosen.settings and row.accumulation == chosen.accumulation]
    for bound, sizes in (
        (answer.batch, {row.micro_batch: row.fits for row in same}),
        (answer.context, {answer.context_length: True}),
    ):
        for size, fits in sizes.items():
            assert (size <= bound.largest) == fits
        assert bound.first_too_large is None or bound.first_too_large > bound.largest
        assert f"{bound.largest:,}" in said
    assert answer.context.largest >= answer.context_length
    if answer.context.first_too_large is None:
        positions = config.get("max_position_embeddings") or config["n_positions"]
        assert answer.context.largest == positions - (2 if answer.goal == "infer" else 0)
        assert "all that the model allows" in said
    assert f"{answer.runs} runs were made" in said
    shown = shlex.split(chosen.command)
    assert shlex.join(shown) in " ".join(said.replace("\\ ", "").split())
    for script in answer.snippets.values():
        numbers = {str(chosen.micro_batch), str(answer.context_length)}
        assert all(number in script for number in numbers)


def _option(command, flag, default):
    words = shlex.split(command)
    return words[words.index(flag) + 1] if flag in words else default


def test_a_host_that_is_full_is_said_alike(memprof, tmp_path):
    """The verdict of a run, and the search for fixes, by the memory that the host has."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    command = ("profile", "--model", Path(tmp_path), "--context-length", 256, "--gpu-vram", 2)
    offload = (*command, "--fix", "cpu-offload-optimizer")
    assert memprof(*offload).exit_code == 0
    full = memprof(*offload, "--host-memory", "100KiB")
    assert full.exit_code == 3 and "are held in host memory" in " ".join(full.stdout.split())
    assert "(--host-memory)" in full.stdout


SPREAD = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", by_day(["inference", "train"]))
def test_over_gpus_each_command_and_each_script_comes_to_what_is_claimed(mode, memprof, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SPREAD), encoding="utf-8")
    asked = ("--model", tmp_path, "--mode", mode, "--context-length", 512, "--gpus", 2, "--gpu-vram", 1)
    answer = memprof("recommend", *asked, "--json").json
    chosen, rows = answer["chosen"], answer["choices"]
    assert chosen["fits"] and chosen["headroom_bytes"] >= 0
    for row in rows:
        told = memprof(*shlex.split(row["command"])[1:], "--json")
        assert told.exit_code == (0 if row["fits"] else 3), row["command"]
        assert told.json["verdict"]["required_bytes"] == row["needed_bytes"], row["command"]
    ranks = {"fully-shard": 0, "tensor-parallel": 1, "device-map": None}
    claimed = {"device-map": next((row for row in rows if row["parallel"] == "device-map"), chosen)}
    ran = ranks.keys() & answer["snippets"].keys()
    assert len(ran) == (2 if mode == "inference" else 1)
    for name in ran:  # by itself, without accelerate's launcher, whose script is run in its own test
        with library.virtual_gpus(2, vram=1, rank=ranks[name]) as gpus:
            exec(compile(answer["snippets"][name], name, "exec"), {"__name__": "__main__"})
        report = gpus.report()
        assert report.verdict.fits, name
        needed = claimed.get(name, chosen)["needed_bytes"]
        assert report.verdict.required_bytes == pytest.approx(needed, rel=0.03), name


@pytest.mark.nightly
def test_eight_layers_of_a_model_of_70_billion_over_eight_gpus(memprof, tmp_path):
    """A tenth of what the documentation asks: all commands, and the script as it is started, do as claimed."""
    config = {**find_model("llama-3.3-70b").load_config(), "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    gpu = ("--gpu-vram", "16", "--gpus", "8")
    answer = memprof("recommend", "--model", tmp_path, *gpu, "--json").json
    chosen = answer["chosen"]
    assert chosen["fits"] and chosen["headroom_bytes"] >= 0 and chosen["parallel"] == "tp=8"
    for row in answer["choices"]:
        told = memprof(*shlex.split(row["command"])[1:], "--json")
        assert told.exit_code == (0 if row["fits"] else 3), row["command"]
        assert told.json["verdict"]["required_bytes"] == row["needed_bytes"]
    (tmp_path / "train.py").write_text(answer["snippets"]["fully-shard"])
    start = shlex.split(answer["launch"]["fully-shard"])
    done = python("-m", "memprof", "run", "--json", *gpu, *start, folder=tmp_path)
    assert done.exit_code == 0, done.stderr[-2000:]
    report = json.loads(done.stdout[done.stdout.index('{\n "schema"') :])
    assert report["verdict"]["fits"] and report["rank"]["world_size"] == 8
