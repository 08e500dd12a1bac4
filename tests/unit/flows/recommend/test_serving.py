"""`memprof recommend --gpus N --mode inference`: the ways, what each claims, and code that comes to it."""

from __future__ import annotations

import dataclasses
import json

import pytest

import memprof as library
from memprof.errors import UsageError
from memprof.flows.recommend.plans import Goal
from memprof.flows.recommend.search import SearchRequest
from memprof.flows.recommend.serving import recommend_serving
from memprof.report.terminal.recommendation import print_recommendation
from memprof.spec import Mode, TargetSpec

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 16384, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return TargetSpec(
        model=str(tmp_path), mode=Mode.INFERENCE, context_length=512, gpus=2, gpu_vram_bytes=4 << 30,
        host_memory_bytes=256 << 30,
    )  # fmt: skip


def answered(spec: TargetSpec, **question):
    return recommend_serving(spec, SearchRequest(Goal.INFER, **question), lambda doing: None)


def test_an_answer(spec, capsys):
    answer = answered(spec, micro_batch=2)
    assert [(row.parallel, row.fits) for row in answer.choices] == [("tp=2", True), ("device-map", True)]
    tensor, layers = answer.choices
    assert tensor.step_seconds < layers.step_seconds and tensor.link_seconds > 0 and answer.chosen == tensor
    assert [*answer.snippets] == [*answer.launch] == ["tensor-parallel", "device-map"]
    assert answer.alternatives[0].name.startswith("1 x ")
    print_recommendation(answer)
    said = capsys.readouterr().out
    assert said.startswith(f"Use {tensor.name}; 2 at a time\n") and "--snippet tensor-parallel or device-map" in said
    print_recommendation(answer, full=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "start with: torchrun --nproc-per-node 2 infer_tp.py" in said and "start with: python infer.py" in said
    measured = "NCCL takes 544.00 MiB to 1.49 GiB a group where others measured it"
    assert f"GiB are left, of which {measured}" in said and any(
        "544.00 MiB to 1.49" in one for one in answer.assumptions
    )
    small = dataclasses.replace(tensor, headroom_bytes=1 << 30)
    print_recommendation(dataclasses.replace(answer, chosen=small))
    assert f"1.00 GiB are left; beside it {measured}" in " ".join(capsys.readouterr().out.split())
    print_recommendation(dataclasses.replace(answer, chosen=layers))  # one process, which sends nothing through NCCL
    assert measured not in " ".join(capsys.readouterr().out.split())


@pytest.mark.nightly
def test_a_model_larger_than_a_gpu(spec):
    """On one GPU it dies; each of two has half of it."""
    whole = library.profile(spec.edit(gpus=1, new_tokens=2, dtype="bfloat16"))[1].verdict.required_bytes
    answer = answered(spec.edit(gpu_vram_bytes=whole - (32 << 20)))
    assert answer.chosen is not None and answer.chosen.headroom_bytes > 0
    assert answer.alternatives[0].name.startswith("2 x ")
    nothing = answered(spec.edit(gpu_vram_bytes=answer.chosen.needed_bytes - (64 << 20)))
    assert nothing.chosen is None and not nothing.snippets and nothing.reason.startswith("no way")
    assert int(nothing.alternatives[0].name.split()[0]) > 2


def test_what_is_not_spread(spec):
    with pytest.raises(UsageError, match="quantized weights are not spread"):
        answered(spec, precision="nf4")
    answer = answered(spec.edit(gpus=3))  # four heads of keys and values
    assert [row.parallel for row in answer.choices] == ["device-map"]
    assert "cannot be divided by 3" in answer.not_applied["tp=3: bfloat16 weights"]
