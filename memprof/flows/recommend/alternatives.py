"""Ways out where nothing fits: another GPU, more GPUs, a shorter context, less that is trained."""

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
    """Return what would do instead; `least` is what needs the least of all that was run."""
    on_the_host = [tried for tried in search.tried.values() if tried.outcome.oom_stage == HOST_MEMORY]
    found = [
        *([_more_host_memory(on_the_host)] if on_the_host else []),
        *([] if least in on_the_host else [_smallest_gpu(search, least), _number_of_gpus(search)]),
        *(_other_goal(search, goal) for goal in LESS_TRAINED[search.goal]),
    ]
    return tuple(one for one in found if one is not None)


def _more_host_memory(tried: list[Tried]) -> Alternative:
    """Return what the host needs for a run that fits the GPU."""
    least = min(tried, key=lambda one: one.outcome.host_bytes)
    return Alternative("the least host memory that does", least.label, least.outcome.host_bytes, estimate=False)


def _smallest_gpu(search: Search, least: Tried) -> Alternative | None:
    """Find the smallest GPU of the catalog on which the run was made and fits."""
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


def _number_of_gpus(search: Search) -> Alternative | None:
    """Return the least number of these GPUs with parameters, gradients and optimizer state divided among them.

    A closed form, as of ZeRO's third stage (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 5.3): each GPU has one N-th of these three, and everything else as it was run.
    Parameters of two layers are there in full: those that compute, and those that are fetched meanwhile.
    """
    gpu = search.runs.gpu
    best: tuple[int, int, Tried] | None = None
    for tried in search.tried.values():
        if tried.plan.optimizer == "adamw-cpu" or tried.plan.precision in ("int8", "nf4"):
            continue
        outcome = tried.outcome
        state = outcome.state
        divided = state.parameters_bytes + state.gradients_bytes + state.optimizer_state_bytes
        kept = outcome.needed_bytes - divided + 2 * state.parameters_bytes // _layers(outcome)
        if kept >= gpu.total_bytes:
            continue
        number = max(math.ceil(divided / (gpu.total_bytes - kept)), 2)
        if number <= MAX_GPUS and (best is None or number < best[0]):
            best = number, kept + math.ceil(divided / number), tried
    if best is None:
        return None
    number, needed, tried = best
    name = f"{number} x {gpu.name}, sharded (FSDP, ZeRO-3): {tried.label} each"
    return Alternative("the least number of these GPUs", name, needed, estimate=True)


def _layers(outcome: SimulatedRun) -> int:
    """Return how many layers the parameters are in; 2 (all of them at once) if the model does not say."""
    # Here and not above: it imports no torch itself, and its package does.
    from memprof.workload.models import find_source

    config = find_source(outcome.spec).config or {}
    text = config.get("text_config")
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        for place in (config, text if isinstance(text, dict) else {}):
            if isinstance(place.get(name), int):
                return max(int(place[name]), 2)
    return 2


def _other_goal(search: Search, goal: Goal) -> Alternative | None:
    """Return a goal that trains less, on the same GPU, with everything on that saves memory and changes no number."""
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
