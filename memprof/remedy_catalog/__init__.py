"""The remedies: one entry each in one table, and what is asked of it. Plain data, no torch.

A remedy is added in `table.py`, with the file that changes a model for it, if it changes one. Whatever else knows
remedies (`--fix`, the ladder, the search, findings, `memprof doctor`, `memprof verify`, the documentation) asks here.
"""

from memprof.remedy_catalog.choice import (
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
from memprof.remedy_catalog.remedy import VALUE, Numerics, Remedy, Tier
from memprof.remedy_catalog.table import REMEDIES

__all__ = [
    "REMEDIES", "VALUE", "Numerics", "Remedy", "Tier", "check_conflicts", "find_remedies", "from_outside",
    "helping", "in_force", "ladder", "options_by_remedy", "tiers", "why_not_together", "why_useless",
]  # fmt: skip
