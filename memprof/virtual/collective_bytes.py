"""Bytes that collectives which are operators send from this rank: DTensor and context parallelism call these."""

from __future__ import annotations

from typing import Any, Final

from memprof.torch_private import distributed
from memprof.virtual.operator_call import OperatorCall

COLLECTIVES: Final = "_c10d_functional"  # their namespace


def bytes_sent(call: OperatorCall) -> int:
    """Bytes that leave this GPU in a call of one, as nccl-tests has it for rings (PERFORMANCE.md, bus bandwidth).

    A sum takes twice what is given but for one rank's part of it, a gathering what the others lack, and of what goes
    from all to all each rank keeps its own part. Zero for what sends nothing: waiting, or a group of one.
    """
    name = call.func.overloadpacket.__name__.removesuffix("_").removesuffix("_coalesced")
    if name not in _SHARES and name not in ("all_to_all_single", "broadcast"):
        return 0
    group: Any = call.kwargs.get("group_name", call.args[-1])
    if isinstance(group, str):  # its name or itself: releases of torch differ
        group = distributed.resolve_process_group(group)
    ranks = group.size()
    given = sum(tensor.numel() * tensor.element_size() for tensor in call.tensors)
    if ranks == 1:
        return 0
    if name == "broadcast":
        return given
    if name == "all_to_all_single":
        splits = [int(size) for size in call.args[2]]
        return given * (sum(splits) - splits[group.rank()]) // max(sum(splits), 1)
    return round(given * _SHARES[name](ranks))


# Of what is given: of what is gathered a rank gives one part and sends it on for all the others.
_SHARES: Final = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
}
