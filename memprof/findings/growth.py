"""Tensors that accumulate from round to round; a round is a training step or a call in an evaluation loop.

Tensors with the same operator, line and module (without layer numbers) are counterparts. The bytes of counterparts that
have outlived a whole round form a curve. The curve grows if it never falls, rises at least twice, and has not settled:
recent rounds still add bytes and make tensors. A tensor that waits for its successor and a window over the last few
rounds settle; a structure that is built once rises once; a full cache makes no more tensors.

Tensors that every round makes anew leave none behind and may still grow, in two ways.
`everything = torch.cat([everything, new])`: joined tensors count from their allocation, if the rounds added nearly all
bytes of the last tensor; batches that happen to grow longer differ less.
`kept = [one.clone() for one in kept] + [new]`: each round leaves more counterparts than the round before, by a constant
number.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memprof.findings.evidence import file_and_line, format_shape, module_pattern, get_names, plural, tensor_evidence
from memprof.findings.finding import Context, Evidence, cache_per_context
from memprof.ledger.steps import training_steps
from memprof.trace.events import ROLES_PER_STEP, Holder, Role, Trace
from memprof.units import format_bytes

_JOINS = ("aten.cat", "aten.stack")

MIN_STEP_BYTES = 64 << 10  # per step, of tensors without a graph: less is a metric that is kept as a tensor

# Two cannot show that tensors pile up: what waits for its successor looks the same. A sum whose graph goes back over
# both steps they can.
MIN_STEPS = 3

MAX_SHOWN = 6  # kinds of tensors in the evidence

MIN_COUNT_RISES = 3  # of the number of counterparts that are made anew: two may be batches that happen to have more parts

MAX_ROUNDS = 10_000_000  # runs are shorter: a GPU that lasts for more is not filled

Key = tuple[int, int, str | None]  # indices of operator and line in the trace; the module's path without numbers


@dataclass(frozen=True, slots=True)
class LeakGroup:
    """Counterparts that accumulate, and that one holder keeps."""

    key: Key
    storages: tuple[int, ...]  # live at the end of the last round
    num_bytes: int  # of blocks that outlived the round which made them, beyond those at the end of the first
    bytes_per_iteration: int  # bytes that a round adds: in the middle where each adds some, else on average
    is_recreated: bool = False  # each round makes all of them again: the old and the new are live together for a moment


def make_key(trace: Trace, index: int) -> Key:
    """Return the key of a storage's counterparts: operator, line, and module without numbers."""
    storage = trace.storages[index]
    return storage.op, storage.source, module_pattern(trace, storage)


def find_leaks(context: Context, storages: Iterable[int], moments: Sequence[int]) -> list[LeakGroup]:
    """Return the groups of growing `storages`, most expensive first; `moments` are the last events of the rounds."""
    lives = context.lives
    groups: dict[Key, list[int]] = defaultdict(list)
    for index in storages:
        groups[make_key(context.ledger.trace, index)].append(index)
    result = []
    joins = {number for number, op in enumerate(context.ledger.trace.ops) if op in _JOINS}
    for key, members in groups.items():
        curve = _compute_curve(context, members, moments, lasting=True)
        grown = is_growing(curve, count_idle_iterations(context, members, moments))
        is_recreated = not grown
        if is_recreated and key[0] in joins:
            curve = _compute_curve(context, members, moments, lasting=False)
            grown = is_growing(curve) and curve[-1] <= 2 * _compute_median_rise(curve) * len(curve)
        elif is_recreated and is_rising_constantly(context, members, moments):
            curve = _compute_curve(context, members, moments, lasting=False)
            grown = is_growing(curve)
        if grown:
            alive = lives.find_live(moments[-1], members).storages
            result.append(LeakGroup(key, alive, curve[-1] - curve[0], _compute_bytes_per_round(curve), is_recreated))
    return sorted(result, key=lambda leak: -leak.num_bytes)


@cache_per_context
def find_step_leaks(context: Context) -> dict[Holder | None, list[LeakGroup]]:
    """Return the tensors that accumulate over the training steps, by their holder.

    Tensors with a role (buffers, optimizer state that is made late) are no leaks, except parameters and state of models
    that training makes. Inputs and gradients count once later ones have replaced them, since parameters may get their
    first gradient in any step. A step's tensors must outlive the step.
    """
    ledger, trace = context.ledger, context.ledger.trace
    steps = training_steps(trace, ledger.allocated)
    if not steps:
        return {}
    births = context.lives.births
    counted = _find_replaced(trace) | _find_late_models(trace, births, steps[0].begin)
    candidates = [
        index
        for index, storage in enumerate(trace.storages)
        if births[index] >= steps[0].begin
        and storage.device == trace.device
        and not storage.hidden
        and (index not in trace.owners or index in counted)
    ]
    found = find_leaks(context, candidates, [step.end - 1 for step in steps]) if len(steps) >= MIN_STEPS else []
    groups = group_by_holder(trace, found)
    for holder in trace.holders:
        if is_running_sum(holder) and make_holder_key(holder) not in {make_holder_key(one) for one in groups}:
            groups[holder] = []
    return groups


