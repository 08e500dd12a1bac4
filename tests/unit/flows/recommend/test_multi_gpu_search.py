"""`memprof recommend --gpus N`: the ways, the ranking, and code that comes to the verdict that was claimed."""

from __future__ import annotations

import json
import shlex

import pytest

from memprof.device.catalog import find_gpu
from memprof.errors import UsageError
from memprof.flows.profile import profile
from memprof.flows.recommend.closed_form import find_estimated_model
from memprof.flows.recommend.multi_gpu_scripts import (
    build_accelerate_script,
    build_accelerate_yaml,
    build_fully_shard_script,
    build_torchtitan_toml,
)
from memprof.flows.recommend.multi_gpu_search import recommend_multi_gpu
from memprof.flows.recommend.parallel_plans import Candidate, list_candidates, list_parallel_plans
from memprof.flows.recommend.plans import Activations, Goal, Plan, make_base_spec
from memprof.flows.recommend.search import SearchRequest
from memprof.flows.recommend.single_gpu_scripts import describe_loaded_model
from memprof.spec import TargetSpec
from memprof.workload.plan import parse_plan
from tests.processes import python

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 16384, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
ON_GPU, CHECKPOINTED = Activations.ON_GPU, Activations.CHECKPOINTED


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return TargetSpec(model=str(tmp_path), context_length=512, gpus=8, gpu_vram_bytes=80 << 30)


def way(parallel, precision="half", activations=ON_GPU, *, chunked=False, times=1) -> Candidate:
    plan = Plan(Goal.FULL, precision, "bfloat16", "adamw", activations, chunked)
    return Candidate(plan, parallel, parse_plan(parallel, 8), 1, times, None, 0.0)


def peak_of(folder, *launched) -> dict:
    command = ("--json", "--gpus", "8", "--gpu-vram", "80", *launched)
    done = python("-m", "memprof", "run", *command, folder=folder)
    assert done.exit_code == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index('{\n "schema"') :])


