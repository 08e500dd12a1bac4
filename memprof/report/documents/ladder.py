"""The result of `--ladder`: runs with fixes added one after another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Where a run runs out of memory, or else the largest part of its peak."""

    stage: str
    step: int
    category: str
    bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class FixCost:
    """The cost of a row's fixes, compared with the baseline; None where operations were not counted."""

    operations: int | None
    extra_operations: int | None
    bus_bytes: int | None
    extra_bus_bytes: int | None
    step_seconds: float | None
    extra_seconds: float | None
    extra_compute_seconds: float | None
    extra_bus_seconds: float | None
    host_bytes: int | None  # Read and written on the CPU in a step: an optimizer that steps there takes its time.
    numerics: str  # exact, approximate or different: the worst of the fixes.
    note: str  # The cost of the last fix, in words.
    link_bytes: int | None = None  # Sent to other GPUs in a step, by this one.
    extra_link_bytes: int | None = None
    extra_link_seconds: float | None = None
    # Duration of torch.compile in this row's run, on this machine and without compiling kernels; None: nothing was
    # compiled, or the duration was not recorded.
    compile_seconds: float | None = None
    compiled_kernels: int | None = None  # Different kernels that Inductor generated.

    @property
    def compile_note(self) -> str:
        """Return a clause on how long torch.compile took in the run."""
        if self.compile_seconds is None:
            return "how long that takes is not known"
        making = f"how long making its {self.compiled_kernels} kernels takes is not known"
        return f"that took {self.compile_seconds:.1f} s on this machine; {making}"


@dataclass(frozen=True, slots=True)
class LadderRow:
    """One row of the ladder: a run with the fixes of the row."""

    fixes: tuple[str, ...]
    added: str | None  # The last fix; None for the baseline.
    peak_allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int  # Needed on the GPU, including the CUDA context.
    host_peak_bytes: int
    saved_bytes: int  # Saved device memory, compared with the row above.
    fits: bool | None
    next_bottleneck: Bottleneck
    cost: FixCost
    parallel: str | None = None  # The distribution of this run over GPUs.
    command: str = ""  # The command for this run alone; empty in reports of early releases.