def _find_replaced(trace: Trace) -> set[int]:
    """Return the storages of inputs and gradients that later ones have replaced."""
    last = {name: index for index, name in get_names(trace, Role.GRADIENT).items()}
    return {
        index for index, owner in trace.owners.items() if owner.role in ROLES_PER_STEP and last.get(owner.name) != index
    }


def _find_late_models(trace: Trace, births: Sequence[int], begin: int) -> set[int]:
    """Return the parameters that are made from event `begin` on, and, if any, the optimizer state from then on.

    Late optimizer state without late parameters belongs to parameters with a late first gradient.
    """
    models, states = (
        {index for index in get_names(trace, role) if births[index] >= begin}
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
    )
    return models | states if models else set()


def count_idle_iterations(context: Context, members: list[int], moments: Sequence[int]) -> int:
    """Return the number of last rounds in which no tensor of `members` was made."""
    return len(moments) - 1 - bisect.bisect_left(moments, max(context.lives.births[index] for index in members))


def is_growing(curve: Sequence[int], count_idle_iterations: int = 0) -> bool:
    """Return whether the bytes at the ends of rounds keep growing; `count_idle_iterations` last rounds made no tensor."""
    rises = [round_ for round_, (before, after) in enumerate(pairwise(curve), 1) if after > before]
    if len(rises) < 2 or any(after < before for before, after in pairwise(curve)):
        return False
    at_rest = max(len(curve) - 1 - rises[-1], count_idle_iterations)
    return at_rest == 0 or at_rest < max(after - before for before, after in pairwise(rises))


def is_rising_constantly(context: Context, members: list[int], moments: Sequence[int]) -> bool:
    """Return whether each round that adds `members` adds the same number of them, and rounds keep adding them."""
    births, deaths = (
        sorted(map(context.lives.births.__getitem__, members)),
        sorted(map(context.lives.deaths.__getitem__, members)),
    )
    alive = [bisect.bisect_right(births, moment) - bisect.bisect_right(deaths, moment) for moment in moments]
    rises = {after - before for before, after in pairwise(alive)} - {0}
    return len(rises) == 1 and sum(after > before for before, after in pairwise(alive)) >= MIN_COUNT_RISES and is_growing(alive)


def _compute_bytes_per_round(curve: Sequence[int]) -> int:
    """Return the bytes that a round adds, from the first round that adds any."""
    first = next(at for at, (before, after) in enumerate(pairwise(curve)) if after > before)
    grown = curve[first:]
    is_steady = all(after > before for before, after in pairwise(grown))
    return _compute_median_rise(grown) if is_steady else (grown[-1] - grown[0]) // (len(grown) - 1)


def _compute_median_rise(curve: Sequence[int]) -> int:
    """Return the median of the bytes that a round adds, of rounds that add any."""
    return statistics.median_low([after - before for before, after in pairwise(curve) if after > before])


def _compute_curve(context: Context, members: list[int], moments: Sequence[int], *, lasting: bool) -> list[int]:
    """Return the bytes of `members` at each moment; with `lasting`, only of members that were live a moment before."""
    lives = context.lives
    changes: list[tuple[int, int]] = []
    for index in members:
        birth, death, num_bytes = lives.births[index], lives.deaths[index], lives.sum_bytes([index])
        if lasting:
            own = bisect.bisect_left(moments, birth)
            birth = moments[own] + 1 if own < len(moments) else death
        if birth < death:
            changes += [(birth, num_bytes), (death, -num_bytes)]
    changes.sort()
    curve, now, position = [], 0, 0
    for moment in moments:
        while position < len(changes) and changes[position][0] <= moment:
            now += changes[position][1]
            position += 1
        curve.append(now)
    return curve


def find_holder_keys(trace: Trace, holder: Holder) -> set[Key]:
    """Return the keys of all tensors that a holder was observed to keep."""
    return {
        make_key(trace, index) for one in trace.holders if make_holder_key(one) == make_holder_key(holder) for index in one.storages
    }


def group_by_holder(trace: Trace, grown: list[LeakGroup]) -> dict[Holder | None, list[LeakGroup]]:
    """Return the leaks by holder, each holder at its largest graph; the key None has leaks without a known holder."""
    members = {leak.key for leak in grown}
    groups: dict[Holder | None, list[LeakGroup]] = defaultdict(list)
    for leak in grown:
        holder = find_holder(trace, leak, members)
        if holder is not None:
            alike = [one for one in trace.holders if make_holder_key(one) == make_holder_key(holder)]
            holder = max(alike, key=lambda one: one.nodes)
        groups[holder].append(leak)
    return groups


