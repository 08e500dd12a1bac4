"""Peaks of whole training runs that others published, against the same runs on the virtual GPU.

Within 3% where the run is simulated as it was; where it was not (compiled layers), or where what was run is not known,
the difference is a stated figure, so that it does not change unseen. Of the rows of *reserved* memory, two are of runs
that are known. Rows with weights in 4 bits (QLoRA) or torchao's 8-bit AdamW are not simulated.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof import pipeline
from memprof.capture.virtual import VirtualGpu
from memprof.catalog import find_gpu
from memprof.ledger.ledger import Ledger, build_ledger
from memprof.pipeline import allocator_settings, live_allocator
from memprof.spec import TargetSpec
from tests.accuracy import adapter_bench, torchtune_recipe
from tests.accuracy.adapter_bench import Bench
from tests.accuracy.torchtune_recipe import LAYERS, Recipe

GIB = 2**30
BAR = 0.03


@dataclass(frozen=True)
class Row:
    """One published row and how it is simulated."""

    model: str
    method: str
    run: Recipe | Bench
    bar: float | None = BAR
    """None: not simulated as it was run; `why` says what is missing."""
    why: str = ""


def _causal_lm(key: str) -> torch.nn.Module:
    from memprof.workload.models import find_source

    return find_source(TargetSpec(model=key, dtype="bfloat16")).build()


def _tiny_gpt2() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=2, n_head=2)
    model: torch.nn.Module = transformers.GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16)
    return model


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
QWEN = Bench(lambda: _causal_lm("qwen2.5-0.5b"), 151_936, 1024, 16, ATTENTION)
TINY = Bench(_tiny_gpt2, 50_257, 128, 8, ("c_attn", "c_proj"))

PACKED = Recipe()
CHECKPOINTED = Recipe(chunked_loss=True, checkpointing=True)
FUSED = Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True)
OFFLOADED = Recipe(chunked_loss=True, checkpointing=True, optimizer_in_backward=True, offloading=True)
LORA = Recipe(chunked_loss=True, checkpointing=True, offloading=True, lora_rank=64)
COMPILED_LAYERS = "compiled layers keep fewer activations than the eager ones that are simulated"

ROWS = [
    Row("Qwen/Qwen2.5-0.5B-Instruct", "lora", QWEN),
    Row("sshleifer/tiny-gpt2", "lora", TINY),
    Row("Llama-3.2-3B", "baseline full FT", Recipe(length=256, packed=False)),
    Row("Llama-3.2-3B", "+ packed", PACKED),
    Row("Llama-3.2-3B", "+ compile", PACKED, None, COMPILED_LAYERS),
    Row("Llama-3.2-3B", "+ chunked CE", Recipe(chunked_loss=True), None, COMPILED_LAYERS),
    Row("Llama-3.2-3B", "+ activation checkpointing", CHECKPOINTED),
    Row("Llama-3.2-3B", "+ optimizer in backward", FUSED),
    Row("Llama-3.2-3B", "+ activation offloading", OFFLOADED),
    Row(
        "Llama-3.2-3B", "LoRA (no opt-in-bwd, AdamW)", LORA, None, "met by the first step, and not by the steady state"
    ),
]
_METRICS = ("peak_allocated_gb", "peak memory active")
"""Of one stream, active is allocated (docs/concepts.md). Both are GiB, whatever the first is called."""
_CARDS = {"RTX 4080 16GB": "rtx-4080", "A100": "a100-80gb"}


def published(folder: Path, row: Row) -> tuple[float, str]:
    """GiB and the card's key in the catalog."""
    with (folder / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        found = [
            (float(line["value"]), _CARDS[line["gpu"]])
            for line in csv.DictReader(file)
            if line["model"] == row.model and line["method"] == row.method and line["metric"] in _METRICS
        ]
    assert len(found) == 1, f"the table has {len(found)} rows of {row.model}, {row.method}"
    return found[0]


@contextmanager
def _no_collection() -> Iterator[None]:
    """When the collector runs depends on what else the process did."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def simulate(run: Recipe | Bench, card: str, snapshot: Callable[[str, int], None] = lambda name, now: None) -> Ledger:
    """The run on the virtual card; `snapshot` is told what is allocated at the benchmark's readings."""
    settings = allocator_settings("")
    with (
        _no_collection(),
        VirtualGpu(find_gpu(card), memory=lambda trace: live_allocator(trace, find_gpu(card), settings)) as gpu,
    ):
        if isinstance(run, Recipe):
            torchtune_recipe.train(run)
        else:
            pytest.importorskip("peft")
            adapter_bench.train(run, lambda name: snapshot(name, torch.cuda.memory_allocated()))
    return build_ledger(gpu.trace)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.bar is not None], ids=lambda row: f"{row.model} {row.method}"
)
def test_published_peak(row: Row, shared_dir: Path) -> None:
    gib, card = published(shared_dir, row)
    assert row.bar is not None
    assert simulate(row.run, card).peak_bytes / GIB == pytest.approx(gib, rel=row.bar)


