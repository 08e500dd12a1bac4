"""Errors for users: a problem, the offending value, and a hint.

Every error that a user can cause is a `MemprofError`. The command line catches it in one place (cli/options.py), prints
it to stderr and exits with `exit_code`; a traceback appears only with `--debug`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

# Control characters except tab and line feed, line separators, surrogates, and Unicode's category Cf (characters
# without width, or that change the writing direction).
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    "\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f"
    "\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001"
    "\U000e0020-\U000e007f]"
)


def printable(text: str) -> str:
    """Return `text` with control characters as visible escapes, such as `\\x1b`.

    Names from files, logs, snapshots and programs are untrusted: a terminal or browser must not interpret them.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text)


class MemprofError(Exception):
    """Error that the user can act on.

    Args:
        problem: one line that describes the problem.
        value: the offending value, if any.
        hint: one line of advice.

    Example:
        try:
            memprof.virtual_gpu("rtx-4900")
        except memprof.MemprofError as error:
            print(error.problem, error.value, error.hint)
    """

    exit_code = 1
    follows_answer = False  # whether stdout has its one JSON document already

    def __init__(self, problem: str, *, value: object = None, hint: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.value = value
        self.hint = hint

    @property
    def line(self) -> str:
        """Return the problem and the offending value in one line."""
        return self.problem if self.value is None else f"{self.problem} ({self.value})"

    def __str__(self) -> str:
        lines = [self.problem]
        if self.value is not None:
            lines.append(f"  value: {self.value}")
        if self.hint:
            lines.append(f"  hint:  {self.hint}")
        return printable("\n".join(lines))


class UsageError(MemprofError):
    """Usage error: an unknown name, a value out of range, a file of the wrong kind.

    Example:
        try:
            memprof.load("no-such-file.memprof")
        except memprof.UsageError as error:
            print(error)
    """

    exit_code = 2


class RunFailedError(MemprofError):
    """Error for a profiled program that raised an exception, or called an operation that cannot be simulated.

    Example:
        def step(layer):
            raise ValueError(layer(torch.zeros(2, 8, device="cuda")).shape)

        try:
            memprof.profile(step, torch.nn.Linear(8, 8))
        except memprof.RunFailedError as error:
            print(error, error.document.peak.allocated_bytes)
    """

    trace: Any = None  # what happened until then (`memprof.trace.events.Trace`)
    # The report on it (`memprof.report.documents.report.Report`), None if nothing had been allocated yet.
    document: Any = None


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or, if that raises, "<exception str() failed>" as in Python's tracebacks."""
    try:
        return str(error)
    except Exception:  # of the program's own class: anything
        return "<exception str() failed>"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message; "" if it is empty."""
    return (error_text(error).strip().splitlines() or [""])[0]


# The libraries that parts of memprof need, as the extras of pyproject.toml have them. They are named instead of
# `memprof[...]`: the memprof of PyPI is another program.
REQUIREMENTS = {
    "peft": "peft>=0.18", "bitsandbytes": "bitsandbytes>=0.46.1", "torchao": "torchao>=0.13",
    "accelerate": "accelerate>=1.1", "pyarrow": "pyarrow>=17", "plotly": "plotly>=6", "matplotlib": "matplotlib>=3.8",
    "distributed": "distributed>=2025.1", "mcp": "mcp>=2",
}  # fmt: skip


def not_installed(problem: str, value: object, package: str, otherwise: str = "") -> UsageError:
    """Return a UsageError for a missing or incompatible library, with the hint to install `package`."""
    from memprof.installer import format_install_command  # here: hardly an error needs it

    return UsageError(problem, value=value, hint=format_install_command(REQUIREMENTS[package]) + otherwise)


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the one of `choices` that is most similar to `name`, ignoring case; None if none is similar."""
    by_lowercase = {choice.lower(): choice for choice in choices}
    transposed = [choice for choice in by_lowercase if sorted(choice) == sorted(name.lower())]  # modle: model, not mode
    matches = transposed or difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=0.5)
    return by_lowercase[matches[0]] if matches else None


_MAX_LONGER = 6  # names that a hint lists of those that begin with what was given


def suggest_name(name: str, choices: Iterable[str]) -> str | None:
    """Return the question which of `choices` was meant by `name`: those that begin with it (the sizes of a chip or of a
    model, in their order), else the most similar; None if none is similar."""
    choices = list(choices)
    longer = [choice for choice in choices if name and choice.lower().startswith(f"{name.lower()}-")]
    if len(longer) > 1:
        more = f" ({len(longer)} in all)" if len(longer) > _MAX_LONGER else ""
        return f"did you mean one of {', '.join(longer[:_MAX_LONGER])}{more}?"
    closest = nearest(name, choices)
    return None if closest is None else f"did you mean {closest!r}?"


def unknown_name(kind: str, name: str, choices: Iterable[str], *, see: str | None = None) -> UsageError:
    """Return a UsageError for the unknown `name` of a `kind`; the hint suggests choices, or lists them. `see` is
    added to the hint."""
    choices = list(choices)
    names = sorted(choices)
    hint = suggest_name(name, choices)
    if hint is None:
        listed = "known: " + ", ".join(names)
        hint = listed if len(names) <= 30 else f"{len(names)} are known, {names[0]!r} to {names[-1]!r} among them"
    if see:
        hint += f" {see}"
    return UsageError(f"unknown {kind}", value=repr(name), hint=hint)
