"""Coverage of a corpus, and the memory that a smaller vocabulary saves: the flow behind `memprof vocab`.

CORPUS -count.py-> CorpusCount -caps-> profile, once for each vocabulary -report-> Vocabulary
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from memprof.errors import UsageError
from memprof.findings.lifetimes import Lifetimes
from memprof.fixes.catalog import check_package
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.profile import profile
from memprof.flows.vocabulary.count import WORDS, CorpusCount, count_corpus
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.flows.vocabulary.sources import find_sources
from memprof.ledger.categories import Category
from memprof.ledger.ledger import build_ledger
from memprof.report.documents.report import Report
from memprof.report.documents.vocabulary import (
    ARITHMETIC,
    SCHEMA,
    SIMULATED,
    CapSavings,
    CoveragePoint,
    TokenCap,
    Vocabulary,
    VocabularyMemory,
)
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import HOST, Trace
from memprof.trace.facts import Target
from memprof.units import format_count, parse_count
from memprof.workload.catalog import synthesize

BEFORE = "before"
MAX_CAPS = 6
# Optimizer -> numbers that torch keeps for each parameter, of the parameter's dtype (torch.optim, by their names).
NUM_STATES_BY_OPTIMIZER = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adagrad": 1, "rmsprop": 1, "none": 0}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
DEFAULT_CONTEXT = 2048
_MAX_CURVE_POINTS = 13

Progress = Callable[[str], None]


def read_corpus(
    corpus: Sequence[str | Path], tokenizer: str, *, encoding: str, column: str | None, show: int, progress: Progress
) -> CorpusCount:
    """Return the counts of a corpus; raise UsageError if the corpus has no token; other errors as `count_corpus`."""
    sources = find_sources(corpus, column)
    if any(source.path.suffix.lower() == ".parquet" for source in sources):
        check_package("Parquet", "pyarrow")
    total = sum(source.num_bytes for source in sources)

    def report(done: int) -> None:
        progress("counting: " + (f"{done / total:.0%} of {total / 1e6:,.0f} MB" if total else f"{done / 1e6:,.0f} MB"))

    count = count_corpus(corpus, tokenizer, encoding=encoding, column=column, show=show, progress=report)
    if not count.frequencies.total:
        value = ", ".join(map(str, corpus))
        raise UsageError("there is no token in the corpus", value=value, hint="is there only white space in it?")
    return count


def parse_shares(text: str) -> list[tuple[str, Fraction]]:
    """Parse percentages such as "99,99.9" to pairs (name, share); raise UsageError unless there are one to six."""
    share_by_name = {}
    for part in (part.strip().removesuffix("%") for part in text.split(",") if part.strip()):
        try:
            share = Fraction(part) / 100
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not 0 < share <= 1:
            raise UsageError("--coverage has no percentage in it", value=repr(part), hint="write 99,99.9")
        share_by_name[f"{part}%"] = share
    if not 0 < len(share_by_name) <= MAX_CAPS:
        raise UsageError("--coverage takes one to six percentages", value=repr(text), hint="write 99,99.9")
    return list(share_by_name.items())


def compute_caps(
    counted: CorpusCount, shares: Sequence[tuple[str, Fraction]], requested_cap: int | None = None
) -> tuple[TokenCap, ...]:
    """Return a vocabulary cap for each share of the corpus, and one of `requested_cap` tokens; the largest first."""
    if requested_cap is not None and requested_cap < 1:
        raise UsageError("--cap must be at least 1", value=requested_cap, hint="give a positive whole number")
    frequencies = counted.frequencies
    # The largest share first, also among shares with equal caps.
    sizes = [(name, frequencies.find_cap(share)) for name, share in sorted(shares, key=lambda one: -one[1])]
    if requested_cap is not None:
        sizes.append(("asked", min(requested_cap, frequencies.distinct)))
    sizes.sort(key=lambda size: -size[1])
    return tuple(
        TokenCap(
            name,
            tokens,
            frequencies.count_covered_tokens(tokens),
            frequencies.compute_coverage(tokens),
            tokens + counted.reserved,
        )
        for name, tokens in sizes
    )


def get_uncapped_size(counted: CorpusCount) -> int | None:
    """Return the vocabulary size without a cap: all words of the corpus, or the tokenizer's number of ids."""
    return counted.frequencies.distinct + counted.reserved if counted.tokenizer == WORDS else counted.vocab_size


