"""Several ranks of a program together: each a process with a virtual GPU of its own, and one report of all.

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
from memprof.flows.gpus import find_gpu_of
from memprof.flows.rank_reports import in_order
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


_STEP_WAIT = 30.0  # seconds for which a measured rank waits for the others to have shown enough


@dataclass(frozen=True, slots=True)
class RanksRun:
    """The result of running a program's ranks together."""

    trace: Trace  # of the lowest, with those of the others
    document: Report | None  # None: nothing was ever on a GPU
    ended: EndReason  # of the rank that failed first, or of the worst
    exit_code: int  # the program's own
    problem: MemprofError | None = None  # what was wrong between ranks, or could not be simulated on one
    said: str = ""  # the traceback of the rank that failed first


def requested_ranks(text: str, size: int) -> list[int]:
    """Return the ranks of `all`, or numbers and spans (`0,3,5-7`); raise UsageError if there are no such ranks."""
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
    """Run ranks of `program` together, until `rule` holds of all of them, they end, or one fails.

    `spec.ranks` None are all; `spec.rank` is the one that the report shows in full, None: the one that decides.
    A launcher that started none gives its outcome. It raises UsageError if there is no such rank, or no room.
    """
    from memprof.script.capture import resolve_process
    from memprof.script.launchers import ProcessSelection
    from memprof.script.ranks import check_memory, run_together

    program.check()
    is_measured = spec.device != "virtual"
    ranks, rank = spec.ranks or "all", spec.rank

    def start_of(number: int | None) -> ProcessStart | ScriptOutcome:
        place = ProcessSelection(number, spec.gpus, spec.nodes)
        return program.start(place) if is_measured else resolve_process(program, place, find_gpu_of(spec))

    first = start_of(None)
    if isinstance(first, ScriptOutcome):
        return first
    numbers = requested_ranks(ranks, first.size)
    if first.size == 1:
        hint = "start it with its launcher (torchrun ...), or say how many GPUs there are: --gpus 4"
        raise UsageError("the program has one process", value=f"--ranks {ranks}", hint=hint)
    if rank is not None and rank not in numbers:
        raise UsageError("no such rank is run", value=f"--rank {rank}", hint=f"--ranks names {format_ranges(numbers)}")
    if is_measured:
        _check_measured(program, first, numbers, spec.device)
    check_memory(len(numbers))
    starts: dict[int, ProcessStart] = {}
    for number in numbers:
        start = start_of(number)
        assert not isinstance(start, ScriptOutcome)
        starts[number] = start
    body = functools.partial(_run_rank, program, rule, starts, spec)
    # Measured ranks wait for each other where nobody sees it.
    ran, problem = run_together(numbers, first.size, body, **({"step_wait": _STEP_WAIT} if is_measured else {}))
    return _merge_results(numbers, ran, problem, first.size, rank, spec.shown_gpu)


def _check_measured(program: Program, start: ProcessStart, ranks: Sequence[int], device: str) -> None:
    """Raise UsageError if the ranks cannot be measured, all of them, on this machine."""
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
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(
                "the port on which the ranks are to meet cannot be used", value=f"{port} ({error})",
                hint="give the launcher another, such as torchrun --master-port 29511",
            ) from None  # fmt: skip


def _run_rank(
    program: Program, rule: StopRule, starts: Mapping[int, ProcessStart], spec: RunSpec, channel: Any
) -> RankResult:
    """Run one rank, in its own process."""
    if spec.device == "cuda":
        from memprof.measured.cuda import set_current_gpu

        set_current_gpu(starts[channel.rank].rank % starts[channel.rank].gpus)
    from memprof.flows.script import capture_run
    from memprof.script.program import error_text
    from memprof.script.ranks import RankResult

    trace, outcome = capture_run(program, rule, spec, start=starts[channel.rank], channel=channel)
    error, said, about = outcome.error, "", None
    if isinstance(error, MemprofError):
        about = (type(error), error.problem, error.value, error.hint)
    elif isinstance(error, Exception):
        said = error_text(error)
    return RankResult(outcome.ended, outcome.exit_code, trace, said, about)


def _merge_results(
    ranks: Sequence[int],
    ran: Mapping[int, RankResult],
    problem: MemprofError | None,
    size: int,
    rank: int | None,
    gpu: int | None,
) -> RanksRun:
    """Make one run of all ranks: who failed first speaks for all; who was stopped for it says so."""
    failed = [number for number in ran if ran[number].ended not in (EndReason.PEER, EndReason.STEPS, EndReason.EXIT)]
    failed += [number for number in ran if ran[number].ended is EndReason.EXIT and ran[number].exit_code]
    culprit = ran[failed[0]] if failed else None
    why, hint = _reason(failed[0] if failed else None, culprit, problem)
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
        if number not in ran and traces:  # it was killed
            facts = traces[0].facts
            program = facts.program and dataclasses.replace(facts.program, ended=EndReason.ERROR.value)
            facts = dataclasses.replace(facts, rank=RankFacts(number, size), program=program)
            traces.append(Trace(facts=facts))
    if not traces:
        raise problem or KeyboardInterrupt
    trace = in_order(traces)
    document = None
    with contextlib.suppress(EmptyTraceError):
        document = analyze(trace, rank=rank, gpu=gpu)
    ended = culprit.ended if culprit else EndReason.PEER if problem else next(iter(ran.values())).ended
    code = culprit.exit_code if culprit else 0
    if any(one.ended is EndReason.INTERRUPTED for one in ran.values()):
        ended, code = EndReason.INTERRUPTED, 130
    return RanksRun(trace, document, ended, code, problem, "" if culprit is None else _shared_traceback(failed, ran))


def _reason(number: int | None, culprit: RankResult | None, problem: MemprofError | None) -> tuple[str, str | None]:
    """Return why the others were stopped, and what to do."""
    if problem is not None:
        return problem.problem, problem.hint
    if culprit is None or number is None:
        return "another rank ended", None
    if culprit.ended is EndReason.REFUSED:
        return f"the GPU of rank {number} was full", f"--rank {number} shows it in full"
    if culprit.ended is EndReason.EXIT:
        return f"rank {number} ended with exit code {culprit.exit_code}", f"see why: --rank {number} runs it alone"
    last = culprit.error[1] if culprit.error else (culprit.said.strip().splitlines() or [culprit.ended.value])[-1]
    return f"rank {number} ended: {last}", f"--rank {number} shows it in full"


def _shared_traceback(failed: Sequence[int], ran: Mapping[int, RankResult]) -> str:
    """Return the traceback of the first, said once for all that end in the same."""
    first = ran[failed[0]].said
    if not first:
        return ""
    last = first.strip().splitlines()[-1]
    same = [number for number in failed if last == (ran[number].said.strip().splitlines() or [""])[-1]]
    return f"Rank{'s' * (len(same) > 1)} {format_ranges(same)}:\n{first}"
