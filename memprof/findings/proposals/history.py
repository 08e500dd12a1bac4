"""Proposes a shorter history for LBFGS, whose state has two vectors of all parameters for each of its iterations.

PyTorch's documentation of torch.optim.LBFGS counts `history_size + 1` times the bytes of the parameters. Its code keeps
two lists, old_dirs and old_stps, of `history_size` vectors each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from memprof.findings.evidence import file_and_line, names_of
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import free_earlier
from memprof.trace.events import Role

HISTORY_SIZE = 10  # proposed; torch's default is 100

_LISTS = ("old_dirs", "old_stps")  # of the state of torch.optim.LBFGS, in the order in which an iteration adds to them


class ShorterHistory(NamedTuple):
    """The change for a run whose LBFGS keeps more iterations than HISTORY_SIZE."""

    frees: dict[int, int]  # storage -> event at which it is dropped then
    vectors: list[int]  # all storages of the lists
    num_iterations: int  # the most that the lists have
    source: str | None  # line that steps the optimizer


@proposes(43)
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for the optimizers that keep more iterations: each frees the vectors of the oldest one."""
    shorter = shorten_history(context)
    if shorter is not None:
        change = (
            f"set history_size={HISTORY_SIZE} in torch.optim.LBFGS, which steps at {file_and_line(shorter.source)} and "
            f"keeps two vectors of all parameters for each iteration, of {shorter.num_iterations} so far"
        )
        yield Proposal(free_earlier(context.ledger.trace, shorter.frees), change, source=shorter.source)


@cache_per_context
def shorten_history(context: Context) -> ShorterHistory | None:
    """Return when each vector would be dropped with HISTORY_SIZE; None if there are no more."""
    trace, births, deaths = context.ledger.trace, context.lifetimes.births, context.lifetimes.deaths
    lists: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for index, name in names_of(trace, Role.OPTIMIZER_STATE).items():
        if name in _LISTS:
            lists[trace.storages[index].shape, name].append(index)
    frees: dict[int, int] = {}
    for own in lists.values():
        own.sort(key=births.__getitem__)
        # The oldest is dropped once the newest is there.
        pairs = zip(own, own[HISTORY_SIZE:], strict=False)
        frees |= {old: births[new] + 1 for old, new in pairs if births[new] + 1 < deaths[old]}
    if not frees:
        return None
    vectors = [index for own in lists.values() for index in own]
    source = trace.source_line(trace.storages[next(iter(frees))])
    return ShorterHistory(frees, vectors, max(len(own) for own in lists.values()), source)