WAYS = [
    way("fsdp", activations=CHECKPOINTED, chunked=True),
    pytest.param(way("tp=2,fsdp=4", "amp"), marks=pytest.mark.nightly),
    pytest.param(way("ddp", "amp", times=2), marks=pytest.mark.nightly),
    pytest.param(way("hsdp:2x4", "amp", CHECKPOINTED), marks=pytest.mark.nightly),
    pytest.param(way("fsdp:shard_grad_op", chunked=True, times=2), marks=pytest.mark.nightly),
    pytest.param(way("tp=8", activations=CHECKPOINTED), marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize("one", WAYS, ids=lambda one: one.parallel)
def test_the_script_comes_to_the_peak_that_was_claimed(one, spec, tmp_path):
    made = one.make_spec(make_base_spec(Goal.FULL, spec.edit(gpus=1)))
    claimed = profile(made, with_details=False)[1]
    (tmp_path / "train.py").write_text(build_fully_shard_script(one, made, describe_loaded_model(spec)))
    found = peak_of(tmp_path, "torchrun", "--nproc-per-node", "8", "train.py")
    assert found["verdict"]["fits"] and found["rank"]["world_size"] == 8
    assert found["peak"]["allocated_bytes"] == pytest.approx(claimed.peak.allocated_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        way("fsdp", activations=CHECKPOINTED),
        way("fsdp:shard_grad_op", "amp"),
        way("ddp", "amp", times=2),
    ],
    ids=lambda one: one.parallel,
)
@pytest.mark.nightly
def test_accelerate_comes_to_it_too(one, spec, tmp_path):
    made = one.make_spec(make_base_spec(Goal.FULL, spec.edit(gpus=1)))
    claimed = profile(made, with_details=False)[1]
    (tmp_path / "accelerate.yaml").write_text(build_accelerate_yaml(one))
    (tmp_path / "train.py").write_text(build_accelerate_script(one, made, describe_loaded_model(spec)))
    found = peak_of(tmp_path, "accelerate", "launch", "--config_file", "accelerate.yaml", "train.py")
    assert found["verdict"]["fits"] and found["rank"]["world_size"] == 8
    # Less where it shards embedding and head by themselves.
    assert found["peak"]["allocated_bytes"] <= 1.02 * claimed.peak.allocated_bytes


def test_what_is_looked_at(spec):
    assert list_parallel_plans(1) == [""]
    assert list_parallel_plans(4) == [
        "ddp", "fsdp", "fsdp:shard_grad_op", "hsdp:2x2", "tp=2,fsdp=2", "tp=4",
    ]  # fmt: skip
    tier = Plan(Goal.FULL, "half", "bfloat16", "adamw")
    base = make_base_spec(Goal.FULL, spec.edit(gpus=1))
    found = list_candidates(tier, base, find_estimated_model(spec), find_gpu("h100-80gb"), 8, 8)
    assert [one.estimated_seconds for one in found] == sorted(one.estimated_seconds for one in found)
    assert all(one.micro_batch * one.accumulation * one.parallel_plan.data == 8 for one in found)
    assert {one.parallel for one in found} == {*list_parallel_plans(8)}
    least = min(found, key=lambda one: one.estimated_bytes)
    assert least.plan.activations is CHECKPOINTED


@pytest.mark.slow
def test_an_answer(spec, monkeypatch):
    """Replicas do not fit, shards do: the claims of each row are those of the run that its command names."""
    ddp, sharded = (
        profile(one.make_spec(make_base_spec(Goal.FULL, spec.edit(gpus=1))), with_details=False)[
            1
        ].verdict.required_bytes
        for one in (way("ddp", "amp", CHECKPOINTED, chunked=True), way("fsdp", "amp", CHECKPOINTED, chunked=True))
    )
    gpu = spec.edit(gpu_vram_bytes=(ddp + sharded) // 2)
    answer = recommend_multi_gpu(gpu, SearchRequest(Goal.FULL), lambda doing: None)
    assert answer.gpus == answer.effective_batch == 8 and answer.chosen == answer.choices[0]
    assert answer.chosen.fits and answer.chosen.parallel != "ddp" and not answer.chosen.given_up
    rows = [row for row in answer.choices if row.fits]
    assert all(row.step_seconds >= answer.chosen.step_seconds for row in rows)
    words = shlex.split(answer.chosen.command)
    assert words[words.index("--gpus") + 1] == "8" and words[words.index("--parallel") + 1] == answer.chosen.parallel
    assert set(answer.launch) <= set(answer.snippets) and "fully-shard" in answer.snippets
    fewest = answer.alternatives[0]
    assert fewest.what == "the least number of these GPUs" and not fewest.estimate


def test_what_is_no_question_over_gpus(spec):
    with pytest.raises(UsageError, match="quantized weights are not spread"):
        recommend_multi_gpu(spec, SearchRequest(Goal.QLORA), lambda doing: None)
    with pytest.raises(UsageError, match="divides the sequences"):
        recommend_multi_gpu(spec.edit(gpus=6), SearchRequest(Goal.FULL, 7, micro_batch=7), lambda doing: None)


def test_the_configuration_of_torchtitan():
    one = way("tp=2,fsdp=4", "half", CHECKPOINTED, times=2)
    made = one.make_spec(make_base_spec(Goal.FULL, TargetSpec(model="llama-3.1-8b", context_length=2048)))
    text = build_torchtitan_toml(one, made, "llama3", "8B")
    for line in (
        'flavor = "8B"', "local_batch_size = 1", "global_batch_size = 8", "seq_len = 2048", 'dtype = "bfloat16"',
        "data_parallel_shard_degree = 4", "tensor_parallel_degree = 2", 'mode = "full"',
    ):  # fmt: skip
        assert line in text.splitlines()
