"""What a command needs and is not installed is said at once: before a model is built, and before any search."""

import sys

import pytest

MODEL = ("--model", "gpt2", "--context-length", 64, "--gpu-vram", 8)


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("peft", ("profile", *MODEL, "--adapter", "lora")),
        ("peft", ("profile", *MODEL, "--fix", "lora")),
        ("peft", ("run", "--fix", "lora", "train.py")),
        ("peft", ("recommend", *MODEL, "--adapter", "lora")),
        ("peft", ("recommend", *MODEL, "--adapter", "lora", "--quantize", "nf4")),
        ("bitsandbytes", ("recommend", *MODEL, "--adapter", "lora", "--quantize", "nf4")),
        ("bitsandbytes", ("recommend", *MODEL, "--mode", "inference", "--quantize", "nf4")),
        ("bitsandbytes", ("profile", *MODEL, "--quantize", "int8", "--mode", "inference")),
        ("accelerate", ("profile", *MODEL, "--quantize", "int8", "--mode", "inference")),
        ("bitsandbytes", ("profile", *MODEL, "--optimizer", "paged-adamw-8bit")),
        ("bitsandbytes", ("profile", *MODEL, "--fix", "qlora")),
        ("pyarrow", ("vocab", "rows.parquet")),
        ("pyarrow", ("recommend", *MODEL, "--lengths", "rows.parquet")),
    ],
)
def test_what_is_missing(memprof, package, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, package, None)
    for part in (f"{package}.optim", f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, part, None)
    from memprof.workload.step import Workload

    monkeypatch.setattr(Workload, "run", lambda *args: pytest.fail("a model was run"))
    result = memprof(*command)
    assert result.exit_code == 2, result.stdout
    assert f"pip install '{package}>=" in result.stderr
    assert result.stdout == ""


def test_stored_formats_need_no_bitsandbytes(monkeypatch):
    from memprof.fixes.catalog import check_installed
    from memprof.spec import STORED_FORMATS, Mode, TargetSpec

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for name in STORED_FORMATS:
        check_installed(TargetSpec(model="llama-3.1-8b", quantize=name, mode=Mode.INFERENCE))


def test_the_table_of_a_gpu_leaves_out_what_cannot_be_run(memprof, monkeypatch):
    """Instead of saying that no model at all fits in that way."""
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(
        "memprof.flows.recommend.largest_models._find_largest", lambda runs, spec, task, **rest: _row(task)
    )
    result = memprof("recommend", "--gpu-vram", 8)
    assert "Could not be run: QLoRA: --adapter lora needs peft" in " ".join(result.stdout.split())
    assert "LoRA  none" not in result.stdout


def _row(task):
    from memprof.report.documents.recommendation import LargestModel

    return LargestModel(task.name, "gpt2", 1, 1, 64, 64, None, None, None, "memprof profile --model gpt2")
