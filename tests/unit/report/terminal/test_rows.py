"""Every view shows the last row of its tables too, and its columns have the numbers of their headings."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from memprof.device.catalog import find_gpu
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import build_estimate
from memprof.findings import Evidence, Finding, Severity
from memprof.flows.account import analyze
from memprof.flows.vocabulary.count import CorpusCount
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.flows.vocabulary.savings import build_vocabulary, compute_caps, estimate_savings
from memprof.report.documents.analysis_build import AnalysisRequest, RecordingOrigin, build_analysis
from memprof.report.documents.ladder import Bottleneck, FixCost, LadderRow
from memprof.report.documents.limit import LargestSearch, LargestSearchRun
from memprof.report.documents.ranks import GpuRow, RankRow
from memprof.report.documents.report import Report
from memprof.report.documents.verification import Deviation, FixPeak, OptimizerRow, Precision, Verification
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.tolerance import Tolerance
from memprof.report.terminal import analysis, comparison, verification, vocabulary
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import to_text
from memprof.report.terminal.estimate import render_estimate
from memprof.report.terminal.ladder import render_ladder
from memprof.report.terminal.limit import render_limit
from memprof.report.terminal.ranks import render_gpus, render_ranks
from memprof.report.terminal.report import render
from memprof.snapshots.recording import build_recordings
from memprof.snapshots.steps import find_steps
from memprof.spec import TargetSpec
from memprof.units import GIB, MIB
from tests.golden.test_report import training_run
from tests.unit.estimate.tiny import tiny_model
from tests.unit.report.runs import facts, run_of
from tests.unit.snapshots.builder import training

UNIT = Unit("MiB", MIB)


def rows(view: Any, width: int = 160) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in to_text(view, width).splitlines()]


def report(**changes: Any) -> Report:
    trace = training_run()
    trace.facts = facts()
    return dataclasses.replace(analyze(trace), **changes)


def test_a_report() -> None:
    evidence = tuple(Evidence(f"evidence {number}") for number in range(6))
    findings = tuple(Finding(f"id{i}", Severity.NOTE, f"Title {i}", i, evidence, ("compile", "npt")) for i in range(3))
    document = report(findings=findings, assumptions=("One.", "Two.", "Last."))
    text = to_text(render(document, explain=True), 160)
    for name in (*document.peak.categories, document.stages[-1].name, "3. note: Title 2", "  - Last."):
        assert name in text
    assert text.count("   - evidence 5") == 3 and text.count("Suggested fixes: compile, npt") == 3
    tensors = text.partition("Largest tensors")[2].partition("Findings")[0]
    assert tensors.count("float32") + tensors.count("float16") + tensors.count("int8") == min(
        len(document.peak.tensors), 10
    )


COST = FixCost(
    10**13, 10**12, 2 * MIB, MIB, 4.0, 1.0, 0.5, 0.25, 0, "exact", "a note", compile_seconds=1.5, compiled_kernels=7
)


def test_a_ladder() -> None:
    names = ("chunked-loss", "activation-checkpointing", "compile")
    ladder = tuple(
        LadderRow(
            names[:i], names[i - 1] if i else None, (40 - i) * MIB, (50 - i) * MIB, 0, 0, i * MIB, i == 3,
            Bottleneck("forward", 1, "x", 1, f"bottleneck {i}"), COST,
        )
        for i in range(4)
    )  # fmt: skip
    document = report(ladder=ladder, ladder_left_out={"fused-optimizer": "saves less", "npt": "is another model"})
    shown = rows(render_ladder(document))
    # peak, reserved, saved, verdict, compute (a tenth of nine tenths more), bus, the step's time, numbers
    (last,) = [row for row in shown if row[:2] == ["+", "compile"]]
    assert last == ["+", "compile", "37.00", "47.00", "3.00", "fits", "+11.1%", "+1.00", "MiB", "4.0", "s", "exact"]
    (first,) = [row for row in shown if row[:1] == ["baseline"]]
    assert first == ["baseline", "40.00", "50.00", "OOM", "10", "TFLOP", "2.00", "MiB", "4.0", "s"]
    assert [row[-1] for row in shown if row[:1] == ["then:"]] == ["0", "1", "2", "3"]
    text = to_text(render_ladder(document), 160)
    assert "npt: is another model" in text and "that took 1.5 s" in text and "its 7 kernels" in text


def test_a_ladder_has_columns_for_what_its_fixes_use() -> None:
    def shown(**changes: Any) -> list[list[str]]:
        cost = dataclasses.replace(COST, **({"extra_bus_seconds": 0.0} | changes))
        row = LadderRow((), None, 40 * MIB, 50 * MIB, 0, 16 * GIB, 0, False, Bottleneck("", 0, "", 0, "end"), cost)
        return rows(render_ladder(report(ladder=(row,))))

    assert ["then:", "end"] in shown(host_bytes=4 * MIB)
    assert shown(host_bytes=4 * MIB + 1)[3][:6] == ["then:", "end;", "the", "CPU", "reads", "and"]
    # A step is four seconds: the bus has a column beside that of other GPUs from a hundredth on.
    for changes, columns in (
        ({}, ["compute", "bus", "step"]),
        ({"link_bytes": MIB}, ["compute", "GPUs", "step"]),
        ({"link_bytes": MIB, "extra_bus_seconds": 0.04}, ["compute", "GPUs", "step"]),
        ({"link_bytes": MIB, "extra_bus_seconds": 0.05}, ["compute", "bus", "GPUs", "step"]),
    ):
        (heading,) = [row for row in shown(**changes) if row[:1] == ["peak"]]
        assert heading[heading.index("compute") : -1] == columns


def test_ranks_and_gpus() -> None:
    ranks = tuple(
        RankRow(
            i, None, (), "", i * MIB, "backward", 2, 2 * i * MIB, 3 * i * MIB, 4 * i * MIB, i < 2, {}, i == 2, i == 1
        )
        for i in range(3)
    )
    shown = rows(render_ranks(ranks, UNIT))
    assert ["1", "<-", "shown", "in", "full", "1.00", "backward", "of", "step", "2", "4.00", "fits"] in shown
    assert ["2", "2.00", "backward", "of", "step", "2", "8.00", "full"] in shown
    equal = (ranks[0], dataclasses.replace(ranks[1], like=0), dataclasses.replace(ranks[2], like=0))
    assert "Ranks 0-2 are equal to the byte." in to_text(render_ranks(equal, UNIT), 160)
    gpus = tuple(
        GpuRow(
            f"cuda:{i}", i != 1, GIB, 0, i * MIB, "forward", 2 * i * MIB, 3 * i * MIB, 4 * i * MIB, True, i == 2, i == 0
        )
        for i in range(3)
    )
    shown = rows(render_gpus(gpus, UNIT))
    assert ["cuda:0", "<-", "shown", "in", "full", "1.00", "GiB", "0.00", "0.00", "fits"] in shown
    assert ["cuda:1", "1.00", "GiB", "1.00", "4.00", "not", "used"] in shown
    assert ["cuda:2", "1.00", "GiB", "2.00", "8.00", "fits"] in shown


def test_a_search_for_the_largest() -> None:
    runs = tuple(
        LargestSearchRun(number, number * MIB, number <= 3, "backward", f"memprof {number}")
        for number in (1, 2, 3, 4, 8)
    )
    text = to_text(render_limit(LargestSearch("batch-size", 3, 4, runs), 5 * MIB), 160)
    assert (
        "3 needs 3.00 MiB, 2.00 MiB to spare" in text and "4 needs 4.00 MiB and runs out of memory in backward" in text
    )
    assert "5 runs were made, at 1, 2, 3, 4, 8; of those beyond, 8 do not fit either." in text
    assert "memprof 3" in text and "memprof 4" in text and "ends there" not in text
    text = to_text(render_limit(LargestSearch("context-length", 3, None, runs[:3]), 2 * MIB), 160)
    assert "3 needs 3.00 MiB without releasing its cache" in text and "a larger one was not tried" in text
    text = to_text(render_limit(LargestSearch("batch-size", None, 1, runs[3:]), 2 * MIB), 160)
    assert "No batch-size fits" in text and "memprof 4" in text


def test_a_comparison() -> None:
    a, b = run_of(training_run()), run_of(training_run())
    b.settings |= {"one": 1, "last": "x"}
    b.assumptions = (*b.assumptions, "Another.", "The last.")
    for name in b.categories:
        b.categories[name] += MIB
    for name, size in b.totals.items():
        b.totals[name] = None if size is None else size + MIB
    for name, size in b.bridge.items():
        b.bridge[name] = None if size is None else size + MIB
    b.tensors = [dataclasses.replace(tensor, count=tensor.count + 1) for tensor in b.tensors]
    found = build_comparison(a, b, Tolerance())
    shown = rows(comparison.render(found, top=100, explain=True))
    assert ["last", "-", "x"] in shown and ["-", "B:", "The", "last."] in shown
    for names in ([row.category for row in found.categories], [row.name for row in found.totals if row.compared],
                  [row.name for row in found.reserved if row.difference_bytes]):  # fmt: skip
        for name in names:
            assert any(row[: len(name.split())] == name.split() and "+1.00" in row for row in shown), name
    heading = next(i for i, row in enumerate(shown) if row[:2] == ["Tensors", "at"])
    tensors = [row for row in shown[heading:] if row and row[0].startswith("+") and len(row) > 5]
    assert len(tensors) == sum(bool(row.difference_bytes) for row in found.tensors)


def test_an_analysis() -> None:
    program = training(steps=6, leak=True)
    found = build_recordings(program.snapshot())
    for one in found:
        one.steps = find_steps(one)
    origin = RecordingOrigin("training.pickle", "torch snapshot", "measured", "", ("A note.", "The last."))
    document = build_analysis(found, origin, AnalysisRequest(top=3))
    (device,) = document.devices
    text = to_text(analysis.render(document), 160)
    for line in (*(group.key for group in device.moment.groups), *(leak.source for leak in device.leaks)):
        assert line.rpartition("/")[2].split()[0] in text
    assert "Note: The last." in text
    assert [row[0] for row in rows(analysis.render(document)) if row[:1] in (["start"], ["peak"], ["end"])] == [
        "start",
        "peak",
        "end",
    ]


def test_a_vocabulary() -> None:
    counted = CorpusCount(
        "whitespace", 9, Frequencies.of([60, 25, 10, 5]), (("the", 60), ("of", 25)), reserved=1, notes=("Read so.",)
    )
    caps = compute_caps(counted, [("60%", Fraction(3, 5)), ("95%", Fraction(95, 100))])
    savings = estimate_savings("1.2B", counted, caps, TargetSpec(model="-", vocab_size=1000))
    document = build_vocabulary(("a.txt", "b.txt"), counted, caps, savings, "0")
    text = to_text(vocabulary.render(document), 160)
    for words in (
        "a.txt, b.txt",
        "'of' 25",
        "60%: 1 tokens cover 60.00% (40 of 100 are lost); with 1 reserved, --vocab-size 2",
        "Note: Read so.",
    ):
        assert words in text
    shown = rows(vocabulary.render(document))
    assert ["4", "100.00%"] in [row[:2] for row in shown]
    assert ["vocabulary,", "tokens", "1,000", "4", "2"] in shown
    assert len(next(row for row in shown if row[:1] == ["saved"])) == 1 + 2 * 2


def test_a_verification() -> None:
    layers = tuple(0.1 * layer for layer in range(15))
    document = Verification(
        seeds=3,
        deviations=[
            Deviation("compile", "gpt2", "loss", "case", "w", 1.0, 2.0, 3.0),
            Deviation("compile", "gpt2", "gradients", "case", "w", 1.0, 3.0, 3.0),
            Deviation("npt", "llama", "loss", "padded", "head", 1.0, 4.0, 3.0),
        ],
        precisions=[Precision(name, "gpt2", 0.5, 0.25, 0.75, layers, 0.3) for name in ("amp-float16", "float16")],
        optimizers=[
            OptimizerRow("x", "gpt2", 5, 0.1, 0.2, 0.3, 0, None),
            OptimizerRow("y", "gpt2", 5, 0.1, 0.2, 0.3, MIB, 0.05),
        ],
        narrow={"gpt2": ("aten.mm", "aten.add")},
        peaks=[FixPeak("q", "gpt2", 0, 0), FixPeak("z", "gpt2", 3 * MIB, 2 * MIB, "cpu", 5 * MIB, 1 * MIB, "too slow")],
        notes=["A note.", "The last."],
        skipped={("a", "m"): "none", ("b", "m"): "no head"},
    )
    text, shown = to_text(verification.render(document), 200), rows(verification.render(document), 200)
    assert ["npt", "llama", "loss", "1.0e+00", "4.0e+00", "3.0e+00", "FAILED"] in shown
    assert ["gradients", "1.0e+00", "3.0e+00", "3.0e+00", "ok"] in shown
    assert ["float16", "gpt2", "5.0e-01", "2.5e-01", "3.0e-01", "75.0%", "ok"] in shown
    shown_layers = next(row for row in shown if row[:2] == ["float16", "gpt2"] and row[2].endswith(":"))
    assert shown_layers[2::2] == [f"{layer}:" for layer in (0, 2, 4, 6, 8, 10, 12, 14)]
    assert ["y", "1.0e-01", "2.0e-01", "3.0e-01", "5.0e-02", "1.00", "FAILED"] in shown
    assert ["z", "3.00", "2.00", "1.00", "5.00", "1.00", "4.00"] in shown
    for words in (
        "npt on llama: loss of head, padded", "not measured: z: too slow", "smaller numbers: aten.mm, aten.add",
        "The last.", "not tried: b on m: no head",
    ):  # fmt: skip
        assert words in text


def test_an_estimate() -> None:
    estimate = build_estimate(tiny_model(), EstimateOptions(gpus=2))
    text = render_estimate(estimate, (find_gpu("t4"), find_gpu("h100-80gb")), explain=True)
    lines = [line.split() for line in text.splitlines()]
    assert len([line for line in lines if line[:2] == ["with", "checkpointing"]]) == 4 + 4 + 3
    # Of each method the smallest that fits, in both tables.
    assert len([line for line in lines if line[-2:] == ["t4", "(14.56)"]]) == 2 * 10
    assert ["allocated", "reserved", "device", "used", "figures", "within", "held", "out"] in lines
    assert any(line[:1] == ["-"] for line in lines) and "KV cache: 2 x layers" in text
