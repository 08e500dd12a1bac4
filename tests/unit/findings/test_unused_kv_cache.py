"""Keys and values that no later call uses, and those of loops that generate."""

from __future__ import annotations

import pytest

from memprof.findings import Context, unused_kv_cache
from memprof.findings.proposals import kv_cache
from memprof.findings.unused_kv_cache import find
from memprof.trace.events import NONE, Forward, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

LINE = "score.py:9 main"


def calls(
    num_calls: int, *, cache_mib: int = 64, other_mib: int = 0, line: str = LINE, is_used_later: bool = False
) -> Context:
    """Calls that make keys and values each, which live until the next one has ended."""
    b = TraceBuilder()
    if other_mib:
        b.alloc(other_mib * MIB)
    b.phase(PhaseKind.FORWARD)
    b.trace.sources.append(line)
    kept: list[int] = []
    for _ in range(num_calls):
        begin = len(b.trace.events)
        b.enter("", "Model")
        made = b.new(cache_mib * MIB // 4, owner=(Role.KV_CACHE, ""))
        b.free(b.new(4))
        b.trace.last_uses += [NONE] * (len(b.trace.storages) - len(b.trace.last_uses))
        b.trace.last_uses[made] = len(b.trace.events) - 1
        if is_used_later and kept:
            b.trace.last_uses[kept[-1]] = len(b.trace.events)
        b.leave()
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, b.trace.sources.index(line), False, 0, ()))
        b.free(*kept)
        kept = [made]
    return b.context()


def test_calls_of_which_none_uses_the_cache_of_another() -> None:
    (finding,) = find(calls(3))
    assert finding.title.startswith("KV cache: 3 calls of Model at score.py:9 keep keys and values that no later call")
    assert finding.num_bytes == 64 * MIB and finding.evidence[0].text.startswith("fix at score.py:9: use_cache=False")


def test_from_5_percent_of_the_peak_on() -> None:
    """64 of 1,278 MiB: two caches are there while a call runs."""
    assert len(find(calls(3, other_mib=1278 - 2 * 64))) == 1


@pytest.mark.parametrize(
    "context",
    [
        calls(3, is_used_later=True),
        calls(1),
        calls(3, line="/lib/transformers/generation/utils.py:9 _prefill"),
        calls(3, cache_mib=63),
        calls(3, other_mib=64 * 19 - 63),
    ],
    ids=["a loop that generates", "one call", "generate()", "63 MiB", "less than 5%"],
)
def test_what_is_no_finding(context: Context) -> None:
    assert find(context) == []


@pytest.mark.parametrize(("num_kept", "is_told"), [(0, True), (2, True), (3, False)])
def test_caches_that_a_list_keeps_are_told_with_it(
    num_kept: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of those of four calls."""
    context = calls(4)
    caches = [index for index, owner in context.ledger.trace.owners.items() if owner.role is Role.KV_CACHE]
    monkeypatch.setattr(unused_kv_cache, "find_kept_storages", lambda _: frozenset(caches[:num_kept]))
    assert bool(find(context)) == is_told


def test_of_one_call_nobody_knows() -> None:
    (proposal,) = kv_cache.propose(calls(1))
    assert proposal.change == "pass use_cache=False in the call at score.py:9, if no later call is to use the KV cache"
