"""`--largest`: the largest batch, or the longest context, with which a run or a script fits; both sides are run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable

from memprof.command_line import profile_command, run_command
from memprof.device.catalog import Gpu
from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.flows.gpus import find_gpu_of
from memprof.flows.ladder.scripts import run_alone
from memprof.flows.profile import profile
from memprof.flows.recommend.bisection import counted_bytes, find_limit
from memprof.report.documents.limit import Limit, LimitRun
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import Program
from memprof.spec import TargetSpec
from memprof.trace.events import Trace

LARGEST = {"batch-size": "batch_size", "context-length": "context_length"}  # what is searched for -> field of the spec
PLACE = "{}"  # where the number stands in the arguments of a script
MOST = 1 << 16  # where a search ends that finds no limit; of a context, the model's own number of positions
BEYOND = 2  # numbers past the first that does not fit which are run too: the allocator rounds, and one of them may fit

Run = Callable[[int], tuple[Trace, Report]]
Progress = Callable[[str], None]


def largest_of_spec(spec: TargetSpec, what: str, progress: Progress = lambda doing: None) -> tuple[Trace, Report]:
    """Return the run of `spec` at the largest `what` that fits its GPU, and its report with all that was tried.

    The search begins at the batch size or context length of `spec`. It raises UsageError where a context length is
    searched for and the model takes no tokens.
    """
    from memprof.workload.models import find_source  # needs torch, which --help does not

    field, most, begin = LARGEST[what], MOST, spec.batch_size
    if what == "context-length":
        most = max((find_source(spec).max_positions or MOST) - (spec.new_tokens or 0), 1)
        begin = spec.context_length or min(2048, most)

    def run(number: int) -> tuple[Trace, Report]:
        one = spec.edit(**{field: number})
        trace, document = profile(one, lambda doing: progress(f"{what} {number:,}: {doing}"))
        target = document.target
        if what == "context-length" and target is not None and target.context_length is None:
            problem = "the model takes no tokens, and so has no context length"
            raise UsageError(problem, value=target.model, hint="ask for --largest batch-size")
        return trace, document

    def command(number: int, *, fits: bool) -> str:
        return profile_command(spec.edit(**{field: number}))

    return _search(run, find_gpu_of(spec), what, command, begin=begin, most=most)


def largest_of_script(
    program: Program, spec: RunSpec, what: str, progress: Progress = lambda doing: None
) -> tuple[Trace, Report]:
    """Return the run of a script at the largest `what` that fits; its arguments have `{}` where the number is to stand.

    Each run is a process of its own. It raises UsageError if no argument has a place for the number.
    """
    if not any(PLACE in argument for argument in program.arguments):
        raise UsageError(
            f"--largest {what} needs a place for the number in the script's own arguments",
            value=shlex.join(program.command),
            hint=f"write {PLACE} there: memprof run --largest {what} {program.name} --{what} {PLACE}",
        )

    def at(number: int) -> Program:
        arguments = tuple(argument.replace(PLACE, str(number)) for argument in program.arguments)
        return Program(program.name, arguments, program.is_module)

    def run(number: int) -> tuple[Trace, Report]:
        progress(f"running the script with {what} {number:,}")
        return run_alone(at(number), spec)

    def command(number: int, *, fits: bool) -> str:
        # Where the GPU is full, the need is only seen beyond.
        return run_command(spec if fits else spec.edit(beyond=True), at(number).command)

    return _search(run, find_gpu_of(spec), what, command, begin=1, most=MOST)


def _search(
    run: Run, gpu: Gpu, what: str, command: Callable[..., str], *, begin: int, most: int
) -> tuple[Trace, Report]:
    made: dict[int, LimitRun] = {}
    kept: dict[bool, tuple[int, Trace, Report]] = {}
    available = gpu.total_bytes

    def needed(number: int) -> int:
        try:
            trace, document = run(number)
        except MemprofError as error:
            # Something else ends here than memory: a model has no such position, or a data set no such batch.
            if not any(one.fits for one in made.values()) or isinstance(error, UsageError):
                raise
            ended = error.document if isinstance(error, RunFailedError) else None
            why = error.line if ended is None or ended.failure is None else ended.failure.error
            made[number] = LimitRun(number, None, False, why, command(number, fits=False))
            return available + 1
        verdict = document.verdict
        fits = bool(verdict.fits)
        oom_stage = "" if fits else verdict.oom_stage or ("host memory" if verdict.host_over_bytes else "a failure")
        made[number] = LimitRun(number, verdict.required_bytes, fits, oom_stage, command(number, fits=fits))
        before = kept.get(fits)
        if before is None or (number > before[0]) == fits:  # the largest that fits, the least that does not
            kept[fits] = number, trace, document
        return counted_bytes(verdict.required_bytes, available, fits=fits)

    bound = find_limit(needed, available, low=1, high=most, begin=begin, beyond=BEYOND)
    limit = Limit(what, bound.largest, bound.first_too_large, tuple(made[number] for number in sorted(made)))
    _, trace, document = kept[bound.largest is not None]
    return trace, dataclasses.replace(document, limit=limit)
