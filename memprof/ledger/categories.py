"""Categories: what each storage is used for, derived from its owner, its phase and its lifetime."""

from __future__ import annotations

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum

from memprof.ledger.stages import Span, vocabulary_size
from memprof.trace.events import NONE, EventKind, ModuleRole, PhaseKind, Role, Storage, Trace


class Category(StrEnum):
    """The categories of the ledger's rows (docs/concepts.md explains each)."""

    PARAMETERS = "parameters"
    UNSHARDED_PARAMETERS = "unsharded parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits and loss"
    INPUTS = "inputs"
    BUFFERS = "buffers"
    KV_CACHE = "KV cache"
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"
    LIBRARY_WORKSPACE = "library workspace"
    FRAGMENTATION = "fragmentation"
    UNATTRIBUTED = "unattributed"


_ALLOC, _FREE, _PHASE = EventKind.ALLOC, EventKind.FREE, EventKind.PHASE
_OUTSIDE_PHASES = (PhaseKind.MODEL, PhaseKind.OTHER, PhaseKind.OPTIMIZER, PhaseKind.OPTIMIZER_STEP)
# For caches whose use is not visible: in a measured run, or before their first use.
_KV_CACHE = re.compile(r"cache_utils\.py|kv_?cache", re.IGNORECASE)
# Stages of a model between its last layer and its loss, outside modules with a stage.
_AFTER_LAYERS = ("final norm", "before the head", "own code")
_TIED = (ModuleRole.HEAD, ModuleRole.EMBEDDING)
_ROLE_CATEGORIES = {
    Role.PARAMETER: Category.PARAMETERS,
    Role.BUFFER: Category.BUFFERS,
    Role.GRADIENT: Category.GRADIENTS,
    Role.OPTIMIZER_STATE: Category.OPTIMIZER_STATE,
    Role.INPUT: Category.INPUTS,
    Role.KV_CACHE: Category.KV_CACHE,
    Role.COMMUNICATION: Category.COMMUNICATION,
    Role.UNSHARDED: Category.UNSHARDED_PARAMETERS,
}


