"""Rule `run-failed`: the run ended early; reports the failed operation, its source line, and what to do."""

from __future__ import annotations

from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.trace.events import Failure, FailureKind


@rule(10)
def find(context: Context) -> list[Finding]:
    """Return one finding if the run failed; `num_bytes` is None, since the memory of the complete run is not known."""
    failure = context.ledger.trace.failure
    if failure is None:
        return []
    is_refused = failure.kind is FailureKind.REFUSED
    is_in_title = is_refused or failure.kind is FailureKind.OTHER_RANK
    evidence = [] if is_in_title else [_make_evidence(failure, f"{failure.error}: {failure.message}")]
    if failure.source is not None:
        in_module = "" if failure.module is None else f" in module {failure.module or 'the model itself'}"
        called = "" if failure.caller is None else f", called at {failure.caller}"
        evidence.append(_make_evidence(failure, f"raised at {failure.source}{in_module}{called}"))
    if failure.read is not None:
        evidence.append(_make_evidence(failure, f"read at {failure.read}"))
    fix = failure.hint or _FIX_BY_KIND[failure.kind]
    if failure.kind is FailureKind.ERROR and _SECOND_BACKWARD in failure.message:
        fix = _SECOND_BACKWARD_FIX
    elif failure.error == ModuleNotFoundError.__name__:
        fix = "install the package that has this module, in the environment that memprof runs in"
    elif context.ledger.trace.source == "measured" and failure.kind is FailureKind.ERROR and not failure.hint:
        fix = "mend this line: it was a real device"
    own_line = failure.caller or failure.source
    evidence.append(Evidence(f"fix: {fix}", module=failure.module, op=failure.op, source=own_line))
    if is_refused:
        evidence.append(Evidence("what the program does on a real GPU from there on is not known, and not counted"))
    else:
        evidence.append(Evidence("everything above the findings is the run up to here: what came later is not counted"))
    return [Finding("run-failed", Severity.ERROR, _format_title(failure), None, tuple(evidence), ())]


def _format_title(failure: Failure) -> str:
    if failure.kind is FailureKind.REFUSED:
        return f"Not simulated: {failure.message.removeprefix('not yet: ')}"
    if failure.kind is FailureKind.OTHER_RANK:
        return f"The ranks stop in {failure.phase}: {failure.message}"
    location = f"in {failure.phase}, at {file_and_line(failure.source)}"
    if failure.module:
        location += f" in {failure.module}"
    if failure.caller:
        location += f", called at {file_and_line(failure.caller)}"
    kernel_text = f"the custom kernel {failure.op}" if failure.op else "a custom kernel"
    reason = _REASONS[failure.kind].format(op=failure.op or "an operation", kernel=kernel_text, error=failure.error)
    return f"The run stops {location}: {reason}"


_REASONS = {
    FailureKind.NO_META_KERNEL: "{op} cannot be simulated, for it has no kernel that works without data",
    FailureKind.CUSTOM_KERNEL: "{kernel} needs data and a real GPU",
    FailureKind.TRACING: "tracing a model (torch.export) is not simulated",
    FailureKind.OTHER_THREAD: "CUDA was used in a thread that does not see the virtual GPU",
    FailureKind.UNKNOWN_VALUE: "{error} after a decision by a value that is not computed",
    FailureKind.OUT_OF_MEMORY: "memory ran out",
    FailureKind.INTERRUPTED: "it was interrupted",
    FailureKind.GAP: "a gap of the virtual GPU, not an error of the program ({error})",
    FailureKind.ERROR: "{error}",
}
_FIX_BY_KIND = {
    FailureKind.NO_META_KERNEL: (
        "register a kernel that says what the operator allocates (torch.library.register_fake, or an implementation "
        'for the "Meta" key), choose another implementation of it, or measure the run on a GPU'
    ),
    FailureKind.CUSTOM_KERNEL: (
        "wrap the kernel in a torch.library.custom_op with register_fake, switch to the model's plain PyTorch "
        "implementation, or measure the run on a GPU"
    ),
    FailureKind.TRACING: "run the model itself, without exporting it",
    FailureKind.OTHER_THREAD: (
        "use the GPU in the thread that runs the program, or in one that it starts itself after the run began, or "
        "measure the run on a GPU"
    ),
    FailureKind.UNKNOWN_VALUE: (
        "numbers that derive from floating-point data are not computed (a float reads as 1.0, an integer as 1, a "
        "boolean as False): switch the check off, or make the value depend on shapes and integers alone"
    ),
    FailureKind.OUT_OF_MEMORY: (
        "what was live then is above; --device virtual --fix auto finds what makes it fit, without running out"
    ),
    FailureKind.REFUSED: "leave it out here, or measure the run on a GPU",
    FailureKind.OTHER_RANK: "see how the other ranks ended, in the row of each",
    FailureKind.INTERRUPTED: "let it run; --timeout stops it by the clock, as a run that was asked to be so long",
    FailureKind.GAP: "leave the operation out here, or measure the run on a GPU; please report the program to memprof",
    FailureKind.ERROR: (
        "mend this line if the program is at fault; if the same code runs on a real GPU, this is a gap of the "
        "virtual one"
    ),
}

_SECOND_BACKWARD = "backward through the graph a second time"  # of torch's message
_SECOND_BACKWARD_FIX = (
    "detach what an earlier step or call has left, such as a hidden state or a sum of losses, before it is used again: "
    "h = h.detach(), of a tuple each part; with retain_graph=True memory would grow in each step"
)


def _make_evidence(failure: Failure, text: str) -> Evidence:
    return Evidence(text, module=failure.module, op=failure.op, source=failure.source)
