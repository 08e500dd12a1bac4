"""The grid of a sweep: values as options parse them, cells in order, and errors that come before any run."""

import pytest

from memprof.errors import UsageError
from memprof.flows.sweep import axes
from memprof.flows.sweep.axes import build_script_grid, build_spec_grid
from memprof.flows.sweep.questions import Question, read_versions, to_payload
from memprof.units import GIB

MODEL = {"model": "pythia-70m"}


def test_cells_are_all_combinations_sizes_last():
    grid = build_spec_grid({**MODEL, "batch_size": "1,2", "context_length": "64, 1k", "gpu": ["t4", "rtx-4090"]})
    assert [(axis.name, axis.values, axis.is_size) for axis in grid.axes] == [
        ("model", ("pythia-70m",), False), ("gpu", ("t4", "rtx-4090"), False),
        ("context_length", ("64", "1000"), True), ("batch_size", ("1", "2"), True),
    ]  # fmt: skip
    assert [cell.values[1:] for cell in grid.cells[:3]] == [("t4", "64", "1"), ("t4", "64", "2"), ("t4", "1000", "1")]
    assert len(grid.cells) == 8 and grid.cells[-1].sizes == (1000, 2)
    assert grid.cells[-1].question.command == (
        "memprof profile --model pythia-70m --context-length 1000 --batch-size 2 --gpu rtx-4090"
    )


def test_a_fix_is_none_or_auto_or_names_joined_by_plus():
    grid = build_spec_grid({**MODEL, "fix": "none,auto,chunked-loss=64+activation-checkpointing"})
    assert [cell.question.fix for cell in grid.cells] == ["none", "auto", "chunked-loss=64,activation-checkpointing"]
    assert "--fix" not in grid.cells[0].question.command
    assert grid.cells[2].question.command.endswith("--fix chunked-loss=64,activation-checkpointing")


def test_the_part_that_is_no_fix_is_named():
    with pytest.raises(UsageError) as raised:
        build_spec_grid({**MODEL, "fix": "bfloat16+chunked-los"})
    assert raised.value.value == "'chunked-los'" and "chunked-loss" in str(raised.value.hint)
    (cell,) = build_spec_grid({**MODEL, "fix": "freeze=a*+b*+chunked-loss"}).cells
    assert cell.question.fix == "freeze=a*+b*,chunked-loss"


def test_a_capacity_is_no_name():
    grid = build_spec_grid({**MODEL, "gpu_vram_bytes": "8,24GB"})
    assert [cell.question.spec.gpu_vram_bytes for cell in grid.cells] == [8 * GIB, 24 * 10**9]
    assert grid.axes[1].values == ("8", "24GB")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "give --model"),
        ({"model": "pythia-70n"}, "unknown model"),
        ({**MODEL, "gpu": "rtx-4090,rtx-4900"}, "unknown GPU"),
        ({**MODEL, "batch_size": "1,,2"}, "an axis has an empty value"),
        ({**MODEL, "batch_size": "0"}, "--batch-size must be at least 1"),
        ({**MODEL, "batch_size": "1,two"}, "--batch-size: not a whole number"),
        ({**MODEL, "dtype": "float32,float8"}, "unknown --dtype"),
        ({**MODEL, "fix": "none,chunked-los"}, "unknown fix"),
        ({**MODEL, "fix": "chunked-loss+"}, "a name of a fix is missing"),
        ({**MODEL, "fix": "chunked-loss++bfloat16"}, "a name of a fix is missing"),
        ({**MODEL, "gpu": {"t4": 1}}, "an axis has a value with parts: gpu"),
        ({**MODEL, "batch_size": [1, [2]]}, "an axis has a value with parts: batch_size"),
        ({**MODEL, "batchsize": 1}, "unknown option of a sweep"),
        ({**MODEL, "batch_size": range(1, 1001), "context_length": range(1, 1001)}, "the sweep has too many cells"),
    ],
)
def test_a_wrong_value_is_an_error_before_any_run(options, problem):
    with pytest.raises(UsageError) as raised:
        build_spec_grid(options)
    assert raised.value.problem.startswith(problem)


def test_options_that_do_not_go_together_are_a_failed_cell():
    grid = build_spec_grid({**MODEL, "dtype": "float32,bfloat16", "amp": "none,bfloat16"})
    assert [cell.question is None for cell in grid.cells] == [False, False, False, True]
    assert grid.cells[0].question.spec.amp is None
    assert grid.cells[3].error == "--amp keeps the weights in float32 (--dtype bfloat16)"


def test_a_script_has_places_for_its_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()")
    words = ["train.py", "--lr", "1e-4", "--bs={batch}"]
    grid = build_script_grid(words, {"batch": "8,16"}, {"gpu": "t4", "steps": 3})
    assert [cell.question.program[-1] for cell in grid.cells] == ["--bs=8", "--bs=16"]
    assert grid.cells[1].question.command == "memprof run --steps 3 --gpu t4 train.py --lr 1e-4 --bs=16"
    assert [axis.is_size for axis in grid.axes] == [False, True]
    first = grid.cells[0].question
    (tmp_path / "train.py").write_text("print(1)")
    assert build_script_grid(words, {"batch": "8,16"}, {"gpu": "t4", "steps": 3}).cells[0].question != first
    for axis, problem in (("lr", "no place for lr"), ("gpu", "no place for gpu")):
        with pytest.raises(UsageError, match=problem):
            build_script_grid(words, {axis: "8"}, {})
    with pytest.raises(UsageError, match="this place has no values"):
        build_script_grid([*words, "--betas={'a': 1}", "{seed}"], {"batch": "8"}, {})
    with pytest.raises(UsageError, match="no such script"):
        build_script_grid(["nosuch.py"], {}, {})
    with pytest.raises(UsageError, match="from outside a script"):
        build_script_grid(["train.py"], {}, {"fix": "micro-batch=2"})


def test_a_question_survives_json_and_its_key_has_the_versions():
    question = build_spec_grid({**MODEL, "mode": "inference", "context_length": 8}).cells[0].question
    assert Question.from_json(to_payload(question)) == question
    versions = read_versions()
    assert question.make_key(versions) != question.make_key({**versions, "torch": "1.0"})
    assert {"memprof", "torch", "transformers"} <= versions.keys()


def test_the_settings_of_the_environment_are_part_of_a_question(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert build_spec_grid(MODEL).cells[0].question.spec.alloc_conf == "expandable_segments:True"


def test_every_axis_is_an_option():
    assert set(axes.AXES) - {"fix"} <= set(axes.TargetSpec.__dataclass_fields__)
