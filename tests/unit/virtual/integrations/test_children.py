"""Processes that a program starts anew: whatever starts them, a Python among them finds the probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.monitor import probe
from memprof.monitor.probe import no_gpu
from memprof.stubs.extension import StubExtension
from memprof.trace.events import FailureKind
from memprof.virtual import VirtualGpu
from tests.lanes import by_day

GPU = find_gpu("a100-80gb")
CODE = "import sys; print([type(finder).__name__ for finder in sys.meta_path], file=open(sys.argv[1], 'w'))"
PYTHON = sys.executable
BARE = {"HOME": "/"}

WAYS = {
    "subprocess": lambda words: subprocess.run(words, check=True),
    "its own environment": lambda words: subprocess.run(words, env=BARE, check=True),
    "a path of its own": lambda words: subprocess.run(words, env={"PYTHONPATH": "/a"}, check=True),
    "as bytes": lambda words: subprocess.run(words, env={b"PYTHONPATH": b"/a"}, check=True),
    "a shell": lambda words: os.system(" ".join(f'"{word}"' for word in words)),
    "os.spawnv": lambda words: os.spawnv(os.P_WAIT, PYTHON, words),
    "os.spawnle": lambda words: os.spawnle(os.P_WAIT, PYTHON, *words, BARE),
    "posix_spawn": lambda words: os.waitpid(os.posix_spawn(PYTHON, words, BARE), 0),
    "a child's child": lambda words: subprocess.run(
        [PYTHON, "-c", f"import subprocess; subprocess.run({words!r})"], check=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_finds_the_probe(tmp_path: Path, way: str) -> None:
    written = tmp_path / "finders"
    with VirtualGpu(GPU):
        WAYS[way]([PYTHON, "-c", CODE, str(written)])
    assert "_TorchCudaImportHook" in written.read_text()
    WAYS[way]([PYTHON, "-c", CODE, str(written)])
    assert "_TorchCudaImportHook" not in written.read_text(), "nothing is left behind"


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("subprocess", ["-I"]),
        ("its own environment", ["-E"]),
        ("a path of its own", ["-B", "-W", "ignore", "-sEu"]),
        ("as bytes", ["-I"]),
        ("os.spawnv", ["-E"]),
        ("os.spawnle", ["-B", "-W", "ignore", "-sEu"]),
        ("posix_spawn", ["-I"]),
    ],
)
def test_one_that_hears_no_environment_finds_it_too(tmp_path: Path, way: str, told: list[str]) -> None:
    written = tmp_path / "finders"
    with VirtualGpu(GPU):
        WAYS[way]([PYTHON, *told, "-c", CODE, str(written)])
    assert "_TorchCudaImportHook" in written.read_text()


@pytest.mark.parametrize("told", ["-I", "-E"])
def test_what_it_does_not_hear_it_still_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    code = """import os, subprocess, sys
mine = lambda: subprocess.run([sys.executable, "-c", "import mine; assert 0"]).returncode
print("", [os.environ["PYTHONPATH"].split(os.pathsep)[-1], "PYTHONSAFEPATH" in os.environ, sys.argv, sys.flags.optimize,
           sys.flags.no_user_site, sys.flags.safe_path, sys.path[-3:], mine()])"""
    command = [PYTHON, told, "-c", code, "-I"]
    alone = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout
    with VirtualGpu(GPU):
        assert subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout == alone
        assert subprocess.run([PYTHON, "-", "-I"], input=b"import sys; assert sys.argv[1:] == ['-I']", check=False)
        assert subprocess.run(args=[PYTHON, told, "-m", "json.tool", "-h"], check=True, capture_output=True).stdout
        assert subprocess.run(["/bin/echo", "-I"], check=True, capture_output=True).stdout == b"-I\n"


def test_it_is_none_the_wiser() -> None:
    """What it imports, and where from, is as without."""
    code = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"
    alone = subprocess.run([PYTHON, "-c", code], capture_output=True, check=True).stdout
    with VirtualGpu(GPU):
        inside = subprocess.run([PYTHON, "-c", code], capture_output=True, check=True).stdout
    modules, path = json.loads(inside)
    assert [modules, path] == json.loads(alone) and probe.FOLDER not in path


def test_what_they_were_refused_is_the_failure_of_the_run() -> None:
    with VirtualGpu(GPU) as gpu:
        told = f"{gpu._context.subprocesses.file!r}, 'a problem', 'a hint'"
        code = f"import runpy; runpy.run_path({no_gpu.__file__!r})['report_refusal']({told})"
        subprocess.run([PYTHON, "-c", code], check=True)
    failure = gpu.trace.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED
    assert (failure.message, failure.hint, failure.source) == ("a problem", "a hint", None)
    no_gpu.report_refusal(gpu._context.subprocesses.file, "too late", None)
    assert not os.path.exists(gpu._context.subprocesses.file)


def test_a_program_does_not_replace_itself() -> None:
    with VirtualGpu(GPU) as gpu:
        with pytest.raises(MemprofError, match=r"not yet: .*test_children.py:\d+ .* puts .* in its own place"):
            os.execvp(PYTHON, [PYTHON, "-c", ""])
        child = os.fork()
        if child == 0:
            os.execv(PYTHON, [PYTHON, "-c", "raise SystemExit(7)"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "a forked child may"
    assert gpu.trace.failure is not None and gpu.trace.failure.kind is FailureKind.REFUSED


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (None, "/a", "/a::/b"):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
        before = dict(os.environ)
        with VirtualGpu(GPU):
            assert os.environ["PYTHONPATH"] == (f"{probe.FOLDER}:{path}" if path else probe.FOLDER)
        assert dict(os.environ) == before


def test_what_a_machine_with_a_gpu_would_show_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts log it (modded-nanogpt's train_gpt.py); requested figures it is missing where it is."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with VirtualGpu(find_gpu("a100-80gb")):
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True)
        assert "nvidia-smi is not on this machine" in done.stdout
        with pytest.raises(FileNotFoundError):
            subprocess.run(["nvidia-smi", "-q"], check=False)
    with pytest.raises(FileNotFoundError):
        subprocess.run(["nvidia-smi"], check=False)


IMPORTS = """
import multiprocessing
import xformers.profiler
from flash_attn import flash_attn_func

