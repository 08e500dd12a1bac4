"""Writes the parts of the documentation that the program itself knows: `make docs`.

* docs/cli.md, from the parser;
* docs/schema/, from the types of the documents;
* docs/python.md, from the docstrings of the public names and of what they return;
* in docs/fixes.md, the tables between `<!-- table of fixes -->` and `<!-- end of table -->`, from the table of
  fixes;
* in docs/stubs.md, the table between `<!-- table of stubs -->` and `<!-- end of table -->`, from the stubs;
* in docs/releases.md, the table between `<!-- table of private names -->` and `<!-- end of table -->`, from
  memprof/torch_private;
* in README.md and below docs/, the text between `<!-- output of: COMMAND -->` and `<!-- end of output -->`: what
  COMMAND prints; with `<!-- output of: COMMAND; before: TEXT -->` only the lines before the first that begins with
  TEXT, and with `; from: TEXT` in front of that only those from the first that does; and between
  `<!-- figure of: COMMAND; after: WORDS -->` and `<!-- end of figure -->`: the figure that it prints after these words,
  in the form of the one that stands there (`1.00 GiB`, `3 of 4`).

`<!-- slow output of: COMMAND -->` is written anew with `--slow` alone: it takes minutes, or has this machine's seconds.
With `--check` nothing is written, and the exit code is 1 if something is out of date.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import typer

from memprof.cli import settings
from memprof.cli.exits import CODE_MEANINGS, EXIT_CODE_NOTE

ROOT = Path(__file__).resolve().parent.parent
CLI_PAGE = ROOT / "docs" / "cli.md"
PYTHON_PAGE = ROOT / "docs" / "python.md"
FIXES_PAGE = ROOT / "docs" / "fixes.md"
STUBS_PAGE = ROOT / "docs" / "stubs.md"
RELEASES_PAGE = ROOT / "docs" / "releases.md"
WIDTH = 110
"""Columns of the outputs shown."""

_HEADER = "<!-- Generated from the parser by docs/generate.py: run `make docs`, do not edit. -->\n"
_OUTPUT = re.compile(
    r"(?P<begin><!-- (?P<slow>slow )?output of: (?P<command>[^\n;]+?)(?:; from: (?P<from>[^\n;]+?))?"
    r"(?:; before: (?P<before>[^\n]+?))? -->\n)"
    r".*?(?P<end><!-- end of output -->)",
    re.DOTALL,
)
_FIGURE = re.compile(
    r"(?P<begin><!-- figure of: (?P<command>[^\n;]+?); after: (?P<after>[^\n]+?) -->)"
    r"(?P<figure>[^<]+)(?P<end><!-- end of figure -->)"
)
_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"


# -- the command line --------------------------------------------------------------------------------------------------


def command_line_reference(app: typer.Typer) -> str:
    """The reference of a typer application, as Markdown: every command with its arguments, options and defaults."""
    root = typer.main.get_command(app)
    pages = [_HEADER, f"# The command line: `{root.name}`\n", *_sections(root, root.name or "", None, level=2)]
    codes = [f"| {code.value} | {meaning} |" for code, meaning in CODE_MEANINGS.items()]
    pages.append("\n".join(["## Exit codes\n", "| code | meaning |", "|---|---|", *codes, "", EXIT_CODE_NOTE, ""]))
    pages.append(f"## Defaults from a file\n\n{inspect.getdoc(settings)}\n")
    return "\n".join(pages)


def _sections(command: Any, name: str, parent: Any, *, level: int) -> list[str]:
    context = command.context_class(command, info_name=name, parent=parent)
    result = [] if parent is None else [f"{'#' * level} `{context.command_path}`\n"]
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    result += [_paragraphs(command.help or ""), f"```text\n{usage}\n```\n"]
    for title, parameters in panels(command, context).items():
        rows = [_row(parameter, context) for parameter in parameters]
        result.append("\n".join([f"| {title} | default | what it does |", "|---|---|---|", *rows]) + "\n")
    if command.epilog:
        _, examples = command.epilog.split("\n", 1)
        result.append(f"```bash\n{examples}\n```\n")
    for child_name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            result += _sections(child, child_name, context, level=level if parent is None else level + 1)
    return result


def _paragraphs(text: str) -> str:
    """Help as it is shown on a terminal, its paragraphs joined into one line each."""
    blocks = text.replace("\b", "").split("\n\n")
    return "\n\n".join(" ".join(block.split()) for block in blocks).strip() + "\n"


def panels(command: Any, context: Any) -> dict[str, list[Any]]:
    """The arguments and options of a command, under the headings that its --help has."""
    found: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context) if context.parent is None else command.params:  # --help, once
        if not parameter.hidden:
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            found.setdefault(parameter.rich_help_panel or title, []).append(parameter)
    return {title: parameters for title, parameters in found.items() if parameters}


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        spelling = " ".join(parameter.get_usage_pieces(context))
    else:
        spelling, _ = parameter.get_help_record(context)
    cells = (f"`{spelling}`", _default(parameter), " ".join((parameter.help or "").split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(parameter: Any) -> str:
    """What is taken where the parameter is not given, as --help says it."""
    if parameter.required:
        return "required" if parameter.param_type_name == "option" else ""
    in_words = isinstance(parameter.show_default, str)
    default = parameter.show_default if in_words else parameter.default
    if default is None or default is False:
        return ""
    return f"{default}" if " " in str(default) else f"`{default}`"


# -- Python ------------------------------------------------------------------------------------------------------------

_PYTHON_HEADER = """\
<!-- Generated from docstrings by docs/generate.py: run `make docs`, do not edit. -->

