"""The settings of PYTORCH_CUDA_ALLOC_CONF, parsed by torch's own rules.

Source: c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.{h,cpp}. A setting that torch rejects at its
first allocation raises an error here with the key, its value and the allowed values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memprof.allocator.releases import LATEST, Release
from memprof.allocator.rounding import DIVISION_ENTRIES, LARGE_SEGMENT
from memprof.errors import UsageError, suggest_name
from memprof.units import GIB, MIB

UNLIMITED = (1 << 64) - 1  # max_split_size when it is not set (SIZE_MAX)

HIP_VARIABLE = "PYTORCH_HIP_ALLOC_CONF"  # read by torch for ROCm, after CUDA's (c10/cuda/CUDAAllocatorConfig.h)
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first variable that is set counts

# Variables of the MPS allocator, which reads no others -> memprof's names of these settings.
MPS_VARIABLES = {
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "mps_high_watermark_ratio",
    "PYTORCH_MPS_LOW_WATERMARK_RATIO": "mps_low_watermark_ratio",
}


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings of the caching allocator (PYTORCH_CUDA_ALLOC_CONF). Sizes are in bytes."""

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    # Address space of one expandable segment, as a fraction of the GPU's memory; the value in bytes has priority.
    expandable_segments_reserve: float = 9 / 8
    expandable_segments_reserve_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()  # one entry per octave from 1 MiB up (16 of them); empty: off
    backend: str = "native"
    # Of MPS, shares of Metal's recommended working set (aten/src/ATen/mps/MPSAllocator.h); 0: no limit.
    mps_high_watermark_ratio: float = 1.7  # above it, allocations fail
    mps_low_watermark_ratio: float = 1.4  # above it, memory is under pressure: cached buffers are released
    text: str = ""  # the text of the settings

    @property
    def reported_max_split_size(self) -> int:
        """Return max_split_size as statistics and snapshots have it: -1 if unlimited."""
        return -1 if self.max_split_size == UNLIMITED else self.max_split_size


def config_from_environment(
    environ: Mapping[str, str] | None = None, release: Release = LATEST, backend: str = "cuda"
) -> tuple[AllocatorConfig, str | None]:
    """Return the settings that torch would read from `environ` (None: os.environ) for this backend, and the variable
    that holds them (None: defaults). Raises UsageError: torch would reject the settings."""
    variables = os.environ if environ is None else environ
    if backend == "mps":
        names = [name for name in MPS_VARIABLES if name in variables]
        text = ",".join(f"{MPS_VARIABLES[name]}:{variables[name]}" for name in names)
        return parse_config(text, release, origin=" and ".join(names)), " and ".join(names) or None
    known = VARIABLES[1:] if backend == "xpu" else VARIABLES if release.has_unified_settings else VARIABLES[:1]
    for name in (*known[:1], HIP_VARIABLE, *known[1:]) if backend == "hip" else known:
        if name in variables:
            return parse_config(variables[name], release, origin=name), name
    return AllocatorConfig(), None


def parse_config(text: str, release: Release = LATEST, *, origin: str = VARIABLES[0]) -> AllocatorConfig:
    """Return the settings in a string such as "expandable_segments:True,max_split_size_mb:128", by the rules of
    `release`.

    Spaces are ignored; errors name `origin` as the source. Raises UsageError: torch would reject the string.
    """
    return _SettingsParser(text, release, origin).parse()


def config_from_settings(settings: Mapping[str, object]) -> AllocatorConfig:
    """Return the configuration of a snapshot's `allocator_settings`, with defaults for missing ones. Raises UsageError:
    torch would reject their PYTORCH_CUDA_ALLOC_CONF."""
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    config = parse_config(text if isinstance(text, str) else "", origin="allocator_settings")
    changes: dict[str, object] = {}
    # Settings in force at the time of the snapshot have priority over the text of the environment.
    limit = settings.get("max_split_size")
    if isinstance(limit, int):
        changes["max_split_size"] = UNLIMITED if limit < 0 or limit >= UNLIMITED >> 1 else limit
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, int | float):
        changes["garbage_collection_threshold"] = float(threshold)
    if isinstance(settings.get("expandable_segments"), bool):
        changes["expandable_segments"] = settings["expandable_segments"]
    counts = settings.get("roundup_power2_divisions")
    if isinstance(counts, Mapping):
        divisions = [0] * DIVISION_ENTRIES
        for key, count in counts.items():
            if str(key).isdecimal() and len(str(key)) < 20 and _is_power_of_2(int(key)) and isinstance(count, int):
                divisions[min(int(key).bit_length() - 1, DIVISION_ENTRIES - 1)] = count
        changes["roundup_power2_divisions"] = tuple(divisions) if any(count > 1 for count in divisions) else ()
    return replace(config, **changes)  # type: ignore[arg-type]


