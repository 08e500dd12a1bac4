"""Case study 4, before and after, and what holds of its report.

    python recipes/4-npt-high-num-ranks/run.py [--no-clock]

With --no-clock nothing is timed: what is printed is the same on every machine.
"""

from __future__ import annotations

import argparse
import textwrap

import audit
from specs import AFTER, BEFORE, MERGED

from memprof.flows.profile import profile
from memprof.units import format_bytes
from memprof.workload.npt import RankOneDeltas


def main() -> None:
    """Print before and after, the audit, and the times on this machine."""
    parser = argparse.ArgumentParser(description="Case study 4.")
    parser.add_argument("--no-clock", action="store_true", help="time nothing")
    clock = not parser.parse_args().no_clock
    print("128 rank-1 updates of rank 64 in one layer of Llama-3.1-8B, 2 x 128 tokens, float32, training\n")
    for name, spec in (("sequential", BEFORE), ("batched", AFTER), ("merged", MERGED)):
        peak = profile(spec)[1].peak
        print(f"{name:<12}{format_bytes(peak.allocated_bytes):>12} at the peak, in {peak.stage}")
    print("\nWhat holds of the report\n")
    for claim in audit.claims():
        print(f"* {claim.text}: {claim.verdict.upper()}")
        print(textwrap.fill(claim.right, 100, initial_indent="  ", subsequent_indent="  "))
    if clock:
        print("\nOn this CPU, one component\n")
        show_times(audit.component("merged"))


def show_times(made: RankOneDeltas) -> None:
    """Seconds to fill a component's parameters, and of its forward."""
    for init in ("orthogonal", "fast"):
        print(f"initialisation, {init:<12}{audit.initialisation_seconds(made, init):8.2f} s")
    for combine, seconds in audit.forward_seconds(made).items():
        print(f"forward, {combine:<19}{seconds:8.2f} s")


if __name__ == "__main__":
    main()
