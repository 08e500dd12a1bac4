"""Output options of commands, and the printing and saving of results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memprof.cli import settings
from memprof.cli.exits import ExitCode
from memprof.cli.options import FILES_PANEL, OUTPUT_PANEL, reuse_option
from memprof.cli.streams import echo
from memprof.errors import MemprofError, UsageError, printable
from memprof.spec import option

if TYPE_CHECKING:
    from memprof.report.documents.base import DisplayedDocument
    from memprof.report.documents.patch import SuggestedPatch
    from memprof.report.documents.report import Report
    from memprof.report.page.page import PageDocument as Page
    from memprof.trace.events import Trace


_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"  # the file of a job's summary


class _JsonConvertible(Protocol):
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of a command that prints a list."""

    as_json: bool = option(False, OUTPUT_PANEL, "Print the result as JSON.", flag="--json")

    def __post_init__(self) -> None:
        """Do nothing: subclasses check their options, and call super()."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(ListOptions):
    """Options of a command that prints a result."""

    quiet: bool = option(False, OUTPUT_PANEL, "Print the verdict alone.", short="-q")

    @contextlib.contextmanager
    def _report_file(self, message: str) -> Iterator[None]:
        """Context manager: print `message` if a file is written; mark an error as following a printed result."""
        try:
            yield
        except MemprofError as error:
            error.follows_answer = True
            raise
        if not self.quiet:
            echo(message, err=True)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(OutputOptions):
    """Options of a command whose result has assumptions."""

    explain: bool = option(False, OUTPUT_PANEL, "List the assumptions, formulas and other runs.", short="-v")


@dataclass(frozen=True, kw_only=True)
class TableOptions(OutputOptions):
    """Options of a command that writes CSV tables; raises UsageError if the folder cannot be written."""

    csv: Path | None = option(
        None, FILES_PANEL, "Write every table into this folder too, each a CSV file; those of an earlier run there are "
        "replaced.", metavar="FOLDER",
    )  # fmt: skip
    force: bool = reuse_option("force")
    csv_path: Path | None = dataclasses.field(default=None, init=False)  # `csv` as absolute path: scripts may chdir

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.csv is not None:
            from memprof.report.export.csv import check_folder

            check_folder(self.csv)
            object.__setattr__(self, "csv_path", self.csv.absolute())

    def write_tables(self, document: DisplayedDocument) -> None:
        """Write the tables of `document` if --csv is given."""
        if self.csv_path is not None:
            from memprof.report.export.csv import write_csv

            with self._report_file(f"Tables: {self.csv}"):
                write_csv(document, self.csv_path, force=self.force)


@dataclass(frozen=True, kw_only=True)
class PageOptions(OutputOptions):
    """Options of a command that writes an HTML page; raises UsageError if plotly is missing, or the file unwritable."""

    html: Path | None = option(
        None, FILES_PANEL, "Write a page to look at into this file too: any browser opens it, offline.", metavar="FILE"
    )
    force: bool = reuse_option("force")
    html_path: Path | None = dataclasses.field(default=None, init=False)  # `html` as absolute path: scripts may chdir

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.html is not None:
            from memprof.fixes.catalog import check_package
            from memprof.report.page.file_kind import PAGE
            from memprof.trace.files import check_output_path

            check_package("--html", "plotly")
            check_output_path(self.html, PAGE, force=self.force)
            object.__setattr__(self, "html_path", self.html.absolute())

    def write_page(self, document: Page) -> None:
        """Write the page of `document` if --html is given."""
        if self.html_path is not None:
            from memprof.report.page.page import write_page

            with self._report_file(f"Page: {self.html}"):
                write_page(document, self.html_path, force=self.force)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ExplainOptions, TableOptions, PageOptions):
    """Options of a command with tables, an HTML page and assumptions."""


@dataclass(frozen=True, kw_only=True)
class FullReportOptions(ReportOptions):
    """Options of a command with a report, of which it prints the first screen, or with --full the whole."""

    full: bool = reuse_option("full")


@dataclass(frozen=True, kw_only=True)
class ImageOptions(OutputOptions):
    """Options of a command that draws a run; raises UsageError if matplotlib is missing, or the file unwritable."""

    image: Path | None = option(
        None, FILES_PANEL, "Draw memory over the run into this file too, a .png or .svg.", metavar="FILE"
    )
    force: bool = reuse_option("force")
    image_path: Path | None = dataclasses.field(default=None, init=False)  # `image` as absolute path: scripts may chdir

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image is not None:
            from memprof.fixes.catalog import check_package
            from memprof.report.export.image_kind import IMAGE, check_suffix
            from memprof.trace.files import check_output_path

            check_suffix(self.image)
            check_package("--image", "matplotlib")
            check_output_path(self.image, IMAGE, force=self.force)
            object.__setattr__(self, "image_path", self.image.absolute())

    def write_image(self, document: Report) -> None:
        """Write the picture of `document` if --image is given."""
        if self.image_path is not None:
            from memprof.report.export.image import write_image

            with self._report_file(f"Picture: {self.image}"):
                write_image(document, self.image_path, force=self.force)


@dataclass(frozen=True, kw_only=True)
class MarkdownOptions(OutputOptions):
    """Options of a command whose report goes into a pull request; raises UsageError if a file cannot be written, or
    --github is given elsewhere than in a job of GitHub Actions."""

    markdown: Path | None = option(
        None, FILES_PANEL, "Write the first screen into this file too, as Markdown.", metavar="FILE"
    )
    github: bool = option(
        False, FILES_PANEL, "In a job of GitHub Actions: add it to the job's summary, and each finding to its line of "
        "the pull request.",
    )  # fmt: skip
    force: bool = reuse_option("force")
    markdown_path: Path | None = dataclasses.field(default=None, init=False)  # absolute: scripts may chdir
    start_folder: Path | None = dataclasses.field(default=None, init=False)  # as above

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markdown is not None or self.github:
            object.__setattr__(self, "start_folder", Path.cwd())
        if self.markdown is not None:
            from memprof.report.export.markdown import MARKDOWN
            from memprof.trace.files import check_output_path

            check_output_path(self.markdown, MARKDOWN, force=self.force)
            object.__setattr__(self, "markdown_path", self.markdown.absolute())
        if self.github and not os.environ.get(_SUMMARY_VARIABLE):
            hint = "a job of GitHub Actions sets it; elsewhere --markdown FILE writes the same"
            raise UsageError(f"--github needs {_SUMMARY_VARIABLE}", value="it is not set", hint=hint)

    def write_markdown(self, document: Report) -> None:
        """Write the Markdown of `document` if --markdown is given, and what --github asks for."""
        if self.start_folder is None:
            return
        from memprof.report.export.markdown import MARKDOWN, list_annotations, to_markdown
        from memprof.trace.files import write_atomically

        text = to_markdown(document, self.start_folder)
        if self.markdown_path is not None:
            with self._report_file(f"Markdown: {self.markdown}"):
                write_atomically(self.markdown_path, text.encode(), MARKDOWN, force=self.force)
        if self.github:
            with self._report_file("Added to the job's summary"):
                _append(Path(os.environ[_SUMMARY_VARIABLE]), text)
            for line in list_annotations(document, self.start_folder):
                echo(line, err=True)


@dataclass(frozen=True, kw_only=True)
class RunReportOptions(FullReportOptions, ImageOptions, MarkdownOptions):
    """Options of a command with the report of a run."""


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(RunReportOptions):
    """Options of a command that can save a capture; raises UsageError if the file cannot be written."""

    save: Path | None = option(None, FILES_PANEL, "Keep the capture in a file, for `memprof show`.", metavar="FILE")
    save_path: Path | None = dataclasses.field(default=None, init=False)  # `save` as absolute path: scripts may chdir
    run_folder: Path = dataclasses.field(default_factory=Path.cwd, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save is not None:
            from memprof.trace.files import check_output_path
            from memprof.trace.io import CAPTURE

            check_output_path(self.save, CAPTURE, force=self.force)
            object.__setattr__(self, "save_path", self.save.absolute())

    def print_run(self, trace: Trace, document: Report) -> None:
        """Print the report of a run, and write its capture if --save is given."""
        print_report(document, self, code_folder=self.run_folder)
        if self.save_path is not None:
            from memprof.trace.io import save_trace

            with self._report_file(f"Saved: memprof show {shlex.quote(str(self.save))}"):
                save_trace(trace, self.save_path, force=self.force)


def _append(path: Path, text: str) -> None:
    """Append `text` to a file. Raises MemprofError: it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MemprofError("the file cannot be written", value=path, hint=error.strerror) from None


