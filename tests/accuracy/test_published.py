"""The accuracy suite: no row is lost, the tables say what the rows say, and a sample of rows is predicted.

The whole sweep is `python -m tests.benchmarks.accuracy`; here are one or two rows of the sources that are quick.
"""

from __future__ import annotations

import collections
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from memprof.device.context import CONTEXT_BYTES
from memprof.flows import profile as flow
from tests.accuracy import liger_kernels
from tests.accuracy.published import generic, report
from tests.accuracy.published.libraries import TRITON, folder
from tests.accuracy.published.prediction import Outcome, Prediction
from tests.accuracy.published.rows import COLUMNS, Row, read_rows
from tests.accuracy.published.sources import OTHER, outcome, source_of
from tests.benchmarks.accuracy import BEGIN, END, PAGE, sweep

GIB = 2**30


def row(**cells: str) -> Row:
    """A row of nobody's table, unless `source` says otherwise."""
    defaults = {"source": "mine", "model": "gpt2", "task": "train", "weights": "fp32", "batch": "2", "seq": "128"}
    defaults |= {"gpu": "A100", "metric": "max_memory_allocated", "value": "1.00", "unit": "GiB"}
    return Row(2, **{name: {**defaults, **cells}.get(name, "") for name in COLUMNS})


@pytest.fixture(scope="module")
def rows(shared_dir: Path) -> list[Row]:
    return read_rows(shared_dir / "published_memory.csv")


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_row_has_a_source_of_its_own(rows: list[Row]) -> None:
    assert len(rows) == 248
    assert not [row.source for row in rows if source_of(row) is OTHER]
    assert len({source_of(row).name for row in rows}) == 12


# -- outcomes and their tables -----------------------------------------------------------------------------------------


def test_an_error_is_signed_and_rounding_is_none() -> None:
    published = row(value="10.0")
    errors = {
        simulated: Outcome(published, Prediction(round(simulated * GIB))).error
        for simulated in (9.96, 10.04, 10.06, 9.0)
    }
    assert errors[9.96] == errors[10.04] == 0
    assert errors[10.06] == pytest.approx(0.006)
    assert errors[9.0] == pytest.approx(-0.1)
    assert Outcome(published, Prediction(reason="unknown")).error is None
    # A source that means GiB by "GB", and one that rounded otherwise.
    assert Outcome(replace(published, unit="GB"), Prediction(10 * GIB, unit_bytes=GIB)).error == 0
    assert Outcome(published, Prediction(round(10.4 * GIB), rounding=0.5)).error == 0


def test_the_page_shows_a_sweep_of_the_whole_table(rows: list[Row]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0]
    found = re.search(r"(\d+) published figures from (\d+) sources; (\d+) of them, from (\d+) sources", shown)
    assert found is not None
    total, num_sources, predicted, predicted_sources = (int(text) for text in found.groups())
    assert (total, num_sources) == (len(rows), 12)
    assert predicted >= 170 and predicted_sources >= 9
    per_source = collections.Counter(source_of(row).name for row in rows)
    for name, count in per_source.items():
        assert f"| {name} | {count} |" in shown
    # Every line of the table that is not predicted stands in the list of reasons.
    listed = 0
    for numbers in re.findall(r"^\| [^|]+ \| \d+ \| ([\d, -]+) \|", shown.partition("### Not predicted")[2], re.M):
        for part in numbers.split(", "):
            first, _, last = part.partition("-")
            listed += int(last or first) - int(first) + 1
    assert listed == total - predicted


# -- rows of other tables ----------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_row_of_an_unknown_source_is_run_as_its_columns_say() -> None:
    for metric, expected in (
        ("max_memory_allocated", lambda peak: peak.allocated_bytes),
        ("peak reserved", lambda peak: peak.reserved_bytes),
        ("NVML used", lambda peak: peak.reserved_bytes + CONTEXT_BYTES),
    ):
        asked = row(metric=metric, ckpt="on", optimizer="AdamW")
        spec = generic.spec_of(asked)
        assert (spec.batch_size, spec.context_length, spec.activation_checkpointing) == (2, 128, True)
        assert (spec.dtype, spec.gpu, spec.adapter) == ("float32", "a100-80gb", None)
        document = flow.profile(spec)[1]
        assert outcome(asked).prediction.num_bytes == expected(document.peak)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"model": "no-such-model"}, "unknown model"),
        ({"gpu": "Voodoo 2"}, "the GPU 'Voodoo 2' is not in the catalog"),
        ({"seq": "<=768 (padded)"}, "the sequence length '<=768 (padded)' is no number"),
        ({"batch": "many"}, "the batch 'many' is no number"),
        ({"weights": "HQQ"}, "weights in a format of kernels that are not simulated: hqq"),
        ({"parallel": "FSDP 8"}, "needs several ranks"),
        ({"compile": "on"}, "torch.compile"),
        ({"optimizer": "sophia"}, "optimizer 'sophia' is not simulated"),
        ({"metric": "tokens per second"}, "the metric 'tokens per second' is none of"),
    ],
)
def test_what_a_row_does_not_say_is_its_reason(cells: dict[str, str], reason: str) -> None:
    prediction = outcome(row(**cells)).prediction
    assert prediction.num_bytes is None
    assert reason in prediction.reason


