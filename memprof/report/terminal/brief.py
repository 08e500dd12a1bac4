"""The first screen of a report: verdict, causes with their line, what to do; then the setting, the categories at the
peak, and the stages with the highest peaks.

It has at most 40 lines of 100 columns, unless ranks or a ladder need more; `--full` prints the whole report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from memprof.allocator.rounding import LARGE_SEGMENT, SMALL_BUFFER
from memprof.findings import Finding, Severity, Suggestion
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS, FIXES
from memprof.ledger.ledger import LiveTensor
from memprof.ledger.stages import describe_name
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import A_BUFFER, describe_tensor, name_operator
from memprof.report.terminal.console import ShellCommand, dim, indent, make_item, make_section, make_table
from memprof.report.terminal.findings import SEVERITY_STYLE
from memprof.report.terminal.folding import ShownStage, choose_full_step, find_peak_row, fold_stages
from memprof.report.terminal.heading import render_heading
from memprof.report.terminal.ladder import render_ladder
from memprof.report.terminal.limit import render_limit
from memprof.report.terminal.next_step import HELP_STEPS, choose_next_step
from memprof.report.terminal.peak import choose_report_unit, render_categories
from memprof.report.terminal.ranks import render_gpus, render_ranks
from memprof.report.terminal.source_code import read_code
from memprof.report.terminal.stage_names import describe_step
from memprof.report.terminal.stages import format_stage
from memprof.report.terminal.steps import render_batches
from memprof.report.terminal.tensors import merge_equal_tensors, render_origin
from memprof.report.terminal.verdict import (
    describe_sum,
    find_certain_errors,
    render_answer,
    render_certain_errors,
    render_verdict,
)
from memprof.stubs.packages import NO_STUBS_HINT
from memprof.trace.events import short_source
from memprof.units import format_bytes

MAX_CAUSES = 4
MAX_SUGGESTIONS = 3
MIN_SAVED_SHARE = 0.1  # of what the run needs: suggestions that save less come last, however little they cost
MIN_SHARE_OF_BEST = 0.25  # of what the best suggestion saves: others that save less are left out
MIN_CAUSE_SHARE = 0.05  # of what a run that does not fit needs: findings about less are not among the causes
MAX_TENSORS = 3
MAX_LINES, WIDTH = 40, 100  # of the screen; of a line, in columns
MAX_STAGES, MIN_STAGES = 8, 2  # as many rows as MAX_LINES leaves
MIN_SHARE = 0.005  # Of the peak: smaller categories and tensors are not shown.


def render(document: Report, *, quiet: bool = False, code_folder: Path | None = None) -> RenderableType:
    """Return the first screen of a report; `quiet` leaves only the verdict.

    `code_folder` is the folder in which the program was run, whose lines are quoted; None: its files may have changed.
    """
    if quiet:
        return render_answer(document)
    total_bytes = document.device.total_bytes or 0
    parts = [] if document.limit is None else [render_limit(document.limit, total_bytes)]
    parts += [*render_certain_errors(document), render_verdict(document, is_short=True)]
    parts += _render_causes(document, code_folder)
    parts += _render_actions(document, code_folder)
    parts.append(render_heading(document))
    parts += [Text(f"Note: {text}") for text in document.assumptions if text.endswith(NO_STUBS_HINT)]
    parts += [Text(""), render_categories(document, MIN_SHARE, note=describe_sum(document))]
    if not _list_told(document) and document.verdict.fits is not False:
        largest = _list_largest(document, document.peak.tensors, MAX_TENSORS)
        parts.append(make_section("Largest at the peak", *map(make_item, largest), below=1))
    rest = dim(_describe_rest(document))
    tables = list(_render_tables(document))
    if tables:
        return Group(*parts, *tables, rest)
    return _Fitting(lambda num_stages: Group(*parts, _render_top_stages(document, num_stages), rest))


class _Fitting:
    """A screen with as many stages, of `make_screen(num_stages)`, as MAX_LINES leave room for at WIDTH."""

    def __init__(self, make_screen: Callable[[int], RenderableType]) -> None:
        self._make_screen = make_screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        measured = options.update(width=WIDTH, height=None)
        for num_stages in range(MAX_STAGES, MIN_STAGES - 1, -1):
            screen = self._make_screen(num_stages)
            if len(console.render_lines(screen, measured)) <= MAX_LINES:
                break
        yield screen


def _list_failed(document: Report, code_folder: Path | None) -> list[RenderableType]:
    """Return an item on the tensor whose allocation fails: its size, its shape, its operator, and the line of Python
    with its code, unless one that is to be changed is quoted; and whether torch's advice helps, if no change is known
    that does. An operator that a line of the program does not name is an inner one of torch's, and left
    out."""
    verdict = document.verdict
    if verdict.oom_shape is None or verdict.oom_source is None:
        return []
    is_product = (verdict.oom_op or "") == "aten.bmm" and verdict.oom_shape[:1] == (1,)  # of matrices, as of einsum
    tensor = describe_tensor(verdict.oom_shape[is_product:], verdict.oom_dtype or "")
    sources = verdict.oom_source, *verdict.oom_callers
    places = list(map(short_source, sources))
    is_of_backward = verdict.oom_stage == "backward" and len(places) > 1  # whose line of the forward is the first
    lines = ", called at ".join([f"the backward of {places[0]}", *places[1:]] if is_of_backward else places)
    operator = name_operator(verdict.oom_op or "")
    is_own = not Path(verdict.oom_source).is_absolute()  # as files of libraries are
    code_there = read_code(verdict.oom_source, code_folder) if code_folder and is_own else None
    is_named = code_there is None or operator.strip(".()") in code_there or tensor == A_BUFFER
    by = f" by {operator}" * bool(operator and is_named)
    tried_bytes = verdict.tried_to_allocate_bytes or 0
    is_segment = tried_bytes in (SMALL_BUFFER, LARGE_SEGMENT)  # for a tensor that may be smaller
    size = "" if is_segment else f"{format_bytes(tried_bytes)}, "
    segment = f", for which a segment of {format_bytes(tried_bytes)} is reserved" * is_segment
    text = f"failed allocation: {size}{tensor}{by}{segment}, {'in' if is_of_backward else 'at'} {lines}"
    changes = [suggestion for finding in document.findings for suggestion in finding.suggestions if suggestion.fits]
    if verdict.expandable_segments_help and not changes and not any(one.is_decisive for one in list_causes(document)):
        text += f"; torch's advice, {EXPANDABLE_SEGMENTS}, lets this one succeed, and maybe not a later one"
    own = [source for source in sources if not Path(source).is_absolute()]
    codes = [code for source in own if code_folder and (code := read_code(source, code_folder))]
    codes *= not _is_solved(document)
    is_quoted = any(action.code and not action.command for action in list_actions(document, code_folder))
    return [make_item(text), *(_quote(code) for code in codes[:1] if not is_quoted)]


def _quote(code: str) -> RenderableType:
    """Return a line of the program, below the item that is about it."""
    return indent(indent(dim(code)))


def _render_causes(document: Report, code_folder: Path | None) -> list[RenderableType]:
    """Return the causes, a line each, the failed allocation, and the largest tensors where the causes do not explain
    the run; of a run that fits without them, what was noticed."""
    causes, failed = list_causes(document), _list_failed(document, code_folder)
    if not causes and document.verdict.fits is not False:
        notes = _list_notes(document)
        return [*map(_render_title, notes), Text("")]
    is_easy = document.verdict.fits is not False and not document.verdict.retries
    if not causes:
        label = "largest of the others: " if failed else "largest tensors: "
        items = [
            *failed,
            *(make_item(Text(label).append(line)) for line in _list_largest(document, _list_others(document), 1)),
        ]
    elif causes[0].is_decisive or is_easy:
        items = [*map(_render_title, causes), *failed]
    else:
        items = [*_describe_largest_category(document, causes[0]), *map(_render_title, causes), *failed]
    return [*items, Text("")]


def list_causes(document: Report) -> list[Finding]:
    """Return the decisive findings, or else the most important ones that the verdict does not tell, without notes."""
    at_verdict = find_certain_errors(document)
    others = [one for one in document.findings if one.id != "does-not-fit" and one not in at_verdict]
    decisive = [finding for finding in others if finding.is_decisive]
    noticed = [one for one in others if one.severity is not Severity.NOTE and not _is_too_small(document, one)]
    # What is free in pieces is seldom more than a part of what another finding is about. Where memory ended the run, it
    # is what is cached.
    is_end = document.program is not None and document.program.ended == "refused"
    shown = decisive or [one for one in noticed if one.id != "fragmentation" or (one is noticed[0] and not is_end)]
    # What has a line to change comes before what is free in pieces.
    shown = sorted(shown, key=lambda one: one.id == "fragmentation" and not one.is_decisive)
    by_title: dict[str, Finding] = {}  # two models of one class that are used alike have findings with equal titles
    for finding in shown:
        by_title.setdefault(finding.title, finding)
    return list(by_title.values())[:MAX_CAUSES]


def _is_too_small(document: Report, finding: Finding) -> bool:
    """Return whether a run that does not fit would not be much smaller without what `finding` is about."""
    min_bytes = MIN_CAUSE_SHARE * document.verdict.required_bytes
    is_small = finding.num_bytes is not None and finding.num_bytes < min_bytes
    return document.verdict.fits is False and finding.severity is not Severity.ERROR and is_small


def _list_notes(document: Report) -> list[Finding]:
    """Return the note that is shown where there is no cause, if one has something to do."""
    notes = (one for one in document.findings if one.severity is Severity.NOTE)
    return [one for one in notes if any(_list_line_fixes([one]))][:1]


def _list_told(document: Report) -> list[Finding]:
    """Return the findings on the screen: the causes, or of a run that fits without them what was noticed."""
    return list_causes(document) or (_list_notes(document) if document.verdict.fits else [])


def _render_title(finding: Finding) -> RenderableType:
    """Return `describe_cause` as an item of a list, its label in colour."""
    text = describe_cause(finding)
    label = text.removesuffix(finding.title) if text.endswith(finding.title) else f"{text.partition(': ')[0]}: "
    return make_item(Text("").append(label, style=SEVERITY_STYLE[Severity.ERROR]).append(text.removeprefix(label)))


def describe_cause(finding: Finding) -> str:
    """Return a finding's title, after `cause` if it decides the verdict; of an error of the program that ended the run,
    after `error`, and with its message."""
    text = finding.title
    if finding.id == "run-failed" and finding.evidence:
        place, _, reason = text.rpartition(": ")
        message = finding.evidence[0].text
        text = f"{place}: {message}" if message.startswith(reason) else f"{text}\n{message}"
    label = "error" if finding.id == "run-failed" else "cause"
    return f"{label}: {text}" if finding.is_decisive or finding.severity is Severity.ERROR else text


def _describe_largest_category(document: Report, finding: Finding) -> Iterator[RenderableType]:
    """Yield a line on the category with most of the peak and its largest tensors, unless `finding` explains half."""
    category, category_bytes = max(document.peak.categories.items(), key=lambda item: item[1], default=("", 0))
    explained_bytes = 0 if finding.id == "fragmentation" else finding.num_bytes or 0  # which is beside all tensors
    if explained_bytes < category_bytes / 2:
        tensors = [tensor for tensor in document.peak.tensors if tensor.category == category]
        for line in _list_largest(document, tensors, 1, with_category=False):
            yield make_item(Text(f"{category}, {format_bytes(category_bytes)}; largest: ").append(line))


def _list_others(document: Report) -> list[LiveTensor]:
    """Return the tensors at the peak without the failed allocation, of which there may be others alike."""
    verdict, others = document.verdict, list(document.peak.tensors)
    failed = verdict.oom_op, verdict.oom_shape, verdict.oom_dtype, verdict.oom_source
    alike = next((i for i, one in enumerate(others) if (one.op, one.shape, one.dtype, one.source) == failed), None)
    if alike is not None:
        one = others.pop(alike)
        rest = one.count - 1
        num_bytes = one.allocated_bytes // one.count * rest
        others += [replace(one, count=rest, allocated_bytes=num_bytes)] if rest else []
    return others


def _list_largest(
    document: Report, tensors: Sequence[LiveTensor], count: int, *, with_category: bool = True
) -> Iterator[Text]:
    """Yield up to `count` descriptions of the largest of `tensors` at the peak, equal ones together."""
    unit = choose_report_unit(document)
    for tensor in sorted(merge_equal_tensors(tensors), key=lambda tensor: -tensor.allocated_bytes)[:count]:
        if tensor.allocated_bytes > MIN_SHARE * document.peak.allocated_bytes:
            what = describe_tensor(tensor.shape, tensor.dtype)
            if tensor.count > 1:
                what = f"{tensor.count:,} {'buffers' if what == A_BUFFER else f'x {what}'}"
            text = Text(f"{what}, {unit.format(tensor.allocated_bytes)} {unit.name}: ")
            yield text.append(render_origin(tensor, with_category=with_category))


class Action(NamedTuple):
    """Something to do."""

    text: str
    code: str = ""  # the line of the program that it is about, or the command
    command: bool = False


def _render_actions(document: Report, code_folder: Path | None) -> list[RenderableType]:
    """Return what `list_actions` does, in a section."""
    lines: list[RenderableType] = []
    actions = list_actions(document, code_folder)
    for text, code, is_command in actions:
        if is_command:
            lines += [make_item(f"{text}:"), indent(ShellCommand(code))]
        else:
            lines += [make_item(Text(text, style="green")), *([_quote(code)] if code else [])]
    return [make_section("Do", *lines, below=1)] if lines else []


def list_actions(document: Report, code_folder: Path | None) -> list[Action]:
    """Return what to do: the fixes at the program's lines, those of options with the lowest need, the next command."""
    told_findings = [*find_certain_errors(document), *_list_told(document)]
    fits = document.verdict.fits is not False
    causes = [one for one in told_findings if fits or one.is_decisive or one.severity is Severity.ERROR]
    actions = _list_fixes_of(document, causes, code_folder)
    if not (_is_solved(document) or document.ladder):
        ranked = sorted(document.findings, key=lambda finding: finding.id != "does-not-fit")  # it has all, best first
        suggestions = {s.text: s for finding in ranked for s in finding.suggestions}.values()
        # Those that do not fit are of use only where none does: together with others they may.
        fitting = [suggestion for suggestion in suggestions if suggestion.fits is not False]
        is_end = document.program is not None and document.program.ended == "refused"  # where little soon ends again
        most = max((one.num_bytes for one in fitting or suggestions), default=0) if is_end else 0
        # What takes away the cause itself comes first, however little that is.
        own = {s.text for cause in list_causes(document) if cause.is_decisive for s in cause.suggestions}
        worth = [one for one in fitting or suggestions if one.num_bytes >= MIN_SHARE_OF_BEST * most or one.text in own]
        if is_end:  # where room is only just made, the next allocations fail instead
            worth = [one for one in worth if not _only_makes_room(document, one)] or worth
            usable_bytes = document.device.usable_bytes or 0
            worth = [one for one in worth if one.required_bytes <= usable_bytes] or worth
        best = sorted(worth, key=lambda one: (one.text not in own, _comes_last(document, one)))
        for one in best[:MAX_SUGGESTIONS]:
            code = read_code(one.source, code_folder) if one.source and code_folder else None
            actions.append(Action(_describe_suggestion(one), code or ""))
    # Without what makes the run fit, this does not.
    actions += _list_fixes_of(document, [one for one in told_findings if one not in causes], code_folder)
    next_step = choose_next_step(document)
    if next_step and next_step not in HELP_STEPS:
        actions.append(Action(*next_step, command=True))
    return actions


