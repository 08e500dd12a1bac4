"""The verdict on a run as text for a terminal: whether it fits, what it needs, and where it runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.allocator.replay import UNLIMITED_BYTES
from memprof.findings import Finding, Severity
from memprof.findings.exhaustion import Growth
from memprof.ledger.batches import may_be_larger
from memprof.ledger.caught_errors import CaughtError
from memprof.ledger.stage_amounts import describe_unusable
from memprof.ledger.stages import EVALUATION_PREFIX, OWN_CODE, SETUP, describe_name
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import choose_unit
from memprof.report.terminal.console import dim, make_section
from memprof.report.terminal.heading import has_own_exit_code
from memprof.report.terminal.limit import format_limit
from memprof.report.terminal.peak import get_uncertain_peak
from memprof.report.terminal.stage_names import describe_moment, describe_stage
from memprof.report.terminal.stages import MIN_HOST_BYTES
from memprof.trace.events import NOT_SIMULATED, FailureKind, PhaseKind, short_source
from memprof.trace.facts import DeviceFacts
from memprof.units import format_bytes

_WORST_STEPS = 2  # that --worst-batch gives the largest batch
_FIRST_STEPS = 2  # without a number where memory runs out
_MAX_SHARE_OF_TENSORS = 0.8  # Of what is reserved: below it, both are told.


def render_answer(document: Report) -> RenderableType:
    """Return what `--quiet` prints: the verdict, or of a search its result."""
    if document.limit is not None:
        return Text(format_limit(document.limit))
    return Group(*render_certain_errors(document), render_verdict(document))


def render_verdict(document: Report, *, is_short: bool = False) -> RenderableType:
    """Return the verdict on a run: whether it fits, what it needs, and torch's message on running out of memory.

    If `is_short`, it has neither this message nor the parts of what a run needs that does not fit.
    """
    verdict = _render_memory_verdict(document, is_short=is_short)
    if document.program is None or not has_own_exit_code(document.program):
        return verdict
    code = f"The exit code {document.program.exit_code} is the script's own"
    note = Text(f"{code}, and says nothing of memory: the script left with it.")
    return Group(verdict, note)


def _render_memory_verdict(document: Report, *, is_short: bool) -> RenderableType:
    verdict, device = document.verdict, document.device
    if document.on_cpu:
        resident = max((row.resident_bytes for row in document.stages if row.resident_bytes), default=None)
        process = "" if resident is None else f"; the process had up to {format_bytes(resident)} resident"
        peak = format_bytes(document.peak.allocated_bytes)
        usage = f"tensors took up to {peak} of host memory{process}."
        if document.failure is None:
            return Text(f"Measured: {usage}")
        reason = f"the run stopped in {document.failure.phase} with {document.failure.error}; until then {usage}"
        return _label("Failed", "bold red", reason)
    suffix = next((f" on {gpu.device}" for gpu in document.gpus if gpu.decides), "")
    suffix = next((f" on rank {row.rank}" for row in document.ranks if row.decides), suffix)
    need = f"{_describe_need(document)}{suffix}"
    if document.failure is not None:
        failure = document.failure
        fit_note, rest = "." if verdict.fits is None else ", which does not fit.", "The rest is not known."
        if failure.kind == FailureKind.REFUSED:
            label, reason = "Refused", f"{failure.message.removeprefix('not yet: ')}. What was simulated needs {need}"
        elif failure.kind == FailureKind.OTHER_RANK:
            label, reason = "Stopped", f"{failure.message}. It needed {need} until then"
        elif failure.kind in NOT_SIMULATED:
            cause = failure.error if failure.op is None else f"{failure.op} ({failure.error})"
            reason = f"the run stopped in {failure.phase}, at {cause}"
            label, reason = "Not simulated", f"{reason}. It needed {need} until then"
        else:
            reason = f"the run stopped in {failure.phase}, with {failure.error}"
            label, reason = "Failed", f"{reason}; it needed {need} until then"
            rest = ""
        return _label(label, "bold red", f"{reason}{fit_note} {rest}".rstrip())
    if verdict.fits is None:
        text = f"it was stopped before a training step had ended, or a model been called; it needed {need} until then."
        return _label("Not known", "bold yellow", f"{text} Give it more time.")
    context_bytes = document.peak.device_used_bytes - document.peak.reserved_bytes  # the context
    usable_bytes = (device.total_bytes or 0) - context_bytes if device.resident_bytes is None else device.resident_bytes
    spare_bytes = usable_bytes - (verdict.required_bytes - context_bytes)
    if verdict.growth is not None and verdict.growth.runs_out and not verdict.host_over_bytes:
        return _render_exhaustion(verdict.growth, () if is_short else document.findings, need)
    if verdict.fits and verdict.first_caught is not None:
        return _render_fit_after_errors(document, verdict.first_caught, need, spare_bytes)
    if verdict.fits and document.paged_bytes:
        return _render_paging(document, need)
    if verdict.fits and not verdict.retries and spare_bytes >= 0:
        return _render_fit(document, need, spare_bytes, usable_bytes).append(_format_growth(verdict.growth))
    if verdict.fits:
        reason = f"{_describe_retries(verdict.retries)}. Without that it would need {need}"
        most_bytes = get_uncertain_peak(document)
        unseen = next(_list_unseen(document), None)
        reason += "" if unseen is None else f"; {unseen}"
        reason += f"; {_describe_uncertainty(most_bytes + context_bytes)}" if most_bytes > usable_bytes else "."
        label = "Fits, with allocator retries" if unseen is None else "Fits so far, with allocator retries"
        return _label(label, "bold yellow", reason).append(_format_growth(verdict.growth))
    if verdict.host_over_bytes and verdict.oom_stage is None:
        fit_note = f"{format_bytes(verdict.host_over_bytes)} more than there is of it (--host-memory)"
        usage = f"{format_bytes(document.host_peak_bytes)} are held in host memory, {fit_note}"
        return _label("Does not fit", "bold red", f"{usage}. Of the GPU it needs {need}.")
    where = describe_moment(document, verdict.oom_stage or "", verdict.oom_step or 0)
    was_refused = document.program is not None and document.program.ended == "refused"
    # What comes after a refused allocation is not known.
    need_intro = "It needs at least" if was_refused else "It needs"
    tried, used = (format_bytes(size or 0) for size in (verdict.tried_to_allocate_bytes, verdict.in_use_bytes))
    num_caught = verdict.out_of_memory_caught
    caught_note = f" Before that {_describe_errors(num_caught)}, and the script went on without what it had requested."
    caught_note *= bool(num_caught)
    required_bytes, total_bytes = verdict.required_bytes, device.total_bytes or 0
    if is_short and verdict.max_buffer_bytes is None:
        at_least = " at least" * was_refused
        size = f"{at_least} {format_bytes(required_bytes)}{suffix}; the GPU has {format_bytes(total_bytes)}"
        causes = [finding.id for finding in document.findings if finding.is_decisive]
        if was_refused and causes[:1] in (["memory-growth"], ["evaluation-accumulates"]):
            size = f" more than the {format_bytes(total_bytes)} of the GPU{suffix}, and more the longer it runs"
        if required_bytes > total_bytes and format_bytes(required_bytes) == format_bytes(total_bytes):
            size = f" more than the {format_bytes(total_bytes)} of the GPU{suffix}"
        place = _describe_place(document)
        return _label("Does not fit", "bold red", f"out of memory {place}. It needs{size}.{caught_note}")
    if required_bytes > total_bytes and format_bytes(required_bytes) == format_bytes(total_bytes):
        need += f", {format_bytes(required_bytes - total_bytes)} more than the GPU has"
    else:
        need += f"; the GPU has {format_bytes(total_bytes)}"
    used += f" in use{_describe_waste(document, usable_bytes)}"
    text = f"a real GPU runs out of memory in {where}, when it tries to allocate {tried} with {used}."
    if verdict.max_buffer_bytes is not None:
        limit = format_bytes(verdict.max_buffer_bytes)
        text = f"Metal refuses a tensor of {tried} in {where}: its buffers are below {limit}."
    view = _label("Does not fit", "bold red", f"{text} {need_intro} {need}.{caught_note}")
    if is_short:
        return view
    message = (verdict.oom_message or "").partition(" If reserved ")
    view.append(f" torch {'said' if was_refused else 'would say'}:")
    return make_section(view, dim(message[0] + (" ..." if message[1] else "")))


def _describe_place(document: Report) -> str:
    """Return where memory runs out: in a script the line of its own code, then the stage. Code outside modules is named
    by that line alone; that of an evaluation, which may have no loss, by the library's function that it calls.

    The first steps have no number: a program may count them from 0, or make one before its loop. Without an optimizer,
    none has.
    """
    verdict = document.verdict
    stage, step = verdict.oom_stage or "", verdict.oom_step or 0
    sources = [] if verdict.oom_source is None else [verdict.oom_source, *verdict.oom_callers]
    own = [source for source in sources if not Path(source).is_absolute()]  # as files of libraries are
    if document.program is None or not own:
        return f"in {describe_moment(document, stage, step)}"
    line, function = short_source(own[-1]), own[-1].rpartition(" ")[2]
    place = f"at {line}{f' in {function}()' * function.isidentifier()}"
    has_optimizer = any(row.kind in (PhaseKind.OPTIMIZER_STEP, PhaseKind.ZERO_GRAD) for row in document.stages)
    told_step = step if step > _FIRST_STEPS and has_optimizer else 0
    if stage in OWN_CODE:
        return f"{place}{f', in step {step}' * bool(told_step)}"
    if describe_name(stage) == SETUP:  # of a model, perhaps beside one that was trained
        return f"{place}{f', after step {step - 1}' * (told_step > 0)}"
    if not stage.startswith(EVALUATION_PREFIX):
        return f"{place}, in {describe_stage(_find_module(document) or stage, told_step)}"
    plain_stage = stage.removeprefix(EVALUATION_PREFIX)
    if plain_stage == "loss" and sources[0] not in own:
        return f"{place}, in {sources[0].rpartition(' ')[2]} ({short_source(sources[0])})"
    is_outside = plain_stage in (*OWN_CODE, "loss")
    return f"{place}, in {'the evaluation' if is_outside else describe_stage(_find_module(document) or stage, 0)}"


def _find_module(document: Report) -> str:
    """Return the module of a model's list, such as a layer, in which memory runs out, with the prefix of an evaluation;
    "" outside of these."""
    row = next((row for row in document.stages if row.oom and row.stack), None)
    if row is None:
        return ""
    prefix = EVALUATION_PREFIX * row.name.startswith(EVALUATION_PREFIX)
    return f"{prefix}module {row.stack}.{row.index}"


def _describe_waste(document: Report, usable_bytes: int) -> str:
    """Return what is cached and no use to the failed allocation, where tensors leave room for it."""
    verdict = document.verdict
    in_use_bytes, reserved_bytes = verdict.in_use_bytes or 0, verdict.reserved_bytes or 0
    tried_bytes = verdict.tried_to_allocate_bytes or 0
    has_room = in_use_bytes + tried_bytes <= usable_bytes
    wasted_bytes = reserved_bytes - in_use_bytes
    is_told = has_room and wasted_bytes > 0  # none where the program has set a lower limit
    return f" and {format_bytes(wasted_bytes)} cached {describe_unusable(tried_bytes)}" if is_told else ""


def _render_paging(document: Report, need: str) -> Text:
    """Return the verdict on a run that fits the allocator's limit, and not the memory that GPU and host share."""
    device = document.device
    total, unified = (format_bytes(num_bytes or 0) for num_bytes in (device.total_bytes, device.unified_bytes))
    host_bytes = document.peak.host_allocated_bytes
    is_gpu_over = document.paged_bytes == document.peak.reserved_bytes - (device.total_bytes or 0)
    host = f" and {format_bytes(host_bytes)} of host tensors" if host_bytes >= MIN_HOST_BYTES else ""
    limit = (
        f"the {total} that the GPU should have of {unified}" if is_gpu_over else f"the {unified} that GPU and CPU share"
    )
    usable_bytes = UNLIMITED_BYTES if device.usable_bytes is None else device.usable_bytes
    end = "" if usable_bytes >= UNLIMITED_BYTES else f" Above {format_bytes(usable_bytes)}, allocations fail."
    sentence = (
        f"needs {need}{host}, {format_bytes(document.paged_bytes)} above {limit}: the system compresses that memory or "
        f"moves it to disk, and steps take longer.{end}"
    )
    return _label("Fits, but pages", "bold yellow", sentence)


