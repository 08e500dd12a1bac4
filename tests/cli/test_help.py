"""What --help shows: whole summaries, examples, exit codes; completion is installed by one command."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
import typer

from memprof.cli.exits import MEANINGS
from memprof.cli.main import COMMANDS, app
from tests.docs.test_docs import _check
from tests.processes import ROOT


def commands():
    for name, command in typer.main.get_command(app).commands.items():
        yield from ((name, more) for more in getattr(command, "commands", {"": None}))


@pytest.mark.parametrize("name", [" ".join(name).strip() for name in commands()])
def test_every_command_has_examples_that_are_right(memprof, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    shown = memprof(*name.split(), "-h").stdout
    assert shown == memprof(*name.split(), "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    examples = shown.partition("\nExamples:\n")[2].splitlines()
    assert examples and all(line.startswith(f"  memprof {name}") for line in examples)
    for line in examples:
        _check(line.split()[1:])


def test_summaries_are_whole(memprof, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ((), ("recipes",)):
        shown = memprof(*name, "--help").stdout
        assert "..." not in shown.replace("[ARGS]...", "") and "…" not in shown
    words = " ".join(memprof("-h").stdout.split())
    for name, command in typer.main.get_command(app).commands.items():
        assert f"{name} {' '.join(command.help.split(chr(10) * 2)[0].split())}" in words
    assert len(COMMANDS) == len(typer.main.get_command(app).commands)


def test_exit_codes_are_in_the_help(memprof):
    words = " ".join(memprof("-h").stdout.split())
    for code, meaning in MEANINGS.items():
        assert f"{code.value} {meaning}" in words


def test_pages_are_shown(memprof):
    listed = memprof("help").stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
    assert all(len(line.split()) > 1 for line in listed)
    assert memprof("help", "lengths").stdout == (ROOT / "docs/lengths.md").read_text(encoding="utf-8")
    result = memprof("help", "lenghts")
    assert result.exit_code == 2 and "did you mean 'lengths'" in result.stderr


def test_no_text_names_a_file_that_a_wheel_lacks():
    """What is printed says `memprof help TOPIC`, and there is such a page; comments and docstrings name files."""
    topics = {page.stem for page in (ROOT / "docs").glob("*.md")}
    named = set()
    for file in (ROOT / "memprof").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        aside = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in aside:
                assert not re.search(r"\bdocs/[\w/-]+\.(?:md|py)\b|README", node.value) or node.value == "README.md", (
                    file
                )
                named |= set(re.findall(r"memprof help ([a-z][\w-]*)", node.value))
    assert named - {"lists"} <= topics and {"lengths", "remedies", "estimate"} <= named


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_by_one_command(tmp_path, shell):
    """By each shell's own name for itself; where it is here, it completes."""
    program = tmp_path / "bin" / "memprof"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom memprof.cli.main import run\nrun()\n")
    program.chmod(0o755)
    place = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": place, "PYTHONPATH": str(ROOT)}
    found = shutil.which(shell)
    begun = [found, "-c"] if found else ["sh", "-c"]
    if found is None:
        environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    install = "memprof --install-completion" + ("" if found else f" {shell}") + "; exit $?"
    done = subprocess.run([*begun, install], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"{shell} completion installed in" in done.stdout, done.stderr
    written = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file() and file != program)
    assert "_MEMPROF_COMPLETE" in written
    if shell == "bash" and found:
        asked = (
            "source ~/.bashrc; complete='$(complete -p memprof | sed \"s/.*-F \\([^ ]*\\).*/\\1/\")'; "
            "COMP_WORDS=(memprof profile --quan); COMP_CWORD=2; eval $complete memprof; echo ${COMPREPLY[@]}; "
            "COMP_WORDS=(memprof profile --quantize n); COMP_CWORD=3; eval $complete memprof; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run([found, "-c", asked], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["--quantize", "nf4"], (done.stdout, done.stderr)
