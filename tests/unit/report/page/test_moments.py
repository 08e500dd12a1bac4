"""The columns of every moment add up to the ledger, whatever the run did."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from memprof.findings import Evidence
from memprof.ledger.ledger import build_ledger, find_live_storages
from memprof.report.page.moments import Moments, build_moments, find_kinds
from memprof.trace.events import PhaseKind
from tests.lanes import examples
from tests.unit.report.runs import traces
from tests.unit.traces import TraceBuilder

MIB = 1 << 20


def categories_at(moments: Moments, event: int) -> Counter[str]:
    sums = Counter[str]()
    for begin, end, kind, extra in zip(moments.begin, moments.end, moments.kind, moments.extra, strict=True):
        if begin <= event < end:
            sums[moments.words[moments.kinds.category[kind]]] += moments.kinds.rounded[kind]
            sums[moments.words[moments.fragmentation]] += extra
    return sums


@settings(max_examples=examples(60), deadline=None)
@given(traces())
def test_they_sum_to_the_ledger_at_its_peak_and_to_what_is_allocated_everywhere(trace):
    ledger = build_ledger(trace)
    moments = build_moments(ledger)
    assert +categories_at(moments, ledger.peak_event) == +Counter(
        {category.value: num_bytes for category, num_bytes in ledger.sum_by_category().items()}
    )
    for event in range(0, len(trace.events), 5):
        assert categories_at(moments, event).total() == ledger.allocated[event]
        living = [kind for begin, end, kind in zip(moments.begin, moments.end, moments.kind, strict=True)
                  if begin <= event < end]  # fmt: skip
        assert len(living) == sum(
            trace.storages[index].num_bytes > 0 for index in find_live_storages(trace, event, frozenset())
        )


def test_layers_are_one_group_and_evidence_finds_its_kinds():
    made = TraceBuilder(None)
    made.phase(PhaseKind.FORWARD, step=1)
    for layer in range(3):
        made.enter(f"layers.{layer}")
        made.alloc(5 * MIB, "aten.mm", line="net.py:3 forward")
        made.leave()
    made.alloc(MIB + 1, "aten.mul", line="net.py:9 forward")
    ledger = build_ledger(made.trace)
    moments = build_moments(ledger)
    assert [stage[1:3] for stage in moments.stages] == [(span.begin, span.end) for span in ledger.spans]
    assert (moments.reserved_at, moments.reserved) == ([0, 2], [0, 20 * MIB])
    assert moments.kinds.group == [0, 0, 0, 1]
    assert moments.kinds.rounded == [5 * MIB] * 3 + [MIB + 512]
    assert find_kinds(moments, Evidence("", module="layers.*", op="aten.mm")) == [0, 1, 2]
    assert find_kinds(moments, Evidence("", source="net.py:9 forward")) == [3]
    assert find_kinds(moments, Evidence("", source="net.py:9 forward", op="aten.mm")) == []
    assert find_kinds(moments, Evidence("", module="layers.*")) == []
