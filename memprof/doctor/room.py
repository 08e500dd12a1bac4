"""What a failed allocation lacks, and whether advice can free as much."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.doctor.diagnosis import MessageSizes

# Fraction of the allocated tensors that a fix frees at most. AdamW in float32 has 4 bytes of parameters, 4 of gradients
# and 8 of states for each parameter; between steps, gradients may be absent.
_LARGEST_SHARES = {
    "bfloat16": 1 / 2,  # Everything is half as large.
    "8-bit-optimizer": 1 / 2,  # 2 bytes of states instead of 8, of 12.
    "cpu-offload-optimizer": 2 / 3,  # 8 of 12.
    "lora": 3 / 4,  # 12 of 16.
    "qlora": 31 / 32,  # All but half a byte of 16.
    "4-bit-weights": 31 / 32,
}
_REQUEST_SHARES = {
    "bfloat16": 1 / 2
}  # Fraction of the failed allocation that stays, for fixes that make it smaller too.


@dataclass(frozen=True, slots=True)
class Room:
    """The room that a failed allocation found, in bytes; None where the message does not say."""

    need: int | None  # The failed allocation.
    available: int | None  # Free memory of the GPU, and what torch has reserved and does not use.
    allocated: int | None  # This process's tensors.
    total: int | None  # The GPU.

    @classmethod
    def from_sizes(cls, sizes: MessageSizes) -> Room:
        """Return the room by the sizes of a message."""
        available = None
        if sizes.free is not None:
            cached = 0
            if sizes.reserved is not None and sizes.allocated is not None:
                cached = max(0, sizes.reserved.num_bytes - sizes.allocated.num_bytes)
            available = sizes.free.num_bytes + cached
        need, allocated, total = (
            None if size is None else size.num_bytes for size in (sizes.tried, sizes.allocated, sizes.total)
        )
        return cls(need, available, allocated, total)

    @property
    def is_reached_by_freeing(self) -> bool:
        """Return whether the allocation could succeed if every tensor of this process were freed; True if unknown."""
        return self._reaches(1.0, 1.0)

    def is_reached_by(self, fix: str) -> bool:
        """Return whether the allocation could succeed with the fix named `fix`; True if the message does not say."""
        return self._reaches(_LARGEST_SHARES.get(fix, 1.0), _REQUEST_SHARES.get(fix, 1.0))

    def _reaches(self, freed_share: float, request_share: float) -> bool:
        """Return whether `request_share` of the need fits beside the tensors without `freed_share` of them."""
        if self.need is None:
            return True
        need = self.need * request_share
        if self.total is not None and need > self.total:
            return False
        if self.available is None or self.allocated is None:
            return True
        return need <= self.available + freed_share * self.allocated