def categorize(trace: Trace, spans: list[Span]) -> list[Category]:
    """Return the category of every storage of the trace, by index."""
    begins = [span.begin for span in spans]
    outlives = _find_outliving_storages(trace)
    first_forward = next((s.begin for s in spans if s.kind is PhaseKind.FORWARD), len(trace.events))
    weights = {trace.storages[index].shape for index, owner in trace.owners.items() if owner.role is Role.PARAMETER}
    weight_sources: set[tuple[int, int]] = set()
    if first_forward == len(trace.events):  # a run that ended while it built the model: weights without an owner
        owned = (index for index, owner in trace.owners.items() if owner.role is Role.PARAMETER)
        weight_sources = {(trace.storages[index].source, trace.storages[index].op) for index in owned}
    births, deaths = trace.lifetimes()
    copies = _find_weight_copies(trace, deaths)
    differentiated = {storage.forward_event for storage in trace.storages}
    backwards = [span.begin for span in spans if span.kind is PhaseKind.BACKWARD]
    next_batches = _NextBatches(trace)
    words = vocabulary_size(trace)
    heads = {index for index, module in enumerate(trace.modules) if module.role is ModuleRole.HEAD}
    of_heads = (one for one in trace.storages if one.module in heads and len(one.shape) > 1 and not one.hidden)
    head_width = max((one.shape[-1] for one in of_heads), default=words)
    tables = {f"{trace.modules[index].path}.weight" for index in heads}
    rows = next((trace.storages[at].shape[0] for at, owner in trace.owners.items() if owner.name in tables), words)
    early_frees = {ref for kind, ref in trace.events[: first_forward + 1] if kind is _FREE}

    # A script measured without --detail has no lines outside its modules: tensors made there count as its own.
    lacks_lines = trace.source == "measured" and trace.facts.target is None

    def is_made_by_program(storage: Storage) -> bool:
        return storage.source != NONE or lacks_lines

    def span_at(time: int) -> Span | None:
        position = bisect.bisect_right(begins, time) - 1
        return spans[position] if position >= 0 and time < spans[position].end else None

    def is_logits(storage: Storage, time: int) -> bool:
        """Return whether `storage`, made at `time` or in the backward of it, belongs to the logits or the loss."""
        span = span_at(time)
        cast = trace.op(storage) == "aten._to_copy"
        if span is None or (cast and (storage.shape in weights or is_half_of(storage, weights))):
            return False  # the head's weight, cast by autocast
        # A head that is no module itself (an einsum, the program's own module) makes one value per word. The same holds
        # for tensors that a program makes from logits, as `.float()` does.
        width = {"output": head_width, "forward": rows, **dict.fromkeys(_AFTER_LAYERS, words)}.get(span.plain_name)
        return span.plain_name in ("logits", "loss") or (
            width is not None
            and len(storage.shape) > 1
            and storage.shape[-1] == width
            and storage.shape not in weights
            and not storage.hidden
        )

    def category_of(index: int, storage: Storage) -> Category:
        owner = trace.owners.get(index)
        if owner is not None:
            named = owner.role is Role.BUFFER and _KV_CACHE.search(owner.name)
            return Category.KV_CACHE if named else _ROLE_CATEGORIES[owner.role]
        if storage.hidden:
            return Category.LIBRARY_WORKSPACE
        if index in copies:
            return Category.PARAMETERS
        kind = trace.phases[storage.phase].kind
        birth = births[index]
        if storage.module != NONE and _is_bucket(trace, storage):
            return Category.COMMUNICATION
        if kind in (PhaseKind.FORWARD, PhaseKind.DECODE, PhaseKind.EVALUATION):
            if is_logits(storage, birth):
                return Category.LOGITS_AND_LOSS
            if index not in outlives:
                return Category.TEMPORARIES
            named = _KV_CACHE.search(trace.source_line(storage) or "")
            return Category.KV_CACHE if named else Category.ACTIVATIONS
        if kind is PhaseKind.BACKWARD:
            if storage.module != NONE and trace.modules[storage.module].role in _TIED and storage.shape in weights:
                # The head's part of a tied weight's gradient, before the embedding's part is added and the sum becomes
                # `.grad`.
                return Category.GRADIENTS
            if storage.forward_event != NONE:
                return Category.LOGITS_AND_LOSS if is_logits(storage, storage.forward_event) else Category.TEMPORARIES
            # A module that runs inside the backward pass is being recomputed.
            recomputed = storage.module != NONE and storage.source != NONE
            return Category.ACTIVATIONS if recomputed and index in outlives else Category.TEMPORARIES
        if kind is PhaseKind.INPUTS:
            return Category.INPUTS
        if kind is PhaseKind.MODEL and (storage.source, storage.op) in weight_sources:
            return Category.PARAMETERS
        if kind is PhaseKind.MODEL and index not in early_frees:
            # Outside the model, and still live when the model is called: data, such as a replay buffer.
            return Category.INPUTS if storage.module == NONE and is_made_by_program(storage) else Category.TEMPORARIES
        if kind in (PhaseKind.OPTIMIZER_STEP, PhaseKind.ZERO_GRAD, PhaseKind.OPTIMIZER, PhaseKind.MODEL):
            return Category.TEMPORARIES
        if storage.module != NONE:  # after a backward pass within a module
            return Category.ACTIVATIONS if index in outlives else Category.TEMPORARIES
        if birth in differentiated:  # in a program without modules
            following = bisect.bisect_left(backwards, birth)
            passes = following < len(backwards) and backwards[following] < deaths[index]
            return Category.ACTIVATIONS if passes else Category.TEMPORARIES
        if is_made_by_program(storage) and (birth < first_forward or next_batches.step(birth, deaths[index])):
            return Category.INPUTS
        return Category.UNATTRIBUTED

    return [category_of(index, storage) for index, storage in enumerate(trace.storages)]


def is_half_of(storage: Storage, weights: set[tuple[int, ...]]) -> bool:
    """Return whether `storage` may be a weight with one of these shapes, in half precision and transposed.

    Compiled code casts weights in this way under autocast.
    """
    return storage.shape[::-1] in weights and storage.dtype in ("bfloat16", "float16")