# -- closer than the bar ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, 512])
def test_baseline_does_not_depend_on_the_length(length: int, shared_dir: Path) -> None:
    """Its batches are unpacked, and how long the texts were is not published. It decides nothing: the peak is the end
    of the backward, where the tied embedding's two gradients and their sum are alive beside all others."""
    gib, card = published(shared_dir, next(row for row in ROWS if row.method == "baseline full FT"))
    ledger = simulate(Recipe(length=length, packed=False), card)
    assert ledger.peak_stage.name == "backward"
    assert round(ledger.peak_bytes / GIB, 1) == gib


def test_packed_to_the_last_digit(shared_dir: Path) -> None:
    gib, card = published(shared_dir, next(row for row in ROWS if row.method == "+ packed"))
    assert round(simulate(PACKED, card).peak_bytes / GIB, 1) == gib


READINGS = {
    "after_load": 0.9279,
    "after_lora_attach": 0.9360,
    "after_first_forward": 1.8585,
    "after_first_backward": 1.2537,
    "after_first_optimizer_step": 1.2504,
}
"""GiB allocated, published with the peak: benchmarks/results/Qwen__Qwen2.5-0.5B-Instruct_lora_s1024_b1_r16_steps3.json
of github.com/DaoyuanLi2816/can-i-finetune-this."""


def test_readings_of_the_adapter_benchmark(shared_dir: Path) -> None:
    """Weights are moved first, and 8 MiB of what torch counts are rests of up to 1 MiB that their blocks keep."""
    found: dict[str, int] = {}
    ledger = simulate(QWEN, "rtx-4080", lambda name, now: found.__setitem__(name, now))
    for name, gib in READINGS.items():
        assert found[name] / GIB == pytest.approx(gib, abs=1e-3), name
    gib, _ = published(shared_dir, ROWS[0])
    assert ledger.peak_bytes / GIB == pytest.approx(gib, abs=3e-3)


@pytest.mark.parametrize(
    ("bench", "model", "difference"),
    [(TINY, "sshleifer/tiny-gpt2", 0.0), (QWEN, "Qwen/Qwen2.5-0.5B-Instruct", -0.1133)],
    ids=["tiny-gpt2", "Qwen2.5-0.5B"],
)
def test_peak_reserved(bench: Bench, model: str, difference: float, shared_dir: Path) -> None:
    """To the last digit for the small one; the other is 3% below. Allocated memory is met in both, so that it is where
    blocks lie that differs: the order of requests under transformers and torch of then (2.6)."""
    with (shared_dir / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["model"], row["method"], row["metric"]) == (model, "lora", "peak_reserved_gb")
        )
    reserved = simulate(bench, "rtx-4080").peak_reserved_bytes / GIB
    assert reserved - float(row["value"]) == pytest.approx(difference, abs=5e-5 if bench is TINY else 5e-3)


def test_the_command_line_runs_the_adapter_benchmark(shared_dir: Path) -> None:
    """The same by `memprof profile --adapter lora`, with torch's AdamW."""
    gib, card = published(shared_dir, ROWS[0])
    settings: dict[str, Any] = {"adapter": "lora", "lora_rank": 16, "lora_targets": ",".join(ATTENTION)}
    spec = TargetSpec(model="qwen2.5-0.5b", context_length=1024, activation_checkpointing=True, gpu=card, **settings)
    document = pipeline.profile(spec)[1]
    assert document.target["num_trainable_parameters"] == 2_162_688
    assert document.peak.allocated_bytes / GIB == pytest.approx(gib, rel=0.01)


# -- what is not met, in figures ---------------------------------------------------------------------------------------

ROUNDING_GIB = 0.05
"""Of the published figures."""


def test_compiled_layers(shared_dir: Path) -> None:
    """With and without the chunked loss, the same is missed: 327 MiB per layer that compiled layers do not keep."""
    missing = []
    for row in ROWS:
        if row.why == COMPILED_LAYERS:
            gib, card = published(shared_dir, row)
            missing.append((simulate(row.run, card).peak_bytes / GIB - gib) / LAYERS)
    assert len(missing) == 2
    assert missing[0] == pytest.approx(missing[1], abs=2 * ROUNDING_GIB / LAYERS)
    assert [gib * 1024 for gib in missing] == pytest.approx([327, 328], abs=2)


def test_lora_of_torchtune(shared_dir: Path) -> None:
    """The steady state is 4% above the published figure, and without the optimizer's state, as in the first step, the
    published one is met. Which of the two was read is not published."""
    gib, card = published(shared_dir, ROWS[-1])
    steady, first = (simulate(dataclasses.replace(LORA, steps=steps), card).peak_bytes / GIB for steps in (2, 1))
    assert steady == pytest.approx(8.861, abs=0.01)
    assert first == pytest.approx(gib, abs=ROUNDING_GIB)
