"""Rule `unsharded-group`: FSDP gathers many layers together because they were not wrapped one by one."""

from __future__ import annotations

import math
import re
from collections import defaultdict

from memprof.findings import groups
from memprof.findings.evidence import plural
from memprof.findings.finding import Context, Evidence, Finding, Severity, rule
from memprof.findings.lifetimes import Saving
from memprof.trace.events import NONE, PhaseKind, Role
from memprof.trace.facts import ShardedGroup
from memprof.units import format_bytes

MAX_UNSHARDED_LAYERS = 2  # layers unsharded at once if each is wrapped: the one that computes, and the next

NEARLY_ALL = 0.9  # a buffer with this share of a group's elements, or bytes, is for the entire group

_LAYER = re.compile(r"((?:\D+\.)?\d+)\.")


@rule(88)
def find(context: Context) -> list[Finding]:
    """Return one finding per FSDP group with many layers; `num_bytes`: reduction of the peak if each is wrapped."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    findings = []
    for group in groups.fsdp_groups(context):
        layers = _sum_bytes_by_layer(group)
        stacks = {layer.rpartition(".")[0] for layer in layers}
        if len(layers) <= MAX_UNSHARDED_LAYERS:
            continue
        excess_layers = set(sorted(layers, key=lambda layer: -layers[layer])[MAX_UNSHARDED_LAYERS:])
        group_bytes = sum(groups.full_bytes(group).values())
        share = sum(layers[layer] for layer in excess_layers) / group_bytes
        saved = lifetimes.peak_reduction(_make_wrapping_savings(context, group, excess_layers, share))
        if not groups.is_large(context, saved):
            continue
        list_paths = [f"model.{path}".rstrip(".") for path in sorted(stacks)]
        name = f"`{group.module}`" if group.module else "The root"
        title = (
            f"{name} is one FSDP group of {format_bytes(group_bytes)}, with {plural(len(layers), 'layer')} of "
            f"{' and '.join(list_paths)} gathered at once: with each layer wrapped {groups.gain_text(context, saved)}"
        )
        line = groups.group_line(trace, group)
        if group.api == groups.FSDP2:
            fix = "; ".join(f"for layer in {path}: fully_shard(layer)" for path in list_paths) + ", before it"
        else:
            fix = f"auto_wrap_policy=ModuleWrapPolicy({{{', '.join(_find_class_names(context, layers))}}})"
        largest = max(layers.values())
        full_bytes = max(lifetimes.find_max_live(own).num_bytes for own in groups.gathers(context, [group]))
        lines = (
            groups.fix_at(line, fix),
            Evidence(f"whole at once: {format_bytes(full_bytes)} of it; a layer has {format_bytes(largest)}"),
        )
        findings.append(Finding("unsharded-group", Severity.WARNING, title, saved, lines, ()))
    return findings


def _sum_bytes_by_layer(group: ShardedGroup) -> dict[str, int]:
    """Return layer path -> bytes of its parameters in `group`; a layer is a module with a number in its name."""
    bytes_by_layer: dict[str, int] = defaultdict(int)
    for name, num_bytes in groups.full_bytes(group).items():
        layer = _LAYER.match(name)
        if layer is not None and layer[1] != group.module:
            bytes_by_layer[layer[1]] += num_bytes
    return bytes_by_layer


def _find_class_names(context: Context, layers: dict[str, int]) -> list[str]:
    return sorted({m.class_name for m in context.ledger.trace.modules if groups.strip_wrappers(m.path) in layers})


def _make_wrapping_savings(context: Context, group: ShardedGroup, excess: set[str], share: float) -> list[Saving]:
    """Return the savings if FSDP wrapped each layer of `group`: on gathered parameters, unsharded gradients, buffers,
    and copies for flat parameters. `share` is the fraction of the group's bytes in the layers `excess`."""
    trace, lifetimes = context.ledger.trace, context.lifetimes
    least = NEARLY_ALL * sum(map(math.prod, group.shapes))
    prefixes = tuple(f"{layer}." for layer in excess)
    savings: list[Saving] = []
    for index in (index for indices in groups.gathers(context, [group]) for index in indices):
        is_flat = trace.storages[index].num_bytes >= NEARLY_ALL * sum(groups.full_bytes(group).values())
        savings += lifetimes.savings(
            [index], share if is_flat else float(groups.strip_wrappers(trace.owners[index].name).startswith(prefixes))
        )
    buffers = [*groups.comm_buffers(trace, "all-gather"), *groups.comm_buffers(trace, "reduce-scatter")]
    savings += lifetimes.savings((index for index in buffers if math.prod(trace.storages[index].shape) >= least), share)
    shapes = set(group.shapes)
    construction_buffers = (
        index
        for index in groups.comm_buffers(trace, "")
        if trace.storages[index].shape in shapes or math.prod(trace.storages[index].shape) >= least
    )
    savings += lifetimes.savings(construction_buffers, share)
    for index, storage in enumerate(trace.storages):
        if trace.phases[storage.phase].kind is not PhaseKind.BACKWARD or storage.hidden:
            continue
        owner = trace.owners.get(index)
        if owner is not None and owner.role is not Role.GRADIENT:
            continue
        if storage.shape in shapes and storage.module != NONE:
            path = groups.strip_wrappers(trace.modules[storage.module].path) + "."
            savings += lifetimes.savings([index], float(path.startswith(prefixes)))
        elif len(storage.shape) == 1 and storage.shape[0] >= least:
            savings += lifetimes.savings([index], share)
    return savings
