"""Case study 5, before and after, and what holds of its report.

    python recipes/5-long-context-logits/run.py [--no-clock]

With --no-clock nothing is timed: what is printed is the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import textwrap

import audit
import longer
import losses
import rotary
from specs import CHUNK, SMALL_CHUNK, SMALL_TOKENS

from memprof.report.documents.report import Report
from memprof.units import GIB, format_bytes

TWO_GPUS = (
    "With fsdp each GPU has half of parameters, gradients and states, and a sequence of its own; with ulysses all of "
    "them, and half of one sequence."
)


def main() -> None:
    """Print before and after of both bugs, the audit, and what is measured on this CPU."""
    parser = argparse.ArgumentParser(description="Case study 5.")
    parser.add_argument("--no-clock", action="store_true", help="time nothing")
    clock = not parser.parse_args().no_clock
    found = audit.runs()
    print("A 4B model, 131,072 tokens, bfloat16, checkpointed layers, 94.97 GiB: forward and backward\n")
    show("loss", "logits and loss", "peak", "verdict")
    for name, document in (
        ("transformers' own", found.model_own),
        ("full logits", found.full),
        ("loop of the report", found.loop),
        ("chunked-loss", found.chunked),
        ("the same, with AdamW", found.training),
    ):
        peak = format_bytes(document.peak.allocated_bytes)
        show(name, format_bytes(audit.loss_bytes(document)), f"{peak} in {document.peak.stage}", says(document))
    print("\nThe report's stages, 131,072 tokens, in GiB\n")
    print(f"{'after':<20}{'report':>8}{'here':>8}")
    for reading in longer.readings(audit.ROTARY_CACHES, found.loop):
        print(f"{reading.after:<20}{reading.report:>8}{reading.num_bytes / GIB:>8.2f}  {longer.holds(reading)}")
        print(fill(reading.why))
    print("\nKinds of attention, 131,072 tokens, checkpointed layers, chunked-loss: forward and backward\n")
    for kind, document in longer.kinds():
        print(row_of(kind, document))
    print("\nTwo GPUs, 131,072 tokens, checkpointed layers, chunked-loss, with AdamW: the rank that takes most\n")
    print(row_of("one GPU", found.training))
    for plan, document in longer.gpus():
        print(row_of(plan, document))
    print(fill(TWO_GPUS))
    print(f"\nChunks of {CHUNK:,} tokens, if all logits are above 10 GiB\n")
    for length in audit.lengths():
        how = "one piece" if length.largest_bytes >= length.logits_bytes else "chunks"
        print(
            f"{length.tokens:>7,} tokens: logits of {format_bytes(length.logits_bytes):>9}, in {how:<9} "
            f"(largest tensor with a vocabulary {format_bytes(length.largest_bytes)})"
        )
    print("\nRotary positions made in host memory, in a small model\n")
    for name, model in (("before", rotary.before()), ("after", rotary.after())):
        findings = rotary.mismatches(model, rotary.CACHED + 1)
        if not findings:
            print(f"{name}: no finding")
        for finding in findings:
            print(textwrap.fill(f"{name}: {finding.title}", 100, subsequent_indent="  ", break_on_hyphens=False))
            for evidence in finding.evidence:
                if evidence.text.startswith("on a real GPU"):
                    print(fill(evidence.text))
    print("\nWhat holds of the report\n")
    measured = losses.measured()
    for claim in [*audit.claims(found), quality(measured), audit.placement_claim()]:
        print(f"* {claim.text}: {claim.verdict.upper()}")
        print(fill(claim.right))
    print(f"\nMeasured on this CPU: {SMALL_TOKENS:,} tokens, vocabulary 32,000, chunks of {SMALL_CHUNK}, float32\n")
    for name, one in measured.items():
        seconds = f"{one.seconds:8.2f} s" if clock else ""
        print(
            f"{name:<20}{format_bytes(one.num_bytes):>12} allocated at most, "
            f"{format_bytes(one.simulated_bytes)} on the virtual GPU{seconds}"
        )


def fill(text: str) -> str:
    """A paragraph of 100 columns, indented."""
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def row_of(name: str, document: Report) -> str:
    """One run: its peak and its verdict."""
    peak = document.peak
    return f"{name:<14}{format_bytes(peak.allocated_bytes):>14} in {peak.stage:<10} {says(document)}"


def show(loss: str, logits: str, peak: str, verdict: str) -> None:
    """One row of the first table."""
    print(f"{loss:<22}{logits:>15}{peak:>26}  {verdict}")


def says(document: Report) -> str:
    """The verdict in words."""
    verdict = document.verdict
    if verdict.fits:
        return "fits"
    return f"out of memory in {verdict.oom_stage}: {format_bytes(verdict.tried_to_allocate_bytes or 0)} refused"


def quality(measured: dict[str, losses.Measured]) -> audit.Claim:
    """The claim about the numbers."""
    full, chunked = measured["full logits"].deviation, measured["chunked-loss"].deviation
    magnitude = math.ceil(math.log10(max(full, chunked)))
    return audit.Claim(
        "no impact on quality",
        "holds" if chunked < 4 * full else "does not hold",
        f"loss and every gradient are within 1e{magnitude} of a float64 run's largest, with full logits and in chunks",
    )


if __name__ == "__main__":
    main()