def make_holder_key(holder: Holder | None) -> tuple[object, ...]:
    """Return the key by which observations of the same holder are equal."""
    return () if holder is None else (holder.kind, holder.name, holder.source)


# -- who keeps it ---------------------------------------------------------------------------------------------------


def find_holder(trace: Trace, leak: LeakGroup, members: set[Key]) -> Holder | None:
    """Return the holder of a leak: a holder of tensors with the leak's key, else the holder of the largest graph.

    `members` holds the keys of all leaks.
    """
    own = [holder for holder in trace.holders if leak.key in find_holder_keys(trace, holder)]
    if own:
        return max(own, key=lambda holder: len(holder.storages))
    graphs = [h for h in trace.holders if h.nodes and (find_holder_keys(trace, h) & members or is_running_sum(h))]
    return max(graphs, key=lambda holder: (holder.node_steps, holder.nodes), default=None)


def is_running_sum(holder: Holder) -> bool:
    """Return whether the holder is a tensor whose graph spans several steps, as in `total = total + loss`."""
    return not holder.kind and holder.node_steps > 1


def describe_holder(holder: Holder) -> str:
    """Return the kind and name of the holder for a sentence: "list `losses`"."""
    kind = holder.kind or "variable"
    return f"{'attribute' if kind == 'variable' and '.' in holder.name else kind} `{holder.name}`"


def format_holders(*holders: Holder | None) -> str:
    """Return the end of a title, with the known holders and the lines that fill them."""
    seen = [
        describe_holder(holder) + (f" ({file_and_line(holder.source)})" if holder.fills else "")
        for holder in holders
        if holder is not None
    ]
    return f", kept by {' and '.join(seen)}" if seen else ""


def make_holder_fix_evidence(holder: Holder | None, what: str) -> Evidence:
    """Return evidence that describes a fix at the line that fills the holder."""
    line = holder.source if holder is not None and holder.fills else None
    where = "" if line is None else f" at {file_and_line(line)}"
    return Evidence(f"fix{where}: {what}", source=line)


def make_holder_evidence(holder: Holder | None) -> Evidence:
    """Return evidence of the holder and of the line that fills it."""
    if holder is None:
        text = "what keeps them was not seen: no variable, attribute or container of the program that was found"
        return Evidence(text)
    how = ", filled at" if holder.fills else " of"
    where = "" if holder.source is None else f"{how} {file_and_line(holder.source)}"
    return Evidence(f"kept by {describe_holder(holder)}{where}", source=holder.source)


def make_leak_evidence(trace: Trace, group: Sequence[LeakGroup], per: str) -> list[Evidence]:
    """Return evidence of each leak, the largest first; leaks beyond MOST_SHOWN are one line."""
    ordered = sorted(group, key=lambda leak: -leak.bytes_per_iteration)
    lines = [_make_group_evidence(trace, leak, per) for leak in ordered[:MAX_SHOWN]]
    others = ordered[MAX_SHOWN:]
    if others:
        num_bytes = sum(leak.bytes_per_iteration for leak in others)
        text = f"and {plural(len(others), 'kind')} of tensors more: {format_bytes(num_bytes)} more a {per}"
        lines.append(Evidence(text, num_bytes=num_bytes))
    return lines


def _make_group_evidence(trace: Trace, leak: LeakGroup, per: str) -> Evidence:
    """Return evidence of one leak: its largest tensor, source line, bytes per round, and number of live tensors."""
    # The largest, of equal ones the last: one line may join logits, labels and losses.
    shown = max(leak.storages, key=lambda index: (trace.storages[index].num_bytes, index))
    storage = trace.storages[shown]
    module = module_pattern(trace, storage)
    inside = f"in {module} " if module else ""
    text = (
        f"{format_shape(storage.shape)} {storage.dtype} by {trace.op(storage)} {inside}at "
        f"{file_and_line(trace.source_line(storage))}: {format_bytes(leak.bytes_per_iteration)} more a {per}, "
        f"{plural(len(leak.storages), 'tensor')} live at the last"
    )
    return tensor_evidence(trace, shown, text, num_bytes=leak.bytes_per_iteration)


def make_exhaustion_evidence(context: Context, bytes_per_iteration: int, per: str) -> Evidence | None:
    """Return evidence of the rounds until the GPU is full; None without a GPU, on a full GPU, or after MAX_ROUNDS."""
    spare = None if context.usable_bytes is None else context.usable_bytes - context.ledger.peak_reserved_bytes
    if spare is None or not bytes_per_iteration or not 0 < spare // bytes_per_iteration <= MAX_ROUNDS:
        return None
    return Evidence(f"at this rate what is left of the GPU lasts for {spare // bytes_per_iteration:,} more {per}s")
