"""The rows of can-i-finetune-this: tests/accuracy/adapter_bench.py has the run."""

from __future__ import annotations

import dataclasses

from memprof.virtual import VirtualGpu
from tests.accuracy import adapter_bench
from tests.accuracy.published.prediction import CARDS, Prediction, missing, not_predicted, run
from tests.accuracy.published.rows import Row

_BENCHES = {
    ("sshleifer/tiny-gpt2", "lora"): adapter_bench.TINY,
    ("Qwen/Qwen2.5-0.5B-Instruct", "lora"): adapter_bench.QWEN,
    ("Qwen/Qwen2.5-0.5B-Instruct", "qlora"): adapter_bench.QLORA,
    ("Qwen/Qwen2.5-1.5B-Instruct", "qlora"): adapter_bench.QLORA_1B,
}
_BLOCKS = (
    "what is allocated is met: blocks lie otherwise in their segments under the transformers and torch (2.6) of then, "
    "whose order of requests differs"
)


def benchmark(row: Row) -> Prediction:
    lacking = missing("peft", "bitsandbytes")
    if lacking:
        return not_predicted(lacking)
    bench = dataclasses.replace(
        _BENCHES[row.model, row.method], length=int(row.seq), checkpointing=row.ckpt == "on", batch_size=int(row.batch)
    )

    def program(gpu: VirtualGpu) -> None:
        adapter_bench.train(bench, lambda name: None)

    done = run(program, CARDS[row.gpu])
    if row.metric == "peak_reserved_gb":
        return Prediction(done.reserved, explanation=_BLOCKS)
    return Prediction(done.allocated)
