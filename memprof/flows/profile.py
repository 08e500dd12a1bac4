"""The flow of `memprof profile`: read this file first, then account.py.

    TargetSpec -workload-> step -capture-> Trace -account-> Report

A run is captured once, and everything else is computed from its trace. So a saved capture gives the same report
again, and simulated and measured runs share the code after the capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable

from memprof.allocator import CurrentSettings
from memprof.device.host import available_bytes
from memprof.errors import MemprofError, RunFailedError, UsageError
from memprof.fixes.catalog import ALL_FIXES
from memprof.flows.account import analyze
from memprof.flows.gpus import RunAllocator, find_spec_gpu, make_device_facts, read_device_facts, resolve_spec_settings
from memprof.flows.local_gpu import find_local_gpu, make_gpu_options
from memprof.flows.rank_reports import merge_traces
from memprof.ledger.ledger import EmptyTraceError
from memprof.report.documents.report import Report
from memprof.spec import TargetSpec
from memprof.torch_private import inductor
from memprof.trace.events import Trace
from memprof.trace.facts import Target
from memprof.units import format_bytes
from memprof.watch.collection import freeze_existing_objects
from memprof.workload.lengths import parse_lengths
from memprof.workload.models import find_source, find_source_without_imports
from memprof.workload.plan import check_plan, parse_plan


def profile(
    spec: TargetSpec, progress: Callable[[str], None] = lambda _: None, *, with_details: bool = True
) -> tuple[Trace, Report]:
    """Run `spec` on a virtual GPU or a real device; return its trace and report (see `capture_trace`, `analyze`)."""
    trace = capture_trace(spec, progress)
    progress("accounting")
    return trace, analyze(trace, with_details=with_details)


def check_inputs(spec: TargetSpec) -> None:
    """Raise UsageError if `spec` names a GPU, allocator settings, a model, lengths or a plan that do not exist, or do
    not go together. Imports no torch: what a search finds wrong only in its first run, the user learns at once."""
    find_spec_gpu(spec)
    resolve_spec_settings(spec)
    source = find_source_without_imports(spec)
    if spec.lengths is not None:
        parse_lengths(spec.lengths)
    if spec.parallel is not None:
        plan = parse_plan(spec.parallel, spec.gpus)
        if source is not None:
            check_plan(plan, spec, source.task, source.config)


def capture_trace(spec: TargetSpec, progress: Callable[[str], None] = lambda _: None) -> Trace:
    """Run `spec` on its virtual GPU, or on a real device; return its trace.

    Raises MemprofError: the model cannot be found or built (UsageError for wrong options); RunFailedError, with the
    trace and report so far: the model's code raised, or cannot be simulated.
    """
    if spec.parallel is None and (spec.gpus > 1 or spec.rank is not None):
        option = f"--gpus {spec.gpus}" if spec.gpus > 1 else f"--rank {spec.rank}"
        hint = "add --parallel fsdp, or ddp; --fix auto finds out"
        raise UsageError("how is the model spread over the GPUs?", value=option, hint=hint)
    if spec.parallel is not None and spec.rank is None and parse_plan(spec.parallel, spec.gpus).layers == 1:
        return _run_each_rank_kind(spec, spec.parallel, progress)
    return _run_process(spec, progress)


def _run_process(spec: TargetSpec, progress: Callable[[str], None]) -> Trace:
    gpu = find_spec_gpu(spec)
    current_settings = CurrentSettings(resolve_spec_settings(spec))
    is_virtual, config = spec.device == "virtual", current_settings.now.config
    device = make_device_facts(gpu, config=config) if is_virtual else read_device_facts(spec.device)
    device = dataclasses.replace(device, host_memory_bytes=spec.host_memory_bytes)
    # Of later runs of a search nothing is imported any more.
    is_imported = {"torch", "transformers"} <= sys.modules.keys()
    progress("building the model" if is_imported else "importing torch and the model's code")
    source = find_source(spec)
    # Imported here: reading a capture and --help need no torch, nor does a model that does not exist.
    from memprof.flows.capture import capture_measured, capture_virtual
    from memprof.workload.step import Workload

    apply_fixes = None
    if spec.fixes:
        from memprof.fixes import spec_fixes

        apply_fixes = spec_fixes.apply_fixes
    if spec.compile or any(ALL_FIXES[fix.partition("=")[0]].compiles for fix in spec.fixes):
        importlib.import_module(inductor.compile_fx.module)
        freeze_existing_objects()  # compiling runs the garbage collector
    run_error: RunFailedError | None = None
    workload = Workload(spec, source, apply_fixes)
    try:
        if spec.device == "virtual":
            trace = capture_virtual(
                workload, gpu, progress, lambda trace: RunAllocator(trace, gpu, current_settings.now), current_settings
            )
        else:
            if spec.device == "cpu":
                _check_host_memory(spec, progress)
            trace = capture_measured(workload, spec.device, progress, detail=spec.detail)
    except RunFailedError as error:
        run_error, trace = error, error.trace
    trace.facts = dataclasses.replace(
        trace.facts,
        command="profile",
        target=Target(
            asked=workload.spec,
            model=source.name,
            task=source.task,
            num_parameters=workload.num_parameters,
            num_trainable_parameters=workload.num_trainable_parameters,
            context_length=workload.context_length,
            dtype=workload.dtype,
            vocab_size=source.vocab_size,
            asked_vocab_size=source.asked_vocab_size,
            max_positions=source.max_positions,
            sequence_lengths=tuple(workload.sequence_lengths),
            alloc_conf=current_settings.now.alloc_conf,
        ),
        device=device,
        allocator=current_settings.now.facts,
    )
    if run_error is None:
        return trace
    progress("accounting")
    with contextlib.suppress(EmptyTraceError):  # the run failed before anything was on the GPU
        run_error.document = analyze(trace)
        run_error.hint = "the finding run-failed says what to do; --debug shows the traceback"
    raise run_error


def _run_each_rank_kind(spec: TargetSpec, plan: str, progress: Callable[[str], None]) -> Trace:
    """Run one rank of each kind in the parallel plan, one after another; return the merged trace."""
    traces = []
    rank_kinds = parse_plan(plan, spec.gpus).group_similar_ranks()
    for rank, equal_ranks in rank_kinds:
        prefix = f"rank {rank}: " if len(rank_kinds) > 1 else ""
        trace = _run_process(spec.edit(rank=rank), lambda message, prefix=prefix: progress(prefix + message))  # type: ignore[misc]
        assert trace.facts.rank is not None and trace.facts.target is not None
        trace.facts = dataclasses.replace(
            trace.facts,
            rank=dataclasses.replace(trace.facts.rank, alike=(equal_ranks[0], equal_ranks[-1])),
            target=dataclasses.replace(trace.facts.target, asked=spec),
        )
        traces.append(trace)
    return merge_traces(traces)


def resolve_device(
    spec: TargetSpec, progress: Callable[[str], None] = lambda _: None
) -> tuple[TargetSpec, Trace | None]:
    """Return `spec` set to run on the CUDA GPU if a simulation fits its free memory; else on a virtual GPU, with the
    trace of the simulation. Without a GPU, return `spec` unchanged."""
    if "torch" not in sys.modules:
        progress("importing torch")
    from memprof.measured.cuda import cuda_unavailable_reason, current_gpu

    if cuda_unavailable_reason() is not None:
        return spec, None
    progress("simulating, to see whether it fits the GPU that is here")
    gpu = find_local_gpu() or current_gpu()
    virtual_spec = spec.edit(device="virtual", **make_gpu_options(gpu.name, gpu.total_bytes))
    try:
        trace, document = profile(virtual_spec, progress, with_details=False)
    except RunFailedError:
        return spec.edit(device="cuda"), None  # the real run raises too, unless the virtual GPU has a gap
    needed_bytes = document.verdict.required_bytes - document.device.context_bytes
    return (spec.edit(device="cuda"), None) if needed_bytes <= gpu.usable_bytes else (virtual_spec, trace)


def count_parallel_runs(spec: TargetSpec) -> int:
    """Return how many runs like `spec` may run in parallel, each in a worker process; 1 for the user's own code."""
    from memprof.workload.pool import count_workers  # needs torch

    _, colon, factory = spec.model.rpartition(":")
    # The user's code may depend on files of an earlier run.
    is_own_code = spec.trust_remote_code or bool(colon and factory.isidentifier())
    return count_workers() if spec.device == "virtual" and not is_own_code and not spec.compile else 1


