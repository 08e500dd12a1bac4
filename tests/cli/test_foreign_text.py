"""Names from files, logs, snapshots, modules and paths are shown as they are, and the terminal obeys none of them."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import MemprofError, printable
from memprof.trace.events import Owner
from memprof.trace.facts import DeviceFacts, Facts
from memprof.trace.io import save_trace
from tests.cli.conftest import Result
from tests.golden.test_report import training_run
from tests.unit.snapshots.builder import MIB, training

FOREIGN = "[/x][proj]\x1b]0;title\x07\x1b[31m\r\x9b2J\u202e\u200b:smile:"
SHOWN = r"[/x][proj]\x1b]0;title\x07\x1b[31m\r\x9b2J\u202e\u200b:smile:"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PACKAGE = Path(__file__).resolve().parents[2] / "memprof"


def foreign(value: Any, names: tuple[str, ...]) -> Any:
    """`value` with the last part of every text below a key of `names` made foreign."""
    if isinstance(value, dict):
        return {key: foreign(item, (*names, "*") if key in names else names) for key, item in value.items()}
    if isinstance(value, str) and "*" in names:
        folder, slash, name = value.rpartition("/")
        return folder + slash + FOREIGN + name
    if isinstance(value, list):
        return [foreign(item, names) for item in value]
    return value


def write_capture(path: Path) -> Path:
    trace = training_run()
    trace.facts = Facts(command=f"memprof {FOREIGN}", device=DeviceFacts(f"GPU {FOREIGN}", 8192 * MIB, 7766 * MIB))
    trace.ops = [op + FOREIGN for op in trace.ops]
    trace.sources = [source + FOREIGN for source in trace.sources]
    trace.modules = [
        module._replace(
            path=f"{FOREIGN}.{module.path}", stack=module.stack and f"{FOREIGN}.{module.stack}", class_name=FOREIGN
        )
        for module in trace.modules
    ]
    trace.owners = {index: Owner(role, name + FOREIGN) for index, (role, name) in trace.owners.items()}
    save_trace(trace, path)
    return path


def write_snapshot(path: Path, *names: str) -> Path:
    from memprof.report.export.memory_viz import convert_snapshot

    data = foreign(convert_snapshot(training(leak=True).snapshot()), names)
    path.write_bytes(pickle.dumps(data, protocol=4))
    return path


def assert_harmless(result: Any, *, shows: bool = True) -> None:
    text = result.stdout + result.stderr
    assert "Traceback" not in text
    assert not OBEYED.search(text), ascii(text)
    if shows:
        # A table may cut a name that is longer than its column, or break it.
        assert r"[proj]\x1b" in re.sub(r"\s", "", text)


def test_printable() -> None:
    assert printable(FOREIGN) == SHOWN
    assert printable("plain Ä 字 █ 🙂\ttext\n") == "plain Ä 字 █ 🙂\ttext\n"
    assert printable("\udcff") == r"\udcff"
    assert str(MemprofError(FOREIGN, value=FOREIGN, hint=FOREIGN)).count(SHOWN) == 3


def test_what_has_no_width_or_turns_the_direction_is_shown() -> None:
    assert printable("a\u200b\u00adb\U000e0041") == r"a\u200b\xadb\U000e0041"
    characters = map(chr, range(sys.maxunicode + 1))
    assert not [
        ascii(one)
        for one in characters
        if unicodedata.category(one) in ("Cf", "Cs", "Zl", "Zp") and printable(one) == one
    ]


@pytest.mark.parametrize("command", ["show", "compare", "analyze"])
def test_a_page_of_others(memprof, tmp_path, command) -> None:
    """A browser obeys U+202E and U+200B as a terminal does."""
    file = write_capture(tmp_path / f"run{FOREIGN.replace('/', '')}.memprof")
    page = tmp_path / "page.html"
    assert memprof(command, file, *([file] if command == "compare" else []), "--html", page).exit_code in (0, 3, 4)
    text = page.read_text(encoding="utf-8")
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    data = gzip.decompress(base64.b64decode(packed)).decode()
    texts = [text, *texts_in(json.loads(data))]
    assert not [ascii(one) for one in texts if OBEYED.search(one)]
    assert any(r"\u202e" in one for one in texts[1:])


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in texts_in(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts_in(part))


@pytest.mark.parametrize("command", ["show", "show --explain", "analyze", "analyze --explain", "show --json"])
def test_a_capture_of_others(memprof, tmp_path, command) -> None:
    name, *options = command.split()
    assert_harmless(memprof(name, write_capture(tmp_path / f"run{FOREIGN.replace('/', '')}"), *options), shows=False)


def test_names_of_a_capture_are_shown(memprof, tmp_path) -> None:
    file = write_capture(tmp_path / "run.memprof")
    assert_harmless(memprof("show", file))
    assert_harmless(memprof("compare", file, file))
    assert_harmless(memprof("analyze", file))


@pytest.mark.parametrize("names", [("filename",), ("filename", "name", "user_metadata")])
def test_a_snapshot_of_others(memprof, tmp_path, names) -> None:
    file = write_snapshot(tmp_path / "snapshot.pickle", *names)
    assert_harmless(memprof("analyze", file), shows=len(names) == 1)
    assert_harmless(memprof("compare", file, file), shows=False)
    assert_harmless(memprof("export", file, "--to", tmp_path / f"{'x' * 9}.json"), shows=False)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "23.52 GiB of which 1.00 GiB is free. {}",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        "and cpu! {}",
        'File "{}", line 3, in {}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.',
        "{}",
    ],
)
def test_a_log_of_others(memprof, tmp_path, line) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(line.format(FOREIGN, FOREIGN).encode("utf-8", "surrogatepass"))
    assert_harmless(memprof("doctor", log), shows=False)


def test_a_program_of_others(memprof, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "[proj]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "[bold]train.py").write_text(
        "import torch\n"
        f"model = torch.nn.Sequential()\nmodel.add_module({FOREIGN!r}, torch.nn.Linear(64, 64))\nmodel.cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(2):\n"
        "    model(torch.randn(8, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    result = memprof("run", "[bold]train.py")
    assert_harmless(result)
    assert "[bold]train.py:" in result.stdout


def test_wrong_names(memprof, tmp_path) -> None:
    wrong = [
        ("show", FOREIGN), ("analyze", FOREIGN), ("compare", FOREIGN, FOREIGN), ("doctor", FOREIGN), ("run", FOREIGN),
        ("profile", "--model", FOREIGN), ("profile", "--model", "gpt2", "--gpu", FOREIGN), ("verify", FOREIGN),
        ("profile", "--model", "gpt2", "--fix", FOREIGN), ("estimate", "--model", FOREIGN), ("vocab", FOREIGN),
        ("recommend", "--gpu", FOREIGN), ("models", FOREIGN), ("gpus", FOREIGN), ("recipes", "run", FOREIGN),
        ("monitor", "--log", f"/nowhere/{FOREIGN}"), ("export", FOREIGN, "--to", "a.json"), ("profile", f"--{FOREIGN}"),
    ]  # fmt: skip
    for arguments in wrong:
        result = memprof(*arguments)
        assert result.exit_code == 2, arguments
        # The parser's own errors, of what the user typed here, leave the direction of writing and what has no width.
        assert_harmless(Result(2, result.stdout, re.sub("[\u202e\u200b]", "", result.stderr)), shows=False)


def test_broken_files_whose_errors_name_what_is_in_them(memprof, tmp_path) -> None:
    capture = tmp_path / "capture"
    for document in ({FOREIGN: 1}, {"format": "memprof capture", "schema": 1, FOREIGN: {}}, [FOREIGN]):
        capture.write_bytes(gzip.compress(json.dumps(document).encode()))
        assert_harmless(memprof("show", capture), shows=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": FOREIGN, "architectures": [FOREIGN]}))
    assert_harmless(memprof("profile", "--model", tmp_path), shows=False)
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": [], "device_traces": [[{"action": FOREIGN}]]}))
    assert_harmless(memprof("analyze", snapshot), shows=False)


def test_every_text_passes_one_place() -> None:
    """Rich's consoles, and what is written past them: each where it is made harmless."""
    allowed = {
        r"\b(?:_Literal)?Console\(": ["report/terminal/console.py"],
        r"typer\.echo\(": ["cli/streams.py"],
        # JSON, which has its own escapes; text made printable there; a program's traceback, as Python prints it; an
        # error for the process that started this one, which makes it printable.
        r"std(?:out|err)\.write\(": [
            "cli/output.py",
            "cli/progress.py",
            "flows/patch/__main__.py",
            "report/terminal/recommendation.py",
            "script/program.py",
            "torch_private/__main__.py",
        ],
        r"from_markup|from_ansi|markup=True": [],
    }
    for pattern, files in allowed.items():
        found = [
            path.relative_to(PACKAGE).as_posix()
            for path in sorted(PACKAGE.rglob("*.py"))
            if re.search(pattern, path.read_text(encoding="utf-8"))
        ]
        assert found == files, pattern


@pytest.mark.parametrize("character", "\u200b\u200c\u200d\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff\u00ad")
def test_what_has_no_width_or_turns_text_is_an_escape(character):
    assert printable(f"a{character}b") == f"a{ascii(character)[1:-1]}b"


@pytest.mark.parametrize("character", "\u200a\u2010\u2027\u202f\u2070 ä")
def test_what_is_beside_them_is_shown(character):
    assert printable(character) == character
