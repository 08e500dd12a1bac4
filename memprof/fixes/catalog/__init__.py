"""The table of all fixes, and functions that search it; no module of this package imports torch.

A fix is a file of `memprof/fixes`, in which a `Fix` decorates the function that changes a model; `table.py` collects
these entries. All users of fixes (`--fix`, the ladder, the search, findings, `memprof doctor`, `memprof verify`, the
documentation) use this package.
"""

from memprof.fixes.catalog.choice import (
    EXPANDABLE_SEGMENTS,
    check_conflicts,
    check_device,
    find_conflict,
    find_device_reason,
    find_fixes,
    find_fixes_for,
    find_precision_reason,
    find_useless_reason,
    group_options,
    list_active_fixes,
    list_headroom_fixes,
    list_ladder,
    list_tiers,
    script_fix_names,
)
from memprof.fixes.catalog.fix import VALUE, Fix, Numerics, Tier
from memprof.fixes.catalog.packages import check_installed, check_package
from memprof.fixes.catalog.spreads import ALL_FIXES, BASE_PLAN, PARALLEL_FIXES
from memprof.fixes.catalog.table import FIXES

__all__ = [
    "ALL_FIXES", "BASE_PLAN", "EXPANDABLE_SEGMENTS", "FIXES", "PARALLEL_FIXES", "VALUE", "Fix", "Numerics",
    "Tier", "check_conflicts", "check_device", "check_installed", "check_package", "find_conflict",
    "find_device_reason", "find_fixes", "find_fixes_for", "find_precision_reason", "find_useless_reason",
    "group_options", "list_active_fixes", "list_headroom_fixes", "list_ladder", "list_tiers", "script_fix_names",
]  # fmt: skip
