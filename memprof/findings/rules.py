"""Application of all rules: imports each file of this package, so that `@rule` or `@proposes` registers its rule."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from memprof.findings.does_not_fit import DOES_NOT_FIT
from memprof.findings.finding import RULES, SEARCH_RULES, Context, Finding
from memprof.findings.fragmentation import FRAGMENTATION
from memprof.findings.suggestions import is_cured

_OF_BATCHES = ("larger-batch", "evaluation-batch", "later-step")

MIN_KEPT_SHARE = 0.25  # of the peak, of what is kept in vain: less may let one more allocation succeed, and no more


def import_rules() -> None:
    """Import every module of this package and of `proposals`, so that its rule is registered."""
    for name in (__package__, f"{__package__}.proposals"):
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{name}.{module.name}")


import_rules()


def apply_rules(context: Context, *, for_search: bool = False) -> list[Finding]:
    """Return the sorted findings of all rules, as documented at `memprof.findings.find_all`."""
    findings = [finding for order in sorted(SEARCH_RULES if for_search else RULES) for finding in RULES[order](context)]
    if not for_search and not any(one.is_decisive for one in findings):
        findings = [replace(one, is_decisive=is_cured(context, one.id)) for one in findings]
    if any(one.is_decisive for one in findings):  # with that changed the run fits as it is
        findings = [replace(one, fixes=(), suggestions=()) if one.id == DOES_NOT_FIT else one for one in findings]
    # What is kept in vain comes before batches that need what they take.
    kept = (one.num_bytes or 0 for one in findings if one.is_decisive and one.id not in (*_OF_BATCHES, FRAGMENTATION))
    if max(kept, default=0) >= MIN_KEPT_SHARE * context.ledger.peak_bytes:
        findings = [replace(one, is_decisive=False) if one.id in _OF_BATCHES else one for one in findings]
    # What is free in pieces depends on what is kept.
    if any(one.is_decisive and one.id != FRAGMENTATION for one in findings):
        findings = [replace(one, is_decisive=False) if one.id == FRAGMENTATION else one for one in findings]
    # The sort is stable: equal findings stay in the order of the rules.
    return sorted(findings, key=lambda one: one.order)
