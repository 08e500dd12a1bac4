"""Simulated runs for `memprof estimate`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from memprof.estimate.geometry import EstimatedModel
from memprof.estimate.methods import MethodPlan
from memprof.estimate.table import SimulatedRun
from memprof.flows.profile import profile
from memprof.spec import TargetSpec

UNLIMITED = 8 << 40  # bytes of a virtual A100 on which everything fits


def simulate(
    subject: EstimatedModel,
    plan: MethodPlan,
    batch_size: int,
    context_length: int | None,
    progress: Callable[[str], None] = lambda doing: None,
    lengths: str | None = None,
    steps: int | None = None,
    parallel: str | None = None,
    gpus: int = 1,
) -> SimulatedRun:
    """Run `plan` on a virtual GPU of unlimited capacity.

    Args:
        subject: the model; a number of parameters is built from the shape derived for it.
        batch_size: sequences of a micro-batch.
        context_length: tokens of a sequence.
        lengths: sequence lengths, in the syntax of `--lengths`, cut to `context_length`.
        steps: number of steps; None: the default of `memprof profile`.
        parallel: the plan over `gpus` GPUs (`--parallel`); one rank of each kind is run, and the highest counts.

    Raises:
        MemprofError: the model cannot be built or run.
    """
    fields = plan.build_spec_fields()
    if plan.method.kind == "lora" and subject.geometry is not None:
        fields["lora_targets"] = plan.lora_targets or subject.geometry.default_lora_modules
    with tempfile.TemporaryDirectory() as folder:
        model = subject.path or subject.name
        if subject.is_derived:
            model = str(Path(folder) / "config.json")
            Path(model).write_text(json.dumps(dict(subject.config)), encoding="utf-8")
        spec = TargetSpec(
            model=model,
            batch_size=batch_size,
            context_length=context_length,
            lengths=lengths,
            steps=steps,  # type: ignore[arg-type]
            gpu_vram_bytes=UNLIMITED,
            alloc_conf="",
            parallel=parallel,
            gpus=gpus,
            **fields,  # type: ignore[arg-type]
        )
        _, document = profile(spec, progress)
    peak = document.peak
    highest = max(document.ranks, key=lambda row: row.peak_allocated_bytes, default=None)
    if highest is not None and highest.peak_allocated_bytes > peak.allocated_bytes:
        # The report in full is of the rank that needs most, with what the allocator keeps.
        required = document.verdict.required_bytes
        return SimulatedRun(highest.peak_stage, highest.peak_allocated_bytes, required, dict(highest.categories))
    return SimulatedRun(peak.stage, peak.allocated_bytes, document.verdict.required_bytes, dict(peak.categories))
