"""`--largest`: the largest batch size or context that fits the GPU, confirmed by a run that fits and one that fails."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable

from memprof.command_line import make_profile_command, make_run_command
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.ladder.scripts import run_script_process
from memprof.flows.profile import profile
from memprof.flows.recommend.bisection import clamp_to_verdict, find_limit
from memprof.report.documents.limit import PAGING, LargestSearch, LargestSearchRun
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program
from memprof.spec import TargetSpec
from memprof.trace.events import Trace

FIELD_BY_QUANTITY = {
    "batch-size": "batch_size",
    "context-length": "context_length",
}  # argument of --largest -> field of the spec
PLACEHOLDER = "{}"  # placeholder of the number in the arguments of a script
MAX_NUMBER = 1 << 16  # upper end of a search; for a context length, the model's maximum
NUM_EXTRA_TRIES = 2  # further numbers run past the first that does not fit: by the allocator's rounding one may fit

RunFunction = Callable[[int], tuple[Trace, Report]]
Progress = Callable[[str], None]


def find_largest_for_spec(spec: TargetSpec, quantity: str, progress: Progress = lambda _: None) -> tuple[Trace, Report]:
    """Return trace and report of `spec` at the largest batch size or context length (`quantity`) that fits the GPU.

    The search begins at the value in `spec`. Raises UsageError: the context length of a model that takes no tokens.
    """
    from memprof.workload.models import find_source  # needs torch, which --help does not

    field, high, start = FIELD_BY_QUANTITY[quantity], MAX_NUMBER, spec.batch_size
    if quantity == "context-length":
        high = max((find_source(spec).max_positions or MAX_NUMBER) - (spec.new_tokens or 0), 1)
        start = spec.context_length or min(2048, high)

    def run(number: int) -> tuple[Trace, Report]:
        run_spec = spec.edit(**{field: number})
        trace, document = profile(run_spec, lambda message: progress(f"{quantity} {number:,}: {message}"))
        target = document.target
        if quantity == "context-length" and target is not None and target.context_length is None:
            problem = "the model takes no tokens, and so has no context length"
            raise UsageError(problem, value=target.model, hint="ask for --largest batch-size")
        return trace, document

    def build_command(number: int, *, fits: bool) -> str:
        return make_profile_command(spec.edit(**{field: number}))

    return _search_largest(run, find_spec_gpu(spec), quantity, build_command, start=start, high=high)


def find_largest_for_script(
    program: Program, spec: RunSpec, quantity: str, progress: Progress = lambda _: None
) -> tuple[Trace, Report]:
    """Return trace and report of a script at the largest batch size or context length (`quantity`) that fits.

    The script's arguments have `{}` in place of the number. Raises UsageError if no argument has it.
    """
    if not any(PLACEHOLDER in argument for argument in program.arguments):
        example = f"memprof run --largest {quantity} {program.name} --{quantity} {PLACEHOLDER}"
        raise UsageError(
            f"--largest {quantity} needs a place for the number in the script's own arguments",
            value=shlex.join(program.command),
            hint=f"write {PLACEHOLDER} there: {example}",
        )

    def build_program(number: int) -> Program:
        arguments = tuple(argument.replace(PLACEHOLDER, str(number)) for argument in program.arguments)
        return Program(program.name, arguments, program.is_module)

    def run(number: int) -> tuple[Trace, Report]:
        progress(f"running the script with {quantity} {number:,}")
        return run_script_process(build_program(number), spec)

    def build_command(number: int, *, fits: bool) -> str:
        # After a failed allocation the need is seen only with --beyond.
        return make_run_command(spec if fits else spec.edit(beyond=True), build_program(number).command)

    return _search_largest(run, find_spec_gpu(spec), quantity, build_command, start=1, high=MAX_NUMBER)


def _search_largest(
    run: RunFunction, gpu: Gpu, quantity: str, command: Callable[..., str], *, start: int, high: int
) -> tuple[Trace, Report]:
    runs: dict[int, LargestSearchRun] = {}
    best_run_by_verdict: dict[bool, tuple[int, Trace, Report]] = {}
    available_bytes = gpu.total_bytes

    def compute_bytes(number: int) -> int:
        try:
            trace, document = run(number)
        except MemprofError as error:
            # Not memory ends the run: the model has no such position, or the data set no such batch.
            if not any(tried_run.fits for tried_run in runs.values()) or isinstance(error, UsageError):
                raise
            failed_report = error.document if isinstance(error, RunFailedError) else None
            why = error.line if failed_report is None or failed_report.failure is None else failed_report.failure.error
            runs[number] = LargestSearchRun(number, None, False, why, command(number, fits=False))
            return available_bytes + 1
        verdict = document.verdict
        fits = bool(document.fits_in_memory)
        oom_stage = "" if fits else verdict.oom_stage or ("host memory" if verdict.host_over_bytes else "a failure")
        oom_stage = PAGING if document.paged_bytes and verdict.fits else oom_stage
        runs[number] = LargestSearchRun(number, verdict.required_bytes, fits, oom_stage, command(number, fits=fits))
        previous = best_run_by_verdict.get(fits)
        if previous is None or (number > previous[0]) == fits:  # the largest that fits, the least that does not
            best_run_by_verdict[fits] = number, trace, document
        return clamp_to_verdict(verdict.required_bytes, available_bytes, fits=fits)

    bound = find_limit(compute_bytes, available_bytes, low=1, high=high, start=start, num_extra_tries=NUM_EXTRA_TRIES)
    search = LargestSearch(
        quantity, bound.largest, bound.first_too_large, tuple(runs[number] for number in sorted(runs))
    )
    _, trace, document = best_run_by_verdict[bound.largest is not None]
    return trace, dataclasses.replace(document, limit=search)
