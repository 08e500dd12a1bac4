"""The table of all fixes, and look-ups in the table; no module of this package imports torch.

A fix is a file of `memprof/fixes`, in which a `Fix` decorates the function that changes a model; `table.py` collects
these entries. All users of fixes (`--fix`, the ladder, the search, findings, `memprof doctor`, `memprof verify`, the
documentation) use this package.
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
