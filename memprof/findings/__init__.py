"""Findings: what is wrong with a run, with bytes and evidence. One rule per file; `find_all` asks them all."""

from memprof.findings.finding import Context, Evidence, Finding, Severity

__all__ = ["Context", "Evidence", "Finding", "Severity", "find_all"]


def find_all(context: Context, *, deciding: bool = False) -> list[Finding]:
    """Apply all rules: errors first, then the most expensive first; those without bytes come last of their kind.

    Args:
        deciding: only what those rules find by which a search is led (`rule`).
    """
    from memprof.findings.rules import ask_all  # here: who shows findings needs none of the rules

    return ask_all(context, deciding=deciding)
