"""Results of the short commands as JSON: lists, diagnoses, paths of written files, and errors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from memprof.device.catalog import Gpu
from memprof.device.environment import Environment
from memprof.device.gpus import NvmlGpu, NvmlSample
from memprof.doctor.diagnosis import Diagnosis
from memprof.doctor.installation import Check
from memprof.monitor.run import MonitorOutcome
from memprof.monitor.sample import MonitorSample, Peaks
from memprof.serving.budget import EngineBudget
from memprof.trace.json_values import JsonValue, json_name
from memprof.version import __version__
from memprof.workload.catalog.models import ModelEntry


def _get_fields(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; unlike `asdict`, without converting nested values."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult(JsonValue):
    """Base of a command's result as JSON: the fields that all results have."""

    schema: int = 2  # Increases when a name changes its meaning.
    memprof_version: str = __version__
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList(CommandResult):
    """The result of `memprof models`."""

    command: str = "models"
    models: tuple[ModelEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuList(CommandResult):
    """The result of `memprof gpus`."""

    command: str = "gpus"
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class PresentGpu(NvmlGpu):
    """A GPU of this machine; `gpu` is its name in the catalog, null if the catalog lacks it."""

    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGpus(CommandResult):
    """The result of `memprof gpus --present`."""

    command: str = "gpus --present"
    gpus: tuple[PresentGpu, ...]
    driver_version: str | None
    cuda_version: str | None  # The newest version that the driver supports.
    notes: tuple[str, ...]
    environment: Environment

    @classmethod
    def from_sample(cls, sample: NvmlSample, names: tuple[str | None, ...], environment: Environment) -> PresentGpus:
        """Return the result for an NVML sample; `names` has each GPU's name in memprof's catalog, None if unknown."""
        gpus = (PresentGpu(**_get_fields(gpu), gpu=name) for gpu, name in zip(sample.gpus, names, strict=True))
        return cls(**_get_fields(sample) | {"gpus": tuple(gpus)}, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisList(CommandResult):
    """The result of `memprof doctor`."""

    command: str = "doctor"
    file: str
    diagnoses: tuple[Diagnosis, ...]
    budget: EngineBudget | None = None  # What an inference engine printed of its start; null: nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudgetResult(CommandResult):
    """The result of `memprof recommend --engine`."""

    command: str = "recommend --engine"
    budget: EngineBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationResult(CommandResult):
    """The result of `memprof doctor --env`."""

    command: str = "doctor --env"
    facts: dict[str, str]  # Facts of this installation, by name.
    findings: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult(CommandResult):
    """The result of `memprof export`."""

    command: str = "export"
    file: str
    viewer: str  # The viewer that opens the file.


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorLine(MonitorSample):
    """A line of `memprof monitor --json`: one sample."""

    peaks: Peaks  # Peaks so far, including this sample.
    schema: int = 2
    command: str = "monitor"

    @classmethod
    def from_sample(cls, sample: MonitorSample, peaks: Peaks) -> MonitorLine:
        """Return the line for a sample, with the peaks so far."""
        return cls(**_get_fields(sample), peaks=peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorEnd(JsonValue):
    """The last line of `memprof monitor --json -- COMMAND`: the outcome of the command."""

    outcome: MonitorOutcome
    schema: int = 2
    command: str = "monitor"


@dataclass(frozen=True, slots=True)
class Topic:
    """A page of the documentation, by its name in `memprof help`."""

    name: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicList(CommandResult):
    """The result of `memprof help`."""

    command: str = "help"
    topics: tuple[Topic, ...]
    text: str | None = None  # Markdown of the one requested page.


@dataclass(frozen=True, slots=True)
class Recipe:
    """A case study, and the command that runs it."""

    name: str
    title: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeList(CommandResult):
    """The result of `memprof recipes ls` and `memprof recipes cp`."""

    command: str = "recipes ls"
    recipes: tuple[Recipe, ...]
    copied_to: str | None = None  # The new folder, of `recipes cp`.


@dataclass(frozen=True, slots=True)
class CachedResult:
    """A cached result: its command, its size, and when it was last used (seconds since the epoch)."""

    asked: str  # The command line.
    num_bytes: int = field(metadata=json_name("bytes"))
    used: float  # Seconds since the epoch.


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResultList(CommandResult):
    """The result of `memprof cache`."""

    command: str = "cache"
    folder: str | None  # The cache folder; None: caching is off.
    num_bytes: int = field(metadata=json_name("bytes"))
    most_bytes: int  # Maximum size of the cache.
    removed: int  # Number of removed results, with --clear.
    answers: tuple[CachedResult, ...]


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """An error: the problem, the offending value, and a hint."""

    problem: str
    value: str | None
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResult(JsonValue):
    """The result of any command that fails."""

    schema: int = 2
    error: ErrorDetails
