"""Conversion between bytes, which are integers everywhere in memprof, and text with units.

Units are binary (1 GiB = 2**30 bytes): a GPU sold as "80 GB" has 79.10 GiB, and mixing the two leads to the wrong
choice of GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from memprof.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = {
    "": GIB,
    "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip
_MAX_NUMBER = 1e18
_MAX_BYTES = 1 << 50  # more than any machine has, and far below 64 bits
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_COUNT = re.compile(r"\s*(-?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:[eE]\+?\d{1,4})?)\s*([kKmMbBtT]?)\s*")
_MIN_PARAMETERS = 1000  # fewer are billions whose B was forgotten
_COUNT_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def gib(num_bytes: int | float) -> str:
    """Return `num_bytes` in GiB with two decimals and no unit, for table cells."""
    return f"{num_bytes / GIB:,.2f}"


def format_rounded_gib(num_bytes: int) -> str:
    """Return an estimate in GiB, with as many digits as it is worth: 1,050 GiB, 14 GiB or 2.4 GiB."""
    size = num_bytes / GIB
    if size >= 100:
        return f"{round(size, -1):,.0f} GiB"
    return f"{size:.0f} GiB" if size >= 10 else f"{size:.1f} GiB"


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` as text with two decimals in GiB, MiB or KiB, the largest unit in which it is at least 1."""
    size = abs(num_bytes)
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes} byte{'' if size == 1 else 's'}"


def format_count(count: int, number_format: str = ".2f") -> str:
    """Return `count` as text such as 4.02B or 124.00M; `number_format` is the format specification."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:{number_format}}{name}"
    return str(count)


def parse_gib(text: str | float) -> int:
    """Return the bytes of a size in GiB ("80") or with a unit ("24GB", "512MiB"); raise UsageError if invalid."""
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not 0 < float(match[1]) < _MAX_NUMBER:
        raise UsageError("not an amount of memory", value=repr(text), hint="give GiB, such as 80 or 23.6, or 24GB")
    num_bytes = int(float(match[1]) * unit)
    if num_bytes > _MAX_BYTES:
        raise UsageError("no machine has so much memory", value=repr(text), hint=f"at most {_MAX_BYTES // GIB} (GiB)")
    return num_bytes


def format_size_option(num_bytes: int) -> str:
    """Return a short text, such as "80" or "24GB", that `parse_gib` parses to exactly `num_bytes`."""
    for unit in ("", "GB", "MiB"):
        text = f"{num_bytes / _UNITS[unit.lower()]:.5g}"
        if "e" not in text and parse_gib(text + unit) == num_bytes:
            return text + unit
    return f"{num_bytes}b"


def parse_count(text: str) -> int:
    """Return the parameter count in text such as "1.2B", "70M", "1e9" or "7000000"; raise UsageError if invalid."""
    number = _parse_number(text)
    if number is None or not 0 < number < _MAX_NUMBER:
        raise UsageError("not a number of parameters", value=repr(text), hint="write it like 70M, 1.2B or 4B")
    if number < _MIN_PARAMETERS:
        raise UsageError("not a number of parameters", value=repr(text), hint=f"did you mean {text.strip()}B?")
    return round(number)


def parse_integer(text: str | int) -> int:
    """Return the integer in text such as "8", "128k" (128,000), "131,072" or "0.5M"; raise UsageError if invalid."""
    number = _parse_number(str(text))
    if number is not None and abs(number) >= _MAX_NUMBER:
        raise UsageError("out of range", value=repr(text), hint="give less than 1e18")
    if number is None or number != number.to_integral_value():
        raise UsageError("not a whole number", value=repr(text), hint="write it like 8, 131072, 128k or 1e6")
    return int(number)


def _parse_number(text: str) -> Decimal | None:
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    return Decimal(match[1].replace(",", "")) * _COUNT_SUFFIX[match[2].lower()]


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the sorted `numbers` as text with ranges, such as "0, 2-5"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