def check_model(spec: TargetSpec) -> None:
    """Raise MemprofError if the model or GPU does not exist; called before a corpus is read, which may take minutes."""
    from memprof.workload.models import find_source  # imports torch

    find_spec_gpu(spec)
    find_source(spec)


def simulate(spec: TargetSpec, counted: CorpusCount, caps: Sequence[TokenCap], progress: Progress) -> CapSavings:
    """Run the model without and with each vocabulary cap, and return the memory of each run.

    Without a cap, the vocabulary is `spec.vocab_size`; if None, all words of the corpus, or the model's own.
    """
    if spec.vocab_size is None and counted.tokenizer == WORDS:
        spec = spec.edit(vocab_size=get_uncapped_size(counted))

    def run(name: str, spec: TargetSpec) -> tuple[Trace, Report]:
        return profile(spec, lambda message: progress(f"{name}: {message}"))

    trace, document = run(BEFORE, spec)
    target = document.target
    assert target is not None
    rows = target.vocab_size or target.asked_vocab_size
    if rows is None:
        rows = get_uncapped_size(counted)  # the vocabulary of a model factory is unknown
    notes = []
    if counted.highest_id is not None and rows is not None and counted.highest_id >= rows:
        notes.append(
            f"The corpus has the id {counted.highest_id:,} and the model {rows:,} rows: they do not go together."
        )
    before = _build_memory(BEFORE, rows or 0, trace, document)
    capped: list[VocabularyMemory] = []
    for cap in caps:
        if rows is not None and cap.vocab_size >= rows:
            notes.append(f"{cap.name} takes {cap.vocab_size:,} rows, and there are {rows:,}: nothing to save.")
            continue
        if capped and capped[-1].vocab_size == cap.vocab_size:
            capped.append(dataclasses.replace(capped[-1], name=cap.name))
            continue
        trace, document = run(cap.name, spec.edit(vocab_size=cap.vocab_size))
        capped.append(_build_memory(cap.name, cap.vocab_size, trace, document))
    return CapSavings(SIMULATED, _describe_run(target), document.device.name, before, tuple(capped), tuple(notes))


def _build_memory(name: str, rows: int, trace: Trace, document: Report) -> VocabularyMemory:
    ledger = build_ledger(trace)
    loss_storages = (index for index, category in enumerate(ledger.categories) if category is Category.LOGITS_AND_LOSS)
    logits = [index for index in loss_storages if trace.storages[index].device != HOST]
    state = document.model_state
    assert state is not None and document.target is not None
    return VocabularyMemory(
        name=name,
        vocab_size=rows,
        num_parameters=document.target.num_parameters,
        parameters_bytes=state.parameters_bytes,
        gradients_bytes=state.gradients_bytes,
        optimizer_state_bytes=state.optimizer_state_bytes,
        logits_bytes=Lifetimes(ledger).find_max_live(logits).num_bytes,
        peak_bytes=document.peak.allocated_bytes,
        required_bytes=document.verdict.required_bytes,
        fits=document.verdict.fits,
        pages=document.pages,
    )


def _describe_run(target: Target) -> str:
    asked = target.asked
    amp = f" with {asked.amp} autocast" if asked.amp else ""
    message = asked.optimizer if asked.mode is Mode.TRAIN else "inference"
    batch = f"batch {asked.batch_size} x {target.context_length or 0:,} tokens"
    return f"{target.model}, {batch}, {target.dtype}{amp}, {message}"


