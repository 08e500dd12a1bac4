"""Leaks: tensors that accumulate over iterations. An iteration is a training step or a call in an evaluation loop.

Tensors with the same operator, source line and module (without layer numbers) are counterparts. The bytes of the
counterparts that have outlived an entire iteration, one value per iteration, form a curve. The curve grows if it never
falls, rises at least twice (three times if not in successive iterations), and recent iterations still add bytes and
allocate tensors. These do not grow: a tensor that is replaced in each iteration, a window over the last iterations, a
structure that is built once, a full cache.

Tensors that each iteration allocates again outlive no iteration, and may still grow, in two ways:
`everything = torch.cat([everything, new])`: the bytes of such results count from their allocation, if the iterations
added nearly all bytes of the last result (not so for batches that happen to get longer).
`kept = [one.clone() for one in kept] + [new]`: each iteration adds the same number of counterparts.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memprof.findings.evidence import file_and_line, format_shape, module_pattern, names_of, plural, tensor_evidence
from memprof.findings.finding import Context, Evidence, cache_per_context
from memprof.ledger.steps import list_training_steps
from memprof.trace.events import AUTOCAST_KIND, HOOK_KIND, NONE, ROLES_OF_MODELS, CycleKind, Holder, Role, Trace
from memprof.units import format_bytes

_JOINS = ("aten.cat", "aten.stack")

MIN_STEP_BYTES = 64 << 10  # per step, of tensors without a graph: less is a metric that is kept as a tensor

# After two steps, a tensor that the next step replaces looks like a leak. (A graph that spans two steps is one.)
MIN_STEPS = 3

MAX_SHOWN = 6  # kinds of tensors in the evidence
MAX_NAMED = 3  # holders in a title, of which the last stands for all others

MAX_NAMES, MAX_NAME_LENGTH = 2, 52  # of holders in a row of the breakdown; of both together, in characters

MAX_NAMED_ITEMS = 2  # of one container: more are named together

# Rises of the number of recreated counterparts: two may be batches that happen to have more parts. Also of a curve that
# does not rise in each iteration: two may be steps of several optimizers that take turns.
MIN_RISES = 3

MAX_VIEW_SHARE = 0.5  # of the bytes of the storages: a holder of tensors with less holds views

MAX_ITERATIONS = 10_000_000  # runs are shorter: with room for more iterations, the GPU is not filled

CONTAINERS = ("dict", "OrderedDict", "defaultdict", "list", "set", "deque")  # kinds of holders

CYCLE_FIXES = {
    CycleKind.GRAD: "take the gradient with torch.autograd.grad(..., create_graph=True), or set .grad = None after the "
    "step",
    CycleKind.CTX: "give it to ctx.save_for_backward(...), which keeps no cycle",
    CycleKind.FUNCTION: "let the function not refer to the object that keeps it (give it a weakref.ref), or remove it "
    "(handle.remove())",
    CycleKind.OBJECTS: "set the attribute to None at the end, or make it a weakref.ref; until then the memory is freed "
    "only when Python's garbage collector happens to run (gc.collect())",
}

Key = tuple[int, int, str | None]  # indices of operator and line in the trace; the module's path without numbers


@dataclass(frozen=True, slots=True)
class LeakGroup:
    """Leak: tensors with the same operator, source line and module that accumulate over iterations."""

    key: Key
    storages: tuple[int, ...]  # live at the end of the last iteration
    num_bytes: int  # growth from the end of the first iteration to the end of the last
    bytes_each: int  # bytes that an iteration adds: the median if each adds some, else the mean
    is_recreated: bool = False  # each iteration allocates all of them again; old and new are live together for a moment


def make_key(trace: Trace, index: int) -> Key:
    """Return the key of the storage `index`: operator, source line, and module path without layer numbers."""
    storage = trace.storages[index]
    return storage.op, storage.source, module_pattern(trace, storage)


def find_leaks(context: Context, storages: Iterable[int], ends: Sequence[int]) -> list[LeakGroup]:
    """Return the leaks among `storages`, largest first; `ends` has the last event index of each iteration."""
    lifetimes = context.lifetimes
    groups: dict[Key, list[int]] = defaultdict(list)
    for index in storages:
        groups[make_key(context.ledger.trace, index)].append(index)
    leaks = []
    join_ops = {index for index, op in enumerate(context.ledger.trace.ops) if op in _JOINS}
    for key, members in groups.items():
        curve = compute_curve(context, members, ends, survivors_only=True)
        is_leak = is_growing(curve, count_idle_iterations(context, members, ends))
        is_recreated = not is_leak
        if is_recreated and key[0] in join_ops:
            curve = compute_curve(context, members, ends, survivors_only=False)
            is_leak = is_growing(curve) and curve[-1] <= 2 * compute_median_rise(curve) * len(curve)
        elif is_recreated and is_rising_constantly(context, members, ends):
            curve = compute_curve(context, members, ends, survivors_only=False)
            is_leak = is_growing(curve)
        if is_leak:
            live = lifetimes.find_live(ends[-1], members).storages
            leaks.append(LeakGroup(key, live, curve[-1] - curve[0], _compute_bytes_per_iteration(curve), is_recreated))
    return sorted(leaks, key=lambda leak: -leak.num_bytes)


@cache_per_context
def find_step_leaks(context: Context) -> dict[Holder | None, list[LeakGroup]]:
    """Return holder -> leaks: the tensors that accumulate over training steps; key None: the holder is not known.

    Tensors with a role are no leaks, except parameters and optimizer state of models that are built during training,
    and inputs and gradients that later ones have replaced (a parameter may get its first gradient in any step).
    """
    ledger, trace = context.ledger, context.ledger.trace
    steps = list_training_steps(trace, ledger.allocated)
    if not steps:
        return {}
    births = context.lifetimes.births
    included = _find_replaced(context) | _find_late_models(trace, births, steps[0].begin)
    candidates = [
        index
        for index, storage in enumerate(trace.storages)
        if births[index] >= steps[0].begin
        and storage.device == trace.device
        and not storage.hidden
        and (index not in trace.owners or index in included)
    ]
    leaks = find_leaks(context, candidates, [step.end - 1 for step in steps]) if len(steps) >= MIN_STEPS else []
    groups = _join_sums_of_one_line(by_holder(trace, leaks))
    for holder in trace.holders:
        if is_running_sum(holder) and holder_key(holder) not in {holder_key(other) for other in groups}:
            groups[holder] = []
    return groups


def _join_sums_of_one_line(groups: dict[Holder | None, list[LeakGroup]]) -> dict[Holder | None, list[LeakGroup]]:
    """Return `groups` with the leaks of running sums that one line carries on, such as an item for each layer, at the
    first of them: an operator of that line makes tensors for all, so that theirs cannot be told apart."""
    joined: dict[Holder | None, list[LeakGroup]] = {}
    first: dict[tuple[str | None, int], Holder] = {}
    for holder, leaks in groups.items():
        target = holder
        if holder is not None and is_running_sum(holder):
            target = first.setdefault((holder.source, holder.node_steps), holder)
        joined.setdefault(holder, [])
        joined[target] += leaks
    return joined


def _find_replaced(context: Context) -> set[int]:
    """Return the storages of inputs, and those of gradients that a later gradient of the same name has replaced.

    Where several models have parameters of this name, it may be the gradient of another one.
    """
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    parameters: dict[str, list[int]] = defaultdict(list)
    for index, name in names_of(trace, Role.PARAMETER).items():
        parameters[name].append(index)
    last = {name: index for index, name in names_of(trace, Role.GRADIENT).items()}

    def is_of_one_model(index: int, name: str) -> bool:
        return sum(births[one] < births[index] < deaths[one] for one in parameters[name]) < 2

    return {
        index
        for index, owner in trace.owners.items()
        if owner.role is Role.INPUT
        or (owner.role is Role.GRADIENT and last[owner.name] != index and is_of_one_model(index, owner.name))
    }


def _find_late_models(trace: Trace, births: Sequence[int], first_event: int) -> set[int]:
    """Return the parameters and the optimizer state allocated from event index `first_event` on.

    Empty without such parameters: late state alone belongs to old parameters that got their first gradient late.
    """
    parameters, optimizer_state = (
        {index for index in names_of(trace, role) if births[index] >= first_event}
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
    )
    return parameters | optimizer_state if parameters else set()


def count_idle_iterations(context: Context, members: list[int], ends: Sequence[int]) -> int:
    """Return the number of iterations after the one that allocated the newest of `members`."""
    return len(ends) - 1 - bisect.bisect_left(ends, max(context.lifetimes.births[index] for index in members))


def is_growing(curve: Sequence[int], num_idle: int = 0) -> bool:
    """Return whether `curve` (bytes after each iteration) grows; the last `num_idle` iterations allocated no tensor."""
    rises = [iteration for iteration, (before, after) in enumerate(pairwise(curve), 1) if after > before]
    if len(rises) < 2 or any(after < before for before, after in pairwise(curve)):
        return False
    longest_gap = max(after - before for before, after in pairwise(rises))
    if longest_gap > 1 and len(rises) < MIN_RISES:
        return False
    num_flat = max(len(curve) - 1 - rises[-1], num_idle)
    return num_flat == 0 or num_flat < longest_gap


def is_rising_constantly(context: Context, members: list[int], ends: Sequence[int]) -> bool:
    """Return whether the number of live `members` keeps growing, always by the same number per iteration."""
    births, deaths = (
        sorted(map(context.lifetimes.births.__getitem__, members)),
        sorted(map(context.lifetimes.deaths.__getitem__, members)),
    )
    counts = [bisect.bisect_right(births, end) - bisect.bisect_right(deaths, end) for end in ends]
    rises = {after - before for before, after in pairwise(counts)} - {0}
    return len(rises) == 1 and sum(b > a for a, b in pairwise(counts)) >= MIN_RISES and is_growing(counts)


def _compute_bytes_per_iteration(curve: Sequence[int]) -> int:
    """Return the bytes that an iteration adds, from the first rise on: the median, or the mean if some add none."""
    first = next(index for index, (before, after) in enumerate(pairwise(curve)) if after > before)
    rising = curve[first:]
    is_steady = all(after > before for before, after in pairwise(rising))
    return compute_median_rise(rising) if is_steady else (rising[-1] - rising[0]) // (len(rising) - 1)


def compute_median_rise(curve: Sequence[int]) -> int:
    """Return the median rise of `curve` over the iterations that add bytes."""
    return statistics.median_low([after - before for before, after in pairwise(curve) if after > before])


def compute_curve(context: Context, members: list[int], ends: Sequence[int], *, survivors_only: bool) -> list[int]:
    """Return the live bytes of `members` at each of `ends`, with `survivors_only` of those live at the end before."""
    lifetimes = context.lifetimes
    changes: list[tuple[int, int]] = []
    for index in members:
        birth, death, num_bytes = lifetimes.births[index], lifetimes.deaths[index], lifetimes.sum_bytes([index])
        if survivors_only:
            iteration = bisect.bisect_left(ends, birth)
            birth = ends[iteration] + 1 if iteration < len(ends) else death
        if birth < death:
            changes += [(birth, num_bytes), (death, -num_bytes)]
    changes.sort()
    curve, live_bytes, position = [], 0, 0
    for end in ends:
        while position < len(changes) and changes[position][0] <= end:
            live_bytes += changes[position][1]
            position += 1
        curve.append(live_bytes)
    return curve


def find_holder_keys(trace: Trace, holder: Holder) -> set[Key]:
    """Return the keys of all tensors that `holder` was observed to keep alive."""
    return {
        make_key(trace, index) for h in trace.holders if holder_key(h) == holder_key(holder) for index in h.storages
    }


def by_holder(trace: Trace, leaks: list[LeakGroup]) -> dict[Holder | None, list[LeakGroup]]:
    """Return holder -> leaks, with the observation of each holder that has the most autograd nodes; None: unknown."""
    leak_keys = {leak.key for leak in leaks}
    leaks_by_holder: dict[Holder | None, list[LeakGroup]] = defaultdict(list)
    for leak in leaks:
        holder = find_holder(trace, leak, leak_keys)
        if holder is not None:
            same = [h for h in trace.holders if holder_key(h) == holder_key(holder)]
            holder = max(same, key=lambda h: h.nodes)
        leaks_by_holder[holder].append(leak)
    return leaks_by_holder


def holder_key(holder: Holder | None) -> tuple[object, ...]:
    """Return a key that is equal for all observations of the same holder."""
    return () if holder is None else (holder.kind, holder.name, holder.source)


# -- holders --------------------------------------------------------------------------------------------------------


@cache_per_context
def find_growing_storages(context: Context) -> frozenset[int]:
    """Return the storages that accumulate over training steps, with their counterparts before the first step's forward
    and in a step that has not ended, and without those of models that are built later."""
    trace = context.ledger.trace
    leaks = [leak for group in find_step_leaks(context).values() for leak in group if not is_of_model(trace, leak)]
    growing = {index for leak in leaks for index in leak.storages}
    keys = {leak.key for leak in leaks}
    if not growing:
        return frozenset()
    outside = (*range(min(growing)), *range(max(growing) + 1, len(trace.storages)))
    return frozenset(growing.union(index for index in outside if make_key(trace, index) in keys))


def is_of_model(trace: Trace, leak: LeakGroup) -> bool:
    """Return whether `leak` is of parts of models that were built later: parameters, buffers, optimizer state."""
    return any(index in trace.owners and trace.owners[index].role in ROLES_OF_MODELS for index in leak.storages)


def find_idle_holder(trace: Trace, storages: Iterable[int]) -> Holder | None:
    """Return the holder that was seen to keep most of `storages` unused; None if none had any."""
    wanted = set(storages)
    holders = [holder for holder in trace.idle_holders if holder.kind != AUTOCAST_KIND]
    counts = [(len(wanted.intersection(holder.storages)), holder) for holder in holders]
    count, holder = max(counts, key=lambda pair: pair[0], default=(0, None))
    return holder if count else None


def find_holder(trace: Trace, leak: LeakGroup, leak_keys: set[Key]) -> Holder | None:
    """Return the holder of tensors with the key of `leak`, else the holder of the largest autograd graph, else None.

    `leak_keys` has the keys of all leaks.
    """
    direct_holders = [h for h in trace.holders if leak.key in find_holder_keys(trace, h)]
    if direct_holders:
        return max(direct_holders, key=lambda h: len(h.storages))
    graphs = [h for h in trace.holders if h.nodes and (find_holder_keys(trace, h) & leak_keys or is_running_sum(h))]
    return max(graphs, key=lambda h: (h.node_steps, h.nodes), default=None)


def is_running_sum(holder: Holder) -> bool:
    """Return whether `holder` is a tensor whose autograd graph spans several steps (`total = total + loss`)."""
    return not holder.kind and holder.node_steps > 1


def list_equal_sums(context: Context, holder: Holder | None, leaks: list[LeakGroup]) -> list[Holder]:
    """Return the other running sums whose graphs span as many steps as that of `holder`. Any of these may keep what the
    graph of `holder` is said to: those of `leaks` that it does not have itself. Without any: those of the same object
    that were found after it, which keep a graph each."""
    trace = context.ledger.trace
    if holder is None or not is_running_sum(holder):
        return []
    if leaks and find_holder_keys(trace, holder).issuperset(k.key for k in leaks):
        return []
    known = find_step_leaks(context)
    others = [
        other
        for other, own in known.items()
        if other not in (None, holder) and not own and is_running_sum(other) and other.node_steps == holder.node_steps
    ]
    if leaks:
        return others
    places, owner = {one: place for place, one in enumerate(known)}, holder.name.rpartition(".")[0]
    alike = [one for one in others if owner and one.name.rpartition(".")[0] == owner]
    return [one for one in alike if places[one] > places[holder]]


def describe_holder(holder: Holder) -> str:
    """Return the kind and name of `holder`, as in "list `losses`"."""
    kind = holder.kind or "variable"
    if holder.is_cycle:
        return f"a {kind}, {holder.name}"
    return f"{'attribute' if kind == 'variable' and '.' in holder.name else kind} `{holder.name}`"


def name_holders(holders: Iterable[Holder]) -> str:
    """Return several holders as words, such as "list `preds` and list `labels`"; of more than MAX_NAMES, or of names
    that are too long for a row of a table, the first ones and the number of others."""
    names = [describe_holder(holder) for holder in holders]
    num_shown = MAX_NAMES if sum(map(len, names[:MAX_NAMES])) <= MAX_NAME_LENGTH else 1
    return " and ".join(names[:num_shown]) + f" and {len(names) - num_shown} more" * (len(names) > num_shown)


def format_holders(*holders: Holder | None, word: str = "and", verb: str = ", kept by") -> str:
    """Return text that names the first of `holders` and the lines that fill them, joined by `word`, after `verb`, for
    the end of a title; "" if all are None."""
    # Items of one container together, all others each on its own.
    named: dict[tuple[str, str, str | None, int], list[Holder]] = defaultdict(list)
    for place, holder in enumerate(holders):
        if holder is not None:
            name, bracket, _ = holder.name.partition("[")
            named[holder.kind, name, holder.source, NONE if bracket else place].append(holder)
    shown: list[Holder] = []
    for (_, name, *_), items in named.items():
        shown += [items[0]._replace(name=f"{name}[...]")] if len(items) > MAX_NAMED_ITEMS else items
    names = [
        describe_holder(holder) + (f" ({file_and_line(holder.source)})" if holder.fills else "") for holder in shown
    ]
    if len(names) > MAX_NAMED:
        names[MAX_NAMED - 1 :] = [f"{len(names) - MAX_NAMED + 1} others"]
    return f"{verb} {f' {word} '.join(names)}" if names else ""


def holder_fix_evidence(holder: Holder | None, fix: str, made_at: str | None = None) -> Evidence:
    """Return evidence that describes the change `fix`, at the line that fills `holder` if it is known, else at that
    which makes what it keeps.

    A holder with a method `reset`, such as a metric, is to be emptied by it before anything else is changed.
    """
    if holder is not None and holder.kind == HOOK_KIND:
        fix = "remove each hook when its work is done (handle.remove()), or register one before the loop"
    if holder is not None and holder.has_reset and (holder.kind or not holder.nodes):  # no state with its graph
        fix = f"call reset() at the end of each epoch, or {fix}"
    line = holder.source if holder is not None and holder.fills else made_at
    location = "" if line is None else f" at {file_and_line(line)}"
    return Evidence(f"fix{location}: {fix}", source=line)


def describe_view(trace: Trace, holder: Holder | None) -> str | None:
    """Return words on the views that `holder` keeps, which keep whole tensors; None if it keeps none of these."""
    if holder is None or holder.held_bytes is None or not holder.storages:
        return None
    whole_bytes = sum(trace.storages[index].num_bytes for index in holder.storages)
    if holder.held_bytes > MAX_VIEW_SHARE * whole_bytes:
        return None
    each, whole = (format_bytes(size // len(holder.storages)) for size in (holder.held_bytes, whole_bytes))
    return f"a view of {each} is kept, which keeps the whole tensor of {whole}"


def holder_evidence(holder: Holder | None) -> Evidence:
    """Return evidence that names `holder` and the line that fills it; None means an unknown holder."""
    if holder is None:
        text = "what keeps them was not seen: no variable, attribute or container of the program that was found"
        return Evidence(text)
    preposition = ", closed at" if holder.is_cycle else ", filled at" if holder.fills else " of"
    location = "" if holder.source is None else f"{preposition} {file_and_line(holder.source)}"
    return Evidence(f"kept by {describe_holder(holder)}{location}", source=holder.source)


def leak_evidence(trace: Trace, leaks: Sequence[LeakGroup], unit: str) -> list[Evidence]:
    """Return one evidence per leak ("... more a `unit`"), largest first, and one for all after the first MAX_SHOWN."""
    largest_first = sorted(leaks, key=lambda leak: -leak.bytes_each)
    lines = [_make_group_evidence(trace, leak, unit) for leak in largest_first[:MAX_SHOWN]]
    rest = largest_first[MAX_SHOWN:]
    if rest:
        num_bytes = sum(leak.bytes_each for leak in rest)
        text = f"and {plural(len(rest), 'kind')} of tensors more: {format_bytes(num_bytes)} more a {unit}"
        lines.append(Evidence(text, num_bytes=num_bytes))
    return lines


def _make_group_evidence(trace: Trace, leak: LeakGroup, unit: str) -> Evidence:
    """Return evidence of one leak: its largest tensor, source line, bytes per `unit`, and number of live tensors."""
    largest = _find_largest(trace, leak)
    storage = trace.storages[largest]
    module = module_pattern(trace, storage)
    in_module = f"in {module} " if module else ""
    text = (
        f"{format_shape(storage.shape)} {storage.dtype} by {trace.op(storage)} {in_module}at "
        f"{file_and_line(trace.source_line(storage))}: {format_bytes(leak.bytes_each)} more a {unit}, "
        f"{plural(len(leak.storages), 'tensor')} live at the last"
    )
    return tensor_evidence(trace, largest, text, num_bytes=leak.bytes_each)


def _find_largest(trace: Trace, leak: LeakGroup) -> int:
    """Return the largest storage of a leak, the last of equal ones: one line may join logits, labels and losses."""
    return max(leak.storages, key=lambda index: (trace.storages[index].num_bytes, index))


def describe_tensor(trace: Trace, leak: LeakGroup) -> str:
    """Return shape, dtype and, where it is known, line of the largest tensor of a leak."""
    storage = trace.storages[_find_largest(trace, leak)]
    line = trace.source_line(storage)
    place = "" if line is None else f" of {file_and_line(line)}"
    return f"{format_shape(storage.shape)} {storage.dtype}{place}"


def exhaustion_evidence(context: Context, bytes_each: int, unit: str) -> Evidence | None:
    """Return evidence of how many more iterations the GPU has room for; None if unknown, 0 or over MAX_ITERATIONS."""
    free_bytes = None if context.usable_bytes is None else context.usable_bytes - context.ledger.peak_reserved_bytes
    if free_bytes is None or not bytes_each or not 0 < free_bytes // bytes_each <= MAX_ITERATIONS:
        return None
    return Evidence(f"at this rate what is left of the GPU lasts for {free_bytes // bytes_each:,} more {unit}s")
