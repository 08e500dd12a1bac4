"""Peaks of whole training runs that others published, against the same runs on the virtual GPU.

Within 3% where the run is simulated as it was; where it was not (compiled layers), or where what was run is not known,
the difference is a stated figure, so that it does not change unseen. Of the rows of *reserved* memory, two are of runs
that are known. Quantized weights and 8-bit optimizers are those of bitsandbytes and torchao, whose own code runs.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.flows import profile as flow
from memprof.flows.gpus import RunAllocator, resolve_settings
from memprof.ledger.ledger import build_ledger
from memprof.spec import TargetSpec
from memprof.stubs.extension import extensions
from memprof.virtual import VirtualGpu
from memprof.watch.collection import disable_garbage_collection
from tests.accuracy import adapter_bench, torchtune_recipe
from tests.accuracy.adapter_bench import ATTENTION, QLORA, QLORA_1B, QLORA_7B, QWEN, TINY, Bench, causal_lm
from tests.accuracy.torchtune_recipe import LAYERS, Recipe
from tests.lanes import by_day

GIB = 2**30
BAR = 0.03


@dataclass(frozen=True)
class Row:
    model: str
    method: str
    run: Recipe | Bench
    bar: float | None = BAR  # None: not simulated as it was run; `why` says what is missing.
    why: str = ""
    # Columns of the table that tell this row from others of the same method, and what is in them.
    where: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The method, and what tells it from others."""
        return " ".join([self.method, *(f"{column}={value}" for column, value in self.where)])


PACKED = Recipe()
CHECKPOINTED = Recipe(chunked_loss=True, checkpointing=True)
FUSED = Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True)
OFFLOADED = Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True, offloading=True)
LORA = Recipe(chunked_loss=True, checkpointing=True, offloading=True, lora_rank=64)
EIGHT_BIT = dataclasses.replace(OFFLOADED, eight_bit="torchao")
FOUR_BIT_LORA = dataclasses.replace(LORA, in_4_bits=True)
COMPILED_HEAD = "compiled: compiled code may not make some tensors of the peak, the head's backward"
COMPILED_LAYERS = "compiled layers keep fewer activations than the simulated eager ones"

ROWS = [
    Row("Qwen/Qwen2.5-0.5B-Instruct", "lora", QWEN),
    Row("Qwen/Qwen2.5-0.5B-Instruct", "qlora", QLORA, where=(("seq", "1024"),)),
    Row("Qwen/Qwen2.5-0.5B-Instruct", "qlora", dataclasses.replace(QLORA, length=2048), where=(("seq", "2048"),)),
    Row("Qwen/Qwen2.5-1.5B-Instruct", "qlora", QLORA_1B, where=(("ckpt", "on"),)),
    Row(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "qlora",
        dataclasses.replace(QLORA_1B, checkpointing=False),
        where=(("ckpt", "off"),),
    ),
    Row("sshleifer/tiny-gpt2", "lora", TINY),
    Row("Llama-3.2-3B", "baseline full FT", Recipe(length=256, packed=False)),
    Row("Llama-3.2-3B", "+ packed", PACKED),
    Row("Llama-3.2-3B", "+ compile", PACKED, None, COMPILED_LAYERS),
    Row("Llama-3.2-3B", "+ chunked CE", Recipe(chunked_loss=True), None, COMPILED_LAYERS),
    Row("Llama-3.2-3B", "+ activation checkpointing", CHECKPOINTED),
    Row("Llama-3.2-3B", "+ optimizer in backward", FUSED),
    Row("Llama-3.2-3B", "+ activation offloading", OFFLOADED),
    Row("Llama-3.2-3B", "+ 8-bit AdamW", EIGHT_BIT, None, "torchao's step is always compiled; see below"),
    Row("Llama-3.2-3B", "LoRA (no opt-in-bwd, AdamW)", LORA, None, COMPILED_HEAD),
    Row("Llama-3.2-3B", "QLoRA (no opt-in-bwd, AdamW)", FOUR_BIT_LORA, None, COMPILED_HEAD),
]
# Of one stream, active is allocated (docs/concepts.md). Both are GiB, whatever the first is called.
_METRICS = ("peak_allocated_gb", "peak memory active")
_GPUS = {"RTX 4080 16GB": "rtx-4080", "A100": "a100-80gb"}