def print_json(result: _JsonConvertible | dict[str, Any]) -> None:
    """Print a result on stdout as JSON, with the options that settings files and presets have set."""
    data = result if isinstance(result, dict) else result.to_json()
    if settings.sources:
        files = ", ".join(str(s.path) for s in settings.sources)
        data = {
            **data,
            "options_from_file": {"file": files, "options": [word for s in settings.sources for word in s.arguments]},
        }
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_result(result: Any, output: OutputOptions, view: str, **options: Any) -> None:
    """Print a result on stdout as JSON or text, and write its CSV tables and HTML page.

    `view` names the module in `report/terminal` whose `render` function builds the text, given `options`.
    """
    if output.as_json:
        print_json(result)
    else:
        from memprof.report.terminal.console import print_view

        render = importlib.import_module(f"memprof.report.terminal.{view}").render
        print_view(render(result, quiet=output.quiet, **options))
    if isinstance(output, TableOptions):
        output.write_tables(result)
    if isinstance(output, PageOptions):
        output.write_page(result)


def print_report(document: Report, output: RunReportOptions, *, code_folder: Path | None = None) -> None:
    """Print the report of a run as JSON or text, and write its CSV tables, HTML page and picture. Of a run that started
    an inference engine, text is the engine's budget; both with --full or --explain, or if the script went on.

    `code_folder`: the folder in which the program has just run, whose lines are quoted.
    """
    is_full, engine_budget = output.full or output.explain, document.engine
    goes_on = engine_budget is not None and engine_budget.starts and not _ends_when_ready(document)
    if engine_budget is not None and not output.as_json and (is_full or goes_on):
        from memprof.report.terminal import engine
        from memprof.report.terminal.console import print_view

        print_view(engine.render(document, quiet=output.quiet))
    if is_full:
        print_result(document, output, "report", explain=output.explain)
    elif engine_budget is not None and not goes_on:
        print_result(document, output, "engine")
    else:
        print_result(document, output, "brief", code_folder=code_folder)
    output.write_image(document)
    output.write_markdown(document)


