"""Categories: what each storage is used for, derived from its owner, its phase and its lifetime."""

from __future__ import annotations

import bisect
import math
import re
from enum import StrEnum
from itertools import pairwise

from memprof.ledger.stages import Span, find_vocabulary_size
from memprof.ledger.weight_copies import find_weight_copies
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
    KEPT = "kept by the program"
    BUFFERS = "buffers"
    KV_CACHE = "KV cache"
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"
    LIBRARY_WORKSPACE = "library workspace"
    FRAGMENTATION = "fragmentation"
    UNATTRIBUTED = "unattributed"


_ALLOC, _FREE = EventKind.ALLOC, EventKind.FREE
# For caches whose use is not visible: in a measured run, or before their first use.
_KV_CACHE = re.compile(r"cache_utils\.py|kv_?cache", re.IGNORECASE)
# Stages of a model between its last layer and its loss, outside modules with a stage.
_FINAL_STAGES = ("final norm", "before the head", "own code")
_SOFTMAXES = ("aten._softmax", "aten._log_softmax")
_TIED = (ModuleRole.HEAD, ModuleRole.EMBEDDING)
_MADE_IN_STEPS = frozenset({
    Category.ACTIVATIONS, Category.LOGITS_AND_LOSS, Category.INPUTS, Category.TEMPORARIES, Category.UNATTRIBUTED,
})  # fmt: skip
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
    outliving = _find_outliving_storages(trace)
    first_forward = next((span.begin for span in spans if span.kind is PhaseKind.FORWARD), len(trace.events))
    weights = {trace.storages[index].shape for index, owner in trace.owners.items() if owner.role is Role.PARAMETER}
    weight_sources: set[tuple[int, int]] = set()
    if first_forward == len(trace.events):  # a run that ended while it built the model: weights without an owner
        parameters = (index for index, owner in trace.owners.items() if owner.role is Role.PARAMETER)
        weight_sources = {(trace.storages[index].source, trace.storages[index].op) for index in parameters}
    births, deaths = trace.lifetimes()
    weight_copies = find_weight_copies(trace, deaths)
    differentiated_events = {storage.forward_event for storage in trace.storages}
    backward_begins = [span.begin for span in spans if span.kind is PhaseKind.BACKWARD]
    next_batches = _NextBatches(trace)
    vocab_size = find_vocabulary_size(trace)
    heads = {index for index, module in enumerate(trace.modules) if module.role is ModuleRole.HEAD}
    logits = (s for s in trace.storages if s.module in heads and len(s.shape) > 1 and not s.hidden)
    logits_width = max((storage.shape[-1] for storage in logits), default=vocab_size)
    names = {f"{trace.modules[index].path}.weight" for index in heads}
    weights_of_heads = (trace.storages[i] for i, owner in trace.owners.items() if owner.name in names)
    head_rows = next((storage.shape[0] for storage in weights_of_heads), vocab_size)
    # Not what is freed as a run unwinds that has ended out of memory.
    early_frees = {ref for kind, ref in trace.events[: min(first_forward, _find_end(trace))] if kind is _FREE}
    scores = _find_scores(trace)
    given = (trace.storages[index] for index, owner in trace.owners.items() if owner.role is Role.INPUT)
    inputs = {(storage.source, storage.op) for storage in given}
    gradients = {trace.storages[index].shape for index, owner in trace.owners.items() if owner.role is Role.GRADIENT}
    computing = [(time, phase.kind) for time, phase in trace.list_phase_begins() if phase.kind.computes]

    # A script measured without --detail has no lines outside its modules: tensors made there count as its own.
    lacks_lines = trace.source == "measured" and trace.facts.target is None

    def is_made_by_program(storage: Storage) -> bool:
        return storage.source != NONE or lacks_lines

    def find_span(time: int) -> Span | None:
        position = bisect.bisect_right(begins, time) - 1
        return spans[position] if position >= 0 and time < spans[position].end else None

    def is_logits(storage: Storage, time: int) -> bool:
        """Return whether `storage`, allocated at event `time` or in its backward, belongs to the logits or the loss."""
        span = find_span(time)
        is_cast = trace.op(storage) == "aten._to_copy"
        if span is None or (is_cast and (storage.shape in weights or is_half_precision_copy(storage, weights))):
            return False  # the head's weight, cast by autocast
        # A head that is no module itself (an einsum, the program's own module) makes one value per word. The same holds
        # for tensors that a program makes from logits, as `.float()` does.
        width = {"output": logits_width, "forward": head_rows, **dict.fromkeys(_FINAL_STAGES, vocab_size)}.get(
            span.plain_name
        )
        return span.plain_name in ("logits", "loss") or (
            width is not None and len(storage.shape) > 1 and storage.shape[-1] == width and storage.shape not in weights
        )

    def own_category(storage: Storage) -> Category:
        """Return the category of a tensor that the program makes outside modules: logits, if it is as wide, as is what
        they are collected in; else data."""
        is_wide = len(storage.shape) > 1 and storage.shape[-1] == logits_width and storage.shape not in weights
        return Category.LOGITS_AND_LOSS if is_wide and "float" in storage.dtype else Category.INPUTS

    def is_gradient_copy(storage: Storage, time: int) -> bool:
        """Return whether a copy with a weight's shape is of gradients: made of what no optimizer has used yet."""
        last = bisect.bisect_right(computing, time, key=lambda begin: begin[0]) - 1
        return last >= 0 and computing[last][1] is PhaseKind.BACKWARD and storage.shape in gradients

    def categorize_storage(index: int, storage: Storage) -> Category:
        owner = trace.owners.get(index)
        if owner is not None:
            has_cache_name = owner.role is Role.BUFFER and _KV_CACHE.search(owner.name)
            return Category.KV_CACHE if has_cache_name else _ROLE_CATEGORIES[owner.role]
        if storage.hidden:
            return Category.LIBRARY_WORKSPACE
        kind = trace.phases[storage.phase].kind
        birth = births[index]
        if index in weight_copies:
            return Category.GRADIENTS if is_gradient_copy(storage, birth) else Category.PARAMETERS
        if storage.module != NONE and _is_bucket(trace, storage):
            return Category.COMMUNICATION
        if kind in (PhaseKind.FORWARD, PhaseKind.DECODE, PhaseKind.EVALUATION):
            if index in scores or is_logits(storage, birth):
                return Category.LOGITS_AND_LOSS
            if index not in outliving:
                return Category.TEMPORARIES
            has_cache_name = _KV_CACHE.search(trace.source_line(storage) or "")
            return Category.KV_CACHE if has_cache_name else Category.ACTIVATIONS
        if kind is PhaseKind.BACKWARD:
            if storage.module != NONE and trace.modules[storage.module].role in _TIED and storage.shape in weights:
                # The head's part of a tied weight's gradient, before the embedding's part is added and the sum becomes
                # `.grad`.
                return Category.GRADIENTS
            if storage.forward_event != NONE:
                return Category.LOGITS_AND_LOSS if is_logits(storage, storage.forward_event) else Category.TEMPORARIES
            # A module that runs inside the backward pass is being recomputed.
            recomputed = storage.module != NONE and storage.source != NONE
            return Category.ACTIVATIONS if recomputed and index in outliving else Category.TEMPORARIES
        if kind is PhaseKind.INPUTS:
            return Category.INPUTS
        if kind is PhaseKind.MODEL and (storage.source, storage.op) in weight_sources:
            return Category.PARAMETERS
        if kind is PhaseKind.MODEL and index not in early_frees:
            # Outside the model, and still live when the model is called: data, such as a replay buffer.
            is_own = storage.module == NONE and is_made_by_program(storage)
            return own_category(storage) if is_own else Category.TEMPORARIES
        if kind in (PhaseKind.OPTIMIZER_STEP, PhaseKind.ZERO_GRAD, PhaseKind.OPTIMIZER, PhaseKind.MODEL):
            return Category.TEMPORARIES
        if storage.module != NONE:  # after a backward pass within a module
            return Category.ACTIVATIONS if index in outliving else Category.TEMPORARIES
        if birth in differentiated_events:  # in a program without modules
            next_backward = bisect.bisect_left(backward_begins, birth)
            is_saved = next_backward < len(backward_begins) and backward_begins[next_backward] < deaths[index]
            return Category.ACTIVATIONS if is_saved else Category.TEMPORARIES
        # Of what one line makes, a model has been given some, and not yet the others.
        is_of_inputs = storage.source != NONE and (storage.source, storage.op) in inputs
        is_next = birth < first_forward or next_batches.is_next_batch(birth, deaths[index])
        if is_of_inputs or (is_made_by_program(storage) and is_next):
            return own_category(storage)
        return Category.UNATTRIBUTED

    categories = [categorize_storage(index, storage) for index, storage in enumerate(trace.storages)]
    kept = _find_kept(trace, categories, births, deaths)
    return [Category.KEPT if index in kept else category for index, category in enumerate(categories)]