def estimate_savings(
    params: str | None, counted: CorpusCount, caps: Sequence[TokenCap], spec: TargetSpec
) -> CapSavings:
    """Return the memory without and with each cap by arithmetic: embedding, head, and one copy of the logits.

    Parameters are rows x hidden size, twice if embedding and head are not tied; gradients are as many; optimizer state
    is parameters x `NUM_STATES_BY_OPTIMIZER`; logits are batch x context x rows. All are in `spec.dtype`.

    Args:
        params: a size such as 1.2B, for a model of the shape of Llama (`catalog.synthesize`); None: the width is
            unknown, and only the logits are computed.
        spec: vocabulary before, batch, context, dtype and optimizer; UsageError for other optimizers.
    """
    optimizer, batch_size = spec.optimizer, spec.batch_size
    if optimizer not in NUM_STATES_BY_OPTIMIZER:
        problem = f"the state of {optimizer} is no fixed number for each parameter"
        raise UsageError(problem, value=f"--optimizer {optimizer}", hint="name a model: --model has it simulated")
    dtype = spec.dtype or "bfloat16"
    context = spec.context_length or DEFAULT_CONTEXT
    row_size = num_parameters = others = 0
    notes = ["By arithmetic: rows of embedding and head, and one copy of the logits. A run has more of both."]
    description = f"batch {batch_size} x {context:,} tokens, {dtype}, {optimizer}"
    if params is not None:
        entry = synthesize(parse_count(params))
        config = entry.load_config()
        row_size = config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
        num_parameters = entry.num_parameters
        others = num_parameters - row_size * config["vocab_size"]
        tables = "once: the head is tied" if config["tie_word_embeddings"] else "in embedding and in head"
        description = f"{format_count(num_parameters)} parameters of the shape of Llama, {description}"
        notes.append(f"Hidden size {config['hidden_size']:,}, {tables}; {format_count(others)} parameters beside them.")
    else:
        notes.append("Without --model or --params the width is not known, and the logits are all that can be told.")
    rows = spec.vocab_size or get_uncapped_size(counted) or 0

    def estimate_memory(name: str, vocabulary: int) -> VocabularyMemory:
        count = others + row_size * vocabulary if params is not None else None
        weights = None if count is None else count * DTYPE_BYTES[dtype]
        state = None if weights is None else NUM_STATES_BY_OPTIMIZER[optimizer] * weights
        logits = batch_size * context * vocabulary * DTYPE_BYTES[dtype]
        return VocabularyMemory(name, vocabulary, count, weights, weights, state, logits, None, None, None)

    capped = []
    for cap in caps:
        if cap.vocab_size >= rows:
            notes.append(f"{cap.name} takes {cap.vocab_size:,} rows, and there are {rows:,}: nothing to save.")
        else:
            capped.append(estimate_memory(cap.name, cap.vocab_size))
    return CapSavings(ARITHMETIC, description, None, estimate_memory(BEFORE, rows), tuple(capped), tuple(notes))


def build_vocabulary(
    corpus: tuple[str, ...],
    counted: CorpusCount,
    caps: tuple[TokenCap, ...],
    savings: CapSavings | None,
    version: str,
) -> Vocabulary:
    """Return the document of `memprof vocab` on the counts, caps and savings."""
    frequencies = counted.frequencies
    # Fields that CorpusCount and Vocabulary share.
    shared_fields = {
        field.name: getattr(counted, field.name) for field in dataclasses.fields(counted) if field.name != "frequencies"
    }
    return Vocabulary(
        schema=SCHEMA,
        memprof_version=version,
        command="vocab",
        corpus=corpus,
        tokens=frequencies.total,
        distinct=frequencies.distinct,
        once=dict(frequencies.histogram).get(1, 0),
        curve=build_curve(frequencies),
        caps=caps,
        savings=savings,
        **shared_fields,
    )


def build_curve(frequencies: Frequencies, points: int = _MAX_CURVE_POINTS) -> tuple[CoveragePoint, ...]:
    """Return the coverage by the most frequent 1, 2, 5, 10, ... tokens (the last `points` of these), and by all."""
    distinct = frequencies.distinct
    if not distinct:
        return ()
    round_numbers = [lead * 10**power for power in range(len(str(distinct))) for lead in (1, 2, 5)]
    shown = [tokens for tokens in round_numbers if tokens < distinct][-(points - 1) :]
    return tuple(CoveragePoint(tokens, frequencies.compute_coverage(tokens)) for tokens in [*shown, distinct])
