"""Sequence lengths of a data set: from a file (lines, JSON lines or Parquet), or drawn from a distribution."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, not_installed
from memprof.report.documents.recommendation import LengthRisk
from memprof.workload.lengths import is_distribution, parse_lengths

# Default columns: the first of these names that the file has.
_DEFAULT_COLUMNS = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "input_ids", "tokens")
_MAX_EXAMPLES = 3
NUM_SAMPLES = 20_000  # samples of a distribution, as a data set


@dataclass
class _LengthReader:
    lengths: list[int] = field(default_factory=list)
    num_empty: int = 0
    num_invalid: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, value: Any, location: str) -> None:
        """Add the length `value`, or the length of the list `value`; `location` is for the error message."""
        if value is None or (isinstance(value, str) and not value.strip()):
            self.num_empty += 1
            return
        length = _parse_length(value)
        if length is None or length < 1:
            self.num_invalid += 1
            if len(self.examples) < _MAX_EXAMPLES:
                value_text = repr(value)
                self.examples.append(f"{location}: {value_text if len(value_text) < 40 else value_text[:37] + '...'}")
            return
        self.lengths.append(length)


def read_lengths(source: str | Path, column: str | None = None) -> tuple[list[int], LengthRisk]:
    """Return the lengths in ascending order, not truncated, and their statistics.

    `source` is a file, or a distribution of workload/lengths.py. Raises UsageError if the file or column is missing, or
    has no length.
    """
    path, reader = Path(source), _LengthReader()
    if is_distribution(str(source)):
        samples = parse_lengths(str(source)).batches(1, 10**9)
        reader.lengths = [longest for _, longest in islice(samples, NUM_SAMPLES)]
    elif not path.is_file():
        raise UsageError("no such file of lengths", value=path, hint="give a file with one length a line")
    name = str(source)
    if reader.lengths:
        name += f", {NUM_SAMPLES:,} drawn"
    elif path.suffix in (".parquet", ".pq"):
        column = _read_parquet(path, column, reader)
    elif path.suffix in (".jsonl", ".ndjson"):
        column = _read_json_lines(path, column, reader)
    else:
        if column is not None:
            raise UsageError("a column is for JSON lines and Parquet", value=column, hint="leave out --lengths-column")
        for line_number, line in enumerate(_iter_lines(path), 1):
            reader.add(line, f"line {line_number}")
    if not reader.lengths:
        raise UsageError(
            "no length in the file",
            value=f"{path}: {reader.num_empty} empty, {reader.num_invalid} no length"
            + "".join(f"; {example}" for example in reader.examples),
            hint="one whole number a line, the tokens of a sequence",
        )
    reader.lengths.sort()
    return reader.lengths, LengthRisk(
        file=name if column is None else f"{name}, column {column}",
        count=len(reader.lengths),
        empty=reader.num_empty,
        bad=reader.num_invalid,
        bad_examples=tuple(reader.examples),
        truncated=0,
        shortest=reader.lengths[0],
        median=compute_quantile(reader.lengths, 0.5),
        p99=compute_quantile(reader.lengths, 0.99),
        longest=reader.lengths[-1],
        packed_rows=0,
        context_length=reader.lengths[-1],
    )


def compute_quantile(sorted_values: list[int], fraction: float) -> int:
    """Return the quantile: the least of `sorted_values` that at least this fraction of the values does not exceed."""
    return sorted_values[max(math.ceil(fraction * len(sorted_values)) - 1, 0)]


def _parse_length(value: Any) -> int | None:
    if isinstance(value, (list, tuple)):
        return len(value)
    if isinstance(value, str):
        text = value.strip().replace(",", "").replace("_", "")
        return int(text) if text.isascii() and text.isdigit() else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _iter_lines(path: Path) -> Iterator[str]:
    # Undecodable bytes are no number either: the line counts as bad, without an error.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            yield line.rstrip("\r\n")


def _read_json_lines(path: Path, column: str | None, reader: _LengthReader) -> str | None:
    num_rows = num_with_column = 0
    for line_number, line in enumerate(_iter_lines(path), 1):
        if not line.strip():
            reader.num_empty += 1
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            reader.add(line, f"line {line_number}")
            continue
        if not isinstance(row, dict):
            reader.add(row, f"line {line_number}")
            continue
        if column is None:
            column = _choose_column(list(row), str(path))
        num_rows, num_with_column = num_rows + 1, num_with_column + (column in row)
        reader.add(row.get(column), f"line {line_number}")
    if num_rows and not num_with_column:
        raise UsageError("no row has this column", value=column, hint="name one that there is: --lengths-column NAME")
    return column


def _read_parquet(path: Path, column: str | None, reader: _LengthReader) -> str:
    try:
        import pyarrow.parquet
    except ImportError:
        raise not_installed("Parquet needs pyarrow", path, "pyarrow", ", or write JSON Lines") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        hint = "give lines, JSON lines or Parquet"
        raise UsageError("cannot read the file", value=f"{path} ({str(error).splitlines()[0]})", hint=hint) from None
    column_names = list(file.schema_arrow.names)
    if column is None:
        column = _choose_column(column_names, str(path))
    if column not in column_names:
        raise UsageError("no such column", value=column, hint=f"there are {', '.join(column_names[:12])}")
    values = (value for batch in file.iter_batches(columns=[column]) for value in batch.column(0).to_pylist())
    for row_number, value in enumerate(values, 1):
        reader.add(value, f"row {row_number}")
    return column


def _choose_column(names: list[str], path: str) -> str:
    column = next((name for name in _DEFAULT_COLUMNS if name in names), names[0] if len(names) == 1 else None)
    if column is not None:
        return column
    raise UsageError(
        "which column has the lengths?", value=f"{path}: {', '.join(names[:12])}", hint="name it: --lengths-column NAME"
    )
