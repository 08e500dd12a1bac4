"""Case study 2, before and after, and what holds of its report.

    python recipes/2-pythia-vocabulary/run.py [--no-measure]

With --no-measure no memory of this machine is measured: what is printed is the same on every machine without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import audit
import batches
from audit import Claim, Run
from specs import AFTER, BEFORE, CAPPED

from memprof.units import MIB, format_bytes

MEASURED_TOKENS = 1 << 22


def main() -> None:
    """Print before and after of the three mends, and the audit."""
    parser = argparse.ArgumentParser(description="Case study 2.")
    parser.add_argument("--no-measure", action="store_true", help="measure no memory of this machine")
    measure = not parser.parse_args().no_measure
    before, after = audit.run(BEFORE), audit.run(AFTER)
    print("1. Vocabulary: Pythia-70M, 32 x 128 tokens, float32, AdamW, A100 80 GB\n")
    show_vocabulary(before, after)
    print("\n2. Batches: 32 x 128 tokens, built before training or streamed; host memory\n")
    show_batches(measure)
    print("\n3. Matrix product in tiles of 16 x 16, a Triton kernel\n")
    loads = show_kernels()
    print("\nWhat holds of the report\n")
    claims = audit.model_claims(before, after) + audit.memory_claims(before, after)
    for claim in claims + (audit.kernel_claims(*loads) if loads else []):
        show_claim(claim)


def show_vocabulary(before: Run, after: Run) -> None:
    """The model before and after, and the fault found."""
    rows = [("numbers", f"{before.num_parameters:,}", f"{after.num_parameters:,}")]
    rows += [(name, format_bytes(before.most[name]), format_bytes(after.most[name])) for name in before.most]
    rows.append(("peak of the run", format_bytes(before.peak_bytes), format_bytes(after.peak_bytes)))
    needs = [format_bytes(run.document.verdict.required_bytes) for run in (before, after)]
    rows.append(("needs of the GPU", *needs))
    print(f"{'the most of':<20}{'50,000 words':>16}{'10,000 words':>16}")
    for name, *figures in rows:
        print(f"{name:<20}" + "".join(f"{figure:>16}" for figure in figures))
    fault, finding = audit.the_fault()
    different, covered = audit.words()
    corpus = f"A corpus of {different:,} different words (synthetic, by Zipf's law, as large as WikiText-2)"
    print("\n" + paragraph(f"{corpus} in code that ignores the cap:"))
    print(paragraph(f"Finding: {finding.title}. Suggested fixes: {', '.join(finding.fixes)}."))
    capped = audit.run(CAPPED)
    print(
        paragraph(
            f"Peak {format_bytes(fault.peak_bytes)}; capped {format_bytes(capped.peak_bytes)}, where {covered:.1%} of "
            "the text keep a token of their own."
        )
    )


def show_batches(measure: bool) -> None:
    """Host memory of one pass, simulated and measured."""
    simulated = {kind: batches.simulated_bytes(kind, MEASURED_TOKENS) for kind in batches.KINDS}
    for kind, num_bytes in simulated.items():
        print(f"{kind:<12}{format_bytes(num_bytes):>12} of tensors at the most, simulated")
    if measure:
        built, streamed = (batches.measured_bytes(kind, MEASURED_TOKENS) for kind in ("built", "streamed"))
        print(f"difference  {round((built - streamed) / (4 * MIB)) * 4:>8} MiB resident, measured in two processes")


def show_kernels() -> tuple[int, int] | None:
    """Correctness, loads and times; returns the loads that were counted, naive and tiled."""
    if importlib.util.find_spec("triton") is None:
        print("Not run: Triton is not installed (pip install triton; Linux alone).")
        return None
    program = str(Path(__file__).with_name("matmul.py"))
    output = ""
    # Interpreted for the loads, whether or not there is a GPU; then compiled, and run where there is one.
    for environment in ({"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "0"}):
        done = subprocess.run(
            [sys.executable, program], stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment}
        )
        print(done.stdout, end="")
        output += done.stdout
    naive, tiled = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) loads counted", output))
    return naive, tiled


def show_claim(claim: Claim) -> None:
    """One claim in two lines or more."""
    print(f"* {claim.text}: {claim.verdict.upper()}")
    print(textwrap.fill(claim.right, 100, initial_indent="  ", subsequent_indent="  "))


def paragraph(text: str) -> str:
    """Lines of at most 100 columns."""
    return textwrap.fill(text, 100)


if __name__ == "__main__":
    main()
