"""Defaults from memprof.toml or pyproject.toml: taken upwards, said once, outdone by the command line, checked."""

from pathlib import Path

import pytest
import typer

from memprof.cli import settings
from memprof.cli.main import app
from memprof.cli.settings import _COMMAND_LINE_ONLY, write_config
from memprof.errors import UsageError

TABLE = """
gpu = "t4"
context-length = 64
explain = true
workspaces = false

[compare]
top = 3

[profile]
batch-size = 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder below the one that may have settings."""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    return tmp_path


def write(folder, text, name="memprof.toml"):
    (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", ["memprof.toml", "pyproject.toml"])
def test_what_is_taken_is_said(memprof, folder, name):
    table = 'gpu = "t4"\ncontext-length = 64\n[estimate]\nbatch-size = 2\n'
    if name == "pyproject.toml":
        table = "[tool.memprof]\n" + table.replace("[estimate]", "[tool.memprof.estimate]")
    write(folder, table, name)
    result = memprof("estimate", "--params", "1.2B")
    words = {"--gpu=t4", "--context-length=64", "--batch-size=2"}
    first, rest = result.stdout.split("\n", 1)
    place, said = first.removeprefix("From ").split(": ")
    assert place == str(folder / name) and set(said.split()) == words
    asked = memprof("estimate", "--params", "1.2B", "--gpu", "t4", "--context-length", 64, "--batch-size", 2, "--json")
    answer = memprof("estimate", "--params", "1.2B", "--json").json
    assert answer.pop("options_from_file") == {"file": str(folder / name), "options": said.split()}
    assert asked.json == answer and "* on t4" in rest
    assert not memprof("estimate", "--params", "1.2B", "-q").stdout.startswith("From ")
    assert memprof("models").stdout.startswith("Qwen\n  qwen3.5-0.8b")  # takes nothing


def test_the_command_line_wins(memprof, folder):
    write(folder, 'gpu = "t4"\ndtype = "float16"\nexplain = true\n[estimate]\nmodel-size = "4B"\n')
    said = memprof("estimate", "--params", "1.2B", "--gpu-vram", 8, "--dtype", "float32").stdout
    assert said.splitlines()[0].endswith(": --explain") and "1.2B parameters in float32" in said and "8.00 GiB" in said
    assert memprof("estimate", "--params", "1.2B", "--gpu", "l4").stdout.splitlines()[-3] != ""
    write(folder / "a", 'gpu = "l4"\n')  # the nearest file alone
    assert memprof("estimate", "--params", "1.2B").stdout.splitlines()[0].endswith(": --gpu=l4")


@pytest.mark.parametrize(
    ("table", "problem", "hint"),
    [
        ('gpus-vram = "8"', "unknown option in", "gpu-vram"),
        ("[estimate]\nuntil-exit = true", "unknown option in", ""),
        ("[estimat]\ngpu = 't4'", "unknown command in", "estimate"),
        ("gpu = [1]", "gpu has no value", ""),
        ("gpu = ", "the file is no TOML", "correct it"),
        ("gpu = 'h1000'", "unknown GPU", "h100"),
        ("batch-size = 'two'", "--batch-size", ""),
        *((f"{name} = 'x'", "is for the command line alone", "") for name in _COMMAND_LINE_ONLY),
    ],
)
def test_what_is_wrong_is_an_error(memprof, folder, table, problem, hint):
    write(folder, table)
    result = memprof("estimate", "--params", "1.2B")
    assert result.exit_code == 2
    assert problem in result.stderr and hint in result.stderr


def test_other_files_are_let_alone(memprof, folder):
    write(folder, "[tool.other]\nname = 'memprof'", "pyproject.toml")
    write(folder / "a", "this is no TOML", "pyproject.toml")
    assert memprof("estimate", "--params", "1.2B").exit_code == 0
    write(folder, "tool.memprof = 5", "pyproject.toml")
    assert "no table" in memprof("estimate", "--params", "1.2B").stderr
    assert memprof("estimate", "--params", "1.2B", "--json").json["error"]["exit_code"] == 2


def test_a_script_s_own_options_are_not_looked_at(memprof, folder):
    write(folder, "[run]\ngpu = 'h1000'")
    (folder / "a" / "b" / "train.py").write_text("")
    assert "unknown GPU" in memprof("run", "train.py", "--gpu", "t4").stderr
    assert "unknown GPU" not in memprof("run", "--gpu", "t4", "another.py").stderr


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("[tool.memprof]\ngpu = 't4'\n", True),
        ("[ tool . \"memprof\" ]\ngpu = 't4'\n", True),
        ("tool.memprof.gpu = 't4'\n", True),
        ("[tool]\nmemprof = {gpu = 't4'}\n", True),
        ("tool = {memprof = {gpu = 't4'}}\n", True),
        ("[tool.memprof.estimate]\ngpu = 't4'\n", True),
        ("[project]\ndependencies = ['memprof']\n[tool.black]\nname = 'memprof'\n", False),
    ],
)
def test_a_project_without_the_table_is_not_parsed(memprof, folder, monkeypatch, text, taken):
    write(folder, text, "pyproject.toml")
    parsed = []
    monkeypatch.setattr(
        settings, "_parse_toml", lambda path, data, own=settings._parse_toml: parsed.append(path) or own(path, data)
    )
    assert memprof("estimate", "--params", "1.2B").stdout.startswith("From ") is taken
    assert bool(parsed) is taken


