"""The settings of PYTORCH_CUDA_ALLOC_CONF, read by torch's own rules.

Source: c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.{h,cpp}. A setting that torch refuses at its
first allocation is refused here with the key, its value and what is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memprof.allocator.releases import LATEST, Release
from memprof.allocator.rounding import DIVISION_ENTRIES, LARGE_SEGMENT
from memprof.errors import UsageError, nearest
from memprof.units import GIB, MIB

UNLIMITED = (1 << 64) - 1
"""max_split_size when it is not set (SIZE_MAX)."""

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first of them that is set counts; releases before 2.9 know the first alone."""


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings that decide what the allocator does. Sizes in bytes."""

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    expandable_segments_reserve: float = 9 / 8
    """Address space of one expandable segment, as a fraction of the card's memory; or"""
    expandable_segments_reserve_bytes: int | None = None
    """... as bytes, which counts more."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """One entry per octave from 1 MiB up (16 of them); empty: off."""
    backend: str = "native"
    text: str = ""
    """What it was read from."""

    @property
    def reported_max_split_size(self) -> int:
        """As statistics and snapshots give it: -1 when unlimited."""
        return -1 if self.max_split_size == UNLIMITED else self.max_split_size


def config_from_environment(
    environ: Mapping[str, str] | None = None, release: Release = LATEST
) -> tuple[AllocatorConfig, str | None]:
    """The settings that torch would take from the environment, and the variable that they are in (None: defaults).

    Raises:
        UsageError: torch would refuse them.
    """
    variables = os.environ if environ is None else environ
    for name in VARIABLES if release.has_unified_settings else VARIABLES[:1]:
        if name in variables:
            return parse_config(variables[name], release, origin=name), name
    return AllocatorConfig(), None


def parse_config(text: str, release: Release = LATEST, *, origin: str = VARIABLES[0]) -> AllocatorConfig:
    """Read settings such as "expandable_segments:True,max_split_size_mb:128".

    Args:
        text: the settings; blanks are ignored, as torch ignores them.
        release: its limits are applied.
        origin: where `text` came from, for the error.

    Raises:
        UsageError: torch would refuse it.
    """
    return _Parser(text, release, origin).parse()


def config_from_settings(settings: Mapping[str, object], release: Release = LATEST) -> AllocatorConfig:
    """The settings that a snapshot reports (`allocator_settings`); defaults where it says nothing.

    Raises:
        UsageError: its settings string is one that torch would refuse.
    """
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    config = parse_config(text if isinstance(text, str) else "", release, origin="allocator_settings")
    changes: dict[str, object] = {}
    # What was in force when the snapshot was taken counts more than the text of the environment.
    limit = settings.get("max_split_size")
    if isinstance(limit, int):
        changes["max_split_size"] = UNLIMITED if limit < 0 or limit >= UNLIMITED >> 1 else limit
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, int | float):
        changes["garbage_collection_threshold"] = float(threshold)
    if isinstance(settings.get("expandable_segments"), bool):
        changes["expandable_segments"] = settings["expandable_segments"]
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        table = [0] * DIVISION_ENTRIES
        for key, parts in divisions.items():
            if str(key).isdecimal() and _is_power_of_2(int(key)) and isinstance(parts, int):
                table[min(int(key).bit_length() - 1, DIVISION_ENTRIES - 1)] = parts
        changes["roundup_power2_divisions"] = tuple(table) if any(part > 1 for part in table) else ()
    return replace(config, **changes)  # type: ignore[arg-type]


class _Parser:
    """One pass over the tokens: words, and the characters , : [ ] between them."""

    def __init__(self, text: str, release: Release, origin: str) -> None:
        self.text = text
        self.release = release
        self.origin = origin
        self.tokens: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", text.replace(" ", ""))
        self.at = 0
        self.found: dict[str, object] = {}
        self.limited: dict[str, int] = {}
        self.readers: dict[str, Callable[[str], None]] = {
            "backend": self._backend,
            "max_split_size_mb": self._max_split_size,
            "max_non_split_rounding_mb": self._max_non_split_rounding,
            "garbage_collection_threshold": self._garbage_collection_threshold,
            "roundup_power2_divisions": self._roundup_power2_divisions,
            "expandable_segments": self._boolean,
            "release_lock_on_cudamalloc": self._ignored_boolean,
            "release_lock_on_hipmalloc": self._ignored_boolean,
            "pinned_use_cuda_host_register": self._ignored_boolean,
            "pinned_use_hip_host_register": self._ignored_boolean,
            "pinned_use_background_threads": self._ignored_boolean,
            "pinned_num_register_threads": self._register_threads,
            "pinned_reserve_segment_size_mb": self._reserve_segment_size,
            "pinned_free_catch_all": self._ignored_boolean,
            "graph_capture_record_stream_reuse": self._ignored_boolean,
        }
        if release.has_large_segment_size:
            self.readers["large_segment_size_mb"] = self._large_segment_size
        if release.has_memory_fraction_setting:
            self.readers["per_process_memory_fraction"] = self._memory_fraction
        if release.has_preemptive_oom:
            self.readers["throw_on_cudamalloc_oom"] = self._boolean
        if release.has_reserve_setting:
            self.readers["expandable_segments_reserve"] = self._reserve
            self.readers["expandable_segments_reserve_by_class"] = self._reserve_by_class

    def parse(self) -> AllocatorConfig:
        while self.at < len(self.tokens):
            key = self._take()
            reader = self.readers.get(key)
            if reader is None:
                close = nearest(key, self.readers)
                hint = f"did you mean {close!r}?" if close else "known: " + ", ".join(sorted(self.readers))
                raise self._error(f"unknown allocator setting {key!r}", hint)
            self._expect(":", after=key)
            reader(key)
            if self.at < len(self.tokens):
                self._expect(",", after=key)
        # torch reads large_segment_size_mb before the settings that it limits, wherever it stands.
        large = self.found.get("large_segment_size", LARGE_SEGMENT)
        assert isinstance(large, int)
        for key, value in self.limited.items():
            if value < large:
                raise self._error(f"{key} is {value // MIB}", f"MiB, at least {large // MIB} (large_segment_size_mb)")
        return AllocatorConfig(**self.found, text=self.text)  # type: ignore[arg-type]

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _take(self) -> str:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _expect(self, token: str, *, after: str) -> None:
        if self._peek() != token:
            raise self._error(f"{token!r} expected after {after!r}, found {self._peek()!r}", "key:value,key:value")
        self.at += 1

    def _value(self, key: str, allowed: str) -> str:
        if self._peek() in ("", ",", ":", "[", "]"):
            raise self._error(f"{key} has no value", allowed)
        return self._take()

    def _integer(self, key: str, allowed: str) -> int:
        """As std::stoull reads it: digits at the front count, what follows does not, and a minus wraps around."""
        value = self._value(key, allowed)
        match = re.match(r"\s*([+-]?)(\d+)", value)
        if match is None or int(match[2]) > UNLIMITED:
            raise self._error(f"{key} is {value!r}", allowed)
        return int(match[1] + match[2]) % (UNLIMITED + 1)

    def _error(self, problem: str, hint: str) -> UsageError:
        return UsageError(problem, value=f"{self.origin}={self.text}", hint=hint)

    # -- settings --------------------------------------------------------------------------------------------------

    def _flag(self, key: str) -> bool:
        value = self._value(key, "True or False")
        if value not in ("True", "False"):
            raise self._error(f"{key} is {value!r}", "True or False, spelt so")
        return value == "True"

    def _boolean(self, key: str) -> None:
        self.found[key] = self._flag(key)

    def _ignored_boolean(self, key: str) -> None:
        self._flag(key)

    def _reserve_segment_size(self, key: str) -> None:
        if not self._integer(key, "MiB, more than 0"):
            raise self._error(f"{key} is 0", "MiB, more than 0")

    def _register_threads(self, key: str) -> None:
        allowed = "a power of 2 up to 128"
        value = self._integer(key, allowed)
        if not _is_power_of_2(value) or value > 128:
            raise self._error(f"{key} is {value}", allowed)

    def _backend(self, key: str) -> None:
        value = self._value(key, "native or cudaMallocAsync")
        if value not in ("native", "cudaMallocAsync"):
            raise self._error(f"{key} is {value!r}", "native or cudaMallocAsync")
        self.found[key] = value

    def _megabytes(self, key: str, least: int, *, inclusive: bool) -> int:
        allowed = f"MiB, {'at least' if inclusive else 'more than'} {least}"
        value = self._integer(key, allowed)
        if value < least or (value == least and not inclusive):
            raise self._error(f"{key} is {value}", allowed)
        return min(value, UNLIMITED // MIB) * MIB

    def _max_split_size(self, key: str) -> None:
        self.found["max_split_size"] = self._split_limit(key)

    def _max_non_split_rounding(self, key: str) -> None:
        self.found["max_non_split_rounding"] = self._split_limit(key)

    def _split_limit(self, key: str) -> int:
        if self.release.has_large_segment_size:  # the limit is that setting, known only at the end
            self.limited[key] = self._megabytes(key, 0, inclusive=True)
            return self.limited[key]
        return self._megabytes(key, LARGE_SEGMENT // MIB, inclusive=self.release.has_unified_settings)

    def _reserve(self, key: str) -> None:
        # torch warns of a value that it cannot read and keeps the default.
        value = self._value(key, "a fraction such as 0.5, or GiB such as 40G")
        match = re.fullmatch(r"([+]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([Gg]?)", value)
        if match is None or not 0 < float(match[1]) < float("inf"):
            return
        if match[2]:
            self.found["expandable_segments_reserve_bytes"] = int(float(match[1]) * GIB)
        else:
            self.found["expandable_segments_reserve"] = float(match[1])

    def _reserve_by_class(self, key: str) -> None:
        # Classes are given to streams by calls of the program; streams without one are not touched.
        self._expect("[", after=key)
        while self._peek() not in ("]", ""):
            self.at += 1
        self._expect("]", after=key)

    def _large_segment_size(self, key: str) -> None:
        self.found["large_segment_size"] = self._megabytes(key, 10, inclusive=False)

    def _garbage_collection_threshold(self, key: str) -> None:
        allowed = "more than 0 and less than 1"
        value = self._float(key, allowed)
        if not 0 < value < 1:
            raise self._error(f"{key} is {value}", allowed)
        self.found[key] = value

    def _memory_fraction(self, key: str) -> None:
        allowed = "between 0 and 1"
        value = self._float(key, allowed)
        if not 0 <= value <= 1:
            raise self._error(f"{key} is {value}", allowed)
        self.found[key] = value

    def _float(self, key: str, allowed: str) -> float:
        value = self._value(key, allowed)
        match = re.match(r"\s*[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|inf|nan)", value, re.IGNORECASE)
        if match is None:  # std::stod: what follows the number does not count
            raise self._error(f"{key} is {value!r}", allowed)
        return float(match[0])

    def _roundup_power2_divisions(self, key: str) -> None:
        allowed = "a power of 2 from 2, or a list such as [256:1,512:2,1024:4,>:8]"
        if self._peek() != "[":
            value = self._integer(key, allowed)
            if not _is_power_of_2(value):
                raise self._error(f"{key} is {value}", allowed)
            self.found[key] = (value,) * DIVISION_ENTRIES
            return
        self.at += 1
        table = [0] * DIVISION_ENTRIES
        first, last = True, 0
        while self._peek() != "]":
            boundary = self._value(key, allowed)
            self._expect(":", after=boundary)
            parts = self._integer(key, allowed)
            if parts and not _is_power_of_2(parts):
                raise self._error(f"{key} has {parts} divisions", "0 or a power of 2")
            if boundary == ">":
                start = last + 1 if self.release.has_unified_settings else last
                table[start:] = [parts] * (DIVISION_ENTRIES - start)
            else:
                if not re.fullmatch(r"\d{1,19}", boundary) or not _is_power_of_2(int(boundary)):
                    raise self._error(f"{key} has the key {boundary!r}", "MiB, a power of 2; or > for all above")
                index = min(int(boundary).bit_length() - 1, DIVISION_ENTRIES - 1)
                if first:
                    table[:index] = [parts] * index
                    first = False
                table[index] = parts
                last = index
            if self._peek() != "]":
                self._expect(",", after=str(parts))
        self.at += 1
        self.found[key] = tuple(table)


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