def preload_imports(spec: TargetSpec, progress: Callable[[str], None]) -> None:
    """Run a small model with the options of `spec`, so that workers forked afterwards share its imports."""
    progress("importing torch and the libraries")
    small_spec = spec.edit(
        model="pythia-70m", model_is_size=False, context_length=8, batch_size=1, steps=1, vocab_size=None,
        lengths=None, parallel=spec.parallel and "fsdp", rank=None, fixes=(),
    )  # fmt: skip
    with contextlib.suppress(MemprofError):  # the runs themselves raise it again
        profile(small_spec, with_details=False)
    freeze_existing_objects()


def _check_host_memory(spec: TargetSpec, progress: Callable[[str], None]) -> None:
    """Raise UsageError if the run, by simulation, needs more than the free host memory of this machine."""
    free_bytes = available_bytes()
    if free_bytes is None:
        return
    progress("simulating, to see whether the run fits host memory")
    try:
        _, document = profile(spec.edit(device="virtual"), progress)
    except RunFailedError:
        return  # the real run raises too, unless the virtual GPU has a gap
    needed_bytes = max(document.peak.allocated_bytes, document.host_peak_bytes)
    if needed_bytes > free_bytes:
        raise UsageError(
            "this run does not fit host memory",
            value=f"it takes {format_bytes(needed_bytes)}, {format_bytes(free_bytes)} are free",
            hint="leave out --device cpu: simulated, it takes no memory",
        )
