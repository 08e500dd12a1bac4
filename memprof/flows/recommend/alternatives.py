"""Alternatives where nothing fits: more host memory, another GPU, more GPUs, or a goal that trains less."""

from __future__ import annotations

import math

from memprof.device.catalog import list_gpus
from memprof.errors import MemprofError
from memprof.flows.recommend.outcome import HOST_MEMORY, SimulatedRun
from memprof.flows.recommend.plans import Goal, tiers
from memprof.flows.recommend.search import Search, Tried
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import Alternative
from memprof.units import gib

MAX_GPUS = 1024
LESS_TRAINED = {Goal.FULL: (Goal.LORA, Goal.QLORA), Goal.LORA: (Goal.QLORA,), Goal.QLORA: (), Goal.INFER: ()}


def alternatives(search: Search, least: Tried) -> tuple[Alternative, ...]:
    """Return the alternatives to a search without a fit; `least` is the run with the lowest need."""
    host_limited = [tried for tried in search.tried.values() if tried.outcome.oom_stage == HOST_MEMORY]
    found = [
        *([_find_host_memory(host_limited)] if host_limited else []),
        *([] if least in host_limited else [_find_smallest_gpu(search, least), _find_num_gpus(search)]),
        *(_try_goal(search, goal) for goal in LESS_TRAINED[search.goal]),
    ]
    return tuple(one for one in found if one is not None)


def _find_host_memory(tried: list[Tried]) -> Alternative:
    """Return the alternative with more host memory: the least need among runs that fit the GPU but not the host."""
    least = min(tried, key=lambda one: one.outcome.host_bytes)
    return Alternative("the least host memory that does", least.label, least.outcome.host_bytes, estimate=False)


def _find_smallest_gpu(search: Search, least: Tried) -> Alternative | None:
    """Return the smallest GPU of the catalog on which the run `least` fits, by a run; None if no GPU is enough."""
    spec = least.outcome.spec.edit(gpu_vram_bytes=None)
    for gpu in sorted(list_gpus(), key=lambda gpu: gpu.total_bytes):
        if gpu.total_bytes < least.outcome.needed_bytes:
            continue
        runs = Simulator(gpu, search.runs.progress)
        outcome = runs.try_run(spec.edit(gpu=gpu.key), f"{least.label} on {gpu.key}")
        if outcome is not None and outcome.fits:
            name = f"{gpu.name} ({gib(gpu.total_bytes)} GiB), {least.label}"
            return Alternative("the smallest GPU that does", name, outcome.needed_bytes, estimate=False)
    return None


def _find_num_gpus(search: Search) -> Alternative | None:
    """Return the least number of GPUs that fits with parameters, gradients and optimizer state sharded.

    A closed form, that of ZeRO's third stage (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 5.3): each GPU has one N-th of the three, and all other memory as in the run.
    Parameters of two layers are unsharded at a time: the current layer and the prefetched one.
    """
    gpu = search.runs.gpu
    best: tuple[int, int, Tried] | None = None
    for tried in search.tried.values():
        if tried.plan.optimizer == "adamw-cpu" or tried.plan.precision in ("int8", "nf4"):
            continue
        outcome = tried.outcome
        state = outcome.state
        sharded_bytes = state.parameters_bytes + state.gradients_bytes + state.optimizer_state_bytes
        unsharded_bytes = outcome.needed_bytes - sharded_bytes + 2 * state.parameters_bytes // _num_layers(outcome)
        if unsharded_bytes >= gpu.total_bytes:
            continue
        number = max(math.ceil(sharded_bytes / (gpu.total_bytes - unsharded_bytes)), 2)
        if number <= MAX_GPUS and (best is None or number < best[0]):
            best = number, unsharded_bytes + math.ceil(sharded_bytes / number), tried
    if best is None:
        return None
    number, needed, tried = best
    name = f"{number} x {gpu.name}, sharded (FSDP, ZeRO-3): {tried.label} each"
    return Alternative("the least number of these GPUs", name, needed, estimate=True)


def _num_layers(outcome: SimulatedRun) -> int:
    """Return the number of layers of the model; 2 (all parameters unsharded) if the configuration has no number."""
    # Imported here: the package memprof.workload.models imports torch.
    from memprof.workload.models import find_source

    config = find_source(outcome.spec).config or {}
    text = config.get("text_config")
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        for place in (config, text if isinstance(text, dict) else {}):
            if isinstance(place.get(name), int):
                return max(int(place[name]), 2)
    return 2


def _try_goal(search: Search, goal: Goal) -> Alternative | None:
    """Return the alternative `goal` on the same GPU, with all exact fixes; None if no run of the goal fits."""
    micro_batch = search.sizes()[0]
    for tier in tiers(goal, search.runs.gpu):
        plan = tier.leanest()
        try:
            outcome = search.runs.run(plan.spec(search.base, micro_batch), f"{goal.value}: {plan.label(micro_batch)}")
        except MemprofError:
            continue
        if outcome.fits:
            name = f"{goal.value} ({plan.label(micro_batch)})"
            return Alternative("less that is trained", name, outcome.needed_bytes, estimate=False)
    return None
