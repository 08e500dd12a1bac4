"""Rule `loaded-ahead`: before anything is trained, tensors of one line fill the GPU, such as a whole data set.

Where training begins beside them, they are told by their share of its peak, if steps use them in turn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from memprof.findings.edits import EditKind, make_holder_edit
from memprof.findings.effect import (
    compute_needs_of,
    effect_evidence,
    has_host_memory,
    is_decisive,
    name_other_place,
)
from memprof.findings.evidence import file_and_line, tensors_evidence
from memprof.findings.finding import Context, Culprit, Finding, Severity, rule
from memprof.findings.growth import (
    Key,
    describe_holder,
    format_holders,
    holder_evidence,
    holder_fix_evidence,
    make_key,
)
from memprof.findings.idle_storages import find_phase
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, Holder, Role
from memprof.units import MIB, format_bytes

MIN_TENSORS = 8  # of one line: fewer may be parts of one sample
MIN_SHARE = 0.5  # of the peak
MIN_TRAINING_SHARE = 0.1  # of the peak of a run that trains
MIN_TRAINING_BYTES = 64 * MIB


@rule(57)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is what the tensors of the line take. It is a note where the run fits."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    computing = [time for time, phase in context.phases if phase.kind.computes]
    if context.spec is not None or not (computing or trace.ended_out_of_memory):
        return []
    first = computing[0] if computing else len(trace.events)
    groups: dict[Key, list[int]] = defaultdict(list)
    for index in lifetimes.at_peak:
        is_data = index not in trace.owners or trace.owners[index].role is Role.INPUT
        is_ahead = lifetimes.births[index] < first and trace.storages[index].source != NONE
        if is_data and is_ahead and trace.storages[index].module == NONE and not trace.storages[index].hidden:
            groups[make_key(trace, index)].append(index)
    many = [members for members in groups.values() if len(members) >= MIN_TENSORS]
    members = max(many, key=lifetimes.sum_bytes, default=[])
    num_bytes = lifetimes.sum_bytes(members)
    min_share = MIN_TRAINING_SHARE if computing else MIN_SHARE
    if not members or num_bytes < min_share * context.ledger.peak_bytes:
        return []
    if computing and (num_bytes < MIN_TRAINING_BYTES or not _are_used_in_turn(context, members)):
        return []
    members.sort()
    holder = _find_holder(context, members)
    needs = compute_needs_of(context, resize(trace, dict.fromkeys(members, 0)))
    decides = is_decisive(context, needs)
    line = file_and_line(trace.source_line(trace.storages[members[0]]))
    title = (
        f"{len(members)} tensors of {line} are on the GPU before anything is trained: {format_bytes(num_bytes)}"
        f"{format_holders(holder)}"
    )
    is_moved = trace.op(trace.storages[members[0]]) == "aten._to_copy"  # from host memory
    how = "without .to(device) here" if is_moved else ".cpu()"
    place = f"in host memory ({how})" if has_host_memory(context) else "in a file (numpy.memmap)"
    fix = f"keep the data {place}, and move each batch to the GPU in its step"
    if has_host_memory(context) and trace.op(trace.storages[members[0]]) == "torch.load":
        fix = 'load it with map_location="cpu"'
    fixing = holder_fix_evidence(holder, fix)
    if fixing.source is None:
        source = trace.source_line(trace.storages[members[0]])
        fixing = replace(fixing, text=f"fix at {line}: {fix}", source=source)
    evidence = (
        fixing,
        holder_evidence(holder),
        effect_evidence(context, needs, name_other_place(context)),
        *tensors_evidence(context, members, context.ledger.peak_event, lambda index: "loaded")[:3],
    )
    edit = make_holder_edit(trace, holder, EditKind.KEEP_OUTPUTS_ON_HOST) if has_host_memory(context) else None
    severity = Severity.NOTE if context.ledger.run.fits else Severity.WARNING
    culprit = Culprit(f"tensors of {line}" if holder is None else describe_holder(holder), frozenset(members))
    return [
        Finding(
            "loaded-ahead", severity, title, num_bytes, evidence, (), is_decisive=decides, edit=edit, culprit=culprit
        )
    ]


def _are_used_in_turn(context: Context, members: list[int]) -> bool:
    """Return whether most of `members` were last used in steps of their own, or not yet: no constants of all steps."""
    trace = context.ledger.trace
    if not trace.last_uses:
        return False
    used, loaded = [trace.last_uses[index] for index in members], max(context.lifetimes.births[i] for i in members)
    # A program without modules has used the first before its first step is seen.
    steps = {find_phase(context.phases, time).step for time in used if time > loaded}
    return bool(steps) and 2 * (len(steps) + used.count(NONE)) > len(members)


def _find_holder(context: Context, members: list[int]) -> Holder | None:
    """Return the container that was seen to keep most of `members`."""
    holders = [one for one in context.ledger.trace.holders if 2 * len(set(members) & set(one.storages)) > len(members)]
    return max(holders, key=lambda one: len(one.storages), default=None)
