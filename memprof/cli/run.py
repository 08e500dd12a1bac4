"""`memprof run`: execute a script, unmodified, on a virtual GPU, and say where its memory goes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from memprof.catalog import DEFAULT_GPU, Gpu, custom_gpu, find_gpu
from memprof.cli.card import check_one_card
from memprof.cli.profile import exit_code, is_search, print_document
from memprof.cli.progress import Progress
from memprof.cli.streams import script_output
from memprof.errors import MemprofError, UsageError, unknown_name
from memprof.script import Ended, Outcome, Program, StopRule
from memprof.trace.events import Trace
from memprof.trace.files import check_place
from memprof.units import parse_gib

DEVICES = ("virtual", "cuda", "cpu")
PATIENCE = 2
"""Steps beyond the second, while memory still grows from step to step."""


def run(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for `python -m`.")] = False,
    gpu: Annotated[str, typer.Option(help="The virtual card (`memprof gpus` lists them).")] = DEFAULT_GPU,
    gpu_vram: Annotated[
        str | None, typer.Option(help="Instead of --gpu: a capacity, in GiB or as 24GB.", metavar="GIB")
    ] = None,
    device: Annotated[str, typer.Option(help="virtual: simulate; cuda or cpu: run for real, and measure.")] = "virtual",
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many optimizer steps. [default: 2]", metavar="COUNT")
    ] = None,
    until_exit: Annotated[bool, typer.Option("--until-exit", help="Let the script run to its own end.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Stop after so long.", metavar="SECONDS")] = None,
    worst_batch: Annotated[
        bool, typer.Option("--worst-batch", help="Feed the largest batch of each data loader first.")
    ] = False,
    beyond: Annotated[
        bool,
        typer.Option("--beyond", help="Go on past a full card, to see the whole need: no error in the script."),
    ] = False,
    fix: Annotated[
        str | None,
        typer.Option(
            help="Switch these remedies on in the script's models, such as chunked-loss; auto: the cheapest that fit.",
            metavar="NAMES",
        ),
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder", help="Run again with remedies that can be switched on from outside, one after another."
        ),
    ] = False,
    alloc_conf: Annotated[
        str | None,
        typer.Option(
            help="The caching allocator's, such as expandable_segments:True. [default: the environment's]",
            metavar="SETTINGS",
        ),
    ] = None,
    detail: Annotated[
        bool, typer.Option("--detail", help="Measured: the line of every allocation as well, which makes steps longer.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON; what the script prints goes to stderr.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Keep the capture in a file, for `memprof show`.", metavar="FILE")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="List what was assumed.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error of memprof's.")] = False,
) -> None:
    """Run a training script as it is on a virtual GPU, and say where its memory goes.

    Options of memprof stand before the script, everything after it is the script's. It is stopped after its second
    optimizer step, when memory has reached its steady state; after its fourth at the latest, if it still grows. Exit
    code 0: it fits; 3: it does not; if the script fails by itself, its own.
    """
    try:
        check_one_card(context, gpu, gpu_vram)
        code = _run(
            _program(command, module=module),
            _rule(steps, timeout, until_exit=until_exit),
            gpu=find_gpu(gpu) if gpu_vram is None else custom_gpu(parse_gib(gpu_vram)),
            device=_device(device),
            alloc_conf=alloc_conf,
            beyond=beyond,
            fix=fix,
            ladder=ladder,
            worst_batch=worst_batch,
            detail=detail,
            as_json=as_json,
            save=save,
            explain=explain,
        )
    except MemprofError as error:
        # Not left to the caller: there --debug may be the script's.
        if debug:
            raise
        typer.echo(f"memprof: {error}", err=True)
        code = error.exit_code
    raise typer.Exit(code)


def _program(command: list[str] | None, *, module: bool) -> Program:
    if not command:
        raise UsageError("no script is given", hint="for instance: memprof run --gpu rtx-4090 train.py --epochs 1")
    return Program(command[0], tuple(command[1:]), is_module=module)


def _rule(steps: int | None, timeout: float | None, *, until_exit: bool) -> StopRule:
    if steps is not None and until_exit:
        raise UsageError("give --steps or --until-exit, not both", value=steps)
    if steps is not None and steps < 1:
        raise UsageError("--steps counts from 1", value=steps, hint="--until-exit stops after none")
    if timeout is not None and not timeout > 0:
        raise UsageError("--timeout must be longer", value=timeout, hint="give seconds, more than 0")
    if until_exit:
        return StopRule(None, timeout)
    return StopRule(2, timeout, patience=PATIENCE) if steps is None else StopRule(steps, timeout)


def _device(name: str) -> str:
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return name


def _run(
    program: Program,
    rule: StopRule,
    *,
    fix: str | None,
    ladder: bool,
    as_json: bool,
    save: Path | None,
    explain: bool,
    **options: Any,
) -> int:
    from memprof.flows.script import run_script
    from memprof.remedies.fixes import parse_fixes

    if save is not None:
        check_place(save, option="--save")
    folder = Path.cwd()  # the script may change it
    if fix is not None and ladder:
        raise UsageError("--ladder chooses remedies itself", value=f"--fix {fix}", hint="give --fix or --ladder")
    searches = is_search(fix)
    fixes = () if fix is None or searches else tuple(map(str, parse_fixes(fix)))
    if ladder or searches:
        return _ladder(program, rule, search=searches, as_json=as_json, save=save, explain=explain, **options)
    before = frozenset(threading.enumerate())
    with script_output(to_stderr=as_json):
        found = run_script(program, rule, fixes=fixes, **options)
    outcome, document = found.outcome, found.document
    if isinstance(outcome.error, UsageError):  # a remedy that does not apply to a model of the script
        raise outcome.error
    if isinstance(outcome.error, MemprofError):  # what cannot be simulated: it names the line itself
        typer.echo(f"memprof: {outcome.error}", err=True)
    elif outcome.error is not None:
        from memprof.script.program import print_error

        print_error(outcome.error)
    if document is None:
        _say_nothing_was_there(outcome)
        return outcome.exit_code
    print_document(document, as_json=as_json, explain=explain)
    _save(found.trace, save, folder)
    if outcome.ended is Ended.REFUSED:
        code = 3
    elif outcome.ended in (Ended.ERROR, Ended.INTERRUPTED) or outcome.exit_code:
        code = outcome.exit_code
    else:
        code = exit_code(document)
    if outcome.ended is not Ended.EXIT:
        _leave_threads(before, code)
    return code


def _leave_threads(before: Collection[threading.Thread], code: int) -> None:
    """End the process here if a script that was stopped leaves threads that go on: Python would wait for them."""
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in left:
        thread.join(timeout=1.0)
    if any(thread.is_alive() for thread in left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ladder(
    program: Program,
    rule: StopRule,
    *,
    search: bool,
    gpu: Gpu,
    device: str,
    alloc_conf: str | None,
    worst_batch: bool,
    as_json: bool,
    save: Path | None,
    explain: bool,
    **ignored: object,
) -> int:
    from memprof.flows.ladder.scripts import Request, script_ladder, script_search

    if device != "virtual":
        raise UsageError(
            "a ladder runs on the virtual card", value=f"--device {device}", hint="leave out --device, or --ladder"
        )
    program.check()
    request = Request(program, rule, gpu, alloc_conf, worst_batch)
    with Progress() as progress:
        trace, document = (script_search if search else script_ladder)(request, progress)
    print_document(document, as_json=as_json, explain=explain)
    _save(trace, save, Path.cwd())
    return exit_code(document)


def _save(trace: Trace, path: Path | None, folder: Path) -> None:
    """Keep the capture at `path` as it was typed in `folder`, where who typed it still is."""
    if path is None:
        return
    from memprof.trace.io import save_trace

    save_trace(trace, folder / path)
    typer.echo(f"Saved: memprof show {path}", err=True)


def _say_nothing_was_there(outcome: Outcome) -> None:
    how = {Ended.TIMEOUT: "was stopped", Ended.ERROR: "failed"}.get(outcome.ended, "ended")
    typer.echo(f"memprof: the script {how} before anything was on the card: there is nothing to report", err=True)
