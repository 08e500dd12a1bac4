"""Why reserved is larger than allocated: the example of docs/allocator.md, run on a virtual GPU.

A batch of tensors is made and let go, a cuBLAS-sized tensor stays in what they leave, and then larger ones come.
"""

from __future__ import annotations

import torch

import memprof
from memprof.units import MIB

SETTINGS = ("", "expandable_segments:True")


def program(alloc_conf: str) -> None:
    """Print what the allocator holds after each line of a small program."""
    print(f"alloc_conf {alloc_conf!r}:")
    print(f"  {'':48}{'requested':>10}{'allocated':>10}{'reserved':>10}  (MiB)")

    def show(line: str) -> None:
        stats = torch.cuda.memory_stats()
        kinds = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        print(f"  {line:48}" + "".join(f"{stats[f'{kind}.all.current'] / MIB:10.1f}" for kind in kinds))

    with memprof.virtual_gpu(vram="24", alloc_conf=alloc_conf) as gpu:

        def mib(size: float) -> torch.Tensor:
            return torch.empty(int(size * MIB), dtype=torch.uint8, device="cuda")

        activations = [mib(45.3) for _ in range(4)]
        show("activations = [mib(45.3) for _ in range(4)]")
        del activations
        show("del activations")
        kept = [mib(8) for _ in range(2)]
        show("kept = [mib(8) for _ in range(2)]")
        longer = [mib(60) for _ in range(4)]
        show("longer = [mib(60) for _ in range(4)]")
        torch.cuda.empty_cache()
        show("torch.cuda.empty_cache()")
        del kept, longer
    peak = gpu.report().peak
    print(f"  under {alloc_conf or 'the defaults'} at most {peak.reserved_bytes / MIB:.1f} MiB reserved, ", end="")
    print(f"{(peak.reserved_bytes - peak.allocated_bytes) / MIB:.1f} MiB of it of no use")


if __name__ == "__main__":
    for settings in SETTINGS:
        program(settings)