def _list_fixes_of(document: Report, findings: Sequence[Finding], code_folder: Path | None) -> list[Action]:
    """Return the fixes of `findings` at the program's lines, with what the run needs then."""
    fixes = dict.fromkeys(_list_line_fixes(findings))
    effects = {
        pair: effect
        for one in findings
        if (effect := _describe_effect(document, one))
        for pair in [*_list_line_fixes([one])][:1]
    }
    # What is to be done at a line is not told again of a variable without one.
    told = {fix.partition(": ")[2] for fix, source in fixes if source}
    actions = []
    for fix, source in (pair for pair in fixes if pair[1] or pair[0] not in told):
        code = read_code(source, code_folder) if source and code_folder else None
        actions.append(Action(f"{fix}{effects.get((fix, source), '')}", code or ""))
    return actions


def _describe_effect(document: Report, finding: Finding) -> str:
    """Return what the run needs with the change of a cause, as the end of a sentence; "" if that is not known, what
    is reserved then is more than the GPU has, though it fits, or memory ended the run before it computed anything."""
    required_bytes = next((one.required_bytes for one in finding.evidence if one.required_bytes is not None), None)
    is_end = document.program is not None and document.program.ended == "refused"
    if not finding.is_decisive or required_bytes is None:
        return ""
    if is_end and not any(row.kind.computes for row in document.stages):
        return ""
    need_bytes = required_bytes + document.peak.device_used_bytes - document.peak.reserved_bytes
    if need_bytes > (document.device.total_bytes or 0):
        return ""
    at_least = " at least" * is_end
    return f": needs{at_least} {format_bytes(need_bytes)} instead of {format_bytes(document.verdict.required_bytes)}"


