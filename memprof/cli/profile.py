"""`memprof profile`: run one real training step on a virtual GPU and say where the memory goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from memprof.cli import settings
from memprof.cli.options import FixOptions, reuse_option
from memprof.cli.output import CaptureOptions, choose_exit_code, print_cache_age, print_report
from memprof.cli.progress import Progress, show_progress
from memprof.errors import RunFailedError, UsageError
from memprof.spec import DEVICES, TargetSpec

if TYPE_CHECKING:
    from memprof.flows.cache.results import ResultCacheEntry
    from memprof.report.documents.report import Report
    from memprof.trace.events import Trace

EXAMPLES = """
memprof profile --model-size 4B --context-length 4096 --gpu rtx-4090
memprof profile --model llama-3.2-1b --adapter lora --dtype bfloat16
memprof profile --model path/to/model.py:build_model --fix chunked-loss
"""
MAIN_OPTIONS = (
    "model", "model_is_size", "mode", "context_length", "batch_size", "dtype", "optimizer", "adapter", "quantize",
    "activation_checkpointing", "gpu", "gpu_vram_bytes", "gpus", "parallel", "fix", "ladder", "largest", "save", "html",
    "full", "as_json", "help_all",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(FixOptions):
    """Options of `memprof profile` that are not in TargetSpec."""

    device: str = reuse_option(
        "device", default="auto", choices=("auto", *DEVICES),
        note="auto: cuda if there is one and the run fits what is free there, else virtual.",
    )  # fmt: skip
    cache: bool = reuse_option("cache")


def profile(context: typer.Context, spec: TargetSpec, options: ProfileOptions, output: CaptureOptions) -> None:
    """Run one real training step on a virtual GPU and say, stage by stage, where the memory goes.

    The model's own code, autograd and the optimizer run for real, on tensors without data. Exit code 0: it fits;
    3: it does not.
    """
    if options.ladder and options.is_search:
        hint = "--fix auto shows a ladder of its own"
        raise UsageError("give --fix auto or --ladder, not both", value=f"--fix {options.fix}", hint=hint)
    options.check_largest(options.device)
    from memprof.fixes.catalog import ALL_FIXES, check_installed
    from memprof.fixes.chosen import parse_fixes

    fixes = () if options.fix is None or options.is_search else [fix.fix for fix in parse_fixes(options.fix, ALL_FIXES)]
    check_installed(spec, fixes)
    from memprof.report.documents.report import Report

    run_error: RunFailedError | None = None
    is_gpu_named = any(context.params[name] is not None for name in ("gpu", "gpu_vram_bytes"))
    entry = _find_cache_entry(spec, options, is_gpu_named=is_gpu_named) if options.cache else None
    # A capture and a page need all events, which cached results do not have.
    cached_result = None if entry is None or output.save or output.html else entry.find(Report)
    if cached_result is not None:
        print_report(cached_result[0], output)
        print_cache_age(cached_result[1], quiet=output.quiet)
        raise typer.Exit(choose_exit_code(cached_result[0]))
    with show_progress(quiet=output.quiet) as progress:
        if progress.shows_estimates and options.device in ("auto", "virtual") and options.largest is None:
            from memprof.flows.first_estimate import estimate_spec

            if (estimate := estimate_spec(spec)) is not None:
                conditions = ["of each GPU"] * (spec.gpus > 1) + ["without fixes"] * bool(options.fix or options.ladder)
                progress.show_estimate(estimate.describe(" ".join(conditions)))
        try:
            trace, document = _run(spec, options, progress, is_gpu_named=is_gpu_named)
        except RunFailedError as error:
            if error.document is None:
                raise
            run_error, trace, document = error, error.trace, error.document
    output.print_run(trace, document)
    if run_error is not None:
        raise run_error
    if entry is not None:
        entry.save(document)
    raise typer.Exit(choose_exit_code(document))


def _find_cache_entry(spec: TargetSpec, options: ProfileOptions, *, is_gpu_named: bool) -> ResultCacheEntry | None:
    """Return the cache entry for the result of this call; None if such a result is never cached."""
    from memprof.flows.cache.results import find_cache_entry, is_torch_without_cuda

    if options.device == "auto":
        is_simulated = is_gpu_named or spec.parallel is not None or spec.gpus > 1 or is_torch_without_cuda()
    else:
        is_simulated = options.device == "virtual"
    key_values = {"fix": options.fix, "ladder": options.ladder, "largest": options.largest}
    return find_cache_entry("profile", spec, key_values, settings.command_line) if is_simulated else None


def _run(spec: TargetSpec, options: ProfileOptions, progress: Progress, *, is_gpu_named: bool) -> tuple[Trace, Report]:
    """Return trace and report of the run, ladder or search; `is_gpu_named`: an option names the GPU to simulate."""
    from memprof.device.visible import hide_gpus
    from memprof.flows import profile as flow
    from memprof.flows.ladder.requested import resolve_fixes, run_requested

    spec, fixes = resolve_fixes(spec, "auto" if options.is_search else options.fix, ladder=options.ladder)
    if options.largest is not None:
        from memprof.flows.ladder.runs import SpecRuns
        from memprof.flows.limit import find_largest_for_spec

        if options.fix is not None:
            spec = SpecRuns(spec, progress).add_fixes(fixes)
        return find_largest_for_spec(spec, options.largest, progress)
    simulated: Trace | None = None
    if options.device == "auto" and not is_gpu_named and spec.parallel is None and spec.gpus == 1:
        spec, simulated = flow.resolve_device(spec, progress)
    elif options.device in ("auto", "virtual"):
        hide_gpus()
    else:
        spec = spec.edit(device=options.device)
    return run_requested(spec, fixes, progress, searches=options.is_search, ladder=options.ladder, simulated=simulated)
