"""Bounds of the allocated peak if workspaces whose sizes are estimated were smaller or larger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.allocator.rounding import round_size
from memprof.trace.events import Trace
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Workspaces of libraries that allocate memory for one call and do not publish its size: cuDNN's convolutions."""

    num_bytes: int = field(metadata=json_name("bytes"))  # By the rule, at the allocated peak.
    min_peak_bytes: int  # The allocated peak if no call has a workspace.
    max_peak_bytes: int  # The allocated peak if each call takes its upper bound.
    refused: int = 0  # Calls without room for a workspace: torch uses another algorithm, without one.

    @classmethod
    def of(
        cls, trace: Trace, allocated: Sequence[int], peak_event: int, refused: frozenset[int] = frozenset()
    ) -> Workspaces | None:
        """Return the workspaces; None if the run called no such library.

        `allocated` are bytes after every event; `refused` are the storages of failed allocations.
        """
        calls = [one for one in trace.workspaces if one.device == trace.device]
        if not calls:
            return None
        known_bytes = {one.event: one.num_bytes for one in calls if one.num_bytes}
        return cls(
            known_bytes.get(peak_event, 0),
            max((num_bytes for event, num_bytes in enumerate(allocated) if event not in known_bytes), default=0),
            max(allocated[peak_event], *(allocated[one.event - 1] + round_size(one.most_bytes) for one in calls)),
            len(refused & trace.optional_storages()),
        )