# memprof in Python

Everything that `import memprof` offers. The names are imported when first used; `MemprofError`, `TargetSpec` and `load`
need no torch. The marker for pytest is described in [dry runs in CI](dry-run-in-ci.md), and the tables of a document
(`frames()`) in [data frames](data-frames.md). The names that a document has are [those of its JSON](json.md).
"""
_RETURNED = {
    "virtual_gpu": ("memprof.api", "ProfiledGpu", ("report", "save", "allocated_bytes", "trace")),
    "profile": ("memprof.report.documents.report", "Report", ("save", "frames", "to_json", "from_json")),
    "sweep": ("memprof.report.documents.sweep", "Sweep", ("save", "frames", "to_json", "from_json")),
    "apply": ("memprof.fixes.applied", "Applied", ("undo",)),
}
"""Public function -> the class of what it returns, with the attributes that are described."""


def python_reference() -> str:
    """The page of the public names: signature, docstring and example of each."""
    import memprof

    parts = [_PYTHON_HEADER]
    names = sorted(memprof.__all__, key=lambda name: (name.startswith("_"), name[0].isupper(), name not in _RETURNED))
    for name in names:
        public = getattr(memprof, name)
        if isinstance(public, str):
            parts.append(f"## `memprof.{name}`\n\nThe release.\n\n" + _example(f"print(memprof.{name})"))
            continue
        parts.append(_described(f"## `memprof.{name}`", f"memprof.{name}", public))
        if name in _RETURNED:
            module, kind, attributes = _RETURNED[name]
            returned = getattr(importlib.import_module(module), kind)
            parts.append(_described(f"### What it returns: `{kind}`", "", returned))
            rows = [(attribute, inspect.getattr_static(returned, attribute)) for attribute in attributes]
            parts.append("\n".join(_attribute(attribute, found) for attribute, found in rows) + "\n")
    return "\n".join(parts)


def _described(title: str, call: str, what: Any) -> str:
    """A heading, the signature of `call`, and a docstring of Google's style as Markdown."""
    about, *sections = re.split(r"\n\n(Args|Raises|Example):\n", inspect.getdoc(what) or "")
    parts = [title, about]
    if call and inspect.isfunction(what):
        parts.insert(1, f"```text\n{call}{_signature(what)}\n```")
    for section, text in zip(sections[::2], sections[1::2], strict=True):
        text = textwrap.dedent(text)
        if section == "Example":
            parts.append(_example(text))
        else:
            items = re.sub(r"\n +", " ", text).splitlines()
            marked = [re.sub(r"^([\w*]+):", r"* `\1`:", item) for item in items]
            parts.append("\n".join([f"{section}:", "", *marked]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in ("self", "cls")]
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=parameters)))


def _attribute(name: str, found: Any) -> str:
    function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    arguments = "" if isinstance(found, property) else _signature(function).partition(" -> ")[0]
    first = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return f"* `.{name}{arguments}`: {first}"


