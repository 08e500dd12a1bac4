"""The fixes: one entry each in one table, and what is asked of it. Plain data, no torch.

A fix is a file of `memprof/fixes`: its entry stands above the function that changes a model, and `table.py` finds
it there. Whatever else knows fixes (`--fix`, the ladder, the search, findings, `memprof doctor`, `memprof verify`,
the documentation) asks here.
"""

from memprof.fixes.catalog.choice import (
    EXPANDABLE_SEGMENTS,
    check_conflicts,
    conflict_reason,
    find_fixes,
    find_helpful,
    in_force,
    ladder,
    options_by_fix,
    script_fix_names,
    tiers,
    useless_reason,
)
from memprof.fixes.catalog.fix import VALUE, Fix, Numerics, Tier
from memprof.fixes.catalog.packages import EXTRAS, check_installed, check_package
from memprof.fixes.catalog.spreads import BESIDE, SPREADS, STEPS
from memprof.fixes.catalog.table import FIXES

__all__ = [
    "BESIDE", "EXPANDABLE_SEGMENTS", "EXTRAS", "FIXES", "SPREADS", "STEPS", "VALUE", "Fix", "Numerics", "Tier",
    "check_conflicts", "check_installed", "check_package", "conflict_reason", "find_fixes", "find_helpful", "in_force",
    "ladder", "options_by_fix", "script_fix_names", "tiers", "useless_reason",
]  # fmt: skip
