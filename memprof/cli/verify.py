"""`memprof verify`: compare a model with and without fixes, each with a float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from memprof.cli.exits import ExitCode
from memprof.cli.options import reuse_option
from memprof.cli.output import OutputOptions, print_result
from memprof.cli.progress import Progress
from memprof.errors import UsageError

EXAMPLES = """
memprof verify chunked-loss --model llama
memprof verify bfloat16 --model gpt2 --seeds 3
"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(OutputOptions):
    """Options of `memprof verify`: the output, and whether code of a model repository may run."""

    trust_remote_code: bool = reuse_option("trust_remote_code")


def verify(
    request: VerifyOptions,
    fixes: Annotated[
        list[str] | None, typer.Argument(metavar="[FIX]...", help="The fixes to verify.", show_default="all")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="One of the small gpt2, llama, gemma2 and handwritten, or a causal language model that "
            "`memprof profile` takes; may be repeated.",
            show_default="the four small ones",
            metavar="MODEL",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How often, with other weights and batches.")] = 2,
) -> None:
    """Check on the CPU that fixes give the same loss, gradients and training steps, and simulate what they save.

    Exit code 0: everything that was tried is within its bound; 4: something is not; 1: nothing could be tried.
    """
    if seeds < 1:
        raise UsageError("--seeds must be at least 1", value=seeds, hint="give a positive whole number")
    from memprof.fixes.catalog import find_fixes
    from memprof.flows.verify.models import check_model

    for name in fixes or ():
        find_fixes([name])
    for name in model or ():
        check_model(name, request.trust_remote_code)
    with Progress(quiet=request.quiet) as progress:
        progress("importing torch")
        from memprof.flows.verify.bench import verify as run

        result = run(
            fixes or (), model or (), seeds=seeds, progress=progress, trust_remote_code=request.trust_remote_code
        )
    print_result(result, request, "verification")
    raise typer.Exit(ExitCode.DONE if result.passed else ExitCode.DIFFERS if result.has_results else ExitCode.FAILED)
