"""The documentation says what is true: references are current, examples run, commands exist, links lead somewhere."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import memprof
from memprof.cli.main import app
from tests.benchmarks import releases
from tests.lanes import by_day
from tests.processes import ROOT, python

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@functools.cache
def _generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._python = lambda arguments, environment: python(*arguments, folder=ROOT, env=environment)[:3]
    return module


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(language: str) -> list:
    return [
        pytest.param(found[2], id=f"{_name(page)}-{number}")
        for page in PAGES
        for number, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")), 1)
        if found[1] == language
    ]


def _commands(program: str) -> list[str]:
    """Every command line of `program` that a shell block or a marked output shows."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in BLOCK.finditer(text) if block[1] == "bash" for line in block[2].splitlines()]
        lines += re.findall(r"<!-- (?:slow )?output of: ([^\n;]+?)(?:;[^\n]*)? -->", text)
        for line in lines:
            command = line.partition(" #")[0].partition(" > ")[0].strip()
            if command.startswith(f"{program} "):
                found.setdefault(command)
    return list(found)


def _mentions(program: str) -> list[str]:
    """What is named in running text, such as `memprof show` or `make docs`: perhaps without its arguments."""
    texts = [BLOCK.sub("", page.read_text(encoding="utf-8")) for page in PAGES]
    return sorted({found for text in texts for found in re.findall(rf"`(?:\S+=\S+ )?({program} [^`\n]+)`", text)})


def _pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _needs_pinned(*packages: str) -> None:
    """Skips where what is shown depends on a release other than the one in constraints.txt."""
    for package in packages:
        installed = importlib.metadata.version(package).partition("+")[0]
        if installed != _pinned()[package]:
            pytest.skip(f"{package} {installed} is installed; the documentation is of {_pinned()[package]}")


def _check(arguments: list[str]) -> None:
    """Parse `memprof ARGUMENTS` as the command line does, without running it."""
    command = typer.main.get_command(app)
    context = command.make_context("memprof", list(arguments))
    name, *rest = [*context._protected_args, *context.args]
    assert name in command.commands, name
    command.commands[name].make_context(name, rest, parent=context)


def _of_the_script(command: Any, words: list[str]) -> list[str]:
    """What follows the script's name: no options of memprof."""
    flags = {name for parameter in command.params if getattr(parameter, "is_flag", False) for name in parameter.opts}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 1 if words[at] in flags or "=" in words[at] else 2
    return words[at + 1 :]


def test_command_line_reference_is_current():
    _needs_pinned("typer")
    generate = _generate()
    wanted = generate.command_line_reference(app)
    assert generate.CLI_PAGE.read_text(encoding="utf-8") == wanted, "docs/cli.md is out of date: run `make docs`"


def test_the_page_of_public_names_is_current():
    text = _generate().PYTHON_PAGE.read_text(encoding="utf-8")
    assert text == _generate().python_reference(), "docs/python.md is out of date: run `make docs`"
    for name in memprof.__all__:  # test_python_blocks_run runs them
        section = text.partition(f"## `memprof.{name}`\n")[2].partition("\n## ")[0]
        assert f"memprof.{name}" in BLOCK.search(section[section.index("```python") :])[2]
        assert name in dir(memprof)


def test_the_tables_of_fixes_are_current():
    text = _generate().FIXES_PAGE.read_text(encoding="utf-8")
    assert text == _generate().with_table(text), "docs/fixes.md is out of date: run `make docs`"
    assert "| `chunked-loss` |" in text and "| `chunk_size` | `chunked-loss` |" in text


def test_the_table_of_private_names_is_current():
    text = _generate().RELEASES_PAGE.read_text(encoding="utf-8")
    assert text == _generate().with_private_names(text), "docs/releases.md is out of date: run `make docs`"


def test_the_table_of_stubs_is_current_and_says_what_is_counted():
    text = _generate().STUBS_PAGE.read_text(encoding="utf-8")
    assert text == _generate().with_stubs(text), "docs/stubs.md is out of date: run `make docs`"
    rows = [line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 4]
    assert len(rows) > 180
    assert all(counted.strip() and source.strip() for _, _, counted, source, _ in (row.split("|") for row in rows))


def test_reference_notices_a_new_option():
    def other(renamed: bool = False) -> None:
        """A command."""

    extended = typer.Typer(name="memprof")
    extended.command("other")(other)
    extended.callback()(lambda: None)
    reference = _generate().command_line_reference(extended)
    assert "## `memprof other`" in reference
    assert "--renamed" in reference


