"""Tensors of two devices that meet in an operator."""

from __future__ import annotations

import pytest

from memprof.findings import Severity
from memprof.trace.events import NONE
from tests.unit.findings.figures import figures
from tests.unit.findings.language_models import of, training


class TestDeviceMismatch:
    def test_says_where_and_what_to_do(self) -> None:
        b = training(64, 100)
        for layer in range(2):
            b.enter(f"layers.{layer}.rope", "Rope")
            b.mismatch(
                "aten.mul",
                "rope.py:9 forward",
                ("cpu", (64, 1), "rope.py:8 forward"),
                ("cuda:0", (32,), "train.py:3 <module>"),
            )
            b.leave()
        (finding,) = of(b.context(), "device-mismatch")
        assert finding.severity is Severity.ERROR and finding.num_bytes is None
        assert "rope.py:9" in finding.title and "rope.py:8" in finding.title
        texts = [line.text for line in finding.evidence]
        assert "2 times" in texts[0] and "layers.*.rope" in texts[0]
        assert any(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!" in text
            for text in texts
        )
        assert "at rope.py:8 create it with device=" in texts[-1]
        assert [line.device for line in finding.evidence[1:3]] == ["cpu", "cuda:0"]

    def test_matrix_products_name_the_argument(self) -> None:
        b = training(64, 100)
        b.mismatch("aten.mm", "a.py:1 f", ("cuda:0", (4, 4), "a.py:2 f"), ("cpu", (4, 4), "a.py:3 f"))
        (finding,) = of(b.context(), "device-mismatch")
        assert "got mat2 is on cpu, different from other tensors on cuda:0" in finding.evidence[3].text
        assert "made on cpu at a.py:3" in finding.title

    def test_silent_without(self) -> None:
        assert not of(training(64, 100).context(), "device-mismatch")

    def test_facts_of_each_operand_and_of_the_module(self) -> None:
        b = training(64, 100)
        b.enter("", "Net")
        b.mismatch("aten.add", "a.py:1 f", ("cuda:0", (4, 4), "a.py:2 f"), ("cpu", (8,), "a.py:3 f"))
        (finding,) = of(b.context(), "device-mismatch")
        assert figures(finding.title) == ["aten.add", "a.py:1", "0", "[8]", "float32", "a.py:3"]
        met, first, second, error, fix = finding.evidence
        assert met.text == "aten.add met them at a.py:1 in the model"
        assert (met.op, met.source, met.module) == ("aten.add", "a.py:1 f", "")
        assert figures(first.text) == ["[4 x 4]", "float32", "0", "a.py:2"]
        assert (first.shape, first.dtype, first.device, first.source) == ((4, 4), "float32", "cuda:0", "a.py:2 f")
        assert figures(second.text) == ["[8]", "float32", "a.py:3"] and second.module == ""
        assert (error.op, error.source, fix.source) == ("aten.add", "a.py:1 f", "a.py:3 f")
        assert fix.text.count("<the cuda:0 tensor>.device") == 2 and "before a.py:1" in fix.text
        assert finding.fixes == ("device-placement",)

    def test_two_gpus_need_a_move_and_no_fix_of_memprof(self) -> None:
        b = training(64, 100)
        b.mismatch("aten.add", "a.py:1 f", ("cuda:0", (4,), "a.py:2 f"), ("cuda:1", (4,), "a.py:3 f"))
        (finding,) = of(b.context(), "device-mismatch")
        assert finding.fixes == ()
        assert finding.evidence[-1].text == "fix: move it with .to(<the cuda:0 tensor>.device) before a.py:1"
        assert finding.evidence[0].text == "aten.add met them at a.py:1"

    def test_what_no_line_has_made_is_to_be_moved_or_registered(self) -> None:
        b = training(64, 100)
        b.mismatch("aten.add", "a.py:1 f", ("cuda:0", (4,), "a.py:2 f"), ("cpu", (4,), "a.py:3 f"))
        (mismatch,) = b.trace.mismatches
        operands = (mismatch.operands[0], mismatch.operands[1]._replace(source=NONE))
        b.trace.mismatches[0] = mismatch._replace(operands=operands)
        (finding,) = of(b.context(), "device-mismatch")
        assert finding.evidence[-1].text.startswith("fix: move it with .to(<the cuda:0 tensor>.device) before a.py:1; ")
        assert "made at an unknown line" in finding.evidence[2].text and finding.evidence[-1].source == "a.py:1 f"

    @pytest.mark.parametrize(
        ("change", "num_findings"),
        [
            ({}, 1),
            ({"shape": (8,)}, 1),  # of another size
            ({"shape": (4, 4)}, 2),
            ({"made": "a.py:9 f"}, 2),
            ({"op": "aten.mul"}, 2),
            ({"line": "a.py:9 f"}, 2),
            ({"device": "cuda:1"}, 2),
        ],
    )
    def test_mismatches_that_are_alike_are_one(self, change: dict[str, object], num_findings: int) -> None:
        b = training(64, 100)
        own = {"op": "aten.add", "line": "a.py:1 f", "device": "cpu", "shape": (4,), "made": "a.py:3 f"}
        for one in (own, own | change):
            operand = (one["device"], one["shape"], one["made"])
            b.mismatch(one["op"], one["line"], ("cuda:0", (4,), "a.py:2 f"), operand)  # type: ignore[arg-type]
        assert len(of(b.context(), "device-mismatch")) == num_findings
