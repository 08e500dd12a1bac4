"""Qwen3's speed benchmark: tests/accuracy/inference_rows.py has the run, and why its decoding is what is compared."""

from __future__ import annotations

from memprof.units import MIB
from tests.accuracy import inference_rows
from tests.accuracy.published.prediction import UNSAID, Prediction
from tests.accuracy.published.rows import Row

_SCRIPT = (
    "the repository's script (examples/speed-benchmark, of 2024) prints GB of the whole call, so another one printed "
    "these MB"
)


_MISSING = {
    "FP8": "the bytes of a separate head, which the figures include at every length although the model ties its head",
    "AWQ-INT4": "keys and values that transformers 4.51.3 repeats for each query head without flash attention, as in "
    "the environment of these rows (its own code, simulated: tests/accuracy/inference_rows.py)",
}


def speed_benchmark(row: Row) -> Prediction:
    published = inference_rows.Row(row.model.lower(), int(row.seq.split()[1]), row.figure, row.weights)
    simulated = inference_rows.simulate(published)
    copy, prefill, missing = simulated.key_copy / MIB, simulated.prefill / MIB, published.missing / MIB
    left = (simulated.decode / MIB - copy + missing) / row.figure - 1
    lacks = f"{missing:,.0f} MiB are not simulated: {_MISSING[row.weights]}; " if missing else ""
    rest = f"; {left:+.2%} with both" if missing else ""
    return Prediction(
        simulated.decode,
        unit_bytes=MIB,  # the parameters' bytes alone decide this: "MB" here is 2**20
        explanation=f"{lacks}{copy:,.0f} MiB are the copy of one layer's keys when the cache grows, which the figures "
        f"do not include; nor do they include a prefill in one pass ({prefill:,.0f} MiB){rest}; {_SCRIPT}",
        differs=UNSAID,
        basis="decoding",
    )
