"""What `memprof doctor` knows of an inference engine: its messages, their figures, and its own options.

Each engine has a file. Every message and option in it was compared with the engine's source text; the file says where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures, MessageSizes
from memprof.doctor.signature import Signature

LIST_PROCESSES = Advice("see who is on the GPU", "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")

# What names a model in commands and logs of engines: an organization or a folder with a name, or a GGUF file.
_SERVED_MODEL = re.compile(
    r"""(?:(?:vllm|trtllm-serve) serve +|trtllm-serve +|--model(?:-path|-id)?(?: +|=)|(?<!\w)-m +"""
    r"""|\bmodel(?:_path|_id)?['"]?[=:] ?|(?:with|load|loading) model,? )"""
    r"""(?:Some\()?['"]?((?:[\w.~-]*/)+[\w.-]*\w|[\w.-]+\.gguf)"""
)


# What an engine could not place.
WEIGHTS, KV_CACHE, COMPUTE_BUFFER = "weights", "KV cache", "compute buffer"
_CAUSES_BY_PART = {WEIGHTS: Cause.WEIGHTS, KV_CACHE: Cause.KV_CACHE, COMPUTE_BUFFER: Cause.ENGINE_BATCH}


def find_cause_of_part(part: str, cause: Cause) -> Cause:
    """Return the cause if an engine could not place `part`, or `cause` if that says more."""
    return _CAUSES_BY_PART.get(part, cause) if cause is Cause.DEVICE_MEMORY else cause


# An option that is set, or a part of a model's name.
_QUANTIZED = re.compile(
    r"quanti[sz](?:e|ation)['\"]?[ =:]+(?:Some\()?['\"]?(?!None|null|no)\w|gptq|awq|marlin|nvfp4|mxfp4|-fp8\b|int4",
    re.I,
)


class Stage(StrEnum):
    """The part of an engine's start or work in which memory ran out."""

    LOAD = "load"  # of the weights
    PROFILE = "profile"  # forward of the largest batch, to measure activations
    CACHE = "cache"  # allocation of the KV cache
    WARM_UP = "warm-up"  # of kernels and the sampler, and capture of CUDA graphs, beside the full KV cache
    SERVE = "serve"  # requests, beside the full KV cache
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine, or another runtime with options of its own."""

    name: str
    list_advice: Callable[[EngineError], Iterator[Advice]]  # Yields advice, what helps most first.
    signatures: tuple[Signature, ...] = ()
    read_figures: Callable[[str, str], EngineFigures] = lambda message, log: EngineFigures()  # of a message and its log
    paths: str = ""  # Regular expression for the files of its code in a traceback; "": none.
    log_marks: str = ""  # Regular expression for what only its logs have; "": none.
    # Functions in its tracebacks by stage. Of several, the last stage decides; a start that computes a batch
    # is no request.
    functions: dict[Stage, tuple[str, ...]] = field(default_factory=dict)

    def find_stage(self, names: frozenset[str]) -> Stage:
        """Return the stage to which functions with these `names` belong."""
        stages = [stage for stage in Stage if names.intersection(self.functions.get(stage, ()))]
        starts = [stage for stage in stages if stage is not Stage.SERVE]
        return (starts or stages or [Stage.UNKNOWN])[-1]


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error in an engine, with everything that the log says of it."""

    engine: Engine
    cause: Cause
    signature: str  # Name of the signature.
    sizes: MessageSizes
    figures: EngineFigures
    log: str  # The beginning of the log, and the text around the error.
    stage: Stage = Stage.UNKNOWN

    def list_advice(self) -> Iterator[Advice]:
        """Yield the engine's advice, what helps most first."""
        return self.engine.list_advice(self)

    @property
    def model(self) -> str:
        """Return the model as the log names it, or MODEL."""
        names = _SERVED_MODEL.findall(self.log)
        return names[-1] if names else "MODEL"

    @property
    def is_quantized(self) -> bool:
        """Return whether the log says that weights are quantized already."""
        return _QUANTIZED.search(self.log) is not None

    @property
    def shortfall(self) -> int | None:
        """Return the bytes by which the failed allocation exceeds the free memory; None if unknown."""
        tried, free = self.sizes.tried, self.sizes.free
        return None if tried is None or free is None else max(0, tried.num_bytes - free.num_bytes)


def find_number(pattern: str, text: str) -> float | None:
    """Return the number of the last match of `pattern`, whose group is the number; None without a match."""
    found = re.findall(pattern, text)
    return float(found[-1]) if found else None


def find_integer(pattern: str, text: str) -> int | None:
    """Return the whole number of the last match of `pattern`, whose group is the number; None without a match."""
    number = find_number(pattern, text)
    return None if number is None else int(number)


def round_fraction_up(fraction: float) -> float:
    """Return the smallest number of hundredths that is at least `fraction`."""
    return math.ceil(fraction * 100 - 1e-9) / 100


def round_fraction_down(fraction: float) -> float:
    """Return the largest number of hundredths that is at most `fraction`."""
    return math.floor(fraction * 100 + 1e-9) / 100
