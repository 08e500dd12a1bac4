"""Case study 4, before and after, and what holds of its report.

    python recipes/4-npt-high-num-ranks/run.py [--no-clock]

With --no-clock nothing is timed: what is printed is the same on every machine.
"""

from __future__ import annotations

import argparse
import textwrap

import audit
from specs import AFTER, BEFORE, COUNTS, MERGED

from memprof.flows.profile import profile
from memprof.units import format_bytes
from memprof.workload.npt import RankOneDeltas


def main() -> None:
    """Print before and after, the audit, and the times on this machine."""
    parser = argparse.ArgumentParser(description="Case study 4.")
    parser.add_argument("--no-clock", action="store_true", help="time nothing")
    clock = not parser.parse_args().no_clock
    print("Rank-1 updates of rank 64 in one layer of Llama-3.1-8B, 2 x 128 tokens, float32, training: the peak\n")
    print(f"{'updates':<9}{'at rest':>12}" + "".join(f"{name:>14}" for name in ("sequential", "batched", "merged")))
    for count in COUNTS:
        peaks = [profile(spec.edit(npt_num_ranks=count))[1].peak for spec in (BEFORE, AFTER, MERGED)]
        sizes = [audit.parameter_bytes() * count // audit.NUM_RANKS, *(peak.allocated_bytes for peak in peaks)]
        print(f"{count:<9}{format_bytes(sizes[0]):>12}" + "".join(f"{format_bytes(size):>14}" for size in sizes[1:]))
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
