"""The recommended configuration for a data set, and the probability that larger batches run out of memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from memprof.flows.recommend.lengths import read_lengths
from memprof.flows.recommend.oom_probability import build_length_row, cut_lengths
from memprof.flows.recommend.recommendation import recommend
from memprof.flows.recommend.search import PlanRun, Search, SearchRequest
from memprof.report.documents.recommendation import DataLoaderRun, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.lengths import is_distribution

MAX_ROWS = 4  # micro-batch sizes examined, each by several runs
MAX_SAMPLES = 10_000  # of a data set, evenly spaced by length, for a run over many batches


def recommend_for_dataset(
    spec: TargetSpec,
    request: SearchRequest,
    progress: Callable[[str], None],
    source: str,
    column: str | None = None,
    batches: int | None = None,
) -> Recommendation:
    """Return the configuration for the longest sequence of `source`, and how likely larger micro-batches fail.

    Sequences are truncated to the context length of `spec`, if given. With `batches`, the configuration is then run
    over this number of batches of the data: reserved memory depends on how the batches differ.
    """
    lengths, read = cut_lengths(*read_lengths(source, column), spec.context_length)
    spec = spec.edit(context_length=read.longest)
    recommendation, search, result = recommend(spec, request, progress)
    run = result.chosen or result.leanest
    assert run is not None
    if request.micro_batch is not None:
        sizes = [request.micro_batch]
    else:
        chosen = run.micro_batch
        sizes = [chosen, *(size for size in (2 * chosen, 4 * chosen, 8 * chosen) if size <= read.count)][:MAX_ROWS]
    rows = tuple(build_length_row(search, run, lengths, size, read.context_length) for size in sizes)
    batches_run = None
    if batches is not None and result.chosen is not None:
        longest_first = lengths[::-1][:: -(-len(lengths) // MAX_SAMPLES)]
        samples = source if is_distribution(source) else json.dumps(longest_first)
        batches_run = _run_batches(search, result.chosen, samples, batches)
    return dataclasses.replace(
        recommendation, lengths=dataclasses.replace(read, rows=rows, stream=batches_run), runs=len(search.simulator)
    )


def _run_batches(search: Search, run: PlanRun, samples: str, batches: int) -> DataLoaderRun:
    spec = run.plan.make_spec(search.base_spec.edit(lengths=samples), run.micro_batch, run.accumulation)
    steps = -(-batches // spec.gradient_accumulation)
    outcome = search.simulator.run(spec.edit(steps=steps), f"{batches:,} batches of the data", run.accumulation)
    batch_memory = outcome.batches
    return DataLoaderRun(
        batches=steps * spec.gradient_accumulation,
        fits=outcome.fits,
        oom_stage=outcome.oom_stage,
        alloc_conf=outcome.spec.alloc_conf,
        reserved=() if batch_memory is None else batch_memory.reserved,
    )
