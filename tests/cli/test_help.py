"""What --help shows: whole summaries, examples, exit codes; completion is installed by one command."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import typer

from memprof.cli.exits import CODE_MEANINGS
from memprof.cli.main import COMMANDS, app
from tests.cli.terminal import Terminal
from tests.docs.test_docs import _check
from tests.lanes import by_day
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
    examples = [line.strip() for line in shown.partition("\n Examples:")[2].splitlines() if line.strip()]
    assert examples and all(line.startswith(f"memprof {name}") for line in examples)
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
    for code, meaning in CODE_MEANINGS.items():
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
    assert named - {"lists"} <= topics and {"lengths", "fixes", "estimate"} <= named


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, with memprof among the commands."""
    program = tmp_path / "bin" / "memprof"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom memprof.cli.main import run\nrun()\n")
    program.chmod(0o755)
    for name, value in (("HOME", tmp_path), ("PYTHONPATH", ROOT), ("PATH", f"{program.parent}:{os.environ['PATH']}")):
        monkeypatch.setenv(name, str(value))
    return tmp_path


STARTED = {"bash": ".bashrc", "zsh": ".zshrc", "fish": None}


@pytest.mark.parametrize("shell", by_day(STARTED, "bash"))
def test_completion_is_installed_by_one_command(home, monkeypatch, shell):
    """By each shell's own name for itself; where it is here, it completes, from the first press of the tab key on."""
    found = shutil.which(shell)
    if found is None:
        monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    if STARTED[shell]:
        (home / STARTED[shell]).write_bytes(b"# ol\xe9")  # of whatever encoding, and without an end of line
    install = "memprof --install-completion" + ("" if found else f" {shell}")
    for _ in range(2):
        done = subprocess.run([found or "sh", "-c", f"{install} && echo done"], capture_output=True, text=True)
        assert done.returncode == 0 and f"{shell} completion installed in" in done.stdout, done.stderr
    if STARTED[shell]:
        kept, line = (home / STARTED[shell]).read_bytes().splitlines()
        assert kept == b"# ol\xe9" and line.startswith((b"source '", b"fpath+="))
    (script,) = (file for file in home.rglob("*memprof*") if file.is_file() and file.parent.name != "bin")
    assert "_MEMPROF_COMPLETE" in script.read_text()
    if found is not None:
        assert COMPLETED[shell](found, "memprof profile --quan") == ["--quantize"]
        assert COMPLETED[shell](found, "memprof profile --quantize n") == ["nf4"]
        assert COMPLETED[shell](found, "memprof mon") == ["monitor"]
        assert COMPLETED[shell](found, "memprof estimate --gpu rtx-409") == ["rtx-4090", "rtx-4090-laptop"]
        assert COMPLETED[shell](found, "memprof profile --model llama-3.2-3") == ["llama-3.2-3b"]


def of_bash(bash, line):
    """What it would put in place of the last word."""
    words = line.split()
    asked = (
        "source ~/.bashrc; complete='$(complete -p memprof | sed \"s/.*-F \\([^ ]*\\).*/\\1/\")'; "
        f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; eval $complete memprof; echo ${{COMPREPLY[@]}}"
    )
    return subprocess.run([bash, "-c", asked], capture_output=True, text=True).stdout.split()


def of_fish(fish, line):
    """The same: it lists completions itself, each with what it means."""
    listed = subprocess.run([fish, "-c", f"complete -C '{line}'"], capture_output=True, text=True).stdout
    return [row.split("\t")[0] for row in listed.splitlines()]


def of_zsh(zsh, line):
    """The same: it completes on a terminal alone."""
    shown = Terminal([zsh, "-i"], {**os.environ, "PS1": "ready> ", "TERM": "dumb"})
    try:
        shown.wait_for("ready> ")
        shown.type(f"{line}\t")
        typed, until, last = line.split()[-1], time.monotonic() + 20, ""
        while not (last.startswith(typed) and last != typed) and time.monotonic() < until:
            shown.read(0.1)
            last = (shown.screen.lines[shown.screen.row].split() or [""])[-1]
        return [last]
    finally:
        shown.end()


COMPLETED = {"bash": of_bash, "fish": of_fish, "zsh": of_zsh}


def test_completion_that_cannot_be_installed(home, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    (home / ".zfunc").write_text("a file")
    done = subprocess.run(["memprof", "--install-completion", "zsh"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("memprof: completion cannot be installed\n  value: ")
    assert "--show-completion" in done.stderr and not (home / ".zshrc").exists()


@pytest.mark.parametrize("name", ["profile", "run"])
def test_help_shows_the_main_options_and_help_all_the_others(memprof, name):
    shown, everything = (
        set(re.findall(r"^│ (--[\w-]+)", memprof(name, flag).stdout, re.MULTILINE)) for flag in ("--help", "--help-all")
    )
    command = typer.main.get_command(app).commands[name]
    parameters = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    flags = {parameter.name: parameter.opts[0] for parameter in parameters if parameter.opts[0] != "-m"}
    flags |= {"as_json": "--json", "quiet": "--quiet", "explain": "--explain"}  # which have a letter, too
    assert everything == {*flags.values(), "--help"}
    assert shown == {flags[name] for name in command.main_options if name in flags} | {"--help"} and len(shown) <= 23
    assert not set(command.main_options) - {parameter.name for parameter in command.params}
