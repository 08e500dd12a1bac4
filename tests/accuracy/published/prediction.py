"""What the virtual GPU says of a published row, or why it says nothing; and the runs behind it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from memprof.allocator.replay import Timeline
from memprof.device.catalog import find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.flows.gpus import RunAllocator, resolve_settings
from memprof.stubs.extension import extensions
from memprof.trace.events import Trace
from memprof.virtual import VirtualGpu
from memprof.watch.collection import disable_garbage_collection
from tests.accuracy.published.rows import UNITS, Row
from tests.unit.allocator.replaying import replay_trace

# A table's name of a GPU -> the catalog's.
GPUS = {
    "1x A100-80G": "a100-80gb",
    "1x H20 96GB": "h20-96gb",
    "1x 4090": "rtx-4090",
    "1x RTX 4090": "rtx-4090",
    "1x A6000": "rtx-a6000",
    "4070Ti SUPER": "rtx-4070-ti-super",
    "A100": "a100-80gb",
    "A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA L40S": "l40s",
    "RTX 4080 16GB": "rtx-4080",
    "V100 16GB": "v100-16gb",
}
FORMAT = "weights in a format of kernels that are not simulated: {}"
RANKS = "needs several ranks, and this sweep runs one process"

COMPILED = "the source is compiled, the simulation is eager"
VERSIONS = "other releases of torch or transformers"
UNSAID = "the source does not say what was measured or with what, or contradicts itself"
# Why code and versions of a predicted row are not those of its source: `Prediction.differs`. By source and metric, and
# never by whether the figure is met.
DRAWN = "lengths are sampled: the source has only their mean and spread (all 5,000 steps: docs/lengths.md)"


@dataclass(frozen=True)
class Prediction:
    """The simulated counterpart of one row; `num_bytes` None: there is none, and `reason` says why."""

    num_bytes: int | None = None
    reason: str = ""
    # Bytes of the row's unit, where its source means another than the table's: "GB" of a script that divides by 2**30.
    unit_bytes: int | None = None
    explanation: str = ""  # Where a difference comes from, with its bytes.
    rounding: float | None = None  # How far the published figure may be off, in its unit; None: half of its last digit.
    basis: str = ""  # What of the run is compared, where it is not its whole.
    code: str = ""  # Whose code ran, where it is the source's own: repository and commit, or package and release.
    differs: str = ""  # What of code and versions is not that of the source; empty: they match.

    def unit(self, row: Row) -> int:
        return self.unit_bytes or UNITS[row.unit.split()[0]]


def missing(*packages: str) -> str:
    """Why a row cannot be run here: what of `packages` is not installed; empty if all are.

    Those that are there are imported, which has to be before a virtual GPU watches.
    """
    for name in packages:
        if importlib.util.find_spec(name) is None:
            return f"needs {name}, which is not installed"
        # Optimizers of torchao are in a package that it does not import itself.
        importlib.import_module(f"{name}.optim" if name in ("bitsandbytes", "torchao") else name)
    return ""


def not_predicted(reason: str) -> Prediction:
    """A row that has no counterpart."""
    return Prediction(reason=reason)


@dataclass(frozen=True)
class Outcome:
    """A row and its prediction; what the tables are made of."""

    row: Row
    prediction: Prediction
    seconds: float = 0.0
    kind: str = field(default="", compare=False)  # Of the source: its heading in the tables.

    @property
    def error(self) -> float | None:
        """(simulated - published) / published; 0 where the published figure is the simulated one, rounded."""
        prediction = self.prediction
        if prediction.num_bytes is None:
            return None
        simulated = prediction.num_bytes / prediction.unit(self.row)
        rounding = self.row.half_a_digit if prediction.rounding is None else prediction.rounding
        if abs(simulated - self.row.figure) <= rounding + 1e-9:
            return 0.0
        return simulated / self.row.figure - 1


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished run on the virtual GPU. Peaks are bytes, over the events from number `start` on."""

    trace: Trace
    replay: Timeline
    start: int = 0

    @property
    def allocated(self) -> int:
        """`torch.cuda.max_memory_allocated()`: of one stream, active is the same."""
        return max(self.replay.allocated[self.start :])

    @property
    def reserved(self) -> int:
        return max(self.replay.reserved[self.start :])

    @property
    def device_used(self) -> int:
        """What NVML shows of a GPU that runs nothing else: reserved and the CUDA context."""
        return self.reserved + CONTEXT_BYTES


def run(
    program: Callable[[VirtualGpu], int | None], name: str, *, alloc_conf: str = "", skips_kernels: bool = False
) -> Run:
    """`program` on the virtual `gpu`; it may return the number of events before those that count."""
    gpu, settings = find_gpu(name), resolve_settings(alloc_conf)
    with (
        disable_garbage_collection(),
        warnings.catch_warnings(),
        VirtualGpu(
            gpu,
            memory=lambda trace: RunAllocator(trace, gpu, settings),
            skips_kernels=skips_kernels,
            extensions=extensions(stubs=False),
        ) as virtual,
    ):
        warnings.simplefilter("ignore")
        start = program(virtual) or 0
    return Run(virtual.trace, replay_trace(virtual.trace, config=settings.config), start)
