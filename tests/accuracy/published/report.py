"""The tables of the accuracy suite, as Markdown: a summary by source, the misses, and what is not predicted."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Sequence

from tests.accuracy.published.prediction import Outcome

# From MISS on a difference is listed with its explanation; FAR is the other bar of the statistics.
MISS, FAR = 0.001, 0.01


def tables(outcomes: Sequence[Outcome]) -> str:
    predicted = [outcome for outcome in outcomes if outcome.error is not None]
    parts = [
        _heading(outcomes, predicted),
        _summary(outcomes),
        "### Why code or versions differ\n",
        _classes(predicted),
        "### Differences above 0.1%\n",
        _misses(predicted),
        "### Every predicted row\n",
        _rows(predicted),
        "### Not predicted\n",
        _reasons(outcome for outcome in outcomes if outcome.error is None),
    ]
    return "\n".join(parts)


def _heading(outcomes: Sequence[Outcome], predicted: Sequence[Outcome]) -> str:
    num_sources = len({outcome.kind for outcome in outcomes})
    with_figures = len({outcome.kind for outcome in predicted})
    return (
        f"{len(outcomes)} published figures from {num_sources} sources; {len(predicted)} of them, from {with_figures} "
        f"sources, are predicted, and {len(outcomes) - len(predicted)} are listed with the reason why not.\n"
    )


def _by_source(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kind].append(outcome)
    return groups


def _summary(outcomes: Sequence[Outcome]) -> str:
    matched = [outcome for outcome in outcomes if _matches(outcome)]
    others = [outcome for outcome in outcomes if outcome.error is not None and not _matches(outcome)]
    lines = [
        "| source | rows | predicted | exact | median error | median absolute error | within 0.1% | within 1% | worst "
        "| under-predicted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_line(name, group) for name, group in _by_source(outcomes).items()),
        _line("**all**", outcomes),
        _line("**code and versions match**", matched),
        _line("**code or versions differ**", others),
        "",
        "An error is (simulated - published) / published, with its sign; an absolute error is without it. A difference "
        "within the rounding of the published figure counts as none (*exact*). *Under-predicted* is the share of rows "
        "whose simulated figure is lower. *Code and versions match*: the run used the source's own code, or code that "
        "was compared with it line by line, eager as in the source. This is decided by source and metric, and not by "
        "result: rows whose code, release or options differ or are unknown are in the next table, including those that "
        "agree.\n",
    ]
    return "\n".join(lines)


def _matches(outcome: Outcome) -> bool:
    return outcome.error is not None and not outcome.prediction.differs


def _line(name: str, group: Sequence[Outcome]) -> str:
    errors = [outcome.error for outcome in group if outcome.error is not None]
    cells = [name, f"{len(group)}", f"{len(errors)}"]
    if errors:
        sizes = [abs(error) for error in errors]
        cells += [f"{errors.count(0)}", _percent(statistics.median(errors)), f"{statistics.median(sizes):.2%}"]
        cells += [f"{sum(size <= bar for size in sizes) / len(sizes):.0%}" for bar in (MISS, FAR)]
        cells += [_percent(max(errors, key=abs)), f"{sum(error < 0 for error in errors) / len(errors):.0%}"]
    else:
        cells += ["-"] * 7
    return "| " + " | ".join(cells) + " |"


def _classes(predicted: Iterable[Outcome]) -> str:
    groups: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in predicted:
        groups[outcome.prediction.differs].append(outcome)
    lines = ["| reason | rows | lines of the table | median error | worst |", "|---|---:|---|---:|---:|"]
    for why, group in groups.items():
        if why:
            errors = [outcome.error for outcome in group if outcome.error is not None]
            numbers = _ranges([outcome.row.line for outcome in group])
            middle, worst = _percent(statistics.median(errors)), _percent(max(errors, key=abs))
            lines.append(f"| {why} | {len(group)} | {numbers} | {middle} | {worst} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "None.\n"


def _percent(error: float) -> str:
    return "0" if error == 0 else f"{error:+.2%}"


def _figures(outcome: Outcome) -> tuple[str, str, str]:
    row, prediction = outcome.row, outcome.prediction
    assert prediction.num_bytes is not None and outcome.error is not None
    digits = len(row.value.partition(".")[2])
    simulated = prediction.num_bytes / prediction.unit(row)
    return (
        f"{row.figure:,.{digits}f} {row.unit.split()[0]}",
        f"{simulated:,.{max(digits, 1)}f}",
        _percent(outcome.error),
    )


def _misses(predicted: Iterable[Outcome]) -> str:
    lines = ["| row | published | simulated | error | bytes | explanation |", "|---|---:|---:|---:|---:|---|"]
    for outcome in predicted:
        assert outcome.error is not None and outcome.prediction.num_bytes is not None
        if abs(outcome.error) > MISS:
            prediction = outcome.prediction
            missing = prediction.num_bytes - outcome.row.figure * prediction.unit(outcome.row)  # type: ignore[operator]
            why = prediction.explanation or "unexplained"
            cells = [f"{outcome.kind}: {outcome.row.title}", *_figures(outcome), f"{missing:+,.0f}", why]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "None.\n"


def _rows(predicted: Iterable[Outcome]) -> str:
    lines = []
    for name, group in _by_source(predicted).items():
        lines += [f"**{name}**", "", "| row | metric | published | simulated | error |", "|---|---|---:|---:|---:|"]
        for outcome in group:
            cells = [outcome.row.title, outcome.row.metric, *_figures(outcome)]
            lines.append("| " + " | ".join(cells) + " |")
        for code in dict.fromkeys(outcome.prediction.code for outcome in group if outcome.prediction.code):
            own = [outcome.row.line for outcome in group if outcome.prediction.code == code]
            lines += ["", f"The source's own code, {code}: lines {_ranges(own)} of the table."]
        for basis in dict.fromkeys(outcome.prediction.basis for outcome in group if outcome.prediction.basis):
            if sum(outcome.prediction.basis == basis for outcome in group) == len(group):
                lines += ["", f"Compared: {basis}."]
        lines.append("")
    return "\n".join(lines)


def _reasons(outcomes: Iterable[Outcome]) -> str:
    lines = ["| source | rows | lines of the table | reason |", "|---|---:|---|---|"]
    for name, group in _by_source(outcomes).items():
        by_reason: dict[str, list[Outcome]] = collections.defaultdict(list)
        for outcome in group:
            by_reason[outcome.prediction.reason].append(outcome)
        for reason, same in by_reason.items():
            numbers = _ranges([outcome.row.line for outcome in same])
            lines.append(f"| {name} | {len(same)} | {numbers} | {reason} |")
    return "\n".join(lines) + "\n"


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