def published(folder: Path, row: Row) -> tuple[float, str]:
    """GiB and the GPU's key in the catalog."""
    with (folder / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        found = [
            (float(line["value"]), _GPUS[line["gpu"]])
            for line in csv.DictReader(file)
            if line["model"] == row.model and line["method"] == row.method and line["metric"] in _METRICS
            if all(line[column] == value for column, value in row.where)
        ]
    assert len(found) == 1, f"the table has {len(found)} rows of {row.model}, {row.name}"
    return found[0]


def needed(run: Recipe | Bench) -> list[str]:
    """The packages of a run, to be imported before a virtual GPU is there to watch."""
    if isinstance(run, Bench):
        return ["peft", "bitsandbytes"]
    return ([f"{run.eight_bit}.optim"] if run.eight_bit else []) + (["torchao"] if run.in_4_bits else [])


@dataclass(frozen=True)
class Simulated:
    peak_bytes: int
    peak_stage: str
    peak_reserved_bytes: int
    readings: dict[str, int]  # Bytes allocated at the benchmark's readings.


def simulate(run: Recipe | Bench, gpu: str) -> Simulated:
    for package in needed(run):
        pytest.importorskip(package)
    return _simulate(run, gpu)


@functools.cache
def _simulate(run: Recipe | Bench, name: str) -> Simulated:
    """Once for all tests that ask for something of it."""
    readings: dict[str, int] = {}
    settings = resolve_settings("")
    with (
        disable_garbage_collection(),
        VirtualGpu(
            find_gpu(name),
            memory=lambda trace: RunAllocator(trace, find_gpu(name), settings),
            extensions=extensions(stubs=False),
        ) as gpu,
    ):
        if isinstance(run, Recipe):
            torchtune_recipe.train(run)
        else:
            adapter_bench.train(run, lambda name: readings.__setitem__(name, torch.cuda.memory_allocated()))
    ledger = build_ledger(gpu.trace)
    return Simulated(ledger.peak_bytes, ledger.peak_stage.name, ledger.peak_reserved_bytes, readings)


# Of rows that differ in one setting, one is in every run.
BY_DAY = ("+ packed",)


def _in_its_lane(row: Row, *others: object) -> object:
    marks = () if row.name in BY_DAY else (pytest.mark.nightly,)
    return pytest.param(row, *others, marks=marks, id=f"{row.model} {row.name}")


@pytest.mark.parametrize("row", [_in_its_lane(row) for row in ROWS if row.bar is not None])
def test_published_peak(row: Row, shared_dir: Path) -> None:
    gib, gpu = published(shared_dir, row)
    assert row.bar is not None
    assert simulate(row.run, gpu).peak_bytes / GIB == pytest.approx(gib, rel=row.bar)


# -- closer than the bar ---------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("length", [128, 512])
def test_baseline_does_not_depend_on_the_length(length: int, shared_dir: Path) -> None:
    """Its batches are unpacked, and how long the texts were is not published. It decides nothing: the peak is the end
    of the backward, where the tied embedding's two gradients and their sum are live beside all others."""
    gib, gpu = published(shared_dir, next(row for row in ROWS if row.method == "baseline full FT"))
    simulated = simulate(Recipe(length=length, packed=False), gpu)
    assert simulated.peak_stage == "backward"
    assert round(simulated.peak_bytes / GIB, 1) == gib


def test_packed_to_the_last_digit(shared_dir: Path) -> None:
    gib, gpu = published(shared_dir, next(row for row in ROWS if row.method == "+ packed"))
    assert round(simulate(PACKED, gpu).peak_bytes / GIB, 1) == gib


# GiB allocated after loading, attaching the adapter, first forward, backward and optimizer step, and the peak: from
# benchmarks/results/*_s1024_b1_r16_*.json of github.com/DaoyuanLi2816/can-i-finetune-this (torch 2.6).
READINGS = {
    "Qwen2.5-0.5B lora": (QWEN, (0.9279, 0.9360, 1.8585, 1.2537, 1.2504, 3.0324)),
    "Qwen2.5-0.5B qlora": (QLORA, (0.6804, 0.6885, 1.9425, 1.2998, 1.2965, 3.1158)),
    "Qwen2.5-1.5B qlora": (QLORA_1B, (1.5092, 1.5254, 2.8647, 2.1503, 2.1424, 4.0413)),
    "Qwen2.5-7B qlora": (dataclasses.replace(QLORA_7B, steps=2), (7.2110, 7.2486, 8.8142, 7.9113, 7.8929, 10.0023)),
}
_POINTS = (
    "after_load",
    "after_lora_attach",
    "after_first_forward",
    "after_first_backward",
    "after_first_optimizer_step",
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", READINGS)
def test_readings_of_the_adapter_benchmark(name: str) -> None:
    """Within 1.2 MiB; of what torch counts, some are rests of up to 1 MiB that blocks keep. In half precision weights
    are moved first, and 8 MiB of such rests are in every reading, and not in the sum of the tensors, the peak here."""
    bench, (*readings, peak) = READINGS[name]
    simulated = simulate(bench, "rtx-4080")
    for point, gib in zip(_POINTS, readings, strict=True):
        assert simulated.readings[point] / GIB == pytest.approx(gib, abs=1.2e-3), point
    assert simulated.peak_bytes / GIB == pytest.approx(peak, abs=1.2e-3 if bench.in_4_bits else 3e-3)


# GiB, the most allocated until the 4-bit model was loaded and prepared: the same files, `after_load`.
LOADING = {"qwen2.5-0.5b": 0.9339, "qwen2.5-1.5b": 1.9436, "qwen2.5-7b": 8.2261}


@pytest.mark.parametrize("key", by_day(LOADING, "qwen2.5-0.5b"))
def test_peak_of_loading_in_4_bits(key: str) -> None:
    """To the last digit: from_pretrained quantizes one weight after the other, and PEFT makes the embedding float32."""
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    gpu, settings = find_gpu("rtx-4080"), resolve_settings("")
    parts = extensions(stubs=False)
    with (
        disable_garbage_collection(),
        VirtualGpu(gpu, memory=lambda trace: RunAllocator(trace, gpu, settings), extensions=parts),
    ):
        peft.prepare_model_for_kbit_training(causal_lm(key, "nf4"))
        assert round(torch.cuda.max_memory_allocated() / GIB, 4) == LOADING[key]


@pytest.mark.parametrize(
    ("row", "difference"),
    [
        _in_its_lane(ROWS[at], difference)
        for at, difference in ((5, 0.0), (0, -0.1133), (1, 0.0), (2, -0.1640), (3, 0.0), (4, 0.0078))
    ],
)
def test_peak_reserved(row: Row, difference: float, shared_dir: Path) -> None:
    """To the last digit in three runs; the others are up to 3% below. Allocated memory is met, so that it is where
    blocks lie that differs: the order of requests under transformers and torch of then (2.6)."""
    with (shared_dir / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        (line,) = (
            line
            for line in csv.DictReader(file)
            if (line["model"], line["method"], line["metric"]) == (row.model, row.method, "peak_reserved_gb")
            if all(line[column] == value for column, value in row.where)
        )
    reserved = simulate(row.run, "rtx-4080").peak_reserved_bytes / GIB
    assert reserved - float(line["value"]) == pytest.approx(difference, abs=5e-3 if difference else 5.1e-5)


@pytest.mark.nightly
def test_the_command_line_runs_the_adapter_benchmark(shared_dir: Path) -> None:
    """The same by `memprof profile --adapter lora`, with torch's AdamW."""
    gib, gpu = published(shared_dir, ROWS[0])
    settings: dict[str, Any] = {"adapter": "lora", "lora_rank": 16, "lora_targets": ",".join(ATTENTION)}
    spec = TargetSpec(model="qwen2.5-0.5b", context_length=1024, activation_checkpointing=True, gpu=gpu, **settings)
    document = flow.profile(spec)[1]
    assert document.target.num_trainable_parameters == 2_162_688
    assert document.peak.allocated_bytes / GIB == pytest.approx(gib, rel=0.01)


# -- what is not met, in figures ---------------------------------------------------------------------------------------

ROUNDING_GIB = 0.05  # Of the published figures.


@pytest.mark.nightly
def test_compiled_layers(shared_dir: Path) -> None:
    """With and without the chunked loss, the same is missed: 327 MiB per layer that compiled layers do not keep."""
    missing = []
    for row in ROWS:
        if row.why == COMPILED_LAYERS:
            gib, gpu = published(shared_dir, row)
            missing.append((simulate(row.run, gpu).peak_bytes / GIB - gib) / LAYERS)
    assert len(missing) == 2
    assert missing[0] == pytest.approx(missing[1], abs=2 * ROUNDING_GIB / LAYERS)
    assert [gib * 1024 for gib in missing] == pytest.approx([327, 328], abs=2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("row", "expected"), [(ROWS[-2], 8.861), (ROWS[-1], 4.967)], ids=lambda value: getattr(value, "name", "")
)
def test_lora_of_torchtune(row: Row, expected: float, shared_dir: Path) -> None:
    """The steady state is 0.36 GiB above the published figure, in 16 and in 4 bits alike. The recipe reads the peak of
    every step; the first, lower by the state of AdamW, would meet it, and is not what a table of whole runs shows."""
    gib, gpu = published(shared_dir, row)
    assert isinstance(row.run, Recipe)
    steady, first = (simulate(dataclasses.replace(row.run, steps=steps), gpu).peak_bytes / GIB for steps in (2, 1))
    assert steady == pytest.approx(expected, abs=0.01)
    assert first == pytest.approx(gib, abs=ROUNDING_GIB)


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_8_bit_adamw_of_torchtune(library: str, shared_dir: Path) -> None:
    """The published saving is 4.2 GiB, and the states alone are 5.88 GiB smaller: 4 bytes a parameter become 2 1/32.
    Which library it was is not published; torchtune's documents name both, and their states are of the same size."""
    gib, gpu = published(shared_dir, ROWS[-3])
    with_16_bits, _ = published(shared_dir, next(row for row in ROWS if row.run is OFFLOADED))
    simulated = [
        simulate(run, gpu).peak_bytes / GIB for run in (OFFLOADED, dataclasses.replace(OFFLOADED, eight_bit=library))
    ]
    assert simulated[0] - simulated[1] == pytest.approx(5.88, abs=0.01)
    assert with_16_bits - gib == pytest.approx(4.2)
    assert simulated[1] - gib == pytest.approx(-1.59, abs=0.01)


TORCHAO_TABLE = {"adamw-8bit": "bnb 8-bit", "torchao-adamw-8bit": "ao 8-bit", "torchao-adamw-4bit": "ao 4-bit"}


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", TORCHAO_TABLE)
def test_what_quantized_state_saves_of_llama_2_7b(optimizer: str, shared_dir: Path) -> None:
    """Of torchao's own table (full fine-tuning with torchtune, whose GB are GiB). Batch and length are not published:
    the rows are compared with the first of them, to 0.35 GiB."""
    pytest.importorskip("torchao" if optimizer.startswith("torchao") else "bitsandbytes")
    with (shared_dir / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        table = {
            line["method"]: float(line["value"])
            for line in csv.DictReader(file)
            if line["model"] == "Llama2-7B full FT" and line["source"].startswith("pytorch/ao")
        }
    common: dict[str, Any] = {"dtype": "bfloat16", "context_length": 512, "activation_checkpointing": True}
    peaks = [
        flow.profile(TargetSpec(model="llama-2-7b", gpu="a100-80gb", **common, **run))[1].peak.allocated_bytes / GIB
        for run in ({"optimizer": "adamw", "optimizer_impl": "fused"}, {"optimizer": optimizer})
    ]
    saved = table["PyTorch fused AdamW"] - table[TORCHAO_TABLE[optimizer]]
    assert peaks[0] - peaks[1] == pytest.approx(saved, abs=0.35)
