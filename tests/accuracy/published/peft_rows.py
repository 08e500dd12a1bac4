"""PEFT's method comparison on MetaMathQA (method_comparison/MetaMathQA/run.py at 5d602fdb).

What is read after a step is what outlives it: parameters, gradients (they are dropped at the start of the next step),
AdamW's state, the batch, and the outputs with their logits, four rows as long as the longest of the batch. Lengths are
those of MetaMathQA in buckets; their mean is not published, so the logits are not in the prediction, and the rest is.
Adapters are in float32 (`autocast_adapter_dtype`), rank 32 on queries and values.
"""

from __future__ import annotations

import torch

from memprof.spec import TargetSpec
from memprof.virtual import VirtualGpu
from tests.accuracy.published.prediction import CARDS, Prediction, not_predicted, run
from tests.accuracy.published.rows import Row

VOCABULARY, BATCH = 128_256, 4
_LENGTHS = (
    "reserved over a run whose batches are padded to their longest text, with an evaluation of 50 rows that generates "
    "up to 300 tokens: the lengths are not published"
)


def meta_math_qa(row: Row) -> Prediction:
    if "memory_allocated" not in row.metric:
        return not_predicted(_LENGTHS)
    adapter = row.method == "lora"
    done = run(lambda gpu: _steps(adapter, gpu), CARDS[row.gpu])
    static = done.replay.allocated[done.start]
    logits = row.figure * 2**30 - static
    length = logits / (BATCH * VOCABULARY * 2)
    return Prediction(
        static,
        explanation=f"{logits / 2**20:,.0f} MiB: the last batch's logits, which the loop keeps; they are those of "
        f"{length:,.0f} tokens a row, and the mean length is not published",
    )


def _steps(adapter: bool, gpu: VirtualGpu) -> int:
    """Two steps of 16 tokens; returns the event before the first tensor that the second step's end frees."""
    from memprof.workload import adapters
    from memprof.workload.models import find_source

    extra = {"adapter": "lora", "lora_rank": 32} if adapter else {}
    spec = TargetSpec(model="llama-3.2-3b", dtype="bfloat16", context_length=16, **extra)  # type: ignore[arg-type]
    source = find_source(spec)
    model = source.build()
    model = (adapters.add_lora(model, spec, source) if adapter else model).to("cuda")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.zeros(1, 16, dtype=torch.int64).to("cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    del tokens
    return len(gpu.trace.events) - 1