def describe_added_memory(device: DeviceFacts) -> str:
    """Return what the need of a run has beside its tensors, as words."""
    return "with cached memory and the CUDA context" if device.has_cuda_context else "with cached memory"


def _describe_need(document: Report) -> str:
    """Return what a run needs, with its parts: tensors at their peak, what is cached beside them, the CUDA context."""
    required_bytes, added = document.verdict.required_bytes, _describe_added(document)
    if added is None:
        return f"{format_bytes(required_bytes)} {describe_added_memory(document.device)}"
    tensors = choose_unit(required_bytes).format(document.peak.allocated_bytes)
    return f"{format_bytes(required_bytes)} ({', '.join(filter(None, (f'{tensors} of tensors', added)))})"


def describe_sum(document: Report) -> str:
    """Return what makes the tensors at the peak the need of a run that does not fit, whose short verdict lacks it."""
    added = None if document.verdict.oom_stage is None else _describe_added(document)
    return f"and {added}: {format_bytes(document.verdict.required_bytes)} in all" if added else ""


def _describe_added(document: Report) -> str | None:
    """Return what a run needs beside its tensors at their peak: what is cached, and the CUDA context; None if the need
    is of another GPU than the peak."""
    required_bytes, peak = document.verdict.required_bytes, document.peak
    context_bytes = peak.device_used_bytes - peak.reserved_bytes
    cached_bytes = required_bytes - context_bytes - peak.allocated_bytes
    if cached_bytes < 0 or document.gpus or document.ranks:
        return None
    unit = choose_unit(required_bytes)
    cached, context = map(unit.format, (cached_bytes, context_bytes))
    parts = [f"{cached} cached"] * (cached != unit.format(0))
    parts += [f"{context} of CUDA context"] * document.device.has_cuda_context
    return ", ".join(parts)