def test_the_readme_shows_an_output():
    assert ROOT / "README.md" in _generate().pages_with_outputs()


def _pages() -> list[Any]:
    """Those of the case studies are left out: tests/recipes runs them. The longest are for the night."""
    pages = [page for page in _generate().pages_with_outputs() if page.parent.name != "case-studies"]
    longest = {"README.md", "lengths.md", "parallel.md", "fixes.md", "stories.md", "vocab.md"}
    return by_day(pages, *(page for page in pages if page.name not in longest))


@pytest.mark.parametrize("page", _pages(), ids=_name)
def test_outputs_are_current(page):
    _needs_pinned("torch", "transformers", "rich", "pandas")
    text = page.read_text(encoding="utf-8")
    assert text == _generate().with_outputs(text), f"{_name(page)} is out of date: run `make docs`"


def test_a_figure_in_prose_is_what_its_command_prints(monkeypatch):
    generate = _generate()
    monkeypatch.setattr(generate, "output_of", lambda command: "reserved: 2\n  of 1,024 blocks; reserved: 3.5 GiB, 7%")
    marked = "<!-- figure of: memprof x; after: reserved: -->{}<!-- end of figure --> and no more"
    for stale, current in (("1 of 9 blocks", "2 of 1,024 blocks"), ("1.25 GiB, 10%", "3.5 GiB, 7%"), ("1", "2")):
        assert generate.with_outputs(marked.format(stale)) == marked.format(current)
    with pytest.raises(RuntimeError, match="prints nothing like '1 MiB' after 'reserved:'"):
        generate.with_outputs(marked.format("1 MiB"))


@pytest.mark.parametrize("code", _blocks("python"))
def test_python_blocks_run(code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "documentation", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_commands_parse():
    for command in _commands("memprof"):
        _check(shlex.split(command.partition(" > ")[0])[1:])


def test_commands_and_options_mentioned_exist():
    for mention in _mentions("memprof"):
        command = typer.main.get_command(app)
        # What follows "--" is another program's.
        _, first, *rest = mention.partition(" -- ")[0].split()
        if not first.startswith("-"):
            assert first in command.commands
            command = command.commands[first]
        known = {"--help", *(spelling for parameter in command.params for spelling in parameter.opts)}
        if command.context_settings.get("allow_interspersed_args") is False and not first.startswith("-"):
            rest = rest[: len(rest) - len(_of_the_script(command, rest))]
        assert {word for word in (first, *rest) if word.startswith("--")} <= known


@pytest.mark.parametrize("arguments", [["profile", "--no-such-option"], ["no-such-command"]])
def test_a_command_that_does_not_exist_is_noticed(arguments):
    with pytest.raises((typer.Exit, AssertionError)):
        _check(arguments)


def test_make_targets_exist():
    for command in [*_commands("make"), *_mentions("make")]:
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert shlex.split(command)[1] in targets


def test_what_the_matrix_of_releases_runs_exists():
    assert [path for path in releases.TESTS if not (ROOT / path).exists()] == []


def test_relative_links_resolve():
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            other = page if not path else (page.parent / path).resolve()
            assert other.exists(), f"{target} in {_name(page)}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{target} in {_name(page)}"


def test_first_result_is_near_the_top_of_the_readme():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20]
    assert any(line.startswith("make demo") for line in lines)
    assert any(line.startswith("make test") for line in lines)


def test_the_map_of_the_package_is_true():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\nmemprof/\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    names = [line.split()[0] for line in shown.splitlines()]
    assert [name for name in names if not (ROOT / "memprof" / name).exists()] == []


def test_every_finding_is_explained():
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "memprof" / "findings").glob("*.py")]
    findings = {name for source in sources for name in re.findall(r'Finding\(\s*"([\w-]+)"', source)}
    assert len(findings) > 5
    for name in findings:
        assert f"| `{name}` |" in page, f"{name} is not explained in docs/findings.md"


def test_nothing_names_a_place_on_one_machine():
    for page in [*PAGES, *(ROOT / "docs").glob("**/*.csv")]:
        assert not re.search(r"/(tmp|home|root|work|Users)/|site-packages", page.read_text(encoding="utf-8")), _name(
            page
        )


def test_version_is_a_release():
    assert re.fullmatch(r"\d+\.\d+\.\d+", memprof.__version__)
