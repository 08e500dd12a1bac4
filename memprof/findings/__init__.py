"""Rules over a ledger."""
from memprof.findings.finding import Context, Evidence, Finding, Severity

def find_all(context: Context) -> list[Finding]:
    return []

__all__ = ["Context", "Evidence", "Finding", "Severity", "find_all"]
