"""Fixes that a GPU has not: of other allocators and packages, and where host memory is the GPU's."""

import pytest

from memprof.device.catalog import find_gpu
from memprof.errors import UsageError
from memprof.fixes.catalog import FIXES, check_device, check_installed, find_device_reason, find_precision_reason
from memprof.flows.gpus import make_device_facts
from memprof.flows.ladder.runs import SpecRuns
from memprof.flows.recommend.plans import Goal, list_tiers
from memprof.flows.recommend.single_gpu_scripts import build_scripts
from memprof.spec import TargetSpec

PACKAGES = {"8-bit-optimizer", "8-bit-weights", "4-bit-weights", "qlora"}  # of bitsandbytes
MOVING = {name for name, fix in FIXES.items() if fix.moves_to_host}


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("h100", set()),
        ("gb10", MOVING),
        ("mi300x", {"expandable-segments"}),
        ("strix-halo", MOVING | {"expandable-segments"}),
        ("arc-b580", {"expandable-segments", "compile"}),
        ("m4-max-64gb", MOVING | PACKAGES | {"expandable-segments", "compile"}),
    ],
)
def test_each_gpu_has_its_fixes(name, left_out):
    gpu = find_gpu(name)
    for device in (gpu, make_device_facts(gpu)):
        assert {name for name, fix in FIXES.items() if find_device_reason(fix, device) is not None} == left_out


@pytest.mark.parametrize("gpu", ["v100-16gb", "t4", "rtx-2080-ti", "gtx-1080-ti", "a100-80gb", "mi300x", "m4-max-64gb"])
def test_a_search_takes_the_half_precision_of_the_gpu(gpu):
    half = "bfloat16" if gpu in ("a100-80gb", "mi300x", "m4-max-64gb") else "float16"
    of_half = ("bfloat16", "float16", "amp-bfloat16", "amp-float16")
    for trains in (True, False):
        taken = {n for n in of_half if find_precision_reason(FIXES[n], find_gpu(gpu), trains=trains) is None}
        assert taken == {half, f"amp-{half}"} - ({"float16"} if trains else set())
    others = FIXES.keys() - of_half
    assert not any(find_precision_reason(FIXES[name], find_gpu(gpu), trains=True) for name in others)
    check_device([FIXES["bfloat16"]], find_gpu(gpu))  # who names it has it


@pytest.mark.parametrize(("gpu", "amp"), [("t4", "amp-float16"), ("a10", "amp-bfloat16")])
def test_what_is_searched_and_what_is_left_out(gpu, amp):
    runs = SpecRuns(TargetSpec(model="1M", model_is_size=True, context_length=64, dtype="float32", gpu=gpu))
    left_out = {}
    names = ["chunked-loss", "amp-bfloat16", "amp-float16", "bfloat16", "float16"]
    taken = runs.select_for_search(names, left_out)
    assert taken == ["chunked-loss", amp] + (["bfloat16"] if gpu == "a10" else [])
    assert left_out == ({} if gpu == "a10" else {
        "amp-bfloat16": "bfloat16 is slow on Tesla T4", "bfloat16": "bfloat16 is slow on Tesla T4",
        "float16": "gradients and updates in float16 vanish",
    })  # fmt: skip


def test_what_a_gpu_has_not_is_an_error_by_name():
    with pytest.raises(UsageError, match="compile does not apply"):
        check_device([FIXES["fused-optimizer"], FIXES["compile"]], find_gpu("m1-8gb"))
    spec = TargetSpec(model="gpt2", optimizer="adamw-8bit")
    check_installed(spec)
    check_installed(spec.edit(gpu="arc-b580"))
    with pytest.raises(UsageError, match="bitsandbytes has no kernels for MPS"):
        check_installed(spec.edit(gpu="m1-8gb"))


def test_a_script_for_a_mac_names_its_device():
    spec = TargetSpec(model="gpt2", gpu="m1-8gb", context_length=64)
    (plan, *_) = list_tiers(Goal.LORA, find_gpu("m1-8gb"))
    (script, *_) = build_scripts(plan, plan.make_spec(spec, 1), 1).values()
    assert plan.half == "bfloat16"
    assert 'device = "mps" if torch.mps.is_available() else "cpu"' in script
