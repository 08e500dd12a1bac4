"""Layers that are gathered together because the layers were not wrapped one by one."""

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

AT_ONCE = 2  # layers that are whole at once where each is wrapped: the one that computes, and the next

NEARLY = 0.9  # what has such a share of a group's elements, or bytes, is made for all of it


_LAYER = re.compile(r"((?:\D+\.)?\d+)\.")


@rule(88)
def find(context: Context) -> list[Finding]:
    """Return one finding for each group; `num_bytes` is the reduction of the peak with wrapped layers."""
    trace, lives = context.ledger.trace, context.lives
    findings = []
    for group in groups.get_fsdp_groups(context):
        layers = _sum_bytes_by_layer(group)
        stacks = {layer.rpartition(".")[0] for layer in layers}
        if len(layers) <= AT_ONCE:
            continue
        beyond = set(sorted(layers, key=lambda layer: -layers[layer])[AT_ONCE:])
        whole = sum(groups.get_unsharded_bytes(group).values())
        share = sum(layers[layer] for layer in beyond) / whole
        saved = lives.peak_reduction(_make_wrapping_savings(context, group, beyond, share))
        if not groups.is_worth_reporting(context, saved):
            continue
        lists = [f"model.{one}".rstrip(".") for one in sorted(stacks)]
        name = f"`{group.module}`" if group.module else "The root"
        title = (
            f"{name} is one FSDP group of {format_bytes(whole)}, with {plural(len(layers), 'layer')} of "
            f"{' and '.join(lists)} gathered at once: with each layer wrapped {groups.format_peak_reduction(context, saved)}"
        )
        line = groups.find_group_line(trace, group)
        if group.api == groups.FSDP2:
            what = "; ".join(f"for layer in {one}: fully_shard(layer)" for one in lists) + ", before it"
        else:
            what = f"auto_wrap_policy=ModuleWrapPolicy({{{', '.join(_find_class_names(context, layers))}}})"
        largest = max(layers.values())
        most = max((lives.find_max_live(own) for own in groups.find_gathers(context, [group])), key=lambda one: one.num_bytes)
        lines = (
            groups.make_fix_evidence(line, what),
            Evidence(f"whole at once: {format_bytes(most.num_bytes)} of it; a layer has {format_bytes(largest)}"),
        )
        findings.append(Finding("unsharded-group", Severity.WARNING, title, saved, lines, ()))
    return findings


def _sum_bytes_by_layer(group: ShardedGroup) -> dict[str, int]:
    """Return the bytes of each layer with parameters in the group; a layer is a module with a number in its name."""
    found: dict[str, int] = defaultdict(int)
    for name, num_bytes in groups.get_unsharded_bytes(group).items():
        layer = _LAYER.match(name)
        if layer is not None and layer[1] != group.module:
            found[layer[1]] += num_bytes
    return found


def _find_class_names(context: Context, layers: dict[str, int]) -> list[str]:
    return sorted({one.class_name for one in context.ledger.trace.modules if groups.strip_wrappers(one.path) in layers})


def _make_wrapping_savings(context: Context, group: ShardedGroup, beyond: set[str], share: float) -> list[Saving]:
    """Return the savings on the group's gathered parameters, whole gradients and communication buffers, and on the
    copies that FSDP makes when it flattens parameters at construction."""
    trace, lives = context.ledger.trace, context.lives
    elements = NEARLY * sum(map(math.prod, group.shapes))
    prefixes = tuple(f"{layer}." for layer in beyond)
    less: list[Saving] = []
    for index in (index for own in groups.find_gathers(context, [group]) for index in own):
        flat = trace.storages[index].num_bytes >= NEARLY * sum(groups.get_unsharded_bytes(group).values())
        less += lives.savings(
            [index], share if flat else float(groups.strip_wrappers(trace.owners[index].name).startswith(prefixes))
        )
    sent = [*groups.find_comm_buffers(trace, "all-gather"), *groups.find_comm_buffers(trace, "reduce-scatter")]
    less += lives.savings((one for one in sent if math.prod(trace.storages[one].shape) >= elements), share)
    shapes = set(group.shapes)
    moved = (
        index
        for index in groups.find_comm_buffers(trace, "")
        if trace.storages[index].shape in shapes or math.prod(trace.storages[index].shape) >= elements
    )
    less += lives.savings(moved, share)
    for index, storage in enumerate(trace.storages):
        if trace.phases[storage.phase].kind is not PhaseKind.BACKWARD or storage.hidden:
            continue
        owner = trace.owners.get(index)
        if owner is not None and owner.role is not Role.GRADIENT:
            continue
        if storage.shape in shapes and storage.module != NONE:
            path = groups.strip_wrappers(trace.modules[storage.module].path) + "."
            less += lives.savings([index], float(path.startswith(prefixes)))
        elif len(storage.shape) == 1 and storage.shape[0] >= elements:
            less += lives.savings([index], share)
    return less
