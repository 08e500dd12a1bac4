"""Findings: what is wrong with a run, with bytes and evidence. One rule per file; `find_all` asks them all."""

from memprof.findings.finding import Context, Evidence, Finding, Severity
from memprof.findings.rules import find_all

__all__ = ["Context", "Evidence", "Finding", "Severity", "find_all"]
