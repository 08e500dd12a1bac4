"""The short answers in JSON: lists, and what was written where. Each begins with its version, and whose it is."""

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


def _fields(row: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by their names; `asdict` would take apart what is in them."""
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(JsonValue):
    """The fields that every answer begins with."""

    schema: int = 2  # Goes up when a name changes its meaning.
    memprof_version: str = __version__
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList(Answer):
    """`memprof models`."""

    command: str = "models"
    models: tuple[ModelEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuList(Answer):
    """`memprof gpus`."""

    command: str = "gpus"
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class PresentGpu(NvmlGpu):
    """A GPU of this machine; `gpu` is what the catalog calls it, null if it has none of that name."""

    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGpus(Answer):
    """`memprof gpus --present`."""

    command: str = "gpus --present"
    gpus: tuple[PresentGpu, ...]
    driver_version: str | None
    cuda_version: str | None  # The newest that the driver runs.
    notes: tuple[str, ...]
    environment: Environment

    @classmethod
    def of(cls, reading: NvmlSample, names: tuple[str | None, ...], environment: Environment) -> PresentGpus:
        """Return what was read; `names` are the catalog's, one a GPU."""
        gpus = (PresentGpu(**_fields(gpu), gpu=name) for gpu, name in zip(reading.gpus, names, strict=True))
        return cls(**_fields(reading) | {"gpus": tuple(gpus)}, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnoses(Answer):
    """`memprof doctor`."""

    command: str = "doctor"
    file: str
    diagnoses: tuple[Diagnosis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(Answer):
    """`memprof doctor --env`."""

    command: str = "doctor --env"
    facts: dict[str, str]  # What is here, by name.
    findings: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported(Answer):
    """`memprof export`."""

    command: str = "export"
    file: str
    viewer: str  # Where it can be opened.


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorLine(MonitorSample):
    """`memprof monitor`: a line, one sample each."""

    peaks: Peaks  # Up to and with this sample.
    schema: int = 2
    command: str = "monitor"

    @classmethod
    def of(cls, sample: MonitorSample, peaks: Peaks) -> MonitorLine:
        """Return the line of a sample."""
        return cls(**_fields(sample), peaks=peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorEnd(JsonValue):
    """`memprof monitor -- COMMAND`: the last line."""

    outcome: MonitorOutcome
    schema: int = 2
    command: str = "monitor"


@dataclass(frozen=True, slots=True)
class Topic:
    """A page of the documentation, by the name that `memprof help` takes."""

    name: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics(Answer):
    """`memprof help`."""

    command: str = "help"
    topics: tuple[Topic, ...]
    text: str | None = None  # Of the one page that was requested, as Markdown.


@dataclass(frozen=True, slots=True)
class Recipe:
    """A case study, and the command that runs it."""

    name: str
    title: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes(Answer):
    """`memprof recipes ls` and `memprof recipes cp`."""

    command: str = "recipes ls"
    recipes: tuple[Recipe, ...]
    copied_to: str | None = None  # The new folder, of `recipes cp`.


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A kept run: its command, and what is kept of it; `used` in seconds since the epoch."""

    asked: str
    num_bytes: int = field(metadata=json_name("bytes"))
    used: float  # When it was requested last.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswers(Answer):
    """`memprof cache`."""

    command: str = "cache"
    folder: str | None  # None: nothing is kept.
    num_bytes: int = field(metadata=json_name("bytes"))
    most_bytes: int  # What is kept at the most.
    removed: int  # How many answers, with --clear.
    answers: tuple[KeptAnswer, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """An error: what went wrong, what was wrong about, and what to do."""

    problem: str
    value: str | None
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(JsonValue):
    """Any command that fails where JSON is requested."""

    schema: int = 2
    error: Fault
