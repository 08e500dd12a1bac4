"""The closed form's first line against runs of models, methods and shapes drawn from a grid.

    python -m tests.benchmarks.first_line_grid [--per-method 7] [--seed 1] [--seconds 1200]

Each configuration is run once on a virtual GPU without limit. Its verdict is contradicted if a GPU as large as the
upper end of the estimate's band is too small, or one that is smaller than its lower end is large enough; where only
the release of cached memory decides, the run is repeated on that GPU. Exit code 1: a verdict is contradicted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from memprof.errors import MemprofError
from memprof.flows.first_estimate import estimate_spec
from memprof.flows.profile import profile
from memprof.spec import TargetSpec
from memprof.units import gib
from tests.benchmarks.first_line import make_spec, measure

CHECKPOINTING, CHUNKED = {"activation_checkpointing": True}, {"fixes": ("chunked-loss",)}
HALF, FLOAT, AMP = {"dtype": "bfloat16"}, {"dtype": "float32"}, {"amp": "bfloat16"}
LORA, EIGHT_BIT = {"adapter": "lora"}, {"optimizer": "adamw-8bit"}
INT8, QLORA = {**LORA, "quantize": "int8", **AMP}, {**LORA, "quantize": "nf4", **AMP}
INFERENCE = {"mode": "inference", "new_tokens": 32}
METHODS: dict[str, Mapping[str, Any]] = {
    "full": HALF, "full, checkpointing": HALF | CHECKPOINTING, "full, chunked": HALF | CHUNKED,
    "full, both": HALF | CHECKPOINTING | CHUNKED, "full, SGD": HALF | {"optimizer": "sgd"},
    "full, fused": HALF | {"optimizer_impl": "fused"}, "full, accumulation": HALF | {"gradient_accumulation": 4},
    "float32": FLOAT, "float32, checkpointing": FLOAT | CHECKPOINTING, "float32, chunked": FLOAT | CHUNKED,
    "mixed": AMP, "mixed, checkpointing": AMP | CHECKPOINTING, "mixed, both": AMP | CHECKPOINTING | CHUNKED,
    "mixed, chunked": AMP | CHUNKED, "float16 mixed": {"amp": "float16"},
    "8-bit AdamW": HALF | EIGHT_BIT, "8-bit AdamW, both": HALF | EIGHT_BIT | CHECKPOINTING | CHUNKED,
    "LoRA": HALF | LORA, "LoRA, checkpointing": HALF | LORA | CHECKPOINTING, "LoRA, chunked": HALF | LORA | CHUNKED,
    "LoRA, float32": FLOAT | LORA, "LoRA on int8": INT8, "LoRA on int8, checkpointing": INT8 | CHECKPOINTING,
    "QLoRA": QLORA, "QLoRA, checkpointing": QLORA | CHECKPOINTING, "QLoRA, rank 64": QLORA | {"lora_rank": 64},
    "inference": INFERENCE | HALF, "inference, float32": INFERENCE | FLOAT,
    "inference, nf4": INFERENCE | HALF | {"quantize": "nf4"},
    "inference, int8": INFERENCE | HALF | {"quantize": "int8"},
}  # fmt: skip
MODELS = (
    "gpt2", "gpt2-medium", "gpt2-xl", "pythia-70m", "pythia-410m", "pythia-1.4b", "pythia-2.8b", "llama-3.2-1b",
    "llama-3.2-3b", "llama-3.1-8b", "tinyllama-1.1b", "smollm2-135m", "smollm2-1.7b", "mistral-7b-v0.3",
    "qwen2.5-0.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-4b", "gemma-2-2b", "gemma-3-1b", "phi-2", "opt-1.3b",
)  # fmt: skip
SHAPES = (  # batch size, context length
    (1, 128), (1, 512), (1, 1000), (2, 512), (2, 900), (4, 256), (4, 1000), (8, 128), (8, 512), (16, 128), (32, 64),
    (64, 128), (3, 700), (1, 16),
)  # fmt: skip


def draw(per_method: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `per_method` configurations of each method: fields of a TargetSpec."""
    chosen = random.Random(seed)
    for name, fields in METHODS.items():
        for model in chosen.sample(MODELS, min(per_method, len(MODELS))):
            batch_size, length = chosen.choice(SHAPES)
            yield name, {**fields, "model": model, "batch_size": batch_size, "context_length": length}


def fits(fields: Mapping[str, Any], capacity_bytes: int) -> bool:
    """Return whether the configuration fits a GPU of this capacity, by a run on it."""
    _, document = profile(TargetSpec(**fields, gpu_vram_bytes=capacity_bytes), with_details=False)
    return bool(document.verdict.fits)


def find_contradiction(fields: Mapping[str, Any], low: int, high: int, allocated: int, required: int) -> str:
    """Return the verdict that the run contradicts on some GPU; empty if there is none."""
    if high < required and (high < allocated or not fits(fields, high)):
        return "fits"
    return "does not fit" if low > allocated and (low > required or fits(fields, low - 1)) else ""


def main() -> int:
    """Print a line for each configuration, and the sums; 1 if a verdict is contradicted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--per-method", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1200, help="of a processor, after which no more is run")
    options = parser.parse_args()
    runs = silent = failed = wrong = 0
    for name, fields in draw(options.per_method, options.seed):
        if time.process_time() > options.seconds:
            break
        try:
            estimate = estimate_spec(make_spec(fields, None, ""))
            run = None if estimate is None else measure(fields, None)
        except MemprofError as error:  # a library that is not installed, a method that the model does not take
            failed += 1
            print(f"{name:28} {fields['model']:16} {error.problem}")
            continue
        if estimate is None or run is None:
            silent += 1
            continue
        runs += 1
        low, high = estimate.low_bytes, estimate.high_bytes
        found = find_contradiction(fields, low, high, run.allocated_bytes, run.required_bytes)
        wrong += bool(found)
        shape = f"{fields['batch_size']} x {fields['context_length']}"
        sizes = " ".join(f"{gib(size):>8}" for size in (low, run.allocated_bytes, run.required_bytes, high))
        print(f"{name:28} {fields['model']:16} {shape:10} {sizes} {found}", flush=True)
    print(f"{runs} runs, {wrong} contradicted; {silent} without a first line, {failed} could not be run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
