"""Diagnoses of the errors in a log: `memprof doctor FILE`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import BinaryIO

from memprof.doctor import advice
from memprof.doctor.causes import find_cause
from memprof.doctor.diagnosis import Candidate, Cause, Diagnosis, MessageSizes
from memprof.doctor.dimensions import (
    Dimensions,
    find_batch_size,
    find_dimensions,
    find_length,
    find_model_name,
    get_dimensions,
)
from memprof.doctor.log import LogReader, Passage, clean_line, join_lines
from memprof.doctor.signatures import SIGNATURES, Signature
from memprof.doctor.tensors import TensorQuery, find_candidates, find_request_range, find_roles
from memprof.doctor.tracebacks import TracebackFrame, choose_frames, read_frames
from memprof.workload.catalog import find_model

# Causes whose sizes are not those of a tensor.
_CAUSES_WITHOUT_TENSOR = frozenset(
    (Cause.HOST_KILLED, Cause.ENGINE_BUDGET, Cause.KV_CACHE, Cause.SHARED_MEMORY, Cause.LIBRARY_HANDLE, Cause.NOT_KNOWN)
)
_MAX_MESSAGE = 1400  # Characters of a message; torch's longest has about 900.
_SAME_ERROR_LINES = 8  # Lines within which matches may belong to the same message.
MAX_DIAGNOSES = 12


@dataclass(frozen=True, slots=True)
class _Error:
    signature: Signature
    passage: Passage
    message: str
    first_line: str

    @property
    def key(self) -> tuple[str, str]:
        """Return the key by which errors count as equal: ranks print the same error with different sizes."""
        return self.signature.name, self.message[:160]


def diagnose(stream: BinaryIO, name: str, reported: advice.ReportedRun | None = None) -> list[Diagnosis]:
    """Return the diagnoses of the errors in a log, the error that explains the others first.

    The log is read once, in chunks; `name` is for error messages. Raises UsageError: the log is no text, or the model
    is not in the catalog.
    """
    reported = reported or advice.ReportedRun()
    model = find_dimensions(reported.model) if reported.model else None
    log = LogReader(stream, name)
    found: list[_Error] = []
    counts: Counter[tuple[str, str]] = Counter()
    for error in filter(None, map(_match_error, log.read_passages())):
        is_near = found and error.passage.line - found[-1].passage.line <= _SAME_ERROR_LINES
        if is_near and _is_same_message(found[-1].signature, error.signature):
            continue
        counts[error.key] += 1
        if counts[error.key] == 1:
            found.append(error)
    ranked = sorted(found, key=lambda error: error.signature.priority)[:MAX_DIAGNOSES]
    return [replace(_explain(error, log.head, reported, model), count=counts[error.key]) for error in ranked]


def _is_same_message(earlier: Signature, later: Signature) -> bool:
    """Return whether two adjacent matches belong to the same message."""
    is_same = later.name == earlier.name or later.cause is earlier.cause
    return later.priority > earlier.priority or (later.priority == earlier.priority and is_same)


def _match_error(passage: Passage) -> _Error | None:
    raw = passage.after.split("\n", 1)[0]
    first_line = clean_line(raw)
    text = join_lines(passage.after, 40)[:6000]
    head = len(join_lines(passage.after, 1))
    for signature in SIGNATURES:
        if not any(word in raw for word in signature.words):
            continue
        searched = first_line if signature.is_one_line else text
        match = re.search(signature.pattern, searched)
        if match is not None and (match.start() <= head or signature.is_one_line):
            start = 0 if signature.is_one_line else match.start()
            return _Error(signature, passage, _cut_next_error(searched[start : start + _MAX_MESSAGE]), first_line)
    return None


def _cut_next_error(message: str) -> str:
    """Return the message up to the next error in the text."""
    for words in ("Tried to allocate", "Traceback (most recent"):
        again = message.find(words, message.find(words) + 1 if words == "Tried to allocate" else 0)
        if again > 0:
            message = message[:again]
    return message


def _explain(error: _Error, head: str, reported: advice.ReportedRun, model: Dimensions | None) -> Diagnosis:
    signature, passage = error.signature, error.passage
    stack = read_frames(passage)
    where = choose_frames(stack)
    figures = signature.figures(error.message)
    cause, said = (signature.cause, ()) if signature.cause is not None else find_cause(figures)
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
        steps = tuple(mismatch.list_advice(met, where))
        return replace(base, title=mismatch.format_title(met), devices=met.devices, steps=steps)
    nearby = head + passage.before[-8192:]
    if model is None and (named := find_model_name(nearby)) is not None:
        model = get_dimensions(find_model(named))
    tensors: tuple[Candidate, ...] = ()
    if cause not in _CAUSES_WITHOUT_TENSOR and signature.source != "ggml":  # a buffer of a whole model, cache or graph
        tensors = _find_tensors(figures, model, reported, nearby, stack)
    run = replace(reported, model=model.model if model else None)
    if model is not None and tensors and len(tensors[0].shape) == 3 and not tensors[0].exact:
        # Batch and length of the likeliest tensor are taken for those of the run.
        batch, length, _ = tensors[0].shape
        run = advice.ReportedRun(model.model, run.batch_size or batch, run.context_length or length)
    return replace(
        base,
        title=_build_title(cause, figures, tensors),
        tensors=tensors,
        steps=advice.list_advice(cause, figures, tensors, run, signature.source, nearby + error.message),
    )


def _find_tensors(
    figures: MessageSizes, model: Dimensions | None, run: advice.ReportedRun, nearby: str, stack: list[TracebackFrame]
) -> tuple[Candidate, ...]:
    interval = find_request_range(figures)
    if interval is None:
        return ()
    inner = [str(frame) for frame in stack[-6:]]
    query = TensorQuery(
        *interval,
        model=model,
        half_dtype=model.half_dtype if model is not None else "bfloat16",
        batch=run.batch_size,
        length=run.context_length,
        logged_numbers=tuple(value for value in (find_length(nearby), find_batch_size(nearby)) if value),
        roles=find_roles(inner),
        mentions_float32=any(word in frame for frame in inner for word in (".float()", "float32", "upcast")),
        allocated_bytes=None if figures.allocated is None else figures.allocated.high,
    )
    return tuple(find_candidates(query))


def _find_error_line(error: _Error) -> str:
    text = error.first_line.strip()
    at = max(0, text.find(error.message[:20]) - 60)
    return text if len(text) <= 240 else text[at : at + 240] + "..."


def _build_title(cause: Cause, figures: MessageSizes, tensors: tuple[Candidate, ...]) -> str:
    tried = "" if figures.tried is None else f": {figures.tried.text}"
    total = f" on a device of {figures.total.text}" if tried and figures.total is not None else ""
    role = f", {tensors[0].role}" if tensors and cause is Cause.LARGE_TENSOR else ""
    return f"{cause.headline}{tried}{total}{role}"
