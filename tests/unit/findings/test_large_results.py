"""Products and resized images outside modules, in parts: larger than everything that they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings.proposals import pairs
from memprof.trace.events import NONE, Forward, PhaseKind
from tests.unit.traces import TraceBuilder

PRODUCT: dict[str, Any] = {"shape": (2048, 4096), "op": "aten.mm"}
IMAGE: dict[str, Any] = {"shape": (1, 200, 512, 512), "op": "aten.upsample_bilinear2d"}
COVARIANCE: dict[str, Any] = {"shape": (3, 4096, 4096), "op": "aten.bmm"}


def evaluated(
    shape: tuple[int, ...], op: str, *, phase: PhaseKind = PhaseKind.EVALUATION, path: str = "", trains: bool = True
) -> TraceBuilder:
    b = TraceBuilder()
    b.parameter("weight", 64, 64)
    if trains:
        b.phase(PhaseKind.FORWARD)
        b.phase(PhaseKind.BACKWARD)
    b.phase(phase)
    if not trains:
        b.enter("", "Encoder")
        b.leave()
        b.trace.forwards.append(Forward(0, len(b.trace.events), 0, NONE, training=False, nodes=0, outputs=()))
    b.new(512, 8, op="aten.randn")
    if path:
        b.enter(path)
    b.new(*shape, op=op, line="score.py:3 score")
    return b


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (PRODUCT, "2,048 rows ("),
        (PRODUCT | {"shape": (2048, 64)}, None),  # of a layer
        (PRODUCT | {"shape": (64, 4096)}, None),
        (PRODUCT | {"phase": PhaseKind.FORWARD}, None),
        (PRODUCT | {"phase": PhaseKind.FORWARD, "trains": False}, "2,048 rows ("),
        (PRODUCT | {"path": "head"}, None),
        (IMAGE, "200 rows along dimension 1"),
        (IMAGE | {"shape": (2, 200, 512, 512)}, "2 rows ("),
        (IMAGE | {"shape": (1, 1, 2048, 2048)}, None),
        (IMAGE | {"phase": PhaseKind.FORWARD}, None),
        (IMAGE | {"phase": PhaseKind.FORWARD, "trains": False}, "200 rows along dimension 1"),
        (IMAGE | {"path": "decoder"}, None),
        (COVARIANCE, "4,096 rows along dimension 1"),
        (COVARIANCE | {"phase": PhaseKind.FORWARD}, "4,096 rows along dimension 1 (with gradients: each under"),
        (COVARIANCE | {"shape": (3, 4096, 4095)}, None),
        (COVARIANCE | {"shape": (300, 64, 64)}, None),
        (COVARIANCE | {"path": "attention"}, None),
    ],
)
def test_results_in_parts(change: dict[str, Any], rows: str | None) -> None:
    found = list(pairs.propose(evaluated(**change).context()))
    assert bool(found) == (rows is not None)
    assert all(f"of the {rows}" in one.change and "score.py:3" in one.change for one in found)