def test_quantized_weights_and_optimizers_are_those_of_the_columns() -> None:
    asked = row(method="QLoRA", weights="nf4 dq", optimizer="paged_adamw_8bit")
    spec = generic.spec_of(asked)
    assert (spec.quantize, spec.adapter, spec.dtype, spec.optimizer) == ("nf4", "lora", "bfloat16", "paged-adamw-8bit")
    assert generic.spec_of(row(method="LoRA int8", weights="")).quantize == "int8"
    assert generic.spec_of(row(method="LoRA")).quantize is None
    for weights, name in {"GPTQ-Int4": "gptq-int4", "FP8": "fp8", "AWQ-INT4": "awq-int4"}.items():
        assert generic.spec_of(row(method="", task="infer", weights=weights)).quantize == name


# -- a sample ----------------------------------------------------------------------------------------------------------


def chosen(rows: list[Row], source: str, **cells: str) -> Row:
    (found,) = (
        row for row in rows if source in row.source and all(getattr(row, name) == text for name, text in cells.items())
    )
    return found


SAMPLE = [
    ("pytorch/ao", {"model": "ViT-H 630M", "method": "PyTorch fused AdamW"}, 0.0),
    ("pytorch/ao", {"model": "ViT-g 1.1B", "method": "no offload"}, 0.003),
    ("model_memory_anatomy", {"method": "+ fp32 weights"}, 0.001),
    ("ml-cross-entropy", {"task": "op fw+bw", "method": "baseline"}, 0.0),
    ("Liger-Kernel", {"model": "rope", "method": "huggingface", "seq": "T=1024"}, 0.0),
    ("Liger-Kernel", {"model": "cross_entropy", "method": "huggingface", "seq": "V=4096"}, 0.0),
    ("Liger-Kernel", {"model": "rope", "method": "huggingface", "seq": "H=512"}, 0.0),
    ("Liger-Kernel", {"model": "jsd", "method": "torch", "seq": "V=4096"}, 0.0),
    ("can-i-finetune-this", {"model": "sshleifer/tiny-gpt2", "metric": "peak_reserved_gb"}, 0.0),
]


@pytest.fixture(scope="module")
def sample(rows: list[Row]) -> list[Outcome]:
    """The cheap rows, each run once; without those of a source's own code that is not here."""
    found = []
    for source, cells, _ in SAMPLE:
        asked = chosen(rows, source, **cells)
        code = source_of(asked).code
        if code is None or code.folder.is_dir():
            found.append(outcome(asked))
    return found


def test_cheap_rows_keep_the_bars(sample: list[Outcome]) -> None:
    """Where code and versions match: half of the rows within 0.1%, and 95% within 1%."""
    sizes = [abs(done.error) for done in sample if done.error is not None and not done.prediction.differs]
    assert len(sizes) >= 5
    assert statistics.median(sizes) <= report.MISS
    assert sum(size <= report.FAR for size in sizes) >= 0.95 * len(sizes)


def test_the_page_keeps_the_bars() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("| **code and versions match** |")[2].partition("\n")[0]
    rows, predicted, _, _, median, _, within, *_ = (cell.strip() for cell in shown.split("|"))
    assert int(rows) == int(predicted) >= 110
    assert float(median.rstrip("%")) <= 0.1
    assert int(within.rstrip("%")) >= 95


def test_every_difference_of_the_page_has_its_cause() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("### Differences above 0.1%")[2].partition("### Every")[0]
    causes = [line.rsplit(" | ", 1)[1] for line in shown.splitlines() if line.startswith("| ") and ": " in line]
    assert len(causes) > 20
    assert not [cause for cause in causes if "unexplained" in cause or "not published" in cause]


@pytest.mark.parametrize(("source", "cells", "bar"), SAMPLE, ids=[f"{s} {' '.join(c.values())}" for s, c, _ in SAMPLE])
def test_sample(sample: list[Outcome], rows: list[Row], source: str, cells: dict[str, str], bar: float) -> None:
    asked = chosen(rows, source, **cells)
    done = next((done for done in sample if done.row == asked), None)
    if done is None:
        pytest.skip(f"{source_of(asked).code} is not in .cache/accuracy: the sweep fetches it")
    assert done.error is not None, done.prediction.reason
    assert abs(done.error) <= bar


@pytest.mark.parametrize("model", ["cross_entropy", "layer_norm", "rope", "jsd"])
def test_the_published_kernels_themselves(rows: list[Row], model: str) -> None:
    """Liger-Kernel's own code, to the last digit, where the sweep has fetched it."""
    own = [row for row in rows if (row.model, row.method) == (model, "liger") and "Liger-Kernel" in row.source]
    for release in liger_kernels.releases((row.note, row.model) for row in own):
        if not folder("liger-kernel", release).is_dir() or not folder(*TRITON).is_dir():
            pytest.skip(f"liger-kernel {release} or Triton is not in .cache/accuracy: the sweep fetches them")
    # In a process of its own: torch asks whether Triton is there, and remembers.
    assert [done.error for done in sweep(own[:2], 1)] == [0.0, 0.0]