def _find_kept(trace: Trace, categories: list[Category], births: list[int], deaths: list[int]) -> set[int]:
    """Return the storages that are made in a training step, and not freed before the next one has ended; of those
    without a role in their step, what the same lines make later; and what was seen to pile up in a container."""
    ends: dict[int, int] = {}
    begins = trace.list_phase_begins()
    for (_, phase), (end, _) in pairwise(begins):
        if phase.kind is PhaseKind.OPTIMIZER_STEP and phase.step:
            ends[phase.step] = end
    first = next((time for time, phase in begins if phase.kind.computes), len(trace.events))
    step_ends = sorted(ends.values())
    own = [index for index, category in enumerate(categories) if category in _MADE_IN_STEPS and first <= births[index]]
    kept = {
        index for index in own if bisect.bisect(step_ends, deaths[index]) - bisect.bisect(step_ends, births[index]) > 1
    }
    lines = {(trace.storages[index].op, trace.storages[index].source) for index in kept}
    kept.update(
        index
        for index in own
        if categories[index] in (Category.UNATTRIBUTED, Category.INPUTS)
        and (trace.storages[index].op, trace.storages[index].source) in lines
    )

    def make_key(index: int) -> tuple[object, ...]:
        storage = trace.storages[index]
        return storage.op, storage.source, storage.module, storage.dtype, trace.phases[storage.phase].kind

    containers = (holder for holder in trace.holders if holder.kind and not holder.is_cycle and holder.limit is None)
    keys = {make_key(index) for holder in containers for index in holder.storages}
    return kept.union(index for index in own if make_key(index) in keys)


