"""What an answer claims of the commands that it prints, to be held against what they do: verdict, exit code, bytes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memprof.flows.saved_files import load_json
from memprof.report.terminal.next_step import choose_next_step

# Runs a command, without the program's name and with --json: its exit code and what it answers.
Run = Callable[[list[str]], tuple[int, dict[str, Any]]]


class Claim(NamedTuple):
    """A command that an answer has, and what it says of it; None: it says nothing."""

    command: str
    fits: bool | None
    needed_bytes: int | None
    where: str


def claims_of(answer: dict[str, Any]) -> Iterator[Claim]:
    """Every command with a figure: rows of a ladder, runs of a limit, choices and largest models of `recommend`."""
    for row in answer.get("ladder") or ():
        yield Claim(row["command"], row["fits"], row["device_used_bytes"], f"row {row['added']}")
    for run in (answer.get("limit") or {}).get("runs", ()):
        yield Claim(run["command"], run["fits"], run["needed_bytes"], f"at {run['number']}")
    chosen = [answer["chosen"]] if answer.get("chosen") else []
    for choice in [*chosen, *answer.get("choices", ())]:
        yield Claim(choice["command"], choice["fits"], choice["needed_bytes"], choice["name"])
    for row in answer.get("largest", ()):
        if row["model"] is not None:
            yield Claim(row["command"], True, None, row["task"])


def hold(claim: Claim, run: Run) -> dict[str, Any]:
    """Run a claim's command; what it answers is what was claimed."""
    code, answer = run(shlex.split(claim.command)[1:])
    verdict = answer["verdict"]
    if claim.needed_bytes is not None:
        assert verdict["required_bytes"] == claim.needed_bytes, claim
    if claim.fits is not None:
        assert verdict["fits"] is claim.fits, claim
        # A run that is stopped by an error that a real one has fits nothing, whatever it needs.
        assert code == (0 if claim.fits else 3), (code, claim)
    return answer


def next_of(answer: dict[str, Any], folder: Path) -> tuple[str, str] | None:
    """What an answer says to try next: what for, and the command."""
    file = folder / "answer.json"
    file.write_text(json.dumps(answer), encoding="utf-8")
    return choose_next_step(load_json(file))


def follow(answer: dict[str, Any], run: Run, folder: Path, most: int = 5) -> list[str]:
    """Run what an answer says to try next, and what that says, until nothing new is named; returns what for.

    Each does what its line says of it.
    """
    said: list[str] = []
    ran: set[str] = set()
    while len(said) < most:
        found = next_of(answer, folder)
        if found is None or found[1] in ran:
            break
        what, command = found
        said.append(what)
        ran.add(command)
        code, after = run(shlex.split(command)[1:])
        if command.startswith("memprof help"):
            assert code == 0
            break
        CHECKS[what](answer, code, after)
        if "verdict" not in after:
            break
        answer = after
    return said


def _same_as_row(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    row = next(row for row in before["ladder"] if row["fits"] and row["fixes"])
    assert code == 0 and after["verdict"]["fits"] is True
    assert after["verdict"]["required_bytes"] == row["device_used_bytes"]


def _a_set(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    """The row as it is is the run that was asked about, whose need was seen if it went on past the full GPU."""
    first, *_, last = [after["ladder"][0], *after["ladder"]]
    assert first["device_used_bytes"] >= before["verdict"]["required_bytes"]
    assert code == (0 if last["fits"] else 3)
    assert after["verdict"]["required_bytes"] == last["device_used_bytes"] and after["verdict"]["fits"] is last["fits"]
    whys = ("nothing fits", "no fix", "none was tried")
    assert last["fits"] or any(why in after["ladder_reason"] for why in whys)


def _a_limit(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    """Not less than what was seen to fit."""
    assert code == 0 and after["limit"]["largest"] >= before["target"]["batch_size"]
    known = {run["number"]: run for run in after["limit"]["runs"]}
    at = known.get(before["target"]["batch_size"])
    assert at is None or (at["fits"] and at["needed_bytes"] == before["verdict"]["required_bytes"])


def _the_largest(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    (row,) = (run for run in before["limit"]["runs"] if run["number"] == before["limit"]["largest"])
    assert code == 0 and after["verdict"]["required_bytes"] == row["needed_bytes"]


def _later(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    """No less than before, for the steps that it begins with are the same."""
    assert after["program"]["steps"] >= before["program"]["steps"]
    assert after["verdict"]["required_bytes"] >= before["verdict"]["required_bytes"]
    assert code == {True: 0, False: 3}[after["verdict"]["fits"]]


def _all_of_it(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    assert after["program"]["ended"] in ("exit", "refused") and after["verdict"]["fits"] is not None


def _with_the_largest_batch(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    assert after["program"]["asked"]["worst_batch"] and after["verdict"]["fits"] is not None


def _recommended(before: dict[str, Any], code: int, after: dict[str, Any]) -> None:
    assert code == (0 if after["chosen"] else 3)
    assert after["chosen"] or after["alternatives"]


# What for, as the line says -> what the command's answer has to be.
CHECKS: dict[str, Callable[[dict[str, Any], int, dict[str, Any]], None]] = {
    "show the first row that fits in full": _same_as_row,
    "find the cheapest set of --fix options that fits": _a_set,
    "try combinations of --fix options": _a_set,
    "find the largest batch that fits": _a_limit,
    "show the report of the largest": _the_largest,
    "check whether later steps need more": _later,
    "run the whole script": _all_of_it,
    "check that its evaluation fits too": _all_of_it,
    "check that all of its steps fit": _all_of_it,
    "check that it fits with these parameters": _all_of_it,
    "check that the steps of the other optimizer fit too": _all_of_it,
    "find what the largest batch needs": _with_the_largest_batch,
    "find what fits this GPU, or how many of them it takes": _recommended,
}
