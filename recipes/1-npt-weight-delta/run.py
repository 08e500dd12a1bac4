"""Case study 1, before and after, and what holds of its report: python recipes/1-npt-weight-delta/run.py."""

from __future__ import annotations

import textwrap

import audit

from memprof.report.documents.report import Verdict
from memprof.units import format_bytes


def in_words(verdict: Verdict) -> str:
    """The verdict in words, with what was in use where it does not fit."""
    if verdict.fits:
        return "fits"
    return f"out of memory in {verdict.oom_stage}, with {format_bytes(verdict.in_use_bytes or 0)} in use"


def main() -> None:
    """Print before and after, the audit, and the report's configurations."""
    before, after, per_token = audit.main_runs()
    print("One NPT component in Llama-3.1-8B, 4 x 512 tokens, float32, training, A100 80 GB\n")
    print(f"{'mode':<12}{'largest tensor':>16}{'component':>14}{'peak of the run':>18}  verdict")
    for name, run in (("dense", before), ("per-token", per_token), ("low-rank", after)):
        verdict = run.document.verdict
        peak = format_bytes(run.document.peak.allocated_bytes)
        says = "fits" if verdict.fits else f"out of memory in {verdict.oom_stage}"
        print(
            f"{name:<12}{format_bytes(run.largest_bytes):>16}{format_bytes(run.component_bytes):>14}{peak:>18}  {says}"
        )
    for finding in before.document.findings:
        if finding.id == "weight-delta-per-token":
            print("\n" + textwrap.fill(f"Finding: {finding.title}. Suggested fixes: {', '.join(finding.fixes)}.", 100))
    print("\nWhat holds of the report\n")
    for claim in audit.claims(before, after, per_token):
        print(f"* {claim.text}: {claim.verdict.upper()}")
        print(textwrap.fill(claim.right, 100, initial_indent="  ", subsequent_indent="  "))
    print("\nThe report's table of memory: 512 tokens, on A100 80 GB\n")
    print(f"{'row':<20}{'report':<24}{'device used':>12}  verdict")
    for row in audit.rows():
        verdict = row.document.verdict
        used = format_bytes(verdict.required_bytes)
        print(f"{row.name:<20}{row.report:<24}{used:>12}  {in_words(verdict)}")
        print(textwrap.fill(row.about, 100, initial_indent="  ", subsequent_indent="  "))
    print("\nThe report's configurations, with the low-rank form and 512 tokens\n")
    for name, run in audit.configurations():
        peak = run.document.peak
        components = format_bytes(run.component_bytes)
        print(f"{name:<40}{format_bytes(peak.allocated_bytes):>12} in {peak.stage:<14} components {components:>10}")


if __name__ == "__main__":
    main()
