"""The ladder: fixes in force one after another. Every figure is of a run that was made with the fixes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The cause of a run's need: where it runs out of memory, or what the most of its peak is."""

    stage: str
    step: int
    category: str
    bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a row's fixes, against the run as it is; None where the work was not counted."""

    operations: int | None
    extra_operations: int | None
    bus_bytes: int | None
    extra_bus_bytes: int | None
    step_seconds: float | None
    extra_seconds: float | None
    extra_compute_seconds: float | None
    extra_bus_seconds: float | None
    host_bytes: int | None  # Read and written on the CPU in a step: an optimizer that steps there takes its time.
    numerics: str  # exact, approximate or different: the worst of the fixes'.
    note: str  # What the last fix costs, in words.
    link_bytes: int | None = None  # Sent to other GPUs in a step, by this one.
    extra_link_bytes: int | None = None
    extra_link_seconds: float | None = None
    # What torch.compile took in this row's run, on this machine and without making kernels; None: nothing was compiled,
    # or it was not noted.
    compile_seconds: float | None = None
    compiled_kernels: int | None = None  # Different ones that Inductor wrote then.

    @property
    def compiling(self) -> str:
        """Return what compiling took, in words."""
        if self.compile_seconds is None:
            return "how long that takes is not known"
        making = f"how long making its {self.compiled_kernels} kernels takes is not known"
        return f"that took {self.compile_seconds:.1f} s on this machine; {making}"


@dataclass(frozen=True, slots=True)
class Rung:
    """One row: the run with these fixes in force."""

    fixes: tuple[str, ...]
    added: str | None  # The last of them; None for the run as it is.
    peak_allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int  # Needed on the GPU, the CUDA context included.
    host_peak_bytes: int
    saved_bytes: int  # Of the device memory that is needed, against the row above.
    fits: bool | None
    next_bottleneck: Bottleneck
    cost: Cost
    parallel: str | None = None  # How this run is spread over GPUs.
    command: str = ""  # That makes this run alone; empty in reports of early releases.
