"""Published peaks of text generation (Qwen3's speed benchmark, Hugging Face transformers, H20) beside simulated ones.

    python -m tests.accuracy.inference_rows [MODEL...]

Weights are bfloat16 or as checkpoints store them: float8 in blocks and GPTQ's eight bits under transformers 4.51.3 with
flash attention, AWQ's four bits in an environment of their own, with AutoAWQ 0.2.9 and without flash attention
(docs/source/getting_started/speed_benchmark.md, Environments).

The published figures of one model differ from length to length by exactly the bytes of its KV cache: they are
parameters + KV cache of prompt and new tokens + the 32 MiB of Hopper's cuBLAS workspace + 1 to 5 MiB, whatever the
length. That leaves room neither for the prefill's activations, which grow with the prompt (2 GiB at 30,720 tokens of
the 4B model, whose three MLP tensors alone are 1.7 GiB in one layer), nor for the second copy of one layer's keys that
growing a cache by concatenation holds (64 MiB at 32,768 tokens). So they cannot be the maximum over a whole call of
`generate` that prefills in one pass; they are what is held while decoding. The phase that is compared is DECODE; the
whole call's peak is printed beside it.

Two things are in the figures and not in this run; both are `missing`:

* Float8, models whose head is tied: as many bytes more as a head of its own has, at every length. transformers 4.51.3
  ties a head whose file has it too, as its own code on the virtual GPU shows, if the configuration says so; that of the
  checkpoints is not at hand.
* AWQ: without flash attention transformers 4.51.3 repeats keys and values for each query head before scaled dot product
  attention (integrations/sdpa_attention.py), which 5.23 leaves to the kernel. Its own code on the virtual GPU, for
  Qwen3-8B: 6,170.2, 7,130.1 and 10,970.3 MiB for 1, 6,144 and 30,720 tokens (published 6,177, 7,113 and 11,001).
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
from memprof.workload.catalog import find_model

SHARED = Path(__file__).resolve().parents[3] / "shared"
SOURCE = "QwenLM/Qwen3 docs/source/getting_started/speed_benchmark.md"
NEW_TOKENS = 2048
FORMATS = {"BF16": None, "FP8": "fp8", "GPTQ-Int8": "gptq-int8", "AWQ-INT4": "awq-int4"}  # The source's names -> ours.


@dataclass(frozen=True)
class Row:
    model: str
    prompt: int
    mib: float
    weights: str = "BF16"

    @property
    def missing(self) -> int:
        """Bytes that the source's run had and ours has not: see above."""
        config = find_model(self.model).load_config()
        if self.weights == "FP8" and config.get("tie_word_embeddings"):
            return int(config["vocab_size"] * config["hidden_size"] * 2)
        if self.weights == "AWQ-INT4":
            repeated = config["num_attention_heads"] * config["head_dim"] * (self.prompt + NEW_TOKENS)
            return int(2 * repeated * 2)
        return 0


@dataclass(frozen=True)
class Simulated:
    """The peaks of one simulated call of `generate`, in bytes."""

    parameters: int
    prefill: int
    decode: int
    key_copy: int  # The largest tensor that concatenation makes while decoding: the keys of one layer.


def published(shared: Path = SHARED) -> list[Row]:
    """The rows of Qwen3 0.6B, 4B and 8B at four prompt lengths."""
    with (shared / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        return [
            Row(row["model"].lower(), int(row["seq"].split()[1]), float(row["value"]), row["weights"])
            for row in csv.DictReader(file)
            if row["source"] == SOURCE
        ]


def simulate(row: Row) -> Simulated:
    """The same call on the virtual H20: flash attention, one sequence, 2,048 new tokens."""
    spec = TargetSpec(
        model=row.model,
        context_length=row.prompt,
        dtype="float16" if row.weights == "AWQ-INT4" else "bfloat16",
        quantize=FORMATS[row.weights],
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
    """The most that the GPU holds in each kind of phase, requests rounded to 512 bytes."""
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
    """One line of the table in docs/accuracy-tables.md."""
    decode, copy, missing = simulated.decode / MIB, simulated.key_copy / MIB, row.missing / MIB
    figures = f"{row.mib:>10,.0f}{decode:>12,.1f}{decode / row.mib - 1:>+8.2%}{copy:>10,.1f}{missing:>9,.1f}"
    left = (decode - copy + missing) / row.mib - 1
    return f"{row.model:<11}{row.weights:<10}{row.prompt:>7,}{figures}{left:>+8.2%}{simulated.prefill / MIB:>10,.1f}"


HEADING = (
    f"{'model':<11}{'weights':<10}{'prompt':>7}{'published':>10}{'decode':>12}{'':>8}{'key copy':>10}{'missing':>9}"
    f"{'left':>8}{'prefill':>10}"
)


def main() -> None:
    """Print the table, of the models named or of all."""
    print(HEADING)
    for row in published():
        if not sys.argv[1:] or row.model in sys.argv[1:]:
            print(line(row, simulate(row)), flush=True)


if __name__ == "__main__":
    main()