def work(queue):
    queue.put(xformers.__version__ + " " + flash_attn_func.__module__)

def main(queue, way):
    process = multiprocessing.get_context(way).Process(target=work, args=(queue,))
    process.start()
    process.join()
"""


@pytest.mark.parametrize("way", by_day(["spawn", "forkserver"]))
def test_a_program_that_is_imported_again_finds_its_stubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """By a process that multiprocessing starts anew: a manager's, a worker's (Meta's lingua starts one)."""
    import multiprocessing

    (tmp_path / "imported_again.py").write_text(IMPORTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = []
    for stubs in (True, False):
        with VirtualGpu(GPU, extensions=[StubExtension()] if stubs else []):
            code = "import multiprocessing, imported_again; print(imported_again.xformers.__version__)"
            done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
            told.append(done.stdout.strip() or done.stderr.strip().splitlines()[-1])
    assert told == ["0.0.32.post2", "ModuleNotFoundError: No module named 'xformers'"]
    with VirtualGpu(GPU, extensions=[StubExtension()]):
        import imported_again

        queue = multiprocessing.get_context(way).SimpleQueue()
        imported_again.main(queue, way)
        assert not queue.empty()
        assert queue.get() == "0.0.32.post2 flash_attn.flash_attn_interface"
    del sys.modules["imported_again"]


@pytest.mark.parametrize("use", by_day(["set_device(0)", "device(0).__enter__()", "synchronize()"], "synchronize()"))
def test_a_child_that_uses_the_gpu_is_refused_at_its_first_call(use: str) -> None:
    code = f"import torch; assert torch.cuda.is_available(); torch.cuda.{use}"
    with VirtualGpu(GPU) as gpu:
        child = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert "<string>:1 <module> uses CUDA in another process" in child.stderr
    assert gpu.trace.failure is not None and gpu.trace.failure.message in child.stderr
