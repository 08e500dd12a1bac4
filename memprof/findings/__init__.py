"""Findings: a run's memory problems, with bytes and evidence. Each file has one rule; `find_all` applies all rules."""

from memprof.findings.finding import Context, Evidence, Finding, Severity, Suggestion

__all__ = ["Context", "Evidence", "Finding", "Severity", "Suggestion", "find_all"]


def find_all(context: Context, *, for_search: bool = False) -> list[Finding]:
    """Return the findings of all rules, errors first, then by bytes, the most first; no bytes count as 0. If
    `for_search`, apply only the rules that guide a search for fixes (`rule(..., guides_search=True)`)."""
    from memprof.findings.rules import apply_rules  # here: code that only displays findings imports no rules

    return apply_rules(context, for_search=for_search)
