"""The configuration for a data set: sized for its longest sequences, and what others would risk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from memprof.flows.recommend.answer import recommend
from memprof.flows.recommend.lengths import read_lengths
from memprof.flows.recommend.odds import cut_lengths, length_row
from memprof.flows.recommend.search import Question, Search, Tried
from memprof.report.documents.recommendation import ChosenOverBatches, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.lengths import is_distribution

MAX_ROWS = 4  # micro-batches that are looked at, each of several runs
MOST_SAMPLES = 10_000  # of a data set, in equal distances by length, for a run over batches of them


def recommend_for_data(
    spec: TargetSpec,
    question: Question,
    progress: Callable[[str], None],
    source: str,
    column: str | None = None,
    batches: int | None = None,
) -> Recommendation:
    """Find the configuration at the longest sequence of `source`, and the odds at its micro-batch and larger ones.

    Sequences are cut to the context length of `spec`, if it has one. What was found at the longest is then run over so
    many `batches`, if that is given: what is reserved over them depends on how they differ.
    """
    lengths, read = cut_lengths(*read_lengths(source, column), spec.context_length)
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
    stream = None
    if batches is not None and found.chosen is not None:
        longest_first = lengths[::-1][:: -(-len(lengths) // MOST_SAMPLES)]
        samples = source if is_distribution(source) else json.dumps(longest_first)
        stream = _stream(search, found.chosen, samples, batches)
    return dataclasses.replace(
        answer, lengths=dataclasses.replace(read, rows=rows, stream=stream), runs=len(search.runs)
    )


def _stream(search: Search, tried: Tried, samples: str, batches: int) -> ChosenOverBatches:
    spec = tried.plan.spec(search.base.edit(lengths=samples), tried.micro_batch, tried.accumulation)
    steps = -(-batches // spec.gradient_accumulation)
    outcome = search.runs.run(spec.edit(steps=steps), f"{batches:,} batches of the data", tried.accumulation)
    over = outcome.batches
    return ChosenOverBatches(
        batches=steps * spec.gradient_accumulation,
        fits=outcome.fits,
        oom_stage=outcome.oom_stage,
        alloc_conf=outcome.spec.alloc_conf,
        reserved=() if over is None else over.reserved,
    )
