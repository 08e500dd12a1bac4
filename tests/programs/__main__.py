"""Run the corpus of public programs, and write the table of docs/programs.md.

    python -m tests.programs --fetched FOLDER [--only WORD,WORD] [--results FOLDER] [--write]

FOLDER has a checkout of each repository under its name, at the commit that the table names. Results are kept in
their folder, and the table is of all that it has: a part of the corpus can be run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.programs.fetched import PROGRAMS
from tests.programs.program import ROOT, Program, Result, run

_TABLE = ("<!-- table -->\n", "<!-- end of table -->\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetched", type=Path, required=True)
    parser.add_argument("--only", default="", help="programs whose names have one of these words, separated by commas")
    parser.add_argument("--results", type=Path, default=Path("corpus-results"))
    parser.add_argument("--seconds", type=float, help="for each program, in place of its own limit")
    parser.add_argument("--write", action="store_true")
    told = parser.parse_args()
    told.results.mkdir(exist_ok=True)
    for program in PROGRAMS:
        if any(word in program.name for word in told.only.split(",")):
            reason = program.missing(told.fetched)
            if not reason:
                result = run(program, told.fetched, told.seconds)
                _keep(result, told.results / f"{program.slug()}.json")
            print(f"{program.name}: {reason or result.wrong(program) or 'ok'}", flush=True)
    if told.write:
        page = ROOT / "docs" / "programs.md"
        before, rest = page.read_text(encoding="utf-8").split(_TABLE[0])
        after = rest.split(_TABLE[1])[1]
        page.write_text(before + _TABLE[0] + _table(told.results) + _TABLE[1] + after, encoding="utf-8")


def _keep(result: Result, file: Path) -> None:
    kept = {"exit_code": result.exit_code, "seconds": result.seconds, "report": result.report, "stderr": result.stderr}
    file.write_text(json.dumps(kept), encoding="utf-8")


def _table(results: Path) -> str:
    lines = ["| program | source | command | result | peak | time |", "|---|---|---|---|---:|---:|"]
    for program in PROGRAMS:
        file = results / f"{program.slug()}.json"
        if file.exists():
            lines.append(_row(program, Result(**json.loads(file.read_text(encoding="utf-8")))))
    return "\n".join(lines) + "\n"


def _row(program: Program, result: Result) -> str:
    wrong = result.wrong(program)
    told = f"wrong: {program.known or wrong}" if wrong else ", ".join(["fits", *sorted(result.findings())])
    peak = result.report["peak"]["allocated_bytes"] / 2**20 if result.report else None
    command = f"own loop, `drivers/{program.command.split()[0]}`" if program.driver else f"`{program.command}`"
    source = f"{program.repository} {program.commit[:7]}"
    shown = f"{peak:,.0f} MiB" if peak else ""
    return f"| {program.name} | {source} | {command} | {told} | {shown} | {result.seconds:.0f} s |"


if __name__ == "__main__":
    main()
