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

UNLIMITED_BYTES = 8 << 40  # bytes of a virtual A100 on which everything fits


def simulate(
    estimated_model: EstimatedModel,
    plan: MethodPlan,
    batch_size: int,
    context_length: int | None,
    progress: Callable[[str], None] = lambda _: None,
    lengths: str | None = None,
    steps: int | None = None,
    parallel: str | None = None,
    gpus: int = 1,
) -> SimulatedRun:
    """Run a model by `plan` on a virtual GPU of unlimited capacity; return its peak. Raises MemprofError.

    `lengths` are sequence lengths in the syntax of `--lengths`, truncated to `context_length` tokens. With `parallel`
    (`--parallel`, over `gpus` GPUs) one rank of each kind is run, and the result is the rank with the highest peak.
    `steps` None is the default of `memprof profile`."""
    spec_fields = plan.build_spec_fields()
    if plan.method.kind == "lora" and estimated_model.geometry is not None:
        spec_fields["lora_targets"] = plan.lora_targets or estimated_model.geometry.default_lora_modules
    with tempfile.TemporaryDirectory() as folder:
        model = estimated_model.path or estimated_model.name
        if estimated_model.is_derived:
            model = str(Path(folder) / "config.json")
            Path(model).write_text(json.dumps(dict(estimated_model.config)), encoding="utf-8")
        spec = TargetSpec(
            model=model,
            batch_size=batch_size,
            context_length=context_length,
            lengths=lengths,
            steps=steps,  # type: ignore[arg-type]
            gpu_vram_bytes=UNLIMITED_BYTES,
            alloc_conf="",
            parallel=parallel,
            gpus=gpus,
            **spec_fields,  # type: ignore[arg-type]
        )
        _, document = profile(spec, progress)
    peak = document.peak
    highest = max(document.ranks, key=lambda row: row.peak_allocated_bytes, default=None)
    if highest is not None and highest.peak_allocated_bytes > peak.allocated_bytes:
        # The report in full is of the rank that needs most, with what the allocator keeps.
        required_bytes = document.verdict.required_bytes
        return SimulatedRun(highest.peak_stage, highest.peak_allocated_bytes, required_bytes, dict(highest.categories))
    return SimulatedRun(peak.stage, peak.allocated_bytes, document.verdict.required_bytes, dict(peak.categories))
