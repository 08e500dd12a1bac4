"""Diagnoses of the errors in a log: `memprof doctor FILE`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import BinaryIO

from memprof.doctor.advice import list_advice
from memprof.doctor.causes import find_cause, find_outside_size
from memprof.doctor.diagnosis import Candidate, Cause, Diagnosis
from memprof.doctor.dimensions import (
    Dimensions,
    find_batch_size,
    find_dimensions,
    find_model_name,
    find_seq_length,
    get_dimensions,
)
from memprof.doctor.engine_starts import read_engine_start
from memprof.doctor.engines import EngineError, find_engine
from memprof.doctor.engines.engine import find_cause_of_part
from memprof.doctor.log import LogReader
from memprof.doctor.log_lines import Passage, clean_line, join_lines
from memprof.doctor.reported_run import ReportedRun, find_arguments
from memprof.doctor.signature import Signature
from memprof.doctor.signatures import SIGNATURES
from memprof.doctor.tensors import TensorQuery, find_candidates, find_request_range, find_roles
from memprof.doctor.torch_advice import FailedAllocation
from memprof.doctor.tracebacks import TracebackFrame, choose_frames, find_script, read_frames
from memprof.serving.budget import EngineBudget
from memprof.workload.catalog import find_model

# Causes whose sizes are not those of a tensor.
_CAUSES_WITHOUT_TENSOR = frozenset(
    (
        Cause.HOST_KILLED, Cause.ENGINE_BUDGET, Cause.ENGINE_BATCH, Cause.KV_CACHE, Cause.WEIGHTS, Cause.SHARED_MEMORY,
        Cause.LIBRARY_HANDLE, Cause.NOT_KNOWN,
    )
)  # fmt: skip
# Sources whose requests are buffers of a whole model, cache, graph or program, or of a framework other than torch.
_SOURCES_WITHOUT_TENSOR = frozenset(("ggml", "XLA", "TensorFlow", "TensorRT-LLM"))
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
        """Return a key that is equal for the same error on several ranks, whose messages differ in sizes."""
        return self.signature.name, self.message[:160]


def diagnose(stream: BinaryIO, name: str, options: ReportedRun | None = None) -> list[Diagnosis]:
    """Return the diagnoses of the errors in a log, root causes first; as `diagnose_log` does."""
    return diagnose_log(stream, name, options)[0]


def diagnose_log(
    stream: BinaryIO, name: str, options: ReportedRun | None = None
) -> tuple[list[Diagnosis], EngineBudget | None]:
    """Return the diagnoses of the errors in a log, root causes first, and what an engine printed of its start.

    The log is read once, in chunks; error messages call it `name`. `options` are those of the failed run, as far as the
    user gives them. Raises UsageError: the log is not text, or the model is not in the catalog.
    """
    options = options or ReportedRun()
    model = find_dimensions(options.model) if options.model else None
    log = LogReader(stream, name)
    errors: list[_Error] = []
    counts: Counter[tuple[str, str]] = Counter()
    for error in filter(None, map(_match_error, log.read_passages())):
        is_adjacent = errors and error.passage.line - errors[-1].passage.line <= _SAME_ERROR_LINES
        if is_adjacent and _is_same_message(errors[-1].signature, error.signature):
            continue
        counts[error.key] += 1
        if counts[error.key] == 1:
            errors.append(error)
    by_priority = sorted(errors, key=lambda error: error.signature.priority)[:MAX_DIAGNOSES]
    diagnoses = [replace(_explain(error, log.head, options, model), count=counts[error.key]) for error in by_priority]
    budget = read_engine_start(log.start_text)
    if budget is not None and diagnoses:
        budget = replace(budget, refusal=diagnoses[0].title, changes=())
    return diagnoses, budget


def _is_same_message(earlier: Signature, later: Signature) -> bool:
    """Return whether two signatures that match adjacent lines belong to the same message."""
    has_same_type = later.name == earlier.name or later.cause is earlier.cause
    return later.priority > earlier.priority or (later.priority == earlier.priority and has_same_type)


def _match_error(passage: Passage) -> _Error | None:
    raw_line = passage.text_after.split("\n", 1)[0]
    first_line = clean_line(raw_line)
    joined_text = join_lines(passage.text_after, 40)[:6000]
    first_line_length = len(join_lines(passage.text_after, 1))
    for signature in SIGNATURES:
        if not any(word in raw_line for word in signature.words):
            continue
        searched_text = first_line if signature.is_one_line else joined_text
        match = re.search(signature.pattern, searched_text)
        if match is not None and (match.start() <= first_line_length or signature.is_one_line):
            start = 0 if signature.is_one_line else match.start()
            return _Error(signature, passage, _cut_next_error(searched_text[start : start + _MAX_MESSAGE]), first_line)
    return None


def _cut_next_error(message: str) -> str:
    """Return the beginning of `message`, up to the next error or traceback in it."""
    for phrase in ("Tried to allocate", "Traceback (most recent"):
        next_error = message.find(phrase, message.find(phrase) + 1 if phrase == "Tried to allocate" else 0)
        if next_error > 0:
            message = message[:next_error]
    return message


def _explain(error: _Error, head: str, options: ReportedRun, model: Dimensions | None) -> Diagnosis:
    signature, passage = error.signature, error.passage
    frames = read_frames(passage)
    relevant_frames = choose_frames(frames)
    sizes = signature.get_sizes(error.message)
    sizes = replace(sizes, outside=find_outside_size(sizes))
    cause, explanation = (signature.cause, ()) if signature.cause is not None else find_cause(sizes)
    result = Diagnosis(
        cause=cause,
        title="",
        source=signature.source,
        message=_find_error_line(error),
        line=passage.line,
        figures=sizes,
        explanation=explanation,
        where=tuple(str(frame) for frame in relevant_frames),
    )
    if cause is Cause.DEVICE_MISMATCH:
        from memprof.doctor import mismatch

        details = mismatch.read_mismatch(error.message)
        steps = tuple(mismatch.list_advice(details, relevant_frames))
        return replace(result, title=mismatch.format_title(details), devices=details.devices, steps=steps)
    log_text = _find_text_before(head, passage)
    engine_error = _find_engine_error(error, result, frames, log_text + passage.text_after)
    if engine_error is not None:
        name = engine_error.engine.name
        source = name if name == signature.source else f"{signature.source} in {name}"
        result = replace(result, cause=engine_error.cause, source=source, engine=engine_error.figures)
    if model is None and (model_name := find_model_name(log_text)) is not None:
        model = get_dimensions(find_model(model_name))
    candidates: tuple[Candidate, ...] = ()
    if result.cause not in _CAUSES_WITHOUT_TENSOR and signature.source not in _SOURCES_WITHOUT_TENSOR:
        candidates = _find_tensors(result, model, options, log_text, frames)
    run = _describe_run(options, model, candidates, frames, log_text)
    failed = FailedAllocation(sizes, candidates, run, frames, log_text + error.message)
    engine_steps = None if engine_error is None else engine_error.list_advice()
    return replace(
        result,
        title=_build_title(result, candidates),
        tensors=candidates,
        steps=list_advice(result.cause, signature.source, failed, engine_steps),
    )


def _find_engine_error(
    error: _Error, diagnosis: Diagnosis, frames: list[TracebackFrame], log: str
) -> EngineError | None:
    """Return what `log` says of the error if it is one of an inference engine, else None."""
    signature = error.signature
    engine = find_engine(signature.source, frames, error.passage.text_after.split("\n", 1)[0], log)
    if engine is None:
        return None
    figures = engine.read_figures(error.message, log)
    cause = find_cause_of_part(figures.part, diagnosis.cause)
    stage = engine.find_stage(frozenset(frame.function.rpartition(".")[2] for frame in frames))
    return EngineError(engine, cause, signature.name, diagnosis.figures, figures, log, stage)


def _describe_run(
    options: ReportedRun,
    model: Dimensions | None,
    candidates: tuple[Candidate, ...],
    frames: list[TracebackFrame],
    log_text: str,
) -> ReportedRun:
    """Return the failed run: by `options`, and where these are silent by the likeliest tensor and the traceback."""
    run = replace(options, model=model.model if model else None)
    if model is not None and candidates and len(candidates[0].shape) == 3 and not candidates[0].exact:
        batch, length, _ = candidates[0].shape
        run = replace(run, batch_size=run.batch_size or batch, context_length=run.context_length or length)
    if (script := find_script(frames)) is not None:
        run = replace(run, script=script, arguments=find_arguments(script, log_text))
    return run


def _find_text_before(head: str, passage: Passage) -> str:
    """Return the beginning of the log, up to the error if that is in it, else with the text before the error."""
    nearest = passage.text_before[-2048:]
    start = head.find(nearest + passage.text_after[:256])
    return head + passage.text_before[-8192:] if start < 0 else head[: start + len(nearest)]


def _find_tensors(
    diagnosis: Diagnosis, model: Dimensions | None, run: ReportedRun, log_text: str, frames: list[TracebackFrame]
) -> tuple[Candidate, ...]:
    sizes = diagnosis.figures
    engine_batch = None if diagnosis.engine is None else diagnosis.engine.batch
    byte_range = find_request_range(sizes)
    if byte_range is None:
        return ()
    inner_frames = [str(frame) for frame in frames[-6:]]
    query = TensorQuery(
        *byte_range,
        model=model,
        half_dtype=model.half_dtype if model is not None else "bfloat16",
        batch=run.batch_size,
        length=run.context_length,
        logged_numbers=tuple(filter(None, (find_seq_length(log_text), find_batch_size(log_text), engine_batch))),
        roles=find_roles(inner_frames),
        mentions_float32=any(word in frame for frame in inner_frames for word in (".float()", "float32", "upcast")),
        allocated_bytes=None if sizes.allocated is None else sizes.allocated.high,
    )
    return tuple(find_candidates(query))


def _find_error_line(error: _Error) -> str:
    text = error.first_line.strip()
    start = max(0, text.find(error.message[:20]) - 60)
    return text if len(text) <= 240 else text[start : start + 240] + "..."


def _build_title(diagnosis: Diagnosis, candidates: tuple[Candidate, ...]) -> str:
    cause, sizes, engine = diagnosis.cause, diagnosis.figures, diagnosis.engine
    more = " more were requested" * (cause in (Cause.GPU_FULL, Cause.FRAGMENTATION, Cause.OTHER_PROCESSES))
    request = "" if sizes.tried is None else f": {sizes.tried.text}{more}"
    capacity = f" on a GPU of {sizes.total.text}" if request and sizes.total is not None else ""
    if engine is not None and engine.part and engine.part.lower() not in cause.headline.lower():
        request = f" ({engine.part}){request}"
    role = ""
    if candidates and cause is Cause.LARGE_TENSOR:
        first = candidates[0]
        role = f", {'perhaps ' if first.is_guess and not first.in_traceback else ''}{first.role}"
    return f"{cause.headline}{request}{capacity}{role}"