def _ends_when_ready(document: Report) -> bool:
    """Return whether the script was stopped when its engine was ready, as a server is."""
    return document.program is not None and document.program.ended == "ready"


def print_patch(patch: SuggestedPatch) -> None:
    """Print a suggested patch on stdout: its effect, and then the diff, which is the last of the output."""
    from memprof.report.terminal.console import print_view
    from memprof.report.terminal.patch import render_patch

    echo("")
    print_view(render_patch(patch))
    # As it is for a program that applies it; a terminal must not interpret what a source file has.
    sys.stdout.write(printable(patch.diff) if sys.stdout.isatty() else patch.diff)


def print_cache_age(seconds: float, *, quiet: bool) -> None:
    """Print on stderr that the result is cached, with its age in seconds."""
    if not quiet:
        units = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
        size, unit = next((size, unit) for size, unit in units if seconds >= 2 * size or size == 1)
        age_text = f"{seconds / size:.0f} {unit} ago; nothing has changed since"
        echo(f"memprof: from the cache, simulated {age_text} (--no-cache runs it again)", err=True)


def choose_exit_code(document: Report) -> int:
    """Return the exit code of a report: FAILED without a verdict, or if a finding has severity error."""
    if document.failure is not None or document.verdict.fits is None:
        return ExitCode.FAILED
    if not document.verdict.fits:
        return ExitCode.DOES_NOT_FIT
    return ExitCode.FAILED if any(finding.severity.value == "error" for finding in document.findings) else ExitCode.DONE
