"""Exit codes mean one thing each, and with --json an error is JSON too."""

import json

import pytest

from memprof.cli.exits import ExitCode

TINY = ("--model-size", "1M", "--context-length", 64)


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    from memprof.flows.profile import profile
    from memprof.spec import TargetSpec
    from memprof.trace.io import save_trace

    folder = tmp_path_factory.mktemp("captures")
    for size in (1, 2):
        spec = TargetSpec(model="1M", model_is_size=True, context_length=64, batch_size=size)
        save_trace(profile(spec)[0], folder / f"{size}.memprof")
    return folder


def test_each_code(memprof, captures, tmp_path, monkeypatch):
    one, two = captures / "1.memprof", captures / "2.memprof"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    (tmp_path / "nothing.py").write_text("import torch\nraise KeyboardInterrupt")
    codes = {
        ("show", one): ExitCode.DONE,
        ("compare", one, one): ExitCode.DONE,
        ("run", "missing.py"): ExitCode.USAGE_ERROR,
        ("estimate",): ExitCode.USAGE_ERROR,
        ("estimate", "--paras", "1B"): ExitCode.USAGE_ERROR,
        ("profile", *TINY, "--gpu-vram", 0.1): ExitCode.DOES_NOT_FIT,
        ("compare", one, two): ExitCode.DIFFERS,
        ("compare", one, two, "--tolerance", "99%"): ExitCode.DONE,
        ("run", "fails.py"): 7,
        ("run", "nothing.py"): ExitCode.INTERRUPTED,
    }
    found = {words: memprof(*words).exit_code for words in codes}
    assert found == codes


@pytest.mark.parametrize(
    ("words", "problem", "code"),
    [
        (("estimate",), "give one of --params", 2),
        (("estimate", "--params", "1B", "--paras", "2"), "no such option --paras", 2),
        (("compare", "a.memprof"), "missing argument", 2),
        (("show", "missing.memprof"), "missing.memprof", 2),
        (("profile", "--model", "gpt3"), "unknown model", 2),
        (("doctor", "missing.log"), "no such file", 2),
        (("run", "fails.py"), "nothing was put on the GPU", 7),
        (("monitor", "--interval", "0"), "the interval is too short", 2),
    ],
)
def test_an_error_is_json_where_json_is_asked(memprof, tmp_path, monkeypatch, words, problem, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    result = memprof(words[0], "--json", *words[1:])
    error = result.json["error"]
    assert problem in f"{error['problem']} {error['value']}" and error.keys() == {
        "problem",
        "value",
        "hint",
        "exit_code",
    }
    assert result.exit_code == error["exit_code"] == code
    assert result.stderr.startswith("memprof: ") and error["problem"] in result.stderr
    assert memprof(*words).stdout == ""


def test_a_run_that_failed_is_one_document(memprof, tmp_path):
    """Its report says so itself: nothing follows it."""
    (tmp_path / "model.py").write_text(
        "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, input_ids, **_):\n"
        "        raise ValueError('no')\n\ndef build():\n    return Model(9, 9)\n"
    )
    result = memprof("profile", "--model", f"{tmp_path / 'model.py'}:build", "--json")
    assert result.exit_code == ExitCode.FAILED
    assert json.loads(result.stdout).keys() & {"error", "failure"} == {"failure"}