def _example(code: str) -> str:
    imports = "\n\n".join(f"import {name}" for name in ("torch", "memprof") if f"{name}." in code)
    if code.startswith(("def ", "@")):  # as ruff sets the code in a page
        imports, code = imports + "\n", re.sub(r"\n\n(?=\S)", "\n\n\n", code)
    return f"```python\n{imports}\n\n{code.strip()}\n```\n"


# -- fixes ----------------------------------------------------------------------------------------------------------


def table_of_fixes() -> str:
    """What each fix changes and costs, and the options of each."""
    from memprof.fixes.catalog import FIXES, Numerics

    names = {Numerics.DIFFERENT: "another model"}
    rows = ["| fix | what it changes | what it costs | numbers |", "|---|---|---|---|"]
    options = ["| option | of | what it is |", "|---|---|---|"]
    for fix in FIXES.values():
        numbers = names.get(fix.numerics, fix.numerics.value)
        rows.append(f"| `{fix.name}` | {fix.changes} | {fix.cost} | {numbers} |".replace(" * ", " \\* "))
        options += [f"| `{name}` | `{fix.name}` | {text} |" for name, text in fix.options.items()]
    return "\n".join([*rows, "", *options]).replace("; * stands", "; `*` stands")


def with_table(page: str) -> str:
    """The page on fixes with its tables as they are now."""
    return _with(page, "<!-- table of fixes -->\n", table_of_fixes())


def _with(page: str, marker: str, table: str) -> str:
    begin, _, rest = page.partition(marker)
    _, end, after = rest.partition("<!-- end of table -->")
    return f"{begin}{marker}{table}\n{end}{after}"


# -- stubs ---------------------------------------------------------------------------------------------------------


def table_of_stubs() -> str:
    """Each function that has a stub, by its package: what is counted, and the files that it was read in."""
    from memprof.stubs import audio, detection, registry  # noqa: F401  # the two register operators of libraries
    from memprof.stubs.packages import INSTALLED_PACKAGES, PACKAGES
    from memprof.virtual.kernels.registry import MISSING_OPERATORS

    sections = []
    for package in PACKAGES.values():
        functions: dict[int, tuple[Any, list[str]]] = {}
        for module, held in registry.find_modules(package.name).items():
            for name, one in held.items():
                functions.setdefault(id(one.value), (one, []))[1].append(f"{module}.{name}")
        rows = [(min(names, key=len), one.value, one.source) for one, names in functions.values()]
        sections.append(_of_package(package, rows))
    for package in INSTALLED_PACKAGES:
        operators = [
            (f"torch.ops.{name}", next(entry for _, entry in entries if callable(entry)), package.source)
            for name, entries in MISSING_OPERATORS.items()
            if name.startswith(f"{package.name}.")
        ]
        sections.append(_of_package(package, operators))
    return "\n\n".join(sections)


def _of_package(package: Any, rows: list[tuple[str, Any, str]]) -> str:
    repository = package.source.partition(":")[0]
    lines = [
        f"### {package.name} {package.version}", "", f"Read in {repository}.", "",
        "| function | what is counted | read in |", "|---|---|---|",
    ]  # fmt: skip
    for name, value, source in sorted(rows, key=lambda row: row[0]):
        described = value.func if isinstance(value, functools.partial) else value
        text = " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {text} | {source.partition(':')[2]} |")
    return "\n".join(lines)


def with_stubs(page: str) -> str:
    """The page on stubs with its table as it is now."""
    return _with(page, "<!-- table of stubs -->\n", table_of_stubs())


# -- private names of torch --------------------------------------------------------------------------------------------


def table_of_private_names() -> str:
    """Each private name of torch that memprof uses: the first release that has it, and what is done without."""
    from memprof.torch_private.check import PRIVATE_NAMES

    rows = ["| name | in torch since | of builds with | without it |", "|---|---|---|---|"]
    for name in sorted(PRIVATE_NAMES, key=str):
        cells = (f"`{name}`", name.since or "2.8 or earlier", name.build, name.fallback or "this torch is refused")
        rows.append("| " + " | ".join(cells).replace("|  |", "| |") + " |")
    return "\n".join(rows)


def with_private_names(page: str) -> str:
    """The page on releases with its table as it is now."""
    return _with(page, "<!-- table of private names -->\n", table_of_private_names())


# -- outputs -----------------------------------------------------------------------------------------------------------


