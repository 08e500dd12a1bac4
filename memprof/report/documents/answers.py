"""Short answers in JSON: lists, and the paths of written files. Each begins with its schema version and its command."""

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
from memprof.trace.json_values import JsonValue, json_name
from memprof.version import __version__
from memprof.workload.catalog.models import ModelEntry


def _read_fields(row: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; `asdict` would also convert the values inside."""
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(JsonValue):
    """The common first fields of every answer."""

    schema: int = 2  # Increases when a name changes its meaning.
    memprof_version: str = __version__
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList(Answer):
    """The answer of `memprof models`."""

    command: str = "models"
    models: tuple[ModelEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuList(Answer):
    """The answer of `memprof gpus`."""

    command: str = "gpus"
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class PresentGpu(NvmlGpu):
    """A GPU of this machine; `gpu` is the catalog's name for it, null if the catalog lacks it."""

    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGpus(Answer):
    """The answer of `memprof gpus --present`."""

    command: str = "gpus --present"
    gpus: tuple[PresentGpu, ...]
    driver_version: str | None
    cuda_version: str | None  # The newest version that the driver supports.
    notes: tuple[str, ...]
    environment: Environment

    @classmethod
    def of(cls, reading: NvmlSample, names: tuple[str | None, ...], environment: Environment) -> PresentGpus:
        """Return the answer for an NVML sample; `names` are the catalog's names, one per GPU."""
        gpus = (PresentGpu(**_read_fields(gpu), gpu=name) for gpu, name in zip(reading.gpus, names, strict=True))
        return cls(**_read_fields(reading) | {"gpus": tuple(gpus)}, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnoses(Answer):
    """The answer of `memprof doctor`."""

    command: str = "doctor"
    file: str
    diagnoses: tuple[Diagnosis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(Answer):
    """The answer of `memprof doctor --env`."""

    command: str = "doctor --env"
    facts: dict[str, str]  # Facts of this installation, by name.
    findings: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Answer):
    """The answer of `memprof export`."""

    command: str = "export"
    file: str
    viewer: str  # The viewer that opens the file.


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorLine(MonitorSample):
    """A line of `memprof monitor`: one sample."""

    peaks: Peaks  # Peaks so far, including this sample.
    schema: int = 2
    command: str = "monitor"

    @classmethod
    def of(cls, sample: MonitorSample, peaks: Peaks) -> MonitorLine:
        """Return the line for a sample."""
        return cls(**_read_fields(sample), peaks=peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorEnd(JsonValue):
    """The last line of `memprof monitor -- COMMAND`."""

    outcome: MonitorOutcome
    schema: int = 2
    command: str = "monitor"


@dataclass(frozen=True, slots=True)
class Topic:
    """A page of the documentation, by its name in `memprof help`."""

    name: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics(Answer):
    """The answer of `memprof help`."""

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
class Recipes(Answer):
    """The answer of `memprof recipes ls` and `memprof recipes cp`."""

    command: str = "recipes ls"
    recipes: tuple[Recipe, ...]
    copied_to: str | None = None  # The new folder, of `recipes cp`.


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A cached result: its command and its size; `used` is in seconds since the epoch."""

    asked: str
    num_bytes: int = field(metadata=json_name("bytes"))
    used: float  # Time of the last request.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswers(Answer):
    """The answer of `memprof cache`."""

    command: str = "cache"
    folder: str | None  # The cache folder; None: caching is off.
    num_bytes: int = field(metadata=json_name("bytes"))
    most_bytes: int  # Limit of the cache.
    removed: int  # Number of removed results, with --clear.
    answers: tuple[KeptAnswer, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """An error: the problem, the wrong value, and a hint."""

    problem: str
    value: str | None
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(JsonValue):
    """The answer of any failing command with JSON output."""

    schema: int = 2
    error: Fault
