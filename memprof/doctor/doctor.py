"""From a log to its diagnoses: `memprof doctor FILE`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import BinaryIO

from memprof.doctor import advice
from memprof.doctor.causes import cause_of
from memprof.doctor.diagnosis import Candidate, Cause, Diagnosis, Figures
from memprof.doctor.dimensions import Dimensions, batch_in, dimensions, find_dimensions, length_in, model_in
from memprof.doctor.log import LogReader, Passage, clean, joined
from memprof.doctor.signatures import SIGNATURES, Signature
from memprof.doctor.tensors import TensorQuery, candidates, requested, roles_in
from memprof.doctor.tracebacks import TracebackFrame, frames, relevant_frames
from memprof.workload.catalog import find_model

# Of these a size, if there is one, is no tensor's.
_WITHOUT_TENSOR = frozenset(
    (Cause.HOST_KILLED, Cause.ENGINE_BUDGET, Cause.KV_CACHE, Cause.SHARED_MEMORY, Cause.LIBRARY_HANDLE, Cause.NOT_KNOWN)
)
_MESSAGE = 1400  # Characters of an error's own words; the longest of torch's has some 900.
_SAME_ERROR_LINES = 8  # A message goes on over so many lines, in which its words may stand again.
MAX_DIAGNOSES = 12


@dataclass(frozen=True, slots=True)
class _Error:
    signature: Signature
    passage: Passage
    message: str
    first_line: str

    @property
    def key(self) -> tuple[str, str]:
        """Return the key of equal errors, which ranks print with different figures."""
        return self.signature.name, self.message[:160]


def diagnose(stream: BinaryIO, name: str, known: advice.ReportedRun | None = None) -> list[Diagnosis]:
    """Return a diagnosis of each error in a log; an error that explains the others is first.

    The log is read once, in pieces; `name` is for error messages. Raises UsageError: the log is no text, or the model
    is not in the catalog.
    """
    known = known or advice.ReportedRun()
    model = find_dimensions(known.model) if known.model else None
    log = LogReader(stream, name)
    found: list[_Error] = []
    counts: Counter[tuple[str, str]] = Counter()
    for error in filter(None, map(_match_error, log.passages())):
        is_near = found and error.passage.line - found[-1].passage.line <= _SAME_ERROR_LINES
        if is_near and _is_same_message(found[-1].signature, error.signature):
            continue
        counts[error.key] += 1
        if counts[error.key] == 1:
            found.append(error)
    ranked = sorted(found, key=lambda error: error.signature.rank)[:MAX_DIAGNOSES]
    return [replace(_explain(error, log.head, known, model), count=counts[error.key]) for error in ranked]


def _is_same_message(earlier: Signature, later: Signature) -> bool:
    """Return whether the later match belongs to the earlier match's message."""
    is_same = later.name == earlier.name or later.cause is earlier.cause
    return later.rank > earlier.rank or (later.rank == earlier.rank and is_same)


def _match_error(passage: Passage) -> _Error | None:
    raw = passage.after.split("\n", 1)[0]
    first_line = clean(raw)
    text = joined(passage.after, 40)[:6000]
    head = len(joined(passage.after, 1))
    for signature in SIGNATURES:
        if not any(word in raw for word in signature.words):
            continue
        searched = first_line if signature.one_line else text
        match = re.search(signature.pattern, searched)
        if match is not None and (match.start() <= head or signature.one_line):
            start = 0 if signature.one_line else match.start()
            return _Error(signature, passage, _cut_next_error(searched[start : start + _MESSAGE]), first_line)
    return None


def _cut_next_error(message: str) -> str:
    """Return the message up to the next error of the same kind."""
    for words in ("Tried to allocate", "Traceback (most recent"):
        again = message.find(words, message.find(words) + 1 if words == "Tried to allocate" else 0)
        if again > 0:
            message = message[:again]
    return message


def _explain(error: _Error, head: str, known: advice.ReportedRun, model: Dimensions | None) -> Diagnosis:
    signature, passage = error.signature, error.passage
    stack = frames(passage)
    where = relevant_frames(stack)
    figures = signature.figures(error.message)
    cause, said = (signature.cause, ()) if signature.cause is not None else cause_of(figures)
    base = Diagnosis(
        cause=cause,
        title="",
        source=signature.source,
        message=_find_error_line(error),
        line=passage.line,
        figures=figures,
        explanation=said,
        where=tuple(str(frame) for frame in where),
    )
    if cause is Cause.DEVICE_MISMATCH:
        from memprof.doctor import mismatch

        met = mismatch.read_mismatch(error.message)
        steps = tuple(mismatch.steps(met, where))
        return replace(base, title=mismatch.title(met), devices=met.devices, steps=steps)
    nearby = head + passage.before[-8192:]
    if model is None and (named := model_in(nearby)) is not None:
        model = dimensions(find_model(named))
    tensors: tuple[Candidate, ...] = ()
    if cause not in _WITHOUT_TENSOR and signature.source != "ggml":  # a buffer of a whole model, cache or graph
        tensors = _find_tensors(figures, model, known, nearby, stack)
    run = replace(known, model=model.model if model else None)
    if model is not None and tensors and len(tensors[0].shape) == 3 and not tensors[0].exact:
        # The rows of the likeliest tensor are the run's.
        batch, length, _ = tensors[0].shape
        run = advice.ReportedRun(model.model, run.batch_size or batch, run.context_length or length)
    return replace(
        base,
        title=_title(cause, figures, tensors),
        tensors=tensors,
        steps=advice.steps(cause, figures, tensors, run, signature.source, nearby + error.message),
    )


def _find_tensors(
    figures: Figures, model: Dimensions | None, known: advice.ReportedRun, nearby: str, stack: list[TracebackFrame]
) -> tuple[Candidate, ...]:
    interval = requested(figures)
    if interval is None:
        return ()
    inner = [str(frame) for frame in stack[-6:]]
    question = TensorQuery(
        *interval,
        model=model,
        half=model.half if model is not None else "bfloat16",
        batch=known.batch_size,
        length=known.context_length,
        hinted=tuple(value for value in (length_in(nearby), batch_in(nearby)) if value),
        roles=roles_in(inner),
        wide=any(word in frame for frame in inner for word in (".float()", "float32", "upcast")),
        held=None if figures.allocated is None else figures.allocated.high,
    )
    return tuple(candidates(question))


def _find_error_line(error: _Error) -> str:
    text = error.first_line.strip()
    at = max(0, text.find(error.message[:20]) - 60)
    return text if len(text) <= 240 else text[at : at + 240] + "..."


def _title(cause: Cause, figures: Figures, tensors: tuple[Candidate, ...]) -> str:
    tried = "" if figures.tried is None else f": {figures.tried.text}"
    total = f" on a device of {figures.total.text}" if tried and figures.total is not None else ""
    role = f", {tensors[0].role}" if tensors and cause is Cause.LARGE_TENSOR else ""
    return f"{cause.headline}{tried}{total}{role}"
