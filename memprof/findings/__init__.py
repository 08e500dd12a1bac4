"""Findings: what is wrong with a run, with bytes and evidence. One rule per file; `find_all` asks them all."""

from memprof.findings.finding import Context, Evidence, Finding, Severity

__all__ = ["Context", "Evidence", "Finding", "Severity", "find_all"]


def find_all(context: Context, *, deciding: bool = False) -> list[Finding]:
    """Apply all rules (if `deciding`, those by which a search is led: `rule`); errors come first, then the most
    expensive, and those without bytes last of their kind."""
    from memprof.findings.rules import ask_all  # here: who shows findings needs none of the rules

    return ask_all(context, deciding=deciding)
