"""The configuration for a data set: sized for its longest sequences, and what others would risk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from memprof.flows.recommend.foretell import cut, length_row
from memprof.flows.recommend.lengths import read_lengths
from memprof.flows.recommend.search import Question, recommend
from memprof.report.documents.recommendation import Recommendation
from memprof.spec import TargetSpec

MAX_ROWS = 4
"""Micro-batches that are looked at, each of several runs."""


def recommend_for_data(
    spec: TargetSpec, question: Question, progress: Callable[[str], None], file: Path, column: str | None = None
) -> Recommendation:
    """`search.recommend` at the longest sequence of `file`, and the odds at its micro-batch and larger ones.

    Sequences are cut to the context length of `spec`, if it has one.

    Raises:
        UsageError: the file has no lengths.
    """
    lengths, read = cut(*read_lengths(file, column), spec.context_length)
    spec = spec.edit(context_length=read.longest)
    answer, search, found = recommend(spec, question, progress)
    tried = found.chosen or found.least
    assert tried is not None
    if question.micro_batch is not None:
        sizes = [question.micro_batch]
    else:
        safe = tried.micro_batch
        sizes = [safe, *(size for size in (2 * safe, 4 * safe, 8 * safe) if size <= read.count)][:MAX_ROWS]
    rows = tuple(length_row(search, tried, lengths, size, read.context_length) for size in sizes)
    return dataclasses.replace(answer, lengths=dataclasses.replace(read, rows=rows), runs=len(search.runs))
