"""Alternatives if no configuration fits: more host memory, another GPU, more GPUs, or LoRA or QLoRA."""

from __future__ import annotations

import math

from memprof.device.catalog import list_suggested_gpus
from memprof.errors import MemprofError
from memprof.flows.recommend.outcome import HOST_MEMORY, SimulatedRun
from memprof.flows.recommend.plans import Goal, list_tiers
from memprof.flows.recommend.search import PlanRun, Search
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import Alternative
from memprof.units import gib

MAX_GPUS = 1024
CHEAPER_GOALS = {Goal.FULL: (Goal.LORA, Goal.QLORA), Goal.LORA: (Goal.QLORA,), Goal.QLORA: (), Goal.INFER: ()}


def find_alternatives(search: Search, leanest: PlanRun) -> tuple[Alternative, ...]:
    """Return alternatives for a search in which no run fits; `leanest` is the run that needs the least memory."""
    host_limited_runs = [run for run in search.run_by_plan.values() if run.outcome.oom_stage == HOST_MEMORY]
    alternatives = [
        *([_find_host_memory(host_limited_runs)] if host_limited_runs else []),
        *([] if leanest in host_limited_runs else [_find_smallest_gpu(search, leanest), _find_num_gpus(search)]),
        *(_try_goal(search, goal) for goal in CHEAPER_GOALS[search.goal]),
    ]
    return tuple(alternative for alternative in alternatives if alternative is not None)


def _find_host_memory(runs: list[PlanRun]) -> Alternative:
    """Return the alternative with more host memory: that of `runs`, which fit the GPU, with the least host memory."""
    leanest = min(runs, key=lambda run: run.outcome.host_bytes)
    return Alternative("the least host memory that does", leanest.label, leanest.outcome.host_bytes, estimate=False)


def _find_smallest_gpu(search: Search, leanest: PlanRun) -> Alternative | None:
    """Return the smallest GPU of the catalog on which a simulated run like `leanest` fits; None if no GPU does."""
    spec = leanest.outcome.spec.edit(gpu_vram_bytes=None)
    for gpu in sorted(list_suggested_gpus(search.simulator.gpu.device_type), key=lambda gpu: gpu.total_bytes):
        if gpu.total_bytes < leanest.outcome.needed_bytes:
            continue
        simulator = Simulator(gpu, search.simulator.progress)
        outcome = simulator.try_run(spec.edit(gpu=gpu.key), f"{leanest.label} on {gpu.key}")
        if outcome is not None and outcome.fits:
            name = f"{gpu.name} ({gib(gpu.total_bytes)} GiB), {leanest.label}"
            return Alternative("the smallest GPU that does", name, outcome.needed_bytes, estimate=False)
    return None


def _find_num_gpus(search: Search) -> Alternative | None:
    """Return the least number of GPUs that fit the model with parameters, gradients and optimizer state sharded.

    A closed form, that of ZeRO's third stage (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 5.3): each GPU has one N-th of the three, and all other memory as in the run.
    Parameters of two layers are unsharded at a time: the current layer and the prefetched one.
    """
    gpu = search.simulator.gpu
    best: tuple[int, int, PlanRun] | None = None
    for run in search.run_by_plan.values():
        if run.plan.optimizer == "adamw-cpu" or run.plan.precision in ("int8", "nf4"):
            continue
        outcome = run.outcome
        state = outcome.state
        sharded_bytes = state.parameters_bytes + state.gradients_bytes + state.optimizer_state_bytes
        unsharded_bytes = outcome.needed_bytes - sharded_bytes + 2 * state.parameters_bytes // _get_num_layers(outcome)
        if unsharded_bytes >= gpu.total_bytes:
            continue
        num_gpus = max(math.ceil(sharded_bytes / (gpu.total_bytes - unsharded_bytes)), 2)
        if num_gpus <= MAX_GPUS and (best is None or num_gpus < best[0]):
            best = num_gpus, unsharded_bytes + math.ceil(sharded_bytes / num_gpus), run
    if best is None:
        return None
    num_gpus, bytes_per_gpu, run = best
    name = f"{num_gpus} x {gpu.name}, sharded (FSDP, ZeRO-3): {run.label} each"
    return Alternative("the least number of these GPUs", name, bytes_per_gpu, estimate=True)


def _get_num_layers(outcome: SimulatedRun) -> int:
    """Return the number of layers in the model's configuration; 2 if the configuration does not have it."""
    # Imported here: the package memprof.workload.models imports torch.
    from memprof.workload.models import find_source

    config = find_source(outcome.spec).config or {}
    text_config = config.get("text_config")
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        for mapping in (config, text_config if isinstance(text_config, dict) else {}):
            if isinstance(mapping.get(name), int):
                return max(int(mapping[name]), 2)
    return 2


def _try_goal(search: Search, goal: Goal) -> Alternative | None:
    """Return the alternative `goal` on the same GPU, with all exact fixes; None if no run of the goal fits."""
    micro_batch = search.list_micro_batches()[0]
    for tier in list_tiers(goal, search.simulator.gpu):
        plan = tier.minimize_memory()
        try:
            outcome = search.simulator.run(
                plan.make_spec(search.base_spec, micro_batch), f"{goal.value}: {plan.format_label(micro_batch)}"
            )
        except MemprofError:
            continue
        if outcome.fits:
            name = f"{goal.value} ({plan.format_label(micro_batch)})"
            return Alternative("less that is trained", name, outcome.needed_bytes, estimate=False)
    return None
