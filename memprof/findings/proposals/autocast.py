"""Proposes autocast: results of matrix products and convolutions, and what follows from them alone, in bfloat16, or in
float16 on GPUs that compute in bfloat16 slowly."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from memprof.findings.evidence import param_names
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import edit_events, resize
from memprof.trace.events import NONE, Event, EventKind, ModuleRole, PhaseKind, Trace

# What the operators are called that autocast runs in half precision, and those that it runs in float32; all others
# have the dtype of their inputs (PyTorch's documentation of torch.amp, "CUDA Ops").
_HALF = re.compile(r"aten\.(convolution|mm|addmm|bmm|baddbmm|_scaled_dot_product_\w+)$")
_FLOAT32 = re.compile(r"(layer|group|rms|vector)_norm|softmax|loss|upsample|aten\.(exp|log|pow|rsqrt|sum|prod|cumsum)$")
_PHASES = (PhaseKind.FORWARD, PhaseKind.BACKWARD)


@proposes(70, fix="amp-bfloat16")
def propose_bfloat16(context: Context) -> Iterator[Proposal]:
    """Yield the change, unless the GPU is slow in bfloat16."""
    if context.ledger.trace.facts.device.has_bfloat16:
        yield from _propose(context)


@proposes(71, fix="amp-float16")
def propose_float16(context: Context) -> Iterator[Proposal]:
    """Yield the change for a GPU that is slow in bfloat16."""
    if not context.ledger.trace.facts.device.has_bfloat16:
        yield from _propose(context)


def _propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for a model in float32; its saving is a lower bound, but for float32 copies that norms save for
    the backward: they are counted in the forward alone."""
    trace = context.ledger.trace
    halved, copied = _find_halved(trace)
    if halved:
        halved += trace.optional_storages()  # workspaces of convolutions
        sizes = {index: trace.storages[index].num_bytes // 2 for index in halved}
        # Autocast keeps a half copy of a weight from the forward to the backward.
        tables = {f"{module.path}.weight" for module in trace.modules if module.role is ModuleRole.EMBEDDING}
        for index, name in param_names(trace).items():
            storage = trace.storages[index]
            if len(storage.shape) > 1 and name not in tables:
                sizes[index] = storage.num_bytes * 3 // 2
        changed = resize(trace, sizes)
        yield Proposal(_add_copies(changed, copied) if copied else changed)


def _add_copies(trace: Trace, times: Sequence[int]) -> Trace:
    """Return `trace` with a float32 copy of the input of each operator whose result is allocated at one of `times`."""
    storages, inserted = list(trace.storages), dict[int, tuple[Event, ...]]()
    for time in times:
        copy = len(storages)
        storages.append(storages[trace.events[time].ref])
        inserted[time] = (*inserted.get(time, ()), Event(EventKind.ALLOC, copy))
        inserted[time + 1] = (Event(EventKind.FREE, copy),)
    return edit_events(dataclasses.replace(trace, storages=storages), inserted, ())


def _find_halved(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the float32 storages of forward and backward passes that are in half precision under autocast, and the
    events at which operators that autocast runs in float32 allocate a result, after a copy of such an input.

    The inputs of an operator are not recorded: those with as many elements as its result are taken for them, and the
    result is in half precision only if all of these that are live are. So are gradients, which have their dtype.
    """
    halved: dict[int, bool] = {}
    copied: list[int] = []
    live = {True: Counter[int](), False: Counter[int]()}  # whether halved -> number of elements -> live storages
    for time, (kind, index) in enumerate(trace.events):
        storage = trace.storages[index] if kind in (EventKind.ALLOC, EventKind.FREE) else None
        if storage is None or storage.dtype != "float32" or storage.device != trace.device or index in trace.owners:
            continue
        size = math.prod(storage.shape)
        if kind is EventKind.FREE:
            live[halved.get(index, False)][size] -= 1
            continue
        op, phase = trace.op(storage), trace.phases[storage.phase].kind
        if phase in _PHASES and storage.module != NONE and not storage.hidden:
            is_input_halved, is_float32 = live[True][size] > 0 and not live[False][size], bool(_FLOAT32.search(op))
            is_forward = phase is PhaseKind.FORWARD
            halved[index] = (is_input_halved and not is_float32) or (is_forward and bool(_HALF.match(op)))
            if is_input_halved and is_float32 and is_forward:
                copied.append(time)
        live[halved.get(index, False)][size] += 1
    return [index for index, is_halved in halved.items() if is_halved], copied