def _render_exhaustion(growth: Growth, findings: Sequence[Finding], need: str) -> Text:
    """Return the verdict on a run whose memory grows until the GPU is full, with the step at which that happens."""
    num_steps = growth.program_steps
    end_text = "; no end of its steps was seen" if num_steps is None else f" of about {num_steps:,}"
    seen_text = f"The first {growth.steps_seen:,} steps, which were run, need {need}."
    growth_text = next((f"{finding.title}." for finding in findings if finding.id == "memory-growth"), "")
    sentence = f"runs out of memory at about step {growth.runs_out_step:,}{end_text}. {seen_text} {growth_text}"
    return _label("Does not fit", "bold red", sentence.rstrip())


def _format_growth(growth: Growth | None) -> str:
    """Return how much memory grows per step, and the step up to which the run fits; "" without growth."""
    if growth is None:
        return ""
    until = "" if growth.runs_out_step is None else f" until about step {growth.runs_out_step:,}"
    end = "" if growth.program_steps is None else f"; the script makes about {growth.program_steps:,} steps"
    if growth.program_steps == growth.steps_seen:
        end = f"; the script ended with step {growth.program_steps:,}, before the GPU was full"
    has_higher_peaks = growth.peak_bytes_per_step > growth.bytes_per_step
    peak = f" (its peak by {format_bytes(growth.peak_bytes_per_step)})" if has_higher_peaks else ""
    return f" Memory grows by {format_bytes(growth.bytes_per_step)} a step{peak}{until and ', and fits'}{until}{end}."


