"""Published peaks of text generation (Qwen3's speed benchmark, Hugging Face transformers, H20) beside simulated ones.

    python -m tests.accuracy.inference_rows [MODEL...]

The published figures of one model differ from length to length by exactly the bytes of its KV cache: they are
parameters + KV cache of prompt and new tokens + the 32 MiB of Hopper's cuBLAS workspace + 1 to 5 MiB, whatever the
length. That leaves room neither for the prefill's activations, which grow with the prompt (2 GiB at 30,720 tokens of
the 4B model, whose three MLP tensors alone are 1.7 GiB in one layer), nor for the second copy of one layer's keys that
growing a cache by concatenation holds (64 MiB at 32,768 tokens). So they cannot be the maximum over a whole call of
`generate` that prefills in one pass; they are what is held while decoding. The phase that is compared is DECODE; the
whole call's peak is printed beside it.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from memprof.flows import profile as flow
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import GPU, EventKind, PhaseKind, Trace
from memprof.units import MIB

SHARED = Path(__file__).resolve().parents[3] / "shared"
SOURCE = "QwenLM/Qwen3 docs/source/getting_started/speed_benchmark.md"
NEW_TOKENS = 2048


@dataclass(frozen=True)
class Row:
    """One published row."""

    model: str
    prompt: int
    mib: float


@dataclass(frozen=True)
class Simulated:
    """The peaks of one simulated call of `generate`, in bytes."""

    parameters: int
    prefill: int
    decode: int
    key_copy: int
    """The largest tensor that concatenation makes while decoding: the keys of one layer."""


def published(shared: Path = SHARED) -> list[Row]:
    """The bfloat16 rows of Qwen3 0.6B, 4B and 8B at four prompt lengths.

    Raises:
        FileNotFoundError: there is no published_memory.csv.
    """
    with (shared / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    found = []
    for row in rows:
        if row[0] == SOURCE and "BF16" in row:
            prompt = next(cell for cell in row if cell and cell.startswith("prompt ")).split()[1]
            value = row[row.index("max_memory_allocated") + 1]
            found.append(Row(row[1].lower(), int(prompt), float(value)))
    return found


def simulate(row: Row) -> Simulated:
    """The same call on the virtual H20: flash attention, one sequence, 2,048 new tokens."""
    spec = TargetSpec(
        model=row.model,
        context_length=row.prompt,
        dtype="bfloat16",
        optimizer="none",
        mode=Mode.INFERENCE,
        new_tokens=NEW_TOKENS,
        sdpa_backend="flash",
        steps=1,
        gpu="h20-96gb",
    )
    trace, _ = flow.profile(spec)
    peaks = phase_peaks(trace)
    copies = [s.num_bytes for s in trace.storages if trace.op(s) == "aten.cat" and _decodes(trace, s.phase)]
    return Simulated(peaks[PhaseKind.MODEL], peaks[PhaseKind.FORWARD], peaks[PhaseKind.DECODE], max(copies, default=0))


def _decodes(trace: Trace, phase: int) -> bool:
    return phase >= 0 and trace.phases[phase].kind is PhaseKind.DECODE


def phase_peaks(trace: Trace) -> dict[PhaseKind, int]:
    """The most that the card holds in each kind of phase, requests rounded to 512 bytes."""
    live, kind = 0, PhaseKind.OTHER
    peaks: dict[PhaseKind, int] = {}
    for event, ref in trace.events:
        if event is EventKind.PHASE:
            kind = trace.phases[ref].kind
        elif event in (EventKind.ALLOC, EventKind.FREE) and trace.storages[ref].device == GPU:
            rounded = -(-trace.storages[ref].num_bytes // 512) * 512
            live += rounded if event is EventKind.ALLOC else -rounded
            peaks[kind] = max(peaks.get(kind, 0), live)
    return peaks


def line(row: Row, simulated: Simulated) -> str:
    """One line of the table in docs/accuracy.md."""
    decode = simulated.decode / MIB
    figures = f"{row.mib:>10,.0f}{decode:>12,.1f}{decode / row.mib - 1:>+8.2%}{simulated.key_copy / MIB:>11,.1f}"
    return f"{row.model:<12}{row.prompt:>8,}{figures}{simulated.prefill / MIB:>12,.1f}"


HEADING = f"{'model':<12}{'prompt':>8}{'published':>10}{'decode':>12}{'':>8}{'key copy':>11}{'prefill':>12}"


def main() -> None:
    """Print the table, of the models named or of all."""
    print(HEADING)
    for row in published():
        if not sys.argv[1:] or row.model in sys.argv[1:]:
            print(line(row, simulate(row)), flush=True)


if __name__ == "__main__":
    main()