_FLAGS = (
    "expandable_segments", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_use_background_threads", "pinned_free_catch_all",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
)  # fmt: skip


class _SettingsParser:
    """A parser of one settings string, whose tokens are words and the characters , : [ ] between them."""

    def __init__(self, text: str, release: Release, origin: str) -> None:
        self.text = text
        self.release = release
        self.origin = origin
        self.tokens: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", text.replace(" ", ""))
        self.position = 0
        self.settings: dict[str, object] = {}
        self.split_limits: dict[str, int] = {}
        parsers: dict[str, Callable[[str], object]] = dict.fromkeys(_FLAGS, self._parse_flag) | {
            "backend": lambda key: self._parse_word(key, "native", "cudaMallocAsync"),
            "max_split_size_mb": self._parse_split_limit,
            "max_non_split_rounding_mb": self._parse_split_limit,
            "garbage_collection_threshold": lambda key: self._parse_float(
                key, "more than 0 and less than 1", lambda value: 0 < value < 1
            ),
            "roundup_power2_divisions": self._parse_divisions,
            "pinned_num_register_threads": lambda key: self._parse_integer(
                key, "a power of 2 up to 128", lambda value: _is_power_of_2(value) and value <= 128
            ),
            "pinned_reserve_segment_size_mb": lambda key: self._parse_integer(key, "MiB, more than 0", bool),
            "large_segment_size_mb": lambda key: self._parse_megabytes(key, 10, inclusive=False),
            "per_process_memory_fraction": lambda key: self._parse_float(
                key, "between 0 and 1", lambda value: 0 <= value <= 1
            ),
            "mps_high_watermark_ratio": lambda key: self._parse_float(
                key, "between 0 and 2", lambda value: 0 <= value <= 2
            ),
            "mps_low_watermark_ratio": lambda key: self._parse_float(
                key, "between 0 and the high ratio", lambda value: 0 <= value <= self._max_low_ratio()
            ),
            "expandable_segments_reserve": self._parse_reserve,
            "expandable_segments_reserve_by_class": self._skip_reserve_by_class,
        }
        self.parsers = {key: parser for key, parser in parsers.items() if release.has_setting(key)}

    def parse(self) -> AllocatorConfig:
        while self.position < len(self.tokens):
            key = self._take_token()
            parser = self.parsers.get(key)
            if parser is None:
                hint = suggest_name(key, self.parsers) or "known: " + ", ".join(sorted(self.parsers))
                raise self._build_error(f"unknown allocator setting {key!r}", hint)
            self._expect_token(":", after=key)
            value, field = parser(key), key.removesuffix("_mb")
            if field in AllocatorConfig.__slots__ and value is not None:  # other settings change nothing in a replay
                self.settings[field] = value
            if self.position < len(self.tokens):
                self._expect_token(",", after=key)
        # torch reads large_segment_size_mb before the settings that it limits, in any order of the text.
        large_segment_size = self.settings.get("large_segment_size", LARGE_SEGMENT)
        assert isinstance(large_segment_size, int)
        for key, value in self.split_limits.items():
            if value < large_segment_size:
                raise self._build_error(
                    f"{key} is {value // MIB}", f"MiB, at least {large_segment_size // MIB} (large_segment_size_mb)"
                )
        return AllocatorConfig(**self.settings, text=self.text)  # type: ignore[arg-type]

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _take_token(self) -> str:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def _peek_token(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _expect_token(self, token: str, *, after: str) -> None:
        if self._peek_token() != token:
            raise self._build_error(
                f"{token!r} expected after {after!r}, found {self._peek_token()!r}", "key:value,key:value"
            )
        self.position += 1

    def _take_value(self, key: str, allowed: str) -> str:
        if self._peek_token() in ("", ",", ":", "[", "]"):
            raise self._build_error(f"{key} has no value", allowed)
        return self._take_token()

    def _parse_integer(self, key: str, allowed: str, is_valid: Callable[[int], bool] = lambda value: True) -> int:
        """Parse an integer as std::stoull does: text after the digits is ignored, and negative numbers wrap around."""
        text = self._take_value(key, allowed)
        match = re.match(r"\s*([+-]?)(\d+)", text)
        if match is None or int(match[2]) > UNLIMITED:
            raise self._build_error(f"{key} is {text!r}", allowed)
        value = int(match[1] + match[2]) % (UNLIMITED + 1)
        if not is_valid(value):
            raise self._build_error(f"{key} is {value}", allowed)
        return value

    def _parse_float(self, key: str, allowed: str, is_valid: Callable[[float], bool]) -> float:
        """Parse a float as std::stod does: text after the number is ignored."""
        text = self._take_value(key, allowed)
        match = re.match(r"\s*[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|inf|nan)", text, re.IGNORECASE)
        if match is None:
            raise self._build_error(f"{key} is {text!r}", allowed)
        value = float(match[0])
        if not is_valid(value):
            raise self._build_error(f"{key} is {value}", allowed)
        return value

    def _parse_word(self, key: str, *words: str, spelling: str = "") -> str:
        allowed = " or ".join(words)
        word = self._take_value(key, allowed)
        if word not in words:
            raise self._build_error(f"{key} is {word!r}", allowed + spelling)
        return word

    def _build_error(self, problem: str, hint: str) -> UsageError:
        return UsageError(problem, value=f"{self.origin}={self.text}", hint=hint)

    # -- settings --------------------------------------------------------------------------------------------------

    def _max_low_ratio(self) -> float:
        """Return the largest low watermark ratio (`setLowWatermarkRatio`): the high ratio, 2 without a limit."""
        high_ratio = self.settings.get("mps_high_watermark_ratio", AllocatorConfig().mps_high_watermark_ratio)
        assert isinstance(high_ratio, float)
        return high_ratio or 2.0

    def _parse_flag(self, key: str) -> bool:
        return self._parse_word(key, "True", "False", spelling=", spelt so") == "True"

    def _parse_megabytes(self, key: str, minimum: int, *, inclusive: bool) -> int:
        allowed = f"MiB, {'at minimum' if inclusive else 'more than'} {minimum}"
        value = self._parse_integer(key, allowed, lambda value: value > minimum or (inclusive and value == minimum))
        return min(value, UNLIMITED // MIB) * MIB

    def _parse_split_limit(self, key: str) -> int:
        if "large_segment_size_mb" in self.parsers:  # the limit is that setting, known only after all settings
            self.split_limits[key] = self._parse_megabytes(key, 0, inclusive=True)
            return self.split_limits[key]
        return self._parse_megabytes(key, LARGE_SEGMENT // MIB, inclusive=self.release.has_unified_settings)

    def _parse_reserve(self, key: str) -> float | None:
        # torch warns of a value that it cannot read and keeps the default.
        value = self._take_value(key, "a fraction such as 0.5, or GiB such as 40G")
        match = re.fullmatch(r"([+]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([Gg]?)", value)
        if match is None or not 0 < float(match[1]) < float("inf"):
            return None
        if match[2]:
            self.settings["expandable_segments_reserve_bytes"] = int(float(match[1]) * GIB)
            return None
        return float(match[1])

    def _skip_reserve_by_class(self, key: str) -> None:
        # The program assigns classes to streams by calls; streams without a class are not affected.
        self._expect_token("[", after=key)
        while self._peek_token() not in ("]", ""):
            self.position += 1
        self._expect_token("]", after=key)

    def _parse_divisions(self, key: str) -> tuple[int, ...]:
        allowed = "a power of 2 from 2, or a list such as [256:1,512:2,1024:4,>:8]"
        if self._peek_token() != "[":
            return (self._parse_integer(key, allowed, _is_power_of_2),) * DIVISION_ENTRIES
        self.position += 1
        divisions = [0] * DIVISION_ENTRIES
        is_first, last_index = True, 0
        while self._peek_token() != "]":
            boundary = self._take_value(key, allowed)
            self._expect_token(":", after=boundary)
            num_divisions = self._parse_integer(key, allowed)
            if num_divisions and not _is_power_of_2(num_divisions):
                raise self._build_error(f"{key} has {num_divisions} divisions", "0 or a power of 2")
            if boundary == ">":
                start = last_index + 1 if self.release.has_unified_settings else last_index
                divisions[start:] = [num_divisions] * (DIVISION_ENTRIES - start)
            else:
                if not re.fullmatch(r"\d{1,19}", boundary) or not _is_power_of_2(int(boundary)):
                    raise self._build_error(f"{key} has the key {boundary!r}", "MiB, a power of 2; or > for all above")
                index = min(int(boundary).bit_length() - 1, DIVISION_ENTRIES - 1)
                if is_first:
                    divisions[:index] = [num_divisions] * index
                    is_first = False
                divisions[index] = num_divisions
                last_index = index
            if self._peek_token() != "]":
                self._expect_token(",", after=str(num_divisions))
        self.position += 1
        return tuple(divisions)


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
