"""Options come from the fields of dataclasses: what a field says is shown by --help, asked and checked."""

import dataclasses
import importlib
from dataclasses import dataclass

import pytest
import typer
from rich.markup import render

from memprof.cli.main import COMMANDS, app
from memprof.cli.options import FixOptions, add_command
from memprof.device.gpus import NvmlGpu, NvmlSample
from memprof.errors import MemprofError, UsageError
from memprof.flows import local_gpu
from memprof.flows import profile as flow
from memprof.spec import TargetSpec, get_options, option
from tests.cli.panels import panels_of


@dataclass(frozen=True, kw_only=True)
class Toy(TargetSpec):
    """The spec with four more options: nothing else is told of them."""

    warmup: int = option(3, "Batch", "Steps that are not looked at.", is_count=True)
    order: str | None = option(None, "Toy", "{choices}.", choices=("given", "sorted"), unset="given")
    pinned: bool = option(True, "Toy", "Leave host memory pageable.")
    budget_bytes: int | None = option(None, "Toy", "As 2KiB.", flag="--budget", parse=lambda text: int(text[:-3]) << 10)


def started(function, *arguments):
    """Runs `function` as the only command of a program; its exit code."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.callback()(lambda: None)
    add_command(program, "ask", function)
    with pytest.raises(SystemExit) as stopped:
        program(["ask", *arguments], standalone_mode=True)
    return stopped.value.code


def made(*arguments):
    asked = []

    def ask(spec: Toy) -> None:
        asked.append(spec)

    assert started(ask, "--model", "gpt2", *arguments) == 0
    (spec,) = asked
    return spec


def test_a_field_of_the_spec_is_an_option():
    assert made() == Toy(model="gpt2")
    assert made("--warmup", "5").warmup == 5
    assert made("--order", "sorted").order == "sorted"
    assert made("--no-pinned").pinned is False
    assert made("--budget", "2KiB").budget_bytes == 2048


def test_it_is_in_the_help_under_its_panel(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def ask(spec: Toy) -> None:
        """Ask."""

    assert started(ask, "--help") == 0
    panels = panels_of(capsys.readouterr().out)
    batch, toy = (" ".join(" ".join(panels[name]).split()) for name in ("Batch", "Toy"))
    assert "--warmup COUNT Steps that are not looked at. [default: 3]" in batch
    assert "given or sorted. [default: (given)]" in toy and "--no-pinned " in toy and "--budget" in toy


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--warmup", "0"), "--warmup must be at least 1"),
        (("--order", "sroted"), "unknown --order"),
        (("--gpu", "t4", "--gpu-vram", "8"), "give --gpu or --gpu-vram, not both"),
        (("--model-size", "4B"), "give --model or --model-size, not both"),
    ],
)
def test_its_values_are_checked(capsys, arguments, problem):
    def ask(spec: Toy) -> None:
        raise AssertionError("not asked")

    assert started(ask, "--model", "gpt2", *arguments) == 2
    assert problem in capsys.readouterr().err
    if "--gpu" not in arguments and "--model-size" not in arguments:
        name, value = arguments[0].strip("-"), arguments[1]
        with pytest.raises(UsageError, match=problem):
            Toy(model="gpt2", **{name: int(value) if value.isdigit() else value})


def test_an_error_is_a_message_and_debug_shows_it(capsys):
    def fail(asked: FixOptions) -> None:
        raise MemprofError("it went wrong", hint="do better")

    assert started(fail) == 1
    assert capsys.readouterr().err == "memprof: it went wrong\n  hint:  do better\n"
    with pytest.raises(MemprofError, match="it went wrong"):
        started(fail, "--debug")


def commands():
    return typer.main.get_command(app).commands


def test_profile_asks_for_all_of_the_spec():
    asked = {parameter.name for parameter in commands()["profile"].params}
    assert {field.name for field in dataclasses.fields(TargetSpec)} - asked == {"fixes"}
    assert len(get_options(TargetSpec)) == len(dataclasses.fields(TargetSpec)) - 1


def test_help_is_readable_at_80_columns(memprof, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = memprof("profile", "--help-all").stdout
    assert max(map(len, shown.splitlines())) <= 80
    panels = panels_of(shown)
    assert list(panels) == [
        "Options", "Model", "Batch", "Precision", "Training", "Adapters", "NPT", "Compiling", "Memory", "GPU",
        "Fixes", "Settings", "Files", "Output",
    ]  # fmt: skip
    flags = {name: [line.split()[0] for line in lines if line.startswith("-")] for name, lines in panels.items()}
    assert max(map(len, flags.values())) <= 9
    listed = [flag for found in flags.values() for flag in found]
    of_all = [option.opts[-1] for option in commands()["profile"].params if not option.hidden]
    assert sorted(listed) == sorted([*of_all, "--help"])


def test_every_text_is_shown_as_it_is_written():
    """None has what rich reads as a style or a picture."""
    for command in commands().values():
        for one in (command, *getattr(command, "commands", {}).values()):
            for text in (one.help, one.epilog, *(parameter.help for parameter in one.params)):
                assert render(text or "").plain == (text or "")


def test_a_command_is_a_module_and_a_name_in_the_list():
    assert list(commands()) == list(COMMANDS)
    for name in COMMANDS:
        module = importlib.import_module(f"memprof.cli.{name}")
        assert hasattr(module, "app") or callable(getattr(module, name))


@pytest.mark.parametrize("command", ["run", "monitor"])
def test_debug_of_what_is_started_is_not_ours(memprof, command, tmp_path):
    gone = str(tmp_path / "none.py")
    result = memprof(command, gone, "--debug")
    assert result.exit_code != 0 and result.stderr.startswith("memprof: ")
    with pytest.raises(MemprofError):
        memprof(command, "--debug", gone)


@pytest.mark.parametrize(
    ("here", "taken"),
    [
        ((), ("h100-80gb", None)),
        ((NvmlGpu(0, "NVIDIA GeForce RTX 4090", total_bytes=25_390_809_088),), ("rtx-4090", None)),
        ((NvmlGpu(0, "NVIDIA Something New", total_bytes=7 << 30),), ("h100-80gb", 7 << 30)),
    ],
)
def test_the_default_gpu_is_the_one_that_is_here(monkeypatch, here, taken):
    monkeypatch.setattr(local_gpu, "read_gpus", lambda: NvmlSample(here))
    spec = made()
    assert (spec.gpu, spec.gpu_vram_bytes) == taken
    spec = made("--gpu", "t4")
    assert (spec.gpu, spec.gpu_vram_bytes) == ("t4", None)
    for command in ("profile", "run", "recommend", "vocab"):
        (shown,) = (one for one in commands()[command].params if one.name == "gpu")
        assert shown.show_default == "the one that is here, else h100-80gb"


def test_a_gpu_that_is_named_is_simulated(memprof, monkeypatch):
    """Also the one that is taken else."""
    monkeypatch.setattr(flow, "resolve_device", lambda spec, progress: pytest.fail("measured"))
    assert memprof("profile", "--model-size", "1M", "--context-length", 16, "--gpu", "h100-80gb").exit_code == 0
