"""Compare what the operators of torch's own database request on the GPU with what they request on the virtual one.

python -m tests.gpu.opinfo --device cuda --gpu h100-80gb --seconds 60 --out FILE.jsonl

Each operator gets a few samples (tests/accuracy/operator_sweep.py), forward and backward. Operators for which there is
no time are counted as not tried. On the CPU, where there is no history, nothing is compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from tests.accuracy import operator_sweep as sweep
from tests.gpu.attempt import attempt
from tests.gpu.history import AllocatorHistory


class Sample(NamedTuple):
    """A sample that ran on the device."""

    number: int
    inputs: Any
    # Bytes of each request; None where no history is kept.
    requested: list[int] | None


def on_device(operator: Any, device: str) -> Iterator[Sample | str]:
    """Run the samples of an operator, and yield them, or the error of each that the device refuses."""
    for number, inputs in enumerate(sweep.samples_of(operator)):
        moved = sweep.on(device, inputs)
        gc.collect()
        with AllocatorHistory(device) as history:
            failed = attempt(lambda moved=moved: sweep.call(operator, moved))  # type: ignore[misc]
        if failed is not None:
            yield failed["error"]
        else:
            yield Sample(number, inputs, history.bytes_of("alloc") if device == "cuda" else None)


def compare(operator: Any, device: str, gpu: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield how each sample of an operator compares, and the bytes that one side alone requested."""
    found = list(on_device(operator, device))
    yield from (("refused by the device", {"error": one}) for one in found if isinstance(one, str))
    samples = [one for one in found if isinstance(one, Sample)]
    with VirtualGpu(find_gpu(gpu), workspaces=True) as virtual:
        made = [sweep.try_on_virtual_gpu(operator, sample.inputs, virtual) for sample in samples]
    for sample, (allocated, hidden, failure) in zip(samples, made, strict=True):
        where = {"sample": sample.number}
        if failure:
            yield "fails on the virtual GPU", {**where, "error": failure}
        elif sample.requested is None:
            yield "not recorded", where
        else:
            real = Counter(sample.requested)
            simulated = Counter(one.num_bytes for one in allocated) + Counter(hidden)
            alone = {
                "real": sorted((real - simulated).elements())[:40],
                "virtual": sorted((simulated - real).elements())[:40],
            }
            yield "equal" if real == simulated else "different", {**where, **alone}


def main() -> None:
    """Compare as many operators as there is time for, and write what is not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", default="h100-80gb", help="the virtual one")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these operators alone")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    warnings.filterwarnings("ignore")
    counts: Counter[str] = Counter()
    operators = sweep.operators(set(asked.only) if asked.only else None)
    gc.collect()
    gc.freeze()
    with asked.out.open("w", encoding="utf-8") as file:
        for operator in operators:
            if time.monotonic() > until:
                counts["operators not tried"] += 1
                continue
            name = f"{operator.name} {operator.variant_test_name}".strip()
            rows = attempt(lambda operator=operator: list(compare(operator, asked.device, asked.gpu)))  # type: ignore[misc]
            if isinstance(rows, dict):
                rows = [("fails", rows)]
            for outcome, row in rows:
                counts[outcome] += 1
                if outcome not in ("equal", "not recorded"):
                    file.write(json.dumps({"operator": name, "outcome": outcome, **row}) + "\n")
                    file.flush()
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()), f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
