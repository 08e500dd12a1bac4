"""Runs of several ranks of a program together, each a process with its own virtual GPU, and one report of all.

Program -script/launchers-> a ProcessStart for each rank -script/ranks-> Traces -account-> Report
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
from memprof.flows.script import add_engine, capture_run, resolve_process
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, ScriptOutcome, StopRule
from memprof.script.launchers import ProcessSelection, ProcessStart, parse_ranks
from memprof.trace.events import Trace
from memprof.trace.facts import RankFacts
from memprof.units import format_ranges

if TYPE_CHECKING:
    from memprof.script.ranks import RankResult


_STEP_WAIT_SECONDS = 30.0  # seconds that a measured rank waits for the others to reach the stop rule


@dataclass(frozen=True, slots=True)
class RanksRun:
    """The result of running a program's ranks together."""

    trace: Trace  # of the lowest rank, with the traces of the others in `others`
    document: Report | None  # None: no rank allocated on a GPU
    ended: EndReason  # of the rank that failed first, else of the lowest rank
    exit_code: int  # the program's own
    problem: MemprofError | None = None  # a mismatch between ranks, or an operation that cannot be simulated
    traceback: str = ""  # the traceback of the rank that failed first


def run_ranks(program: Program, rule: StopRule, spec: RunSpec) -> RanksRun | ScriptOutcome:
    """Run the ranks `spec.ranks` (None: all) of `program` together, until `rule` stops them, all end, or one fails.

    `spec.rank` is shown in full (None: the rank that requires most memory). If the launcher starts no process, return
    its outcome. Raises UsageError: unknown ranks, or too little host memory.
    """
    program.check()
    is_measured = spec.device != "virtual"
    ranks_option, rank = spec.ranks or "all", spec.rank

    def resolve_start(number: int | None) -> ProcessStart | ScriptOutcome:
        selection = ProcessSelection(number, spec.gpus, spec.nodes)
        return program.start(selection) if is_measured else resolve_process(program, selection, find_spec_gpu(spec))

    first_start = resolve_start(None)
    if isinstance(first_start, ScriptOutcome):
        return first_start
    numbers = parse_ranks(ranks_option, first_start.size)
    if first_start.size == 1:
        hint = "start it with its launcher (torchrun ...), or say how many GPUs there are: --gpus 4"
        raise UsageError("the program has one process", value=f"--ranks {ranks_option}", hint=hint)
    if rank is not None and rank not in numbers:
        raise UsageError("no such rank is run", value=f"--rank {rank}", hint=f"--ranks names {format_ranges(numbers)}")
    if is_measured:
        _check_measurable(program, first_start, numbers, spec.device)
    from memprof.script.ranks import check_host_memory, run_ranks_together  # needs torch

    check_host_memory(len(numbers))
    starts: dict[int, ProcessStart] = {}
    for number in numbers:
        start = resolve_start(number)
        assert not isinstance(start, ScriptOutcome)
        starts[number] = start
    run_rank = functools.partial(_run_rank, program, rule, starts, spec)
    # Measured ranks wait for each other inside NCCL or gloo, unseen by memprof.
    results, problem = run_ranks_together(
        numbers, first_start.size, run_rank, **({"step_wait_seconds": _STEP_WAIT_SECONDS} if is_measured else {})
    )
    return _merge_results(numbers, results, problem, first_start.size, rank, spec.shown_gpu)


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
    from memprof.script.program import format_traceback
    from memprof.script.ranks import RankResult

    trace, outcome = capture_run(program, rule, spec, start=starts[channel.rank], channel=channel)
    error, traceback, error_parts = outcome.error, "", None
    if isinstance(error, MemprofError):
        error_parts = (type(error), error.problem, error.value, error.hint)
    elif isinstance(error, Exception):
        traceback = format_traceback(error)
    return RankResult(outcome.ended, outcome.exit_code, trace, traceback, error_parts, outcome.engine)


def _merge_results(
    ranks: Sequence[int],
    ran: Mapping[int, RankResult],
    problem: MemprofError | None,
    size: int,
    rank: int | None,
    gpu: int | None,
) -> RanksRun:
    """Merge the results of all ranks into one: the first failed rank gives end reason, exit code and error."""
    in_order = (EndReason.PEER, EndReason.STEPS, EndReason.READY, EndReason.EXIT)
    failed = [number for number in ran if ran[number].ended not in in_order]
    failed += [number for number in ran if ran[number].ended is EndReason.EXIT and ran[number].exit_code]
    failure = ran[failed[0]] if failed else None
    cause, hint = _explain_stop(failed[0] if failed else None, failure, problem)
    if failure is not None and failure.error is not None and problem is None:
        error_type, *arguments = failure.error
        problem = error_type(arguments[0], value=arguments[1], hint=arguments[2])
    traces = []
    for result in ran.values():
        trace: Trace = result.result
        if result.ended is EndReason.PEER and trace.failure is not None:
            trace.failure = trace.failure._replace(message=cause, hint=hint)
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
        document = add_engine(
            analyze(trace, rank=rank, gpu=gpu), next((result.engine for result in ran.values() if result.engine), None)
        )
    ended = failure.ended if failure else EndReason.PEER if problem else next(iter(ran.values())).ended
    exit_code = failure.exit_code if failure else 0
    if any(result.ended is EndReason.INTERRUPTED for result in ran.values()):
        ended, exit_code = EndReason.INTERRUPTED, 130
    return RanksRun(
        trace, document, ended, exit_code, problem, "" if failure is None else _find_first_traceback(failed, ran)
    )


def _explain_stop(rank: int | None, failure: RankResult | None, error: MemprofError | None) -> tuple[str, str | None]:
    """Return the reason why the ranks that did not fail were stopped, and a hint."""
    if error is not None:
        return error.problem, error.hint
    if failure is None or rank is None:
        return "another rank ended", None
    if failure.ended is EndReason.REFUSED:
        return f"the GPU of rank {rank} was full", f"--rank {rank} shows it in full"
    if failure.ended is EndReason.EXIT:
        return f"rank {rank} ended with exit code {failure.exit_code}", f"see why: --rank {rank} runs it alone"
    last = failure.error[1] if failure.error else (failure.traceback.strip().splitlines() or [failure.ended.value])[-1]
    return f"rank {rank} ended: {last}", f"--rank {rank} shows it in full"


def _find_first_traceback(failed_ranks: Sequence[int], results: Mapping[int, RankResult]) -> str:
    """Return the traceback of the first failed rank, after a line with all ranks that end in the same error."""
    first_traceback = results[failed_ranks[0]].traceback
    if not first_traceback:
        return ""
    last_line = first_traceback.strip().splitlines()[-1]
    same = [rank for rank in failed_ranks if last_line == (results[rank].traceback.strip().splitlines() or [""])[-1]]
    return f"Rank{'s' * (len(same) > 1)} {format_ranges(same)}:\n{first_traceback}"
