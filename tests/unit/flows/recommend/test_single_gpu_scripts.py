"""The code to paste runs as it is, on the CPU."""

import warnings

import pytest

from memprof.flows import profile as flow
from memprof.flows.recommend.plans import Activations, Goal, Plan, make_base_spec
from memprof.flows.recommend.single_gpu_scripts import build_scripts
from memprof.spec import TargetSpec

PLANS = {
    "full": Plan(Goal.FULL, "amp", "bfloat16", "adamw"),
    "full-lean": Plan(Goal.FULL, "half", "bfloat16", "adamw", Activations.CHECKPOINTED, chunked_loss=True),
    "full-cpu": Plan(
        Goal.FULL, "float32", "bfloat16", "adamw-cpu", Activations.CHECKPOINTED_OFFLOADED, chunked_loss=True
    ),
    "full-float16": Plan(Goal.FULL, "amp", "float16", "adamw", Activations.OFFLOADED),
    "lora": Plan(Goal.LORA, "half", "bfloat16", "adamw", Activations.CHECKPOINTED, chunked_loss=True),
    "infer": Plan(Goal.INFER, "half", "bfloat16"),
}


def _spec(plan, model, **changes):
    base = make_base_spec(plan.goal, TargetSpec(model=str(model), context_length=32, **changes))
    return plan.make_spec(base, 2, 2)


@pytest.mark.parametrize("kind", ["pytorch", "transformers"])
@pytest.mark.parametrize("name", PLANS)
def test_runs(name, kind, tiny, tmp_path, monkeypatch, capsys):
    plan = PLANS[name]
    scripts = build_scripts(plan, _spec(plan, tiny), 2)
    if kind not in scripts:
        assert plan.goal is Goal.INFER
        return
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that the script uses
        exec(compile(scripts[kind], "script", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    if kind == "pytorch" and plan.goal is not Goal.INFER:
        losses = [float(line.split()[1]) for line in printed.splitlines() if line[:2] in ("0 ", "1 ")]
        # Two steps were taken, of a model that knows nothing: ln 512 is 6.2.
        assert len(losses) == 2 and all(5.5 < loss < 7.5 for loss in losses)
    if kind == "transformers":
        assert "train_loss" in printed


def test_quantized_scripts_load_with_bitsandbytes():
    plan = Plan(Goal.QLORA, "nf4", "bfloat16", "adamw")
    spec = _spec(plan, "llama-3.1-8b")
    script = build_scripts(plan, spec, 4)["transformers"]
    assert 'bnb_4bit_quant_type="nf4"' in script
    assert "prepare_model_for_kbit_training" in script
    assert "gradient_accumulation_steps=4" in script
    compile(script, "script", "exec")


@pytest.mark.parametrize("plan", [Plan(Goal.QLORA, "nf4", "bfloat16", "adamw"), Plan(Goal.INFER, "int8", "bfloat16")])
def test_a_quantized_script_without_weights_loads_what_it_has_made(plan, tiny):
    """Weights are quantized while they are loaded; a configuration alone has none."""
    import memprof

    spec = _spec(plan, tiny, gpu_vram_bytes=8 << 30)
    said = flow.profile(spec)[1].verdict.required_bytes
    with memprof.virtual_gpu(vram=8) as gpu, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that the script uses
        exec(compile(build_scripts(plan, spec, 2)["pytorch"], "script", "exec"), {"__name__": "__main__"})
    assert abs(gpu.report().verdict.required_bytes - said) <= 2 << 20  # a segment


def test_model_of_a_size_alone_is_built_from_its_configuration():
    plan = PLANS["full"]
    spec = plan.make_spec(TargetSpec(model="3M", model_is_size=True, context_length=16), 1)
    script = build_scripts(plan, spec, 1)["pytorch"]
    assert "AutoConfig.for_model" in script and "from_pretrained" not in script
    compile(script, "script", "exec")


def test_a_model_of_the_users_own_has_no_script():
    assert build_scripts(PLANS["full"], TargetSpec(model="train.py:build", context_length=8), 1) == {}


def test_what_is_fed_no_tokens_has_no_script(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "vit", "architectures": ["ViTForImageClassification"]}', encoding="utf-8")
    assert build_scripts(PLANS["full"], TargetSpec(model=str(file), context_length=None), 1) == {}


def test_the_script_takes_what_was_said(tiny):
    """The plain script, run on the virtual GPU, comes to the peak of the run that it is from."""
    import memprof

    plan = PLANS["full-lean"]
    spec = _spec(plan, tiny, gpu_vram_bytes=8 << 30)
    _, document = flow.profile(spec)
    with memprof.virtual_gpu(vram=8) as gpu:
        exec(compile(build_scripts(plan, spec, 2)["pytorch"], "script", "exec"), {"__name__": "__main__"})
    said, taken = document.peak.allocated_bytes, gpu.report().peak.allocated_bytes
    assert abs(taken - said) <= 0.01 * said, (said, taken)
