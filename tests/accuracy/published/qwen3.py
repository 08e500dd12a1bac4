"""Qwen3's speed benchmark: tests/accuracy/inference_rows.py has the run, and why its decoding is what is compared."""

from __future__ import annotations

from memprof.units import MIB
from tests.accuracy import inference_rows
from tests.accuracy.published.prediction import UNSAID, Prediction
from tests.accuracy.published.rows import Row

_SCRIPT = (
    "the repository's script (examples/speed-benchmark, of 2024) prints GB of the whole call: another printed these MB"
)


_MISSING = {
    "FP8": "a head of its own, whose bytes the figures have at every length where the model's is tied",
    "AWQ-INT4": "keys and values repeated for each query head, by transformers 4.51.3 where there is no flash "
    "attention, as in the environment of these rows (its own code, run here: tests/accuracy/inference_rows.py)",
}


def speed_benchmark(row: Row) -> Prediction:
    published = inference_rows.Row(row.model.lower(), int(row.seq.split()[1]), row.figure, row.weights)
    simulated = inference_rows.simulate(published)
    copy, prefill, missing = simulated.key_copy / MIB, simulated.prefill / MIB, published.missing / MIB
    left = (simulated.decode / MIB - copy + missing) / row.figure - 1
    lacks = f"{missing:,.0f} MiB that are not here: {_MISSING[row.weights]}; " if missing else ""
    rest = f"; {left:+.2%} with both" if missing else ""
    return Prediction(
        simulated.decode,
        unit_bytes=MIB,  # the parameters' bytes alone decide this: "MB" here is 2**20
        explanation=f"{lacks}{copy:,.0f} MiB: the copy of one layer's keys when the cache grows, for which the figures "
        f"have no room, as they have none for a prefill in one pass ({prefill:,.0f} MiB){rest}; {_SCRIPT}",
        differs=UNSAID,
        basis="decoding",
    )