def with_outputs(page: str, *, slow: bool = False) -> str:
    """`page` with every marked output and figure replaced by what its command prints now.

    Args:
        page: its text.
        slow: also the slow ones.
    """

    def current(found: re.Match[str]) -> str:
        if found["slow"] and not slow:
            return found[0]
        output = output_of(found["command"])
        if output is None:
            return found[0]
        if found["from"]:
            lines = itertools.dropwhile(lambda line: not line.startswith(found["from"]), output.splitlines())
            output = "\n".join(lines)
        if found["before"]:
            lines = itertools.takewhile(lambda line: not line.startswith(found["before"]), output.splitlines())
            output = "\n".join(lines).rstrip()
        for place in {sys.prefix, str(Path.home())}:
            if place in output:
                raise RuntimeError(f"the output of {found['command']!r} names a place on this machine: {place}")
        return f"{found['begin']}```text\n{output}\n```\n{found['end']}"

    def current_figure(found: re.Match[str]) -> str:
        output = output_of(found["command"])
        return found[0] if output is None else found["begin"] + figure_in(output, **found.groupdict()) + found["end"]

    return _FIGURE.sub(current_figure, _OUTPUT.sub(current, page))


def figure_in(output: str, after: str, figure: str, command: str, **_: str) -> str:
    """What `output` has after the words `after`, in the form of `figure`; line breaks count as spaces.

    Raises:
        RuntimeError: there is nothing of this form.
    """
    form = _NUMBER.join(re.escape(part) for part in re.split(_NUMBER, " ".join(figure.split())))
    found = re.search(f"{re.escape(after)} ?({form})", " ".join(output.split()))
    if found is None:
        raise RuntimeError(f"{command!r} prints nothing like {figure!r} after {after!r}")
    return found[1]


@functools.cache
def output_of(command: str) -> str | None:
    """What `command` (memprof or python, with arguments) prints on stdout; it may say that something does not fit. Of
    `file PATH` what is in the file.

    None if it says, by exit code 4, that what it needs is not here.

    Raises:
        RuntimeError: the command failed.
    """
    program, *arguments = shlex.split(command)
    if program == "file":  # a part of the repository
        return (ROOT / arguments[0]).read_text(encoding="utf-8").rstrip("\n")
    programs = {"memprof": ["-m", "memprof"], "python": []}
    allocator = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # whatever is set here, the defaults are shown
    inherited = {name: value for name, value in os.environ.items() if name not in allocator}
    environment = {**inherited, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "MEMPROF_CACHE": "off", "PYTHONPATH": str(ROOT)}
    exit_code, stdout, stderr = _python([*programs[program], *arguments], environment)
    if exit_code == 4:
        return None
    if exit_code not in (0, 3):
        raise RuntimeError(f"{command!r} failed with exit code {exit_code}:\n{stderr}")
    return "\n".join(line.rstrip() for line in stdout.strip("\n").splitlines())


def _python(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python ARGUMENTS` in the checkout."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def pages_with_outputs() -> list[Path]:
    """The pages that show an output."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return [page for page, text in texts.items() if _OUTPUT.search(text) or _FIGURE.search(text)]


def main() -> int:
    """Write, or check, everything; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes, or depends on this machine")
    options = parser.parse_args()
    from docs.schemas import files
    from memprof.cli.main import app
    from memprof.workload.pool import run_all_or_raise

    # The reference first: it may be linked from, and it costs nothing.
    wanted = {CLI_PAGE: command_line_reference(app), **files()}
    wanted[PYTHON_PAGE] = python_reference()
    wanted[FIXES_PAGE] = with_table(FIXES_PAGE.read_text(encoding="utf-8"))
    wanted[STUBS_PAGE] = with_stubs(STUBS_PAGE.read_text(encoding="utf-8"))
    wanted[RELEASES_PAGE] = with_private_names(RELEASES_PAGE.read_text(encoding="utf-8"))
    pages = pages_with_outputs()
    texts = [wanted.get(page) or page.read_text(encoding="utf-8") for page in pages]
    tasks = [functools.partial(with_outputs, text, slow=options.slow) for text in texts]
    wanted |= zip(pages, run_all_or_raise(tasks, lambda done: print(f"pages: {done}")), strict=True)
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    for page in stale:
        name = page.relative_to(ROOT)
        if options.check:
            print(f"{name} is out of date: run `make docs`")
        else:
            page.write_text(wanted[page], encoding="utf-8")
            print(f"wrote {name}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