def _label(label: str, style: str, sentence: str) -> Text:
    return Text(f"{label}: ", style=style).append(sentence, style="default")


def render_certain_errors(document: Report) -> list[RenderableType]:
    """Return the titles of `find_certain_errors`, which are shown before the verdict on memory."""
    label = "Fails on a real GPU: "
    return [Text(label, style="bold red").append(f.title, style="default") for f in find_certain_errors(document)]


def find_certain_errors(document: Report) -> list[Finding]:
    """Return the findings that end the run on a real GPU even with enough memory."""
    repeated_ids = ("does-not-fit", "run-failed", "memory-growth")  # findings that repeat the verdict
    return [f for f in document.findings if f.severity is Severity.ERROR and f.id not in repeated_ids]


def _describe_retries(retries: int) -> str:
    frequency = "once" if retries == 1 else f"{retries} times" if retries else "now and then"
    return f"the GPU is full {frequency}, and the allocator releases its cache, which takes time"


def _describe_errors(count: int) -> str:
    subject = "an out-of-memory error was" if count == 1 else f"{count} out-of-memory errors were"
    return f"{subject} raised and caught"


def _describe_uncertainty(most_bytes: int) -> str:
    return f"it may not fit: if cuDNN takes the most for convolutions, it needs at least {format_bytes(most_bytes)}."


