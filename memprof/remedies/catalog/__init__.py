"""The remedies: one entry each in one table, and what is asked of it. Plain data, no torch.

A remedy is a file of `memprof/remedies`: its entry stands above the function that changes a model, and `table.py` finds
it there. Whatever else knows remedies (`--fix`, the ladder, the search, findings, `memprof doctor`, `memprof verify`,
the documentation) asks here.
"""

from memprof.remedies.catalog.choice import (
    EXPANDABLE_SEGMENTS,
    check_conflicts,
    find_remedies,
    from_outside,
    helping,
    in_force,
    ladder,
    options_by_remedy,
    tiers,
    why_not_together,
    why_useless,
)
from memprof.remedies.catalog.packages import EXTRAS, check_installed, check_package
from memprof.remedies.catalog.remedy import VALUE, Numerics, Remedy, Tier
from memprof.remedies.catalog.spreads import BESIDE, SPREADS, STEPS
from memprof.remedies.catalog.table import REMEDIES

__all__ = [
    "BESIDE", "EXPANDABLE_SEGMENTS", "EXTRAS", "REMEDIES", "SPREADS", "STEPS", "VALUE", "Numerics", "Remedy", "Tier",
    "check_conflicts", "check_installed", "check_package", "find_remedies", "from_outside", "helping", "in_force",
    "ladder", "options_by_remedy", "tiers", "why_not_together", "why_useless",
]  # fmt: skip
