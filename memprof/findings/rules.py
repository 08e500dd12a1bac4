"""The registry of rules: each file of this package with `@rule(place)` is imported and applied in order."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from memprof.findings.finding import RULES, SEARCH_RULES, Context, Finding, Severity


def import_rules() -> None:
    """Import every file of the package, so that its rules are registered."""
    package = sys.modules[__package__]
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


import_rules()


def apply_rules(context: Context, *, for_search: bool = False) -> list[Finding]:
    """Apply all rules, as `memprof.findings.find_all` does."""
    findings = [finding for order in sorted(SEARCH_RULES if for_search else RULES) for finding in RULES[order](context)]
    # The sort is stable, so that equal ones stay in the order of the rules.
    return sorted(findings, key=lambda finding: (finding.severity is not Severity.ERROR, -(finding.num_bytes or 0)))
