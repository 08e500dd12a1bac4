"""Findings: problems of a run, with bytes and evidence. Each file has a rule; `find_all` applies all rules."""

from memprof.findings.finding import Context, Evidence, Finding, Severity

__all__ = ["Context", "Evidence", "Finding", "Severity", "find_all"]


def find_all(context: Context, *, for_search: bool = False) -> list[Finding]:
    """Return the findings of all rules, or, if `for_search`, of the rules that guide a search (see `rule`): errors
    first, then by bytes; findings without bytes are the last of their severity."""
    from memprof.findings.rules import apply_rules  # here: who shows findings needs none of the rules

    return apply_rules(context, for_search=for_search)
