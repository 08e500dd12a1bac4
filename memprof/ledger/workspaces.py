"""The peak under other workspaces, where their size follows a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.allocator.rounding import round_size
from memprof.trace.events import Trace
from memprof.trace.json_values import json_name


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Workspaces of libraries that take memory for one call and do not publish how much: cuDNN's convolutions."""

    num_bytes: int = field(metadata=json_name("bytes"))  # By the rule, at the peak.
    min_peak_bytes: int  # The most that is allocated if no call takes any.
    max_peak_bytes: int  # The same if each takes the bound of what it may.
    refused: int = 0  # Calls that found no room for theirs: torch goes on to an algorithm that takes none.

    @classmethod
    def of(
        cls, trace: Trace, allocated: Sequence[int], peak_event: int, refused: frozenset[int] = frozenset()
    ) -> Workspaces | None:
        """Return the workspaces; None if the run called no such library.

        `allocated` is after every event, in bytes; `refused` are the storages that the GPU had no room for.
        """
        calls = [one for one in trace.workspaces if one.device == trace.device]
        if not calls:
            return None
        taken = {one.event: one.num_bytes for one in calls if one.num_bytes}
        return cls(
            taken.get(peak_event, 0),
            max((num_bytes for event, num_bytes in enumerate(allocated) if event not in taken), default=0),
            max(allocated[peak_event], *(allocated[one.event - 1] + round_size(one.most_bytes) for one in calls)),
            len(refused & trace.optional_storages()),
        )