def _is_bucket(trace: Trace, storage: Storage) -> bool:
    """Return whether `storage` is a bucket of DistributedDataParallel for gradients."""
    maker = trace.modules[storage.module].class_name
    return maker == "DistributedDataParallel" and trace.op(storage) == "aten.empty" and len(storage.shape) == 1


def _find_weight_copies(trace: Trace, deaths: list[int]) -> set[int]:
    """Return copies of weights outside the model: a moving average, a loaded checkpoint, the fast weights of MAML.

    One line makes the copies, outside every model's parts, in shapes of parameters alone: at least half of these shapes
    and as many tensors as half of the parameters, in one phase that the copies outlive.
    """
    shapes: dict[Role, list[tuple[int, ...]]] = {Role.PARAMETER: [], Role.BUFFER: []}
    for index, owner in trace.owners.items():
        if owner.role in shapes and trace.storages[index].device == trace.device:
            shapes[owner.role].append(trace.storages[index].shape)
    weights = set(shapes[Role.PARAMETER])
    buffers = {*shapes[Role.BUFFER], *_flatten_shapes(shapes[Role.BUFFER]), ()}  # copy.deepcopy copies their storages
    ends: dict[int, int] = {}
    begun = NONE
    for time, (kind, ref) in enumerate(trace.events):
        if kind is _PHASE:
            ends[begun], begun = time, ref
    made: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    never = len(trace.events)
    for index, storage in enumerate(trace.storages):
        if (
            trace.phases[storage.phase].kind in _OUTSIDE_PHASES
            and (storage.module == NONE or trace.modules[storage.module].role is ModuleRole.ROOT)
            and storage.source != NONE
            and not storage.hidden
            and index not in trace.owners
            and deaths[index] > ends.get(storage.phase, never - 1)
        ):
            made[storage.source, storage.op, storage.phase].append(index)
    result: set[int] = set()
    for (_, op, _), members in made.items():
        own = {trace.storages[index].shape for index in members}
        known = _flatten_shapes(weights) if trace.ops[op] == "torch.load" else weights  # storages without a shape
        if (
            own <= known | buffers
            and 2 * len(own & known) >= len(known)
            and len(members) >= max(2, len(shapes[Role.PARAMETER]) / 2)
        ):
            result.update(members)
    return result


def _flatten_shapes(shapes: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {(math.prod(shape),) for shape in shapes}


class _NextBatches:
    """Recognizes storages made between two steps for the next step: batches, targets, noise."""

    def __init__(self, trace: Trace) -> None:
        self._begins: list[int] = []  # the first forward of each step
        seen: set[int] = set()
        for time, phase in trace.list_phase_begins():
            if phase.kind is PhaseKind.FORWARD and phase.step not in seen:
                seen.add(phase.step)
                self._begins.append(time)

    def step(self, birth: int, death: int) -> bool:
        """Return whether a storage with this life is live at the begin of exactly one step."""
        return bisect.bisect(self._begins, death) - bisect.bisect(self._begins, birth) == 1


def _find_outliving_storages(trace: Trace) -> set[int]:
    """Return the storages that are still live when the module call that made them ends.

    A storage freed inside the call that made it is a temporary. Storages made outside modules all count as outliving,
    and so do storages that are live when the run is cut short.
    """
    requests = [time for time, (kind, _) in enumerate(trace.events) if kind is _ALLOC]
    end = requests[-1] + 1 if trace.ended_out_of_memory and requests else len(trace.events)
    result: set[int] = set()
    calls: list[set[int]] = [set()]
    maker: dict[int, set[int]] = {}
    for kind, ref in trace.events[:end]:
        if kind is _ALLOC:
            calls[-1].add(ref)
            maker[ref] = calls[-1]
        elif kind is _FREE:
            if ref in maker:
                maker.pop(ref).discard(ref)
        elif kind is EventKind.ENTER:
            calls.append(set())
        elif kind is EventKind.EXIT and len(calls) > 1:
            result |= calls.pop()
    return result.union(*calls) if trace.ended_out_of_memory else result | calls[0]
