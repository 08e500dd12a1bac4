"""Runs of several ranks of a program together, each a process with its own virtual GPU, and one report of all.

Program -script/launchers-> a ProcessStart for each rank -script/ranks-> Traces -report-> Report
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memprof.errors import MemprofError, UsageError
from memprof.flows.account import analyze
from memprof.flows.gpus import find_spec_gpu
from memprof.flows.rank_reports import merge_traces
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, ScriptOutcome, StopRule
from memprof.trace.events import Trace
from memprof.trace.facts import RankFacts
from memprof.units import format_ranges

if TYPE_CHECKING:
    from memprof.script.launchers import ProcessStart
    from memprof.script.ranks import RankResult


_STEP_WAIT = 30.0  # seconds that a measured rank waits for the others to reach the stop rule


@dataclass(frozen=True, slots=True)
class RanksRun:
    """The result of running a program's ranks together."""

    trace: Trace  # of the lowest rank, with the traces of the others in `others`
    document: Report | None  # None: no rank allocated on a GPU
    ended: EndReason  # of the rank that failed first, else of the lowest rank
    exit_code: int  # the program's own
    problem: MemprofError | None = None  # a mismatch between ranks, or an operation that cannot be simulated
    traceback: str = ""  # the traceback of the rank that failed first


def parse_ranks(text: str, size: int) -> list[int]:
    """Return the ranks of `text`: `all`, or numbers and spans (`0,3,5-7`); raise UsageError for unknown ranks."""
    if text.strip() == "all":
        return list(range(size))
    found: set[int] = set()
    for part in text.split(","):
        first, *rest = part.strip().split("-", 1)
        last = rest[0] if rest else first
        if not (first.isdigit() and last.isdigit()):
            raise UsageError("--ranks takes numbers", value=text, hint="for instance all, 0,3 or 0-3")
        span = range(int(first), int(last) + 1)
        if not span or span[-1] >= size:
            raise UsageError("there is no such rank", value=f"--ranks {text} of {size}", hint="ranks count from 0")
        found |= set(span)
    return sorted(found)


def run_ranks(program: Program, rule: StopRule, spec: RunSpec) -> RanksRun | ScriptOutcome:
    """Run ranks of `program` together, until `rule` holds for all of them, all end, or one fails.

    `spec.ranks` None: all ranks; `spec.rank`: the rank shown in full, None: the rank with the highest need. Returns the
    launcher's outcome if it started no process. Raises UsageError: unknown ranks, or too little host memory.
    """
    from memprof.script.capture import resolve_process
    from memprof.script.launchers import ProcessSelection
    from memprof.script.ranks import check_host_memory, run_ranks_together

    program.check()
    is_measured = spec.device != "virtual"
    ranks, rank = spec.ranks or "all", spec.rank

    def resolve_start(number: int | None) -> ProcessStart | ScriptOutcome:
        place = ProcessSelection(number, spec.gpus, spec.nodes)
        return program.start(place) if is_measured else resolve_process(program, place, find_spec_gpu(spec))

    first = resolve_start(None)
    if isinstance(first, ScriptOutcome):
        return first
    numbers = parse_ranks(ranks, first.size)
    if first.size == 1:
        hint = "start it with its launcher (torchrun ...), or say how many GPUs there are: --gpus 4"
        raise UsageError("the program has one process", value=f"--ranks {ranks}", hint=hint)
    if rank is not None and rank not in numbers:
        raise UsageError("no such rank is run", value=f"--rank {rank}", hint=f"--ranks names {format_ranges(numbers)}")
    if is_measured:
        _check_measurable(program, first, numbers, spec.device)
    check_host_memory(len(numbers))
    starts: dict[int, ProcessStart] = {}
    for number in numbers:
        start = resolve_start(number)
        assert not isinstance(start, ScriptOutcome)
        starts[number] = start
    body = functools.partial(_run_rank, program, rule, starts, spec)
    # Measured ranks wait for each other inside NCCL or gloo, unseen by memprof.
    results, problem = run_ranks_together(
        numbers, first.size, body, **({"step_wait_seconds": _STEP_WAIT} if is_measured else {})
    )
    return _merge_results(numbers, results, problem, first.size, rank, spec.shown_gpu)


def _check_measurable(program: Program, start: ProcessStart, ranks: Sequence[int], device: str) -> None:
    """Raise UsageError if not all ranks can be measured on this machine."""
    if not program.has_launcher:
        hint = "start them with torchrun, or leave out --device"
        raise UsageError("ranks that a script starts itself cannot be measured", value=f"--device {device}", hint=hint)
    if start.nodes > 1 or len(ranks) < start.size:
        raise UsageError(
            "all ranks are measured, on this machine", value=f"{len(ranks)} of {start.size} on {start.nodes} machines",
            hint="leave out --ranks and the launcher's machines, or --device",
        )  # fmt: skip
    if device == "cuda":
        from memprof.measured.cuda import check_gpus

        check_gpus(start.size)
    port = start.environment.get("MASTER_PORT", "")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                "the port on which the ranks are to meet cannot be used", value=f"{port} ({error})",
                hint="give the launcher another, such as torchrun --master-port 29511",
            ) from None  # fmt: skip