def _is_solved(document: Report) -> bool:
    """Return whether the first finding is the cause, with its change: the run fits with that change alone."""
    return any(_list_line_fixes([finding for finding in document.findings[:1] if finding.is_decisive]))


def _comes_last(document: Report, suggestion: Suggestion) -> bool:
    """Return whether a suggestion comes after others, however little it costs."""
    saves_little = suggestion.num_bytes < MIN_SAVED_SHARE * document.verdict.required_bytes
    return saves_little or _only_makes_room(document, suggestion)


def _only_makes_room(document: Report, suggestion: Suggestion) -> bool:
    """Return whether a suggestion makes room of free pieces where something else is the cause."""
    is_in_pieces = any(one.is_decisive and one.id == "fragmentation" for one in document.findings[:1])
    fix = None if suggestion.fix is None else FIXES[suggestion.fix.partition("=")[0]]
    return fix is not None and bool(fix.alloc_conf) and not is_in_pieces


def _describe_suggestion(suggestion: Suggestion) -> str:
    """Return the text of a suggestion; if that begins with the fix to switch on, as its option with what it does."""
    if suggestion.fix is None or not suggestion.text.startswith(f"{suggestion.fix}:"):
        return suggestion.text
    changes = FIXES[suggestion.fix.partition("=")[0]].changes
    return f"--fix {suggestion.fix} ({changes}){suggestion.text.removeprefix(suggestion.fix)}"


