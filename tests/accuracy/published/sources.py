"""The sources of published figures and who predicts their rows: read this first.

A row goes to the first source whose `marker` is in its column `source`; one that none knows goes to `generic.any_row`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.accuracy.published import (
    adapters,
    anatomy,
    generic,
    operators,
    peft_rows,
    qwen1,
    qwen3,
    threads,
    torchao,
    torchtune,
)
from tests.accuracy.published.libraries import Checkout
from tests.accuracy.published.prediction import Outcome, Prediction
from tests.accuracy.published.rows import Row


@dataclass(frozen=True)
class Source:
    """Where figures were published, and how their rows are predicted."""

    name: str
    marker: str
    predict: Callable[[Row], Prediction]
    isolated: bool = False  # Imports other projects' packages: in processes of its own.
    code: Checkout | None = None  # The source's own code, which is run.


SOURCES = (
    Source("Liger-Kernel benchmark", "linkedin/Liger-Kernel", operators.liger, isolated=True),
    Source("Cut Cross-Entropy benchmark", "apple/ml-cross-entropy", operators.cut_cross_entropy, isolated=True),
    Source("torchtune README", "torchtune README", torchtune.readme, code=torchtune.torchtune_own.SOURCE),
    Source("torchtune LoRA tutorial", "torchtune docs", torchtune.tutorial),
    Source("can-i-finetune-this", "can-i-finetune-this", adapters.benchmark, code=adapters.SOURCE),
    Source("torchao optimizers", "pytorch/ao", torchao.readme),
    Source("PEFT MetaMathQA", "huggingface/peft", peft_rows.meta_math_qa, code=peft_rows.SOURCE),
    Source("transformers memory anatomy", "model_memory_anatomy", anatomy.page),
    Source("Qwen3 speed benchmark", "QwenLM/Qwen3", qwen3.speed_benchmark),
    Source("Qwen README", "QwenLM/Qwen README", qwen1.finetuning),
    Source("torchtitan", "pytorch/torchtitan", threads.listed),
    Source("GitHub threads", "github ", threads.listed),
)
OTHER = Source("other", "", generic.any_row)


def source_of(row: Row) -> Source:
    return next((source for source in SOURCES if source.marker in row.source), OTHER)


def outcome(row: Row) -> Outcome:
    """Predict one row; what its run raises is its reason, so that one row cannot end a sweep."""
    source, began = source_of(row), time.perf_counter()
    try:
        prediction = source.predict(row)
    except Exception as error:
        prediction = Prediction(reason=f"the run failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Outcome(row, prediction, time.perf_counter() - began, source.name)


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    return [outcome(row) for row in rows]
