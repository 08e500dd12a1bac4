"""-q prints the verdict alone, -v what it rests on; in a pipe progress is a plain line now and then."""

import os
import sys
import time

import pytest

from memprof.cli import progress
from memprof.flows.capture import _describe_progress
from memprof.flows.progress import describe_progress, report_progress_with
from memprof.trace.events import Event, EventKind, Module, ModuleRole, Phase, PhaseKind, Trace
from memprof.trace.io import save_trace
from tests.cli.terminal import Terminal
from tests.golden.test_report import training_run
from tests.processes import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("verdicts")
    save_trace(training_run(), place / "run.memprof")
    (place / "train.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the "
        "allocated memory 77.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.\n"
    )
    (place / "corpus.txt").write_text("a b c\nb c\n")
    return place


@pytest.mark.parametrize(
    ("words", "verdict", "lines"),
    [
        (("show", "run.memprof"), "", 4),
        (("profile", "--model-size", "1M", "--context-length", "16"), "Fits: needs", 2),
        (("compare", "run.memprof", "run.memprof"), "totals that are compared are equal", 2),
        (("analyze", "run.memprof"), "Device 0: peak of ", 1),
        (
            ("estimate", "--params", "1.2B", "--gpu", "t4"),
            "1.2B parameters in bfloat16 on t4: about 2.96 GiB for inference (fits)",
            2,
        ),
        (("doctor", "train.log"), "", 2),
        (("vocab", "corpus.txt"), "What a cap saves", 12),
    ],
)
def test_the_verdict_alone(memprof, folder, monkeypatch, words, verdict, lines):
    monkeypatch.chdir(folder)
    whole, alone = memprof(*words), memprof(*words, "-q")
    assert alone.exit_code == whole.exit_code and alone.stdout == memprof(*words, "--quiet").stdout
    assert verdict in alone.stdout and 1 <= len(alone.stdout.splitlines()) <= lines
    assert len(alone.stdout) < len(whole.stdout) and not alone.stdout.startswith("\n")
    said = " ".join(whole.stdout.split())
    assert all(" ".join(line.split()) in said for line in alone.stdout.splitlines())


def test_v_explains(memprof):
    words = ("estimate", "--params", "1.2B")
    assert memprof(*words, "-v").stdout == memprof(*words, "--explain").stdout != memprof(*words).stdout


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PIPE_INTERVAL", 0.05)
    with progress.Progress() as echo:
        echo("reading a\x1b[31m name")
        time.sleep(0.18)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) in (2, 3) and set(lines) == {r"memprof: reading a\x1b[31m name (0 s)"}
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    with progress.Progress():
        time.sleep(0.1)
    assert capsys.readouterr().err == ""  # nothing is known yet
    with progress.Progress(quiet=True) as echo:
        echo("reading")
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_progress_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PIPE_INTERVAL", 0.05)
    with progress.Progress() as echo, report_progress_with(lambda: "layer 3 of 9"):
        echo("training step 1 of 2")
        time.sleep(0.08)
    with progress.Progress() as echo, report_progress_with(lambda: str(1 // 0)):
        echo("accounting")
        time.sleep(0.08)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "memprof: training step 1 of 2, layer 3 of 9 (0 s)" and second == "memprof: accounting (0 s)"
    assert describe_progress() == ""


def test_progress_on_a_terminal_is_one_line_that_goes_away():
    code = (
        "from memprof.cli import progress\nimport time\nprogress._FIRST_DELAY = progress._REDRAW_INTERVAL = 0.05\n"
        "with progress.Progress() as say:\n    say('reading ' + 'x' * 200)\n    time.sleep(0.4)\nprint('done')"
    )
    shown = Terminal([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}, columns=60)
    assert shown.wait() == 0
    assert shown.received.count("memprof: reading xxx") >= 2 and shown.screen.text.split() == ["done"]
    shown.end()


ESTIMATE = """
import time
from memprof.cli import progress
progress._FIRST_DELAY = progress._REDRAW_INTERVAL = 0.05
with progress.Progress({}) as show:
    show.show_estimate("about 710 GiB, does not fit")
    time.sleep(0.15)
    show("building")
    time.sleep(0.2)
    show("with " + "x" * 40)
    time.sleep(0.2)
print("done")
"""


def test_an_estimate_stands_at_once_and_goes_where_there_is_no_room():
    shown = Terminal([sys.executable, "-c", ESTIMATE.format("")], {**os.environ, "PYTHONPATH": str(ROOT)}, columns=90)
    assert shown.wait() == 0
    lines = list(dict.fromkeys(shown.received.split("\r\033[K")))
    assert lines[1] == "memprof: about 710 GiB, does not fit; running it..."
    assert lines[2] == "memprof: about 710 GiB, does not fit; building (0 s)"
    assert lines[3] == f"memprof: with {'x' * 40} (0 s)"
    assert shown.screen.text.split() == ["done"]
    shown.end()


@pytest.mark.nightly
def test_no_estimate_is_drawn_in_a_pipe_or_where_quiet(capsys):
    with progress.Progress() as piped:
        assert not piped.shows_estimates
        piped.show_estimate("about 710 GiB, does not fit")
    assert capsys.readouterr().err == ""
    code = ESTIMATE.format("quiet=True")
    shown = Terminal([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}, columns=90)
    assert shown.wait() == 0 and shown.received.split() == ["done"]
    shown.end()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("profile --model qwen3-0.6b --gpus 2 --parallel fsdp", " GiB of each GPU, fits the h100-80gb"),
        ("profile --model llama-3.1-8b --gpu rtx-4090 --fix auto", "GiB without fixes, does not fit the rtx-4090"),
        ("recommend --model qwen3-0.6b --mode inference", "GiB with bfloat16 weights, fits the h100-80gb"),
    ],
)
def test_a_command_says_first_what_the_closed_form_says(words, line):
    command = [sys.executable, "-m", "memprof", *words.split(), "--no-cache"]
    shown = Terminal(command, {**os.environ, "PYTHONPATH": str(ROOT)}, columns=120)
    try:
        shown.wait_for("; running it...")
        assert line in shown.received
    finally:
        shown.end()


def test_layers_of_a_forward_are_counted():
    trace = Trace(modules=[Module("", "Net", ModuleRole.ROOT, "")])
    trace.modules += [Module(f"h.{n}", "Layer", ModuleRole.LAYER, "h") for n in range(3)]
    for kind in (PhaseKind.MODEL, PhaseKind.FORWARD, PhaseKind.BACKWARD):
        trace.phases.append(Phase(kind, 1, 1))
    phase, enter = EventKind.PHASE, EventKind.ENTER
    events = [(phase, 0), (phase, 1), (enter, 0), (enter, 2), (phase, 2)]
    said = []
    for event in events:
        trace.events.append(Event(*event))
        said.append(_describe_progress(trace))
    assert said == ["", "forward", "forward", "layer 2 of 3", "backward"]


@pytest.mark.parametrize(
    "words",
    [
        ("show", "run.memprof", "--csv", "tables"),
        ("compare", "run.memprof", "run.memprof", "--csv", "compared"),
        ("analyze", "run.memprof", "--csv", "analyzed"),
        ("export", "run.memprof", "--to", "run.json"),
        ("profile", "--model-size", "1M", "--context-length", "16", "--save", "new.memprof"),
    ],
)
def test_q_says_nothing_beside_the_verdict(memprof, folder, monkeypatch, words):
    """No progress, and not where files were written."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(progress, "PIPE_INTERVAL", 0.01)
    assert memprof(*words).stderr != ""
    assert memprof(*words, "-q").stderr == ""
