"""Qwen3's speed benchmark: tests/accuracy/inference_rows.py has the run, and why its decoding is what is compared."""

from __future__ import annotations

from memprof.units import MIB
from tests.accuracy import inference_rows
from tests.accuracy.published.prediction import FORMAT, UNSAID, Prediction, not_predicted
from tests.accuracy.published.rows import Row

_FORMATS = {
    "FP8": "float8 in blocks of 128 x 128, unpacked by transformers' Triton kernels",
    "GPTQ-Int8": "AutoGPTQ's",
    "AWQ-INT4": "AutoAWQ's",
}
_SCRIPT = (
    "the repository's script (examples/speed-benchmark, of 2024) prints GB of the whole call: another printed these MB"
)


def speed_benchmark(row: Row) -> Prediction:
    if row.weights != "BF16":
        return not_predicted(FORMAT.format(_FORMATS[row.weights]))
    published = inference_rows.Row(row.model.lower(), int(row.seq.split()[1]), row.figure)
    simulated = inference_rows.simulate(published)
    copy, prefill = simulated.key_copy / MIB, simulated.prefill / MIB
    return Prediction(
        simulated.decode,
        unit_bytes=MIB,  # the parameters' bytes alone decide this: "MB" here is 2**20
        explanation=f"{copy:,.0f} MiB: the copy of one layer's keys when the cache grows, for which the figures have "
        f"no room, as they have none for a prefill in one pass ({prefill:,.0f} MiB); {_SCRIPT}",
        differs=UNSAID,
        basis="decoding",
    )
