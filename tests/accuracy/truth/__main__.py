"""Record the truth cases on the CUDA GPU of this machine, and compare their simulation with them.

    python -m tests.accuracy.truth [--out DIR] [--case NAME] [--seconds N] [--compare]

Each case runs in a process of its own, on a GPU that nothing else uses; one that fails is skipped, with the reason.
All of them together take at most --seconds: what comes last in CASES is left out, and listed, if they need more.
Files go to tests/accuracy/truth/<gpu>-<torch>/, or DIR. --compare records nothing.

Exit codes: 0; 1 no case could be recorded; 2 there is no CUDA GPU, no such case, or nothing to compare.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from memprof.errors import MemprofError
from tests.accuracy.cases import CASES
from tests.accuracy.truth import compare
from tests.accuracy.truth.record import INDEX, machine, read_index, record, write_index

USAGE = 2
_LIMIT_S = 600  # of one case
_LEAST_S = 20  # with less, no case is started: torch and transformers are imported, and a model is built
_DEFAULT_S = 1800  # of all cases


def folder_name(gpu: str, torch_version: str) -> str:
    """`h200-2.8.0`: of a GPU and a release of torch."""
    short = re.sub(r"^nvidia (geforce )?", "", gpu.lower())
    return f"{re.sub(r'[^a-z0-9]+', '-', short).strip('-')}-{torch_version.partition('+')[0]}"


def record_one(name: str, folder: Path) -> str:
    """Record a case in this process; returns why it was skipped, empty if it was not."""
    index = read_index(folder)
    why = ""
    try:
        index["cases"][name] = record(name, CASES[name], folder)
    except (MemprofError, RuntimeError, ImportError, ValueError) as error:
        problem = (
            f"{error.problem}: {error.value}" if isinstance(error, MemprofError) else f"{type(error).__name__}: {error}"
        )
        why = " ".join(problem.split())[:300]
        index["cases"][name] = {"skipped": why}
    write_index(folder, {**index, **machine()})
    return why


def record_all(folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> tuple[int, list[str]]:
    """Record the cases in their order, each in a process of its own, for `seconds`; returns how many were recorded, and
    the names of those that were left out, or ended, for lack of time."""
    until = clock() + seconds
    recorded = 0
    left_out = []
    for name in CASES:
        left = until - clock()
        if left < _LEAST_S:
            left_out.append(name)
            continue
        command = [sys.executable, "-m", "tests.accuracy.truth", "--case", name, "--out", str(folder), "--quiet"]
        try:
            done = subprocess.run(command, timeout=min(_LIMIT_S, left), check=False, capture_output=True, text=True)
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            if left < _LIMIT_S:
                left_out.append(name)
                continue
            said = f"it ran longer than {_LIMIT_S} s"
        index = read_index(folder)
        if name not in index["cases"]:  # its process died
            index["cases"][name] = {"skipped": said[:300]}
            write_index(folder, {**index, **machine()})
        case = index["cases"][name]
        recorded += "skipped" not in case
        print(f"{name}: {case['skipped']}" if "skipped" in case else f"{name}: {case['seconds']} s", flush=True)
    return recorded, left_out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.truth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to, instead of tests/accuracy/truth/<gpu>-<torch>"
    )
    parser.add_argument("--case", metavar="NAME", help="this case alone, in this process")
    parser.add_argument(
        "--seconds", type=float, default=_DEFAULT_S, metavar="N", help=f"for all cases together (default: {_DEFAULT_S})"
    )
    parser.add_argument("--compare", action="store_true", help="record nothing, compare what is there")
    parser.add_argument("--quiet", action="store_true", help="do not compare")
    asked = parser.parse_args(arguments)
    if asked.compare and asked.out is not None and not (asked.out / INDEX).is_file():
        print(f"nothing was recorded in {asked.out}", file=sys.stderr)
        return USAGE
    if asked.compare:
        print(compare.section(CASES) if asked.out is None else compare.table(asked.out, CASES))
        return 0
    from memprof.measured.cuda import cuda_unavailable_reason

    why = cuda_unavailable_reason()
    if why is not None:
        print(f"truth captures are recorded on a CUDA GPU: {why}", file=sys.stderr)
        return USAGE
    if asked.case is not None and asked.case not in CASES:
        print(f"no such case: {asked.case}; there are {', '.join(CASES)}", file=sys.stderr)
        return USAGE
    facts = machine()
    folder = asked.out or compare.HERE / folder_name(facts["gpu"], facts["torch"])
    if asked.case is None:
        recorded, left_out = record_all(folder, asked.seconds)
        if left_out:
            print(f"left out, for {asked.seconds:.0f} s are not enough: {', '.join(left_out)}", flush=True)
    else:
        why = record_one(asked.case, folder)
        recorded = not why
        if why:
            print(f"{asked.case}: {why}", file=sys.stderr)
    if not asked.quiet and recorded:
        print(compare.table(folder, CASES))
    return 0 if recorded else 1


if __name__ == "__main__":
    sys.exit(main())
