"""Scores that are left to a kernel."""

from __future__ import annotations

import pytest

from memprof.findings.proposals import attention
from tests.unit.findings.proposals.proposed import listed, only
from tests.unit.traces import TraceBuilder

SDPA = "use scaled_dot_product_attention instead of the scores at model.py:3"


@pytest.mark.parametrize(
    ("ops", "line", "change"),
    [
        (
            ("aten.bmm", "aten._softmax"),
            "model.py:3 attend",
            "use scaled_dot_product_attention instead of the scores at model.py:3",
        ),
        (("aten.bmm", "aten._softmax"), "/x/transformers/bert.py:3 attend", ""),  # the fix changes the library
        (("aten.bmm", "aten._softmax"), r"C:\x\transformers\bert.py:3 attend", ""),
        (("aten.bmm", "aten._softmax"), None, ""),
        (("aten.add", "aten._softmax"), "model.py:3 attend", None),
        (("aten.bmm", "aten._safe_softmax"), "model.py:3 attend", None),  # SDPA's own
    ],
)
def test_scores_that_are_products_are_left_to_a_kernel(
    ops: tuple[str, str], line: str | None, change: str | None
) -> None:
    b = TraceBuilder()
    b.inputs(1, 512)
    made = [b.new(1, 4, 512, 512, op=op, line=line) for op in ops]
    b.new(1, 1, 512, 512, dtype="bool")
    found = listed(attention.propose(b.context()))
    assert [one.change for one in found] == ([] if change is None else [change])
    for one in found:
        assert one.source == (line if change else None)
        sizes = [storage.num_bytes for storage in one.trace.storages]
        assert [sizes[index] for index in made] == [0, 0] and sizes[-1] == 512 * 512


@pytest.mark.parametrize(
    ("class_name", "parameter", "is_told"),
    [
        ("MultiheadAttention", "attn.in_proj_weight", True),
        ("MultiheadAttention", "attn.q_proj_weight", True),
        ("MultiheadAttention", "attn.query.weight", False),  # a class of the program's
        ("MultiheadAttention", "other.in_proj_weight", False),
        ("Attention", "attn.in_proj_weight", False),
    ],
)
def test_the_attention_of_torch_is_asked_for_no_weights(class_name: str, parameter: str, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter(parameter, 24, 8)
    b.inputs(1, 512)
    b.enter("attn", class_name)
    for op in ("aten.bmm", "aten._softmax"):
        b.new(1, 4, 512, 512, op=op, line="model.py:3 forward")
    b.leave()
    change = only(attention.propose(b.context())).change
    expected = "pass need_weights=False to nn.MultiheadAttention at model.py:3"
    assert change.startswith(
        expected if is_told else "use scaled_dot_product_attention instead of the scores at model.py:3"
    )
