"""Helpers for rules on distributed runs: FSDP and DDP parameter groups, their gathered tensors and buffers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from memprof.findings.evidence import file_and_line, param_names, percent
from memprof.findings.finding import Context, Evidence
from memprof.trace.events import Role, Trace
from memprof.trace.facts import ShardedGroup
from memprof.units import MIB, format_bytes

MIN_BYTES = 64 * MIB
MIN_SHARE = 0.02  # of the peak; a finding reduces the peak by at least this share and by MIN_BYTES

DDP, FSDP1, FSDP2 = "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"
_WRAPPERS = re.compile(r"(?<![^.])(module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")
_ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def strip_wrappers(name: str) -> str:
    """Return the module or parameter `name` without the parts that wrappers insert (`module`, `_orig_mod`, ...)."""
    return _WRAPPERS.sub("", name).rstrip(".")


def is_large(context: Context, saved_bytes: int) -> bool:
    """Return whether a reduction of the peak by `saved_bytes` is large enough for a finding."""
    return saved_bytes >= MIN_BYTES and saved_bytes >= MIN_SHARE * context.ledger.peak_bytes


def gain_text(context: Context, saved_bytes: int) -> str:
    """Return text that says how far `saved_bytes` would reduce the peak, for the end of a finding's title."""
    return f"the peak is about {format_bytes(saved_bytes)} ({percent(saved_bytes, context.ledger.peak_bytes)}) lower"


def ddp_groups(context: Context) -> list[ShardedGroup]:
    """Return the parameter groups that DistributedDataParallel replicates on more than one rank."""
    return [group for group in context.ledger.trace.facts.groups if group.api == DDP and group.ranks > 1]


def fsdp_groups(context: Context) -> list[ShardedGroup]:
    """Return the parameter groups that FSDP (FullyShardedDataParallel, fully_shard) shards over several ranks."""
    return [group for group in context.ledger.trace.facts.groups if group.api in (FSDP1, FSDP2) and group.ranks > 1]


def full_bytes(group: ShardedGroup) -> dict[str, int]:
    """Return parameter name -> unsharded size in bytes, for the parameters of `group`."""
    itemsize = _ITEMSIZES.get(group.dtype, 4)
    return {name: itemsize * math.prod(shape) for name, shape in zip(group.parameters, group.shapes, strict=True)}


def name_filter(group: ShardedGroup) -> Callable[[str], bool]:
    """Return a function that tests whether a name is a parameter of `group`, or FSDP's flat parameter of `group`."""
    names = {*group.parameters, f"{group.module}._flat_param".lstrip(".")}
    return lambda name: strip_wrappers(name) in names


def gathers(context: Context, groups: Iterable[ShardedGroup]) -> list[list[int]]:
    """Return the unsharded storages of `groups`: one list of storage indices for each all-gather of a group."""
    trace = context.ledger.trace
    storages_by_name: dict[str, list[int]] = defaultdict(list)
    for index, owner in trace.owners.items():
        if owner.role is Role.UNSHARDED and trace.storages[index].device == trace.device:
            storages_by_name[strip_wrappers(owner.name)].append(index)
    result: list[list[int]] = []
    for group in groups:
        storages_by_gather: dict[int, list[int]] = defaultdict(list)
        for name in filter(name_filter(group), storages_by_name):
            for gather, index in enumerate(sorted(storages_by_name[name], key=context.lifetimes.births.__getitem__)):
                storages_by_gather[gather].append(index)
        result += storages_by_gather.values()
    return result


def comm_buffers(trace: Trace, purpose: str) -> list[int]:
    """Return the GPU storages that torch.distributed allocated for `purpose` ("all-gather", ...; "" if not known)."""
    return [
        index
        for index, owner in trace.owners.items()
        if owner.role is Role.COMMUNICATION
        and owner.name == purpose
        and trace.storages[index].device == trace.device
        and trace.storages[index].dtype in _ITEMSIZES  # not integer counters
    ]


def group_line(trace: Trace, group: ShardedGroup) -> str | None:
    """Return the source line that allocated the shards (FSDP) or buckets (DDP) of `group`; None if not known."""
    if group.api == DDP:
        storages = comm_buffers(trace, "gradient bucket")
    else:
        is_in_group = name_filter(group)
        storages = [index for index, name in param_names(trace).items() if is_in_group(name)]
    return next((line for index in storages if (line := trace.source_line(trace.storages[index])) is not None), None)


def fix_at(line: str | None, fix: str) -> Evidence:
    """Return evidence that describes the change `fix` at source line `line` of the program."""
    return Evidence(f"fix at {file_and_line(line)}: {fix}", source=line)
