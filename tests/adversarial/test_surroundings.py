"""Odd terminals, environments and users; streams that are closed or full; programs that leave; Ctrl-C."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.adversarial.documents import TINY, write_capture
from tests.adversarial.harmless import SECONDS, WAIT
from tests.lanes import of_lane
from tests.processes import ROOT, python

pytestmark = pytest.mark.slow
MOST = SECONDS * WAIT

STREAMS = {
    "full": ">/dev/full", "closed": ">&-", "no stderr": "2>&-", "no streams": ">&- 2>&- <&-", "no stdin": "<&-",
    "full stderr": "2>/dev/full", "all full": ">/dev/full 2>&1", "gone": "| true; exit ${PIPESTATUS[0]}",
}  # fmt: skip
SAID = {"full": 1, "all full": 1}
COMMANDS = ("show run.memprof", "show run.memprof --json", "analyze run.memprof", "gpus", "--help", "show --help")
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "no HOME": {"HOME": ""}, "HOME is a file": {"HOME": "{folder}/run.memprof"}, "HOME is not there": {"HOME": "/none"},
    "HOME is read-only": {"HOME": "/proc"}, "no TMPDIR": {"TMPDIR": "/none"},
    "TMPDIR is read-only": {"TMPDIR": "/proc"},
    "C locale": {"LC_ALL": "C"}, "POSIX": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Japanese": {"LANG": "ja_JP.eucJP", "LC_ALL": "ja_JP.eucJP"}, "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"PYTHONIOENCODING": "ascii"}, "utf-16": {"PYTHONIOENCODING": "utf-16"}, "no UTF-8": {"PYTHONUTF8": "0"},
    "dumb": {"TERM": "dumb"}, "no terminal": {"TERM": ""}, "an odd terminal": {"TERM": "x" * 300},
    "odd time": {"TZ": "Nowhere/Land+99"}, "one hash": {"PYTHONHASHSEED": "0"}, "no user": {"USER": "", "LOGNAME": ""},
    "optimized": {"PYTHONOPTIMIZE": "2"}, "warnings": {"PYTHONWARNINGS": "error"}, "colours": {"FORCE_COLOR": "1"},
    "development": {"PYTHONDEVMODE": "1"}, "no PATH": {"PATH": ""}, "safe path": {"PYTHONSAFEPATH": "1"},
    **{f"{columns} columns": {"COLUMNS": columns} for columns in ("", "abc", "0", "-5", "1", "99999", "9" * 30)},
}  # fmt: skip
FACTORIES = ("sys.exit(0)", "sys.exit()", "sys.exit(3)", "os._exit(0)", "raise SystemExit('x')", "raise GeneratorExit")
MOMENTS = 15
INPUTS = {
    "closed, full or broken streams": len(STREAMS) * len(COMMANDS),
    "environments": len(ENVIRONMENTS) * 2 + 3,
    "model factories that exit": len(FACTORIES) * 2,
    "Ctrl-C at different moments": MOMENTS,
}


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


def _some(cases: list[Any], every: int) -> list[Any]:
    """One in `every` in each run, the others at night."""
    night = pytest.mark.nightly
    return of_lane(pytest.param(*case, marks=() if n % every == 0 else night) for n, case in enumerate(cases))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "run.memprof")
    return tmp_path


@pytest.mark.parametrize(("name", "command"), _some([(s, c) for s in STREAMS for c in COMMANDS], 17))
def test_streams(folder: Path, name: str, command: str) -> None:
    line = f"{sys.executable} -m memprof {command} {STREAMS[name]}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=_environment(), capture_output=True, timeout=MOST)
    by_click = name == "gone" and "--help" in command  # whose answer it is
    assert by_click or done.returncode == SAID.get(name, 0), done.stderr
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    assert name != "full" or done.stderr == b"memprof: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("name", "command"), _some([(e, c) for e in ENVIRONMENTS for c in ("show", "analyze")], 31))
def test_environments(folder: Path, name: str, command: str) -> None:
    odd = {key: value.format(folder=folder) for key, value in ENVIRONMENTS[name].items()}
    done = subprocess.run(
        [sys.executable, "-m", "memprof", command, "run.memprof"], cwd=folder, env=_environment(**odd),
        capture_output=True, timeout=MOST,
    )  # fmt: skip
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert len(done.stdout.split()) > 50


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["the folder is gone", "umask 777", "nobody"])
def test_places(folder: Path, how: str) -> None:
    show = f"{sys.executable} -m memprof show {folder / 'run.memprof'}"
    before = {
        "the folder is gone": f"mkdir gone; cd gone; rmdir ../gone; {show}",
        "umask 777": f"umask 777; {show} --csv tables; test -d tables",
        "nobody": f"chmod 755 . ; setpriv --reuid 65534 --regid 65534 --clear-groups {show}",
    }
    if how == "nobody" and (os.getuid() or subprocess.run(["which", "setpriv"], capture_output=True).returncode):
        pytest.skip("only root becomes somebody else")
    done = subprocess.run(
        ["bash", "-c", before[how]], cwd=folder, env=_environment(), capture_output=True, timeout=MOST
    )
    assert b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("code", "at"), _some([(c, at) for at in ("in the factory", "on import") for c in FACTORIES], 14)
)
def test_factories_that_leave(folder: Path, code: str, at: str) -> None:
    text = f"import os, sys\ndef build(): {code}\n" if at == "in the factory" else f"import os, sys\n{code}\n"
    (folder / "model.py").write_text(text)
    done = python("-m", "memprof", "profile", "--model", "model.py:build", folder=folder, seconds=MOST)
    assert done.exit_code == 2, done
    assert done.stderr.startswith("memprof: ") and "Traceback" not in done.stderr and not done.stdout


def _used(process: int) -> float:
    """Seconds of a processor that a process has used until now."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _of_others() -> float:
    """The same of all processes that were waited for."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def _left(session: int) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "stat").read_text().rpartition(")")[2].split() if process.name.isdigit() else []
        except OSError:
            continue
        if words and int(words[3]) == session and words[0] != "Z":
            found.append(int(process.name))
    return found


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is left")
def test_ctrl_c_at_any_moment_of_a_search(folder: Path) -> None:
    (folder / "tiny.json").write_text(json.dumps(TINY))
    search = "profile --model tiny.json --batch-size 8 --gpu-vram 0.45 --fix auto"
    command = [sys.executable, "-m", "memprof", *search.split()]
    where: dict[str, Any] = {"cwd": folder, "env": _environment()}
    before = _of_others()
    done = subprocess.run(command, **where, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300)
    whole = _of_others() - before
    for moment in range(MOMENTS):
        process = subprocess.Popen(
            command, **where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        # From where Python has begun with memprof; before that the answer is Python's. By the processor's clock.
        until = 0.5 + (whole - 0.5) * moment / MOMENTS
        while process.poll() is None and _used(process.pid) < until:
            time.sleep(0.01)
        if process.poll() is None:
            used = _of_others() + _used(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            answer, said = process.communicate(timeout=MOST)
            seconds = _of_others() - used
            # A shell shows both as 130. Where all was said, only Python had to end.
            codes = {130, -signal.SIGINT} | ({done.returncode} if answer == done.stdout else set())
            assert process.returncode in codes and b"Traceback" not in said, (moment, process.returncode, said[-900:])
            assert seconds < 2 and not _left(process.pid), (moment, seconds)
        process.stdout.close()  # type: ignore[union-attr]
        process.stderr.close()  # type: ignore[union-attr]
