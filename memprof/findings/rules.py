"""The registry of rules: each file of this package with `@rule(place)` is imported and applied in order."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from memprof.findings.finding import SEARCH_RULES, RULES, Context, Finding, Severity


def import_rules() -> None:
    """Import every file of the package, so that its rules are registered."""
    package = sys.modules[__package__]
    for file in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{file.name}")


import_rules()


def apply_rules(context: Context, *, deciding: bool = False) -> list[Finding]:
    """Apply all rules, as `memprof.findings.find_all` does."""
    findings = [finding for place in sorted(SEARCH_RULES if deciding else RULES) for finding in RULES[place](context)]
    # The sort is stable, so that equal ones stay in the order of the rules.
    return sorted(findings, key=lambda finding: (finding.severity is not Severity.ERROR, -(finding.num_bytes or 0)))