def _run_rank(
    program: Program, rule: StopRule, starts: Mapping[int, ProcessStart], spec: RunSpec, channel: Any
) -> RankResult:
    """Run one rank in the current process; return its trace, end reason and error."""
    if spec.device == "cuda":
        from memprof.measured.cuda import set_current_gpu

        set_current_gpu(starts[channel.rank].rank % starts[channel.rank].gpus)
    from memprof.flows.script import capture_run
    from memprof.script.program import format_traceback
    from memprof.script.ranks import RankResult

    trace, outcome = capture_run(program, rule, spec, start=starts[channel.rank], channel=channel)
    error, traceback, error_parts = outcome.error, "", None
    if isinstance(error, MemprofError):
        error_parts = (type(error), error.problem, error.value, error.hint)
    elif isinstance(error, Exception):
        traceback = format_traceback(error)
    return RankResult(outcome.ended, outcome.exit_code, trace, traceback, error_parts)


def _merge_results(
    ranks: Sequence[int],
    ran: Mapping[int, RankResult],
    problem: MemprofError | None,
    size: int,
    rank: int | None,
    gpu: int | None,
) -> RanksRun:
    """Merge the results of all ranks into one: the first failed rank gives end reason, exit code and error."""
    failed = [number for number in ran if ran[number].ended not in (EndReason.PEER, EndReason.STEPS, EndReason.EXIT)]
    failed += [number for number in ran if ran[number].ended is EndReason.EXIT and ran[number].exit_code]
    culprit = ran[failed[0]] if failed else None
    why, hint = _explain_stop(failed[0] if failed else None, culprit, problem)
    if culprit is not None and culprit.error is not None and problem is None:
        kind, *about = culprit.error
        problem = kind(about[0], value=about[1], hint=about[2])
    traces = []
    for one in ran.values():
        trace: Trace = one.result
        if one.ended is EndReason.PEER and trace.failure is not None:
            trace.failure = trace.failure._replace(message=why, hint=hint)
        traces.append(trace)
    for number in ranks:
        if number not in ran and traces:  # the rank was killed
            facts = traces[0].facts
            program = facts.program and dataclasses.replace(facts.program, ended=EndReason.ERROR.value)
            facts = dataclasses.replace(facts, rank=RankFacts(number, size), program=program)
            traces.append(Trace(facts=facts))
    if not traces:
        raise problem or KeyboardInterrupt
    trace = merge_traces(traces)
    document = None
    with contextlib.suppress(EmptyTraceError):
        document = analyze(trace, rank=rank, gpu=gpu)
    ended = culprit.ended if culprit else EndReason.PEER if problem else next(iter(ran.values())).ended
    code = culprit.exit_code if culprit else 0
    if any(one.ended is EndReason.INTERRUPTED for one in ran.values()):
        ended, code = EndReason.INTERRUPTED, 130
    return RanksRun(
        trace, document, ended, code, problem, "" if culprit is None else _find_first_traceback(failed, ran)
    )


def _explain_stop(number: int | None, culprit: RankResult | None, error: MemprofError | None) -> tuple[str, str | None]:
    """Return why the other ranks were stopped, and a hint."""
    if error is not None:
        return error.problem, error.hint
    if culprit is None or number is None:
        return "another rank ended", None
    if culprit.ended is EndReason.REFUSED:
        return f"the GPU of rank {number} was full", f"--rank {number} shows it in full"
    if culprit.ended is EndReason.EXIT:
        return f"rank {number} ended with exit code {culprit.exit_code}", f"see why: --rank {number} runs it alone"
    last = culprit.error[1] if culprit.error else (culprit.traceback.strip().splitlines() or [culprit.ended.value])[-1]
    return f"rank {number} ended: {last}", f"--rank {number} shows it in full"


def _find_first_traceback(failed: Sequence[int], results: Mapping[int, RankResult]) -> str:
    """Return the traceback of the first failed rank, with all ranks that end in the same error."""
    first = results[failed[0]].traceback
    if not first:
        return ""
    last = first.strip().splitlines()[-1]
    same = [number for number in failed if last == (results[number].traceback.strip().splitlines() or [""])[-1]]
    return f"Rank{'s' * (len(same) > 1)} {format_ranges(same)}:\n{first}"
