"""Reading of one text column of a JSON Lines or Parquet file, a batch of rows at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, not_installed
from memprof.flows.vocabulary import text as texts
from memprof.flows.vocabulary.sources import get_file_size, open_source
from memprof.flows.vocabulary.tally import COUNTING_ERROR_HANDLER, Tally, UndecodableCounter
from memprof.flows.vocabulary.text import NoTextError, Progress, find_codec

DEFAULT_COLUMN = "text"
MAX_ROW_CHARACTERS = 1 << 26
PARQUET_ROWS = 64  # rows read at a time; row groups are decoded lazily


def read_json_rows(
    path: Path, column: str | None, encoding: str, tally: Tally, progress: Progress
) -> Iterator[list[str]]:
    """Yield the text in `column` of a JSON Lines file, a list of rows at a time; `tally` counts rows without text.
    Raises UsageError: no row has text, or the file cannot be read; NoTextError: the file is empty or binary."""
    column_name = column or DEFAULT_COLUMN
    rows_before = tally.rows
    seen_columns: set[str] = set()
    undecodable = UndecodableCounter(tally, path)
    codec = find_codec(encoding)
    with open_source(path) as (file, tell):
        head = file.peek(4096)
        if not head:
            raise NoTextError("the corpus is empty", value=path, hint="give files with text")
        texts.check_is_text(path, head, encoding)
        lines = io.TextIOWrapper(file, codec, errors=COUNTING_ERROR_HANDLER, newline="\n")
        batch: list[str] = []
        batch_characters = number = num_characters = 0
        while True:
            with undecodable:
                try:
                    line = lines.readline(MAX_ROW_CHARACTERS + 1)
                except UnicodeError as error:
                    raise texts.make_decoding_error(path, encoding, error) from None
            if not line:
                break
            number += 1
            num_characters += len(line)
            if len(line) > MAX_ROW_CHARACTERS:
                raise UsageError(
                    f"a row of more than {MAX_ROW_CHARACTERS >> 20} Mi characters", value=f"{path}, line {number:,}",
                    hint="is it JSON Lines, one object in each line?",
                )  # fmt: skip
            if line.isspace():
                continue
            value = _parse_row(line, column_name, seen_columns, path, number, tally)
            if value is None:
                continue
            tally.rows += 1
            tally.num_bytes += count_bytes(value)
            batch.append(value)
            batch_characters += len(value)
            if batch_characters >= texts.BATCH_BYTES:
                yield batch
                batch, batch_characters = [], 0
                progress(tell())
        lines.detach()
    if undecodable.count > texts.MAX_UNDECODABLE * num_characters:
        raise texts.make_encoding_error(path, encoding, undecodable, num_characters)
    if tally.rows == rows_before:
        columns = ", ".join(sorted(seen_columns)[:8])
        hint = f"give --column: there are {columns}" if columns else "is it JSON Lines, one object in each line?"
        raise UsageError(f"no row has text in the column {column_name!r}", value=path, hint=hint)
    if batch:
        yield batch
    progress(get_file_size(path))


def _parse_row(line: str, column: str, seen_columns: set[str], path: Path, number: int, tally: Tally) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        tally.count_bad_row(path, f"is line {number:,}, which is no JSON")
        return None
    if not isinstance(row, dict):
        tally.count_bad_row(path, f"is line {number:,}, which is no object")
        return None
    value: Any = row.get(column)
    if not isinstance(value, str):
        if len(seen_columns) < 64:
            seen_columns.update(str(key) for key, other in row.items() if isinstance(other, str))
        tally.count_bad_row(path, f"is line {number:,}, without text in {column!r}")
        return None
    # Lone surrogates, valid in JSON, are replaced: tokenizers reject them.
    return value.encode("utf-8", "replace").decode() if "\\ud" in line.lower() else value


def read_parquet_rows(path: Path, column: str | None, tally: Tally, progress: Progress) -> Iterator[list[str]]:
    """Yield the text in `column` of a Parquet file, a batch of rows at a time. Raises UsageError: pyarrow is not
    installed, the file is no Parquet, or has no such column of text; NoTextError: the file has no rows."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise not_installed("Parquet needs pyarrow", path, "pyarrow", ", or write JSON Lines") from None
    column_name = column or DEFAULT_COLUMN
    size = get_file_size(path)
    with open_source(path) as (raw, _):
        try:
            file = pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=1 << 20)
        except (pyarrow.ArrowException, OSError) as error:
            raise UsageError("not a Parquet file", value=path, hint=str(error).splitlines()[0]) from None
        strings = [f.name for f in file.schema_arrow if str(f.type) in ("string", "large_string", "string_view")]
        if column_name not in strings:
            hint = f"give --column: there are {', '.join(strings[:8])}" if strings else "it has no column of text"
            raise UsageError(f"no column of text is called {column_name!r}", value=path, hint=hint)
        num_rows = file.metadata.num_rows
        if not num_rows:
            raise NoTextError("the corpus is empty", value=path, hint="give files with text")
        done = 0
        try:
            for rows in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column_name]):
                values = rows.column(0).to_pylist()
                texts_of_rows = [value for value in values if value is not None]
                for _ in range(len(values) - len(texts_of_rows)):
                    tally.count_bad_row(path, f"is within rows {done + 1:,} to {done + len(values):,}, without text")
                done += len(values)
                tally.rows += len(texts_of_rows)
                tally.num_bytes += sum(map(count_bytes, texts_of_rows))
                yield texts_of_rows
                progress(size * done // num_rows)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise UsageError("the Parquet file is damaged", value=path, hint=str(error).splitlines()[0]) from None


def count_bytes(value: str) -> int:
    """Return the number of bytes of `value` in UTF-8."""
    return len(value) if value.isascii() else len(value.encode())
