"""The wheel and the sdist in clean environments: with each extra, with pipx and with uv; hints to install do work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.errors import REQUIREMENTS
from tests.processes import ROOT

pytestmark = pytest.mark.nightly

MODEL = ("profile", "--model", "gpt2", "--context-length", "64", "-q")
HTML, IMAGE = (*MODEL, "--html", "page.html"), (*MODEL, "--image", "run.png")
# Extra -> a command that needs it.
COMMANDS = {
    "adapters": (*MODEL, "--adapter", "lora"),
    "quantization": (*MODEL, "--quantize", "nf4", "--mode", "inference"),
    "parquet": ("vocab", "-q", "corpus.parquet"),
    "html": HTML,
    "images": IMAGE,
    "mcp": ("mcp",),
}
# Wheels beside the index (PIP_FIND_LINKS), which uv does not read; else torch's build for the CPU.
_LINKS = os.environ.get("PIP_FIND_LINKS")
TORCH = ("--find-links", _LINKS) if _LINKS else ("--torch-backend", "cpu")
CONSTRAINTS = ("--constraints", str(ROOT / "constraints.txt"))


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the variables of a terminal in which no environment is active."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        list(map(str, command)),
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=variables.get("PWD"),
    )


def succeed(*command: object, **variables: str) -> str:
    done = run(*command, **variables)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that has uv and pipx."""
    folder = tmp_path_factory.mktemp("tools")
    succeed(sys.executable, "-m", "venv", folder)
    done = run(folder / "bin/pip", "install", "-q", "uv", "pipx")
    if done.returncode:
        pytest.skip(f"uv and pipx cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, by their suffixes."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "hatchling", "build", "-d", folder, PWD=str(ROOT))
    return {path.suffix: path for path in folder.iterdir()}


def make_environment(tools: Path, folder: Path, requirement: object) -> Path:
    """Return the folder of commands of a new environment with `requirement` in it."""
    succeed(tools / "uv", "venv", "-q", "--python", sys.executable, folder)
    succeed(tools / "uv", "pip", "install", "-q", "--python", folder / "bin/python", *CONSTRAINTS, *TORCH, requirement)
    return folder / "bin"


def find_hint(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 2, done.stdout + done.stderr
    return shlex.split(re.search(r"hint: +(.*)", done.stderr)[1].partition(",")[0])


@pytest.mark.parametrize("extra", [*COMMANDS, "all"])
def test_the_wheel_with_an_extra(extra: str, built: dict[str, Path], tools: Path, tmp_path: Path) -> None:
    folder = make_environment(tools, tmp_path / "environment", f"{built['.whl']}[{extra}]")
    if extra in ("parquet", "all"):
        code = "import pandas; pandas.DataFrame({'text': ['a b', 'b c']}).to_parquet('corpus.parquet')"
        succeed(folder / "python", "-c", code, PWD=str(tmp_path))
    for command in COMMANDS.values() if extra == "all" else [COMMANDS[extra]]:
        succeed(folder / "memprof", *command, PWD=str(tmp_path))


def test_the_wheel_alone_says_how_to_install_the_rest(built: dict[str, Path], tools: Path, tmp_path: Path) -> None:
    folder = make_environment(tools, tmp_path / "environment", built[".whl"])
    (tmp_path / "corpus.parquet").write_bytes(b"PAR1" + bytes(64) + b"PAR1")
    succeed(folder / "memprof", *MODEL, PWD=str(tmp_path))
    for extra, command in COMMANDS.items():
        uv, *install, requirement = find_hint(run(folder / "memprof", *command, PWD=str(tmp_path)))
        assert [uv, *install] == ["uv", "pip", "install"], extra
        assert requirement in REQUIREMENTS.values(), extra
    succeed(tools / "uv", "pip", "install", "-q", "matplotlib>=3.8", VIRTUAL_ENV=str(folder.parent))
    succeed(folder / "memprof", *IMAGE, PWD=str(tmp_path))


def test_the_sdist(built: dict[str, Path], tools: Path, tmp_path: Path) -> None:
    folder = make_environment(tools, tmp_path / "environment", built[".gz"])
    assert succeed(folder / "memprof", "help", "lengths") == (ROOT / "docs/lengths.md").read_text(encoding="utf-8")
    assert "run.py" not in succeed(folder / "memprof", "recipes", "ls")


@pytest.mark.parametrize("tool", ["uv", "pipx"])
def test_a_command_of_its_own(tool: str, built: dict[str, Path], tools: Path, tmp_path: Path) -> None:
    """As README.md installs it; the hint for a library installs that into the environment of the command."""
    commands = tmp_path / "bin"
    variables = {
        "UV_TOOL_DIR": str(tmp_path / "uv" / "tools"), "UV_TOOL_BIN_DIR": str(commands), "PWD": str(tmp_path),
        "PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(commands), "PATH": f"{tools}:{os.environ['PATH']}",
    }  # fmt: skip
    if tool == "uv":
        succeed("uv", "tool", "install", "--python", sys.executable, *CONSTRAINTS, *TORCH, built[".whl"], **variables)
    else:
        arguments = f"--pip-args=-c {ROOT / 'constraints.txt'}"
        succeed("pipx", "install", "--python", sys.executable, arguments, built[".whl"], **variables)
    hint = find_hint(run(commands / "memprof", *HTML, **variables))
    assert hint[0] == tool, hint
    succeed(*hint, **variables)
    succeed(commands / "memprof", *HTML, **variables)
    assert (tmp_path / "page.html").exists()
