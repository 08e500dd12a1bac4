"""`--fix auto --gpus N`: which plan, and which fixes besides."""

from __future__ import annotations

import json

import pytest

import memprof
from memprof.device.catalog import Gpu, find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import UsageError
from memprof.flows.cost import compute_step_work
from memprof.flows.ladder.plans import _bound_plan_bytes, _find_fitting_plan, list_plans, search_plans
from memprof.flows.ladder.runs import SpecRuns
from memprof.spec import TargetSpec
from tests.lanes import by_day

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 16384, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return TargetSpec(model=str(tmp_path), context_length=1024, gpus=2, gpu_vram_bytes=80 << 30)


def needs(spec: TargetSpec) -> int:
    return memprof.profile(spec)[1].verdict.required_bytes


def test_the_plans_of_a_model(spec):
    assert [*list_plans(spec, 2)] == ["ddp", "fsdp", "ulysses=2,fsdp"]
    assert [*list_plans(spec, 12)] == ["ddp", "fsdp", "ulysses=2,fsdp", "ulysses=4,fsdp"]
    assert [*list_plans(spec.edit(lengths="alpaca"), 4)] == ["ddp", "fsdp"]


def test_the_simplest_plan_that_fits_gives_nothing_up(spec):
    ddp, fsdp = needs(spec.edit(parallel="ddp")), needs(spec.edit(parallel="fsdp"))
    assert fsdp < ddp
    _, document = search_plans(spec.edit(gpu_vram_bytes=ddp + (1 << 20)))
    assert document.target.asked.parallel == "ddp" and document.verdict.fits and len(document.ladder) == 1
    _, document = search_plans(spec.edit(gpu_vram_bytes=(ddp + fsdp) // 2))
    assert document.target.asked.parallel == "fsdp" and document.verdict.fits
    assert [(row.added, row.parallel, row.fits) for row in document.ladder] == [
        (None, "ddp", False), ("fsdp", "fsdp", True),
    ]  # fmt: skip
    assert document.ladder_reason == "--parallel fsdp over 2 GPUs fits without fixes"
    assert list(document.ladder_left_out) == ["--parallel ddp"]


@pytest.mark.nightly
def test_fixes_are_taken_where_no_plan_is_enough(spec, monkeypatch):
    least = memprof.profile(spec.edit(parallel="ulysses=2,fsdp"))[1]
    too_small = least.device.context_bytes + least.peak.allocated_bytes - (32 << 20)
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")
    _, document = search_plans(spec.edit(gpu_vram_bytes=too_small))
    assert document.ledger is not None  # it is explained, wherever it was run
    assert document.verdict.fits and document.ladder[-1].fixes
    assert document.ladder_reason.startswith(f"--parallel {document.target.asked.parallel}")
    assert "4 such GPUs run it without fixes (--parallel ulysses=4,fsdp)" in document.ladder_reason
    assert document.ladder[-1].cost.link_bytes and document.ladder[0].parallel == "ddp"
    assert document.ladder[-1].parallel == document.target.asked.parallel


@pytest.mark.nightly
def test_one_process_finds_what_several_find(spec, monkeypatch):
    found = []
    for processes in "12":
        monkeypatch.setenv("MEMPROF_PROCESSES", processes)
        found.append(search_plans(spec.edit(gpu_vram_bytes=(9 << 30) // 10))[1].to_json())
    assert found[0] == found[1] and len(found[0]["ladder"]) > 2


@pytest.mark.parametrize("length", by_day([256, 4096]))
def test_a_plan_that_is_not_run_could_not_fit(spec, length):
    """What is passed over by what a replica holds needs at least that, be it weights or activations that decide."""
    runs = SpecRuns(spec.edit(parallel="ddp", context_length=length))
    for plan in list_plans(spec, 2):
        least, document = (
            _bound_plan_bytes(runs, plan, 2),
            memprof.profile(spec.edit(parallel=plan, context_length=length))[1],
        )
        assert 0.3 * document.peak.allocated_bytes < least <= document.peak.allocated_bytes, plan
    usable = _bound_plan_bytes(runs, "ulysses=2,fsdp", 2) - 1
    small = spec.edit(context_length=length, gpu_vram_bytes=usable + CONTEXT_BYTES)
    fits, left_out = _find_fitting_plan(SpecRuns(small.edit(parallel="ddp")), 2, list_plans(small, 2))
    assert fits is None and left_out["--parallel ulysses=2,fsdp"].startswith("without fixes it needs at least ")
    assert (
        left_out["--parallel ddp"].startswith("without fixes it needs ") and "least" not in left_out["--parallel ddp"]
    )


def test_gpus_without_a_plan_are_asked_for_one(spec):
    with pytest.raises(UsageError, match="how is the model spread"):
        memprof.profile(spec)


def sent(spec: TargetSpec, gpu: Gpu) -> tuple[int, float]:
    work = compute_step_work(memprof.profile(spec)[0], gpu)
    assert work is not None
    return work.link_bytes, work.link_seconds


def test_what_goes_between_gpus(spec):
    """In a step of N ranks: DDP reduces all gradients; fully_shard gathers parameters, those of layers once more for
    the backward, and scatters gradients."""
    layer = 2 * (1024 * 1024 + 1024 * 512) + 3 * 1024 * 2048 + 2 * 1024
    root = 2 * 16384 * 1024 + 1024
    whole = 2 * (4 * layer + root)  # bytes of bfloat16
    gpu = find_gpu("h100-80gb")
    assert gpu.link_bandwidth == 450e9
    ddp, seconds = sent(spec.edit(parallel="ddp", gpus=4), gpu)
    assert ddp == pytest.approx(2 * 3 / 4 * whole, rel=1e-3) and seconds == ddp / 450e9
    fsdp, _ = sent(spec.edit(parallel="fsdp", gpus=4), gpu)
    assert fsdp == pytest.approx(3 / 4 * (3 * 2 * 4 * layer + 2 * 2 * root), rel=1e-3)
    assert find_gpu("rtx-4090").link_bandwidth == find_gpu("rtx-4090").host_bandwidth