def test_a_folder_that_was_removed_has_none(memprof, monkeypatch):
    def gone():
        raise FileNotFoundError

    monkeypatch.setattr(settings.Path, "cwd", gone)
    assert memprof("estimate", "--params", "1.2B", "-q").exit_code == 0


def test_flags_of_every_command_are_accepted(memprof, folder):
    """Whatever has a value that a file can have, of whichever command."""
    import typer

    root = typer.main.get_command(app)
    names = {
        option.opts[-1][2:]: option.is_flag
        for command in root.commands.values()
        for option in command.params
        if option.param_type_name == "option" and option.opts[-1].startswith("--")
    }
    lines = [f"{name} = false" if flag else f"{name} = '1'" for name, flag in names.items()]
    write(folder, "\n".join(line for line in lines if line.split()[0] not in _COMMAND_LINE_ONLY))
    assert memprof("models").exit_code == 0


def test_no_file_names_a_place_to_write_to():
    """A folder of others must not replace files by being entered."""
    paths = {
        option.opts[-1].removeprefix("--")
        for command in typer.main.get_command(app).commands.values()
        for option in command.params
        if option.param_type_name == "option" and option.metavar in ("FILE", "FOLDER")
    }
    assert {"save", "csv", "html", "to", "log"} <= paths <= set(_COMMAND_LINE_ONLY)


@pytest.mark.parametrize("name", ["mine.yaml", "mine.toml"])
def test_a_saved_config_is_the_command_again(memprof, folder, name):
    asked = ("estimate", "--params", "1.2B", "--gpu", "t4", "--context-length", 64)
    answer = memprof(*asked, "--save-config", folder / name, "--json").json
    again = memprof("estimate", "--config", folder / name, "--json").json
    words = again.pop("options_from_file")
    assert words["file"] == str(folder / name)
    assert set(words["options"]) == {"--params=1.2B", "--gpu=t4", "--context-length=64"}
    assert again == answer
    refused = memprof(*asked, "--save-config", folder / name)
    assert refused.exit_code == 2 and "replaces no file" in refused.stderr


def test_a_saved_config_has_what_was_given_more_than_once(memprof, folder):
    file = folder / "mine.yaml"
    asked = ("verify", "bfloat16", "--model", "none-1", "--model", "none-2")
    assert "none-1" in memprof(*asked, "--save-config", file).stderr
    shown = memprof("verify", "bfloat16", "--config", file)
    assert "--model=none-1 --model=none-2" in shown.stdout and "none-1" in shown.stderr


def test_help_is_shown_where_a_file_is_wrong(memprof, folder):
    write(folder, "gpu = ")
    assert memprof("estimate", "--help").exit_code == 0


def test_what_is_nearer_wins(memprof, folder):
    write(folder, 'gpu = "t4"\ndtype = "float32"\nbatch-size = 3')
    write(folder, "gpu: l4\nestimate:\n  context_length: 64\n", "mine.yaml")
    shown = memprof(
        "estimate", "--params", "1B", "--config", folder / "mine.yaml", "--preset", "optimized", "--batch-size", 5
    )
    lines = shown.stdout.splitlines()
    assert lines[0] == "From preset optimized: --dtype=bfloat16"  # of memprof.toml nothing is left
    assert lines[1] == f"From {folder / 'mine.yaml'}: --context-length=64 --gpu=l4" or set(lines[1].split()[2:]) == {
        "--context-length=64", "--gpu=l4",
    }  # fmt: skip
    assert memprof("profile", "--config", folder / "mine.yaml", "--model", "gpt2", "-q").exit_code == 0


