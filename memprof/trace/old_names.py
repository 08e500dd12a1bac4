"""Names in the JSON files of older releases, and their replacements."""

from __future__ import annotations

from typing import Any

OLD_NAMES = {
    "card": "gpu",
    "card_note": "gpu_note",
    "cards": "gpus",
    "dies_in": "oom_stage",
    "given_back_bytes": "released_bytes",
    "latest_bytes": "upper_bound_bytes",
    "least_peak_bytes": "min_peak_bytes",
    "margin_bytes": "headroom_bytes",
    "most_peak_bytes": "max_peak_bytes",
    "no_stand_ins": "no_stubs",
    "on_card": "on_gpu",
    "one_stream_bytes": "single_stream_bytes",
    "refused_event": "failed_event",
    "refused_requests": "failed_allocations",
    "remedies": "fixes",
    "remedy": "fix",
    "shown_card": "shown_gpu",
    "soonest_bytes": "lower_bound_bytes",
    "unnamed_bytes": "unattributed_bytes",
}  # old -> new; docs/json.md has the table


def rename_old(values: Any) -> Any:
    """Return JSON values with old names replaced by the names of this release, at any depth."""
    if isinstance(values, dict):
        return {OLD_NAMES.get(name, name): rename_old(value) for name, value in values.items()}
    return [rename_old(value) for value in values] if isinstance(values, list) else values