def _list_line_fixes(findings: Sequence[Finding]) -> Iterator[tuple[str, str | None]]:
    """Yield the fixes in the evidence of `findings`, which begin with `fix:` or `fix at LINE:`, as `LINE: fix`, each
    with its source `file:line function`."""
    for evidence in (evidence for finding in findings for evidence in finding.evidence):
        marker, _, fix = evidence.text.partition(": ")
        if marker == "fix" and evidence.source:
            line = short_source(evidence.source)
            yield f"{line}: {fix.removeprefix(f'at {line} ').replace(f' at {line}', '')}", evidence.source
        elif marker == "fix":
            yield fix, None
        elif marker.startswith("fix at "):
            yield f"{marker.removeprefix('fix at ')}: {fix}", evidence.source


def _render_tables(document: Report) -> Iterator[RenderableType]:
    """Yield the tables that an option of the run requested: ranks, GPUs, varying lengths, the ladder."""
    unit = choose_report_unit(document)
    if document.ranks:
        yield render_ranks(document.ranks, unit, on_cpu=document.on_cpu)
    if document.gpus:
        yield render_gpus(document.gpus, unit)
    if document.batches is not None and document.batches.lengths is not None:
        yield render_batches(document.batches, unit)
    if document.ladder:
        yield render_ladder(document, full=False)