def test_a_named_file_may_name_the_model_and_list_fixes(memprof, folder):
    write(folder, "model: gpt2\ncontext_length: 64\nfix: [activation-checkpointing, chunked-loss]\n", "mine.yaml")
    result = memprof("profile", "--config", folder / "mine.yaml", "--json").json
    assert "--fix=activation-checkpointing,chunked-loss" in result["options_from_file"]["options"]
    assert [row["fixes"] for row in result["ladder"]][-1] == ["activation-checkpointing", "chunked-loss"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu: [t4", "the file is no YAML"),
        ("- gpu", "has no options"),
        ("", "has no options"),
        ("gpu: {a: 1}", "gpu is an option, and has names below it"),
        ("model: {name: gpt2}", "model is an option, and has names below it"),
        ("estimate: 5", "estimate is a command, and has a value"),
        ("estimate: {gpu: {a: 1}}", "gpu has no value that an option has"),
        ("gpus-vram: {a: 1}", "unknown command in"),
        ("batch-size: 1\nbatch-size: 2", "batch-size is in the file twice"),
        ("batch_size: 1\nbatch-size: 2", "batch-size is in the file twice"),
        ("estimate: {gpu: t4, gpu: l4}", "gpu is in the file twice"),
        ("estimate: {gpu: t4}\nestimate: {batch-size: 2}", "estimate is in the file twice"),
        ("batch-size: yes", "batch-size takes a value"),
        ("batch-size: off", "batch-size takes a value"),
        ("batch-size: [1, [2]]", "batch-size has no value that an option has"),
        ("batch-size: []", "batch-size has no value that an option has"),
        ("batch-size: [1, 2]", "--batch-size"),
        ("batch-size: .nan", "--batch-size"),
        ("batch-size: 2026-01-01", "batch-size has no value that an option has"),
        ("gpu: !!binary aGVsbG8=", "gpu has no value that an option has"),
        ("gpu: t4\n---\ngpu: l4", "the file is no YAML"),
        ("? [gpu]\n: t4", "the file is no YAML"),
        ("explain: 3", "explain is a flag"),
        ("1: 2", "unknown option in"),
        ("command: train.py", "unknown option in"),
        ("fixes: bfloat16", "unknown option in"),
        ("gpu: t4\ngpu-vram: 8", "gpu and gpu-vram exclude each other"),
        ("estimate: {model: gpt2, params: 1B}", "model and params exclude each other"),
        ("force: true", "force is for the command line alone"),
        ("config: other.yaml", "config is for the command line alone"),
        ("gpus-vram: 8", "unknown option in"),
        ("gpu: null", "gpu has no value that an option has"),
        ("gpu: !!python/object/apply:os.system [true]", "the file is no YAML"),
    ],
)
def test_a_bad_config_is_one_error(memprof, folder, text, problem):
    write(folder, text, "mine.yaml")
    result = memprof("estimate", "--params", "1.2B", "--config", folder / "mine.yaml")
    assert result.exit_code == 2 and problem in result.stderr and "mine.yaml" in result.stdout + result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3


def test_the_table_of_a_command_replaces_what_excludes_its_options(memprof, folder):
    write(folder, 'gpu = "t4"\n[estimate]\ngpu-vram = "8"\n')
    assert memprof("estimate", "--params", "1.2B").stdout.splitlines()[0].endswith(": --gpu-vram=8")


def test_presets(memprof, folder):
    assert "unknown --preset" in memprof("estimate", "--params", "1B", "--preset", "smal").stderr
    assert "says nothing to this command" in memprof("gpus", "--preset", "small").stderr
    assert "no such file" in memprof("gpus", "--config", folder / "none.yaml").stderr
    assert "From preset small: --model=gpt2" in memprof("profile", "--preset", "small").stdout


def test_a_config_of_aliases_without_end_is_one_error(memprof, folder):
    value = "&a0 [x, x, x, x, x, x, x, x, x, x]"
    for level in range(1, 12):
        value = f"&a{level} [{value}{f', *a{level - 1}' * 9}]"
    Path("bomb.yaml").write_text(f"gpu: {value}\n")
    done = memprof("gpus", "--config", "bomb.yaml")
    assert done.exit_code == 2 and "gpu has no value that an option has" in done.stderr
    assert len(done.stderr) < 500


def test_a_config_that_could_not_be_written_is_not_there(folder):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UsageError, match="cannot write"):
            write_config(Path("config.yaml"), "gpus", {"json": True})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not Path("config.yaml").exists()