def _list_unseen(document: Report) -> Iterator[str]:
    """Yield what a script had not come to when it was stopped, and may need more memory."""
    program = document.program
    if program is None:
        return
    if program.misses_calls:
        yield "a model is called behind them, and not all of these calls were run"
    if program.misses_evaluation:
        which, step = "a later" if program.evaluated else "the", program.evaluation_step
        where = "" if step is None else f" (it comes after step {step:,})"
        yield f"{which} evaluation in its code was not reached{where}"
    if program.misses_unfreezing:
        yield "its training loop unfreezes parameters, and that was not reached"
    if program.misses_model:
        yield "a loop around its training builds another model, and that was not reached"
    if program.idle_optimizers:
        yield f"{'an optimizer has' if program.idle_optimizers == 1 else 'optimizers have'} made no step yet"
    if has_unseen_batches(document):
        yield "batches differ in size, and those of later steps may need more"


def has_unseen_batches(document: Report) -> bool:
    """Return whether a script was stopped before batches that may be larger than those it has had."""
    program, batches = document.program, document.batches
    if program is None or program.ended != "steps" or document.verdict.growth is not None or batches is None:
        return False
    largest = max(batches.steps, key=lambda step: step.peak_allocated_bytes)
    was_sought = program.asked is not None and program.asked.worst_batch and largest.step <= _WORST_STEPS
    return may_be_larger(batches) and not was_sought


def _render_fit(document: Report, need: str, spare: int, usable_bytes: int) -> Text:
    """Return the verdict on a run that fits; for several GPUs, also whether the headroom suffices for NCCL, and for
    convolutions, whether it does for the most that they may take."""
    nccl = None if document.bridge is None else document.bridge.nccl_group_bytes
    if nccl is None and (unseen := next(_list_unseen(document), None)):
        text = f"{_name_part(document)} {need}, {format_bytes(spare)} to spare; {unseen}."
        return _label("Fits so far", "bold yellow", text)
    if nccl is None and (most_bytes := get_uncertain_peak(document)) > usable_bytes:
        context_bytes = document.peak.device_used_bytes - document.peak.reserved_bytes
        rest = f"{format_bytes(spare)} to spare; {_describe_uncertainty(most_bytes + context_bytes)}"
        return _label("Fits by an estimate", "bold yellow", f"needs {need}, {rest}")
    if nccl is None:
        return _label("Fits", "bold green", f"{_name_part(document)} {need}, {format_bytes(spare)} to spare.")
    min_bytes, max_bytes = nccl
    range_text = f"{format_bytes(min_bytes)} to {format_bytes(max_bytes)}"
    if spare >= max_bytes:
        rest = f"{format_bytes(spare)} to spare, of which NCCL takes {range_text} a group where others measured it."
        return _label("Fits", "bold green", f"needs {need}, {rest}")
    rest = f"which leaves {format_bytes(spare)} to NCCL: where others measured it, a group takes {range_text}."
    return _label("Fits without headroom for NCCL", "bold yellow", f"needs {need}, {rest}")


def _name_part(document: Report) -> str:
    """Return what a verdict that a run fits is of, as the beginning of a sentence on its need."""
    program = document.program
    if program is None or program.ended != "steps" or not program.steps:
        return "needs"
    planned = program.planned_steps or 0
    if planned > program.steps:
        return f"{program.steps:,} of about {planned:,} training steps need"
    return "1 training step needs" if program.steps == 1 else f"{program.steps:,} training steps need"


def _render_fit_after_errors(document: Report, first: CaughtError, need: str, spare_bytes: int) -> Text:
    """Return the verdict on a program that caught out-of-memory errors, and fits without the failed allocations."""
    verdict, peak = document.verdict, document.peak
    num_caught = verdict.out_of_memory_caught
    first_note = "" if num_caught == 1 else ", the first"
    stage = describe_moment(document, first.stage, first.step)
    where = f" at {short_source(first.source)}" if first.source else ""
    request = f"{format_bytes(first.num_bytes)} were requested with {format_bytes(first.in_use_bytes)} in use"
    retries_text = f"and fits, with allocator retries: {_describe_retries(verdict.retries)}"
    need_note = retries_text if verdict.retries or spare_bytes < 0 else f"{format_bytes(spare_bytes)} to spare"
    if peak.allocated_bytes < _MAX_SHARE_OF_TENSORS * peak.reserved_bytes:  # segments that the attempts have left
        sizes = f"{format_bytes(peak.allocated_bytes)} of the {format_bytes(peak.reserved_bytes)} reserved"
        need_note += f"; tensors take at most {sizes}"
    errors_text = f"{_describe_errors(num_caught)}{first_note} in {stage}{where}, where {request}"
    sentence = f"{errors_text}; the script went on without it. What it did instead needs {need}, {need_note}."
    return _label("Fits only without the failed allocations", "bold yellow", sentence)