def is_half_precision_copy(storage: Storage, weight_shapes: set[tuple[int, ...]]) -> bool:
    """Return whether `storage` may be a transposed half-precision copy of a weight with one of `weight_shapes`.

    Compiled code casts weights in this way under autocast.
    """
    return storage.shape[::-1] in weight_shapes and storage.dtype in ("bfloat16", "float16")


def _find_scores(trace: Trace) -> set[int]:
    """Return the storages of what calls return and the program takes a softmax of, and of this softmax."""
    outputs = {index for forward in trace.forwards for index in forward.outputs}
    softmaxes = [
        index
        for index, storage in enumerate(trace.storages)
        if trace.op(storage) in _SOFTMAXES and (storage.module == NONE or trace.modules[storage.module].path == "")
    ]
    returned, taken = (
        {_flatten_rows(trace.storages[index].shape) for index in group} for group in (outputs, softmaxes)
    )
    return {index for index in (*outputs, *softmaxes) if _flatten_rows(trace.storages[index].shape) in returned & taken}


def _flatten_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return `shape` as rows and columns, of which a loss takes its tokens or pixels."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _is_bucket(trace: Trace, storage: Storage) -> bool:
    """Return whether `storage` is a bucket of DistributedDataParallel for gradients."""
    class_name = trace.modules[storage.module].class_name
    return class_name == "DistributedDataParallel" and trace.op(storage) == "aten.empty" and len(storage.shape) == 1


class _NextBatches:
    """The begins of steps, to recognize storages made between two steps for the next: batches, targets, noise."""

    def __init__(self, trace: Trace) -> None:
        self._begins: list[int] = []  # the first forward of each step
        seen_steps: set[int] = set()
        for time, phase in trace.list_phase_begins():
            if phase.kind is PhaseKind.FORWARD and phase.step not in seen_steps:
                seen_steps.add(phase.step)
                self._begins.append(time)

    def is_next_batch(self, birth: int, death: int) -> bool:
        """Return whether a storage allocated at event `birth` and freed at `death` is live as just one step begins."""
        return bisect.bisect(self._begins, death) - bisect.bisect(self._begins, birth) == 1


def _find_end(trace: Trace) -> int:
    """Return the number of events of a run up to its end; if that is out of memory, up to the last allocation."""
    alloc_times = [time for time, (kind, _) in enumerate(trace.events) if kind is _ALLOC]
    return alloc_times[-1] + 1 if trace.ended_out_of_memory and alloc_times else len(trace.events)


def _find_outliving_storages(trace: Trace) -> set[int]:
    """Return the indices of storages that are still live when the module call that allocated them returns.

    A storage freed inside that call is a temporary. Storages allocated outside modules all count as outliving, and so
    do storages that are live when the run ends out of memory.
    """
    end = _find_end(trace)
    outliving: set[int] = set()
    call_stack: list[set[int]] = [set()]
    call_of_storage: dict[int, set[int]] = {}
    for kind, ref in trace.events[:end]:
        if kind is _ALLOC:
            call_stack[-1].add(ref)
            call_of_storage[ref] = call_stack[-1]
        elif kind is _FREE:
            if ref in call_of_storage:
                call_of_storage.pop(ref).discard(ref)
        elif kind is EventKind.ENTER:
            call_stack.append(set())
        elif kind is EventKind.EXIT and len(call_stack) > 1:
            outliving |= call_stack.pop()
    return outliving.union(*call_stack) if trace.ended_out_of_memory else outliving | call_stack[0]
