"""`memprof run` twice in one process: to the second optimizer step, and to the script's end.

    python -m tests.scripts.twice RESULT SCRIPT [ARGS]...

Importing the libraries takes most of the time. The exit codes and reports of both go to the file RESULT.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from memprof.cli.main import run

WAYS = {"stopped": ["--steps", "2"], "to the end": ["--until-exit"]}


def report_of(arguments: list[str]) -> tuple[int, str]:
    """Exit code and stdout of one command; by file descriptor, as the command itself turns its script's away."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        try:
            run(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
        out.seek(0)
        return code, out.read()


def main() -> None:
    result, *program = sys.argv[1:]
    found = {}
    for way, options in WAYS.items():
        code, text = report_of(["run", "--json", *options, *program])
        found[way] = {"exit_code": code, "report": json.loads(text) if text else None}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
