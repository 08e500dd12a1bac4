"""The commands that repeat a failed run, with a fix or without."""

from __future__ import annotations

import pytest

from memprof.doctor.reported_run import ReportedRun, find_arguments
from memprof.fixes.catalog import FIXES

GIB = 1 << 30


def test_a_command_has_what_is_known_of_the_run():
    run = ReportedRun("qwen3-4b", 4, 2048, npt="dense", gpu_bytes=24 * 10**9, attention="eager")
    options = "--context-length 2048 --batch-size 4 --npt dense --attention eager --gpu-vram 24GB"
    assert run.build_command() == f"memprof profile --model qwen3-4b {options}"
    assert run.build_command("lora") == f"memprof profile --model qwen3-4b {options} --fix lora"
    assert ReportedRun().build_command() == "memprof profile --model MODEL"


def test_a_command_that_runs_the_script():
    run = ReportedRun(script="a b.py", arguments="--x 1", gpu_bytes=80 * GIB)
    assert run.build_script_command("lora") == "memprof run --gpu-vram 80 --fix lora 'a b.py' --x 1"
    assert ReportedRun(script="train.py").build_script_command() == "memprof run train.py"
    with pytest.raises(ValueError, match="not known"):
        ReportedRun().build_script_command()


@pytest.mark.parametrize(
    ("run", "fix", "command"),
    [
        (ReportedRun("qwen3-4b"), "lora", "memprof profile --model qwen3-4b --fix lora"),
        # A batch that is not known may have more than one sequence.
        (ReportedRun("qwen3-4b"), "micro-batch", "memprof profile --model qwen3-4b --batch-size 2 --fix micro-batch"),
        (ReportedRun("qwen3-4b", 1), "micro-batch", None),
        (
            ReportedRun("qwen3-4b", 8),
            "micro-batch",
            "memprof profile --model qwen3-4b --batch-size 8 --fix micro-batch",
        ),
        # Weights that are in half precision already.
        (ReportedRun("qwen3-4b"), "bfloat16", None),
        (ReportedRun("opt-125m"), "bfloat16", None),
        (ReportedRun("gpt2"), "bfloat16", "memprof profile --model gpt2 --fix bfloat16"),
        (ReportedRun(), "bfloat16", "memprof profile --model MODEL --fix bfloat16"),
        # The script is run where the model is not known, and where the fix can be switched on in it.
        (ReportedRun(script="t.py"), "chunked-loss", "memprof run --fix chunked-loss t.py"),
        (ReportedRun(script="t.py"), "bfloat16", ""),
        (ReportedRun("gpt2", script="t.py"), "chunked-loss", "memprof profile --model gpt2 --fix chunked-loss"),
    ],
)
def test_a_command_with_a_fix_that_applies(run: ReportedRun, fix: str, command: str | None):
    assert run.build_command_with_fix(FIXES[fix]) == command


@pytest.mark.parametrize(
    ("log", "arguments"),
    [
        ("accelerate launch --num_processes 2 src/train.py --a 1\n", "--a 1"),
        ("deepspeed train.py --a=1,2:3@x%y+z\r\n", "--a=1,2:3@x%y+z"),
        ("python train.py --a 1|tee log", "--a 1"),
        ("python train.py --a 1 & wait", "--a 1"),
        ("python mytrain.py --a 1", ""),
        ("python train.pyc --a 1", ""),
        ("python a.py; train.py --a 1", ""),
    ],
)
def test_arguments_behind_a_launcher(log: str, arguments: str):
    assert find_arguments("/w/train.py", log) == arguments
    assert find_arguments(r"C:\w\train.py", log) == arguments
