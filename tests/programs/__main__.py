"""Run the corpus of public programs, and write the table of docs/programs.md.

    python -m tests.programs --fetched FOLDER [--only WORD] [--write]
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.programs.fetched import PROGRAMS
from tests.programs.program import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fetched", type=Path, required=True)
    parser.add_argument("--only", default="", help="names with one of these words, separated by commas")
    parser.add_argument("--keep", type=Path, help="a folder for reports and what was on stderr")
    told = parser.parse_args()
    for program in PROGRAMS:
        if not any(word in program.name for word in told.only.split(",")):
            continue
        reason = program.missing(told.fetched)
        if reason:
            print(f"{program.name}: skipped: {reason}")
            continue
        result = run(program, told.fetched)
        peak = result.report.get("peak", {}).get("allocated_bytes", 0)
        print(f"{program.name}: {result.wrong(program.findings) or 'ok'} | {peak / 2**20:.0f} MiB | {result.seconds:.0f} s", flush=True)
        if told.keep:
            told.keep.mkdir(exist_ok=True)
            name = program.name.replace(" ", "_")
            (told.keep / f"{name}.json").write_text(json.dumps(result.report, indent=1))
            (told.keep / f"{name}.txt").write_text(result.stderr)


main()