def _render_top_stages(document: Report, num_stages: int) -> RenderableType:
    """Return a table of the `num_stages` stages with the highest peaks, in the order of the run; nothing if a line is
    to be changed, or memory ended the run: what is there then stands above."""
    is_end = document.program is not None and document.program.ended == "refused"
    if is_end or any(source for _, source in _list_line_fixes(_list_told(document))):
        return Group()
    unit, rows = choose_report_unit(document), fold_stages(document)
    peak_index = find_peak_row(document, rows)
    with_tensors = _merge_equal_names(rows, peak_index)
    if len(with_tensors) < 2:
        return Group()
    top = sorted(sorted(with_tensors, key=lambda i: -rows[i].peak_allocated_bytes)[:num_stages])
    usable, resident = document.device.usable_bytes, document.device.resident_bytes
    cells = [
        (row, *format_stage(row, usable, unit, is_peak=i == peak_index, resident_bytes=resident))
        for i, row in ((i, replace(rows[i], num_rounds=with_tensors[i])) for i in top)
    ]
    step = describe_step(document, choose_full_step(document))
    title = f"stage{f' ({step})' * bool(step)}, {unit.name} of tensors"
    table = make_table(title, ">peak", ">after")
    for row, name, fit in cells:
        sizes = unit.format(row.peak_allocated_bytes), unit.format(row.allocated_bytes)
        table.add_row(name.append(f"  <- {fit.plain}", style="red") if row.oom else name, *sizes)
    omitted = len(with_tensors) - len(top)
    notes = [dim(f"and {omitted} more with lower peaks")] if omitted else []
    return indent(table, *notes, below=1)


def _merge_equal_names(rows: Sequence[ShownStage], peak_index: int | None) -> dict[int, int]:
    """Return the rows with tensors, of those with one name the highest alone: index -> how many times it came."""
    by_name: dict[tuple[str, int, str | None], list[int]] = {}
    for i, row in enumerate(rows):
        if row.peak_allocated_bytes:
            by_name.setdefault((describe_name(row.name), row.num_merged, row.source), []).append(i)
    merged = {}
    for indices in by_name.values():
        highest = max(indices, key=lambda i: (i == peak_index, rows[i].peak_allocated_bytes))
        merged[highest] = sum(rows[i].num_rounds for i in indices)
    return merged


def _describe_rest(document: Report) -> str:
    findings = ", findings" * bool(document.findings)
    return f"More: --full (timeline, tensors{findings}), --explain (assumptions), --html FILE"
