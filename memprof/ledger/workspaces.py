"""Bounds of the allocated peak if workspaces whose sizes are estimated were smaller or larger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.allocator.rounding import round_request
from memprof.trace.events import Trace
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Temporary memory of library calls that do not publish how much they take: cuDNN's convolutions."""

    num_bytes: int = field(metadata=json_name("bytes"))  # By the rule, at the allocated peak.
    min_peak_bytes: int  # The allocated peak if no call has a workspace.
    max_peak_bytes: int  # The allocated peak if each call takes its upper bound.
    refused: int = 0  # Calls without room for a workspace: torch uses another algorithm, without one.

    @classmethod
    def from_trace(
        cls, trace: Trace, allocated: Sequence[int], peak_event: int, failed_storages: frozenset[int] = frozenset()
    ) -> Workspaces | None:
        """Return the workspaces of a run; None if the run called no such library.

        `allocated` has the allocated bytes after every event; `failed_storages` are the storages of failed allocations.
        """
        calls = [call for call in trace.workspaces if call.device == trace.device]
        if not calls:
            return None
        workspace_bytes = {call.event: call.num_bytes for call in calls if call.num_bytes}
        return cls(
            workspace_bytes.get(peak_event, 0),
            max((num_bytes for event, num_bytes in enumerate(allocated) if event not in workspace_bytes), default=0),
            max(
                allocated[peak_event],
                *(allocated[call.event - 1] + round_request(call.most_bytes, call.device) for call in calls),
            ),
            len(failed_storages & trace.optional_storages()),
        )
