"""What findings cost, in seconds of a processor: all rules with their what-ifs, and the record of last uses.

    python -m tests.benchmarks.findings [--repeat 5]

* All rules on the trace of a 4B model's training steps, of a run that fits and of one that does not; exit code 1 if
  they take more than half a second.
* The same steps with and without the record of each storage's last use, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable

import torch

from memprof.device.catalog import find_gpu
from memprof.findings import rules
from memprof.findings.finding import Context, Finding
from memprof.flows.capture import capture_virtual
from memprof.flows.profile import profile
from memprof.spec import TargetSpec
from memprof.watch.storage_table import StorageTable
from memprof.workload.models import find_source
from memprof.workload.step import Workload

MODEL, GPU = "qwen3-4b", "h100-80gb"
MOST_SECONDS = 0.5
LENGTHS = (4096, 131072)


def measure_rules(repeat: int) -> bool:
    """Print the medians; return whether each is below MOST_SECONDS."""
    seconds: list[float] = []
    apply_rules = rules.apply_rules

    def measure(context: Context, *, for_search: bool = False) -> list[Finding]:
        begin = time.process_time()
        found = apply_rules(context, for_search=for_search)
        seconds.append(time.process_time() - begin)
        return found

    enough = True
    for length in LENGTHS:
        spec = TargetSpec(model=MODEL, context_length=length, gpu=GPU)
        seconds.clear()
        rules.apply_rules = measure
        try:
            for _ in range(repeat):
                profile(spec)
        finally:
            rules.apply_rules = apply_rules
        median = statistics.median(seconds)
        print(f"findings of {MODEL}, {length:,} tokens: {median:.2f} s (at most {MOST_SECONDS})")
        enough = enough and median <= MOST_SECONDS
    return enough


def measure_last_uses(repeat: int) -> None:
    spec = TargetSpec(model=MODEL, context_length=LENGTHS[0], steps=2)
    workload = Workload(spec, find_source(spec))
    record = StorageTable.record_uses
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def record_nothing(table: StorageTable, tensors: Iterable[torch.Tensor]) -> None:
        """Record no use."""

    for _ in range(repeat):
        for is_on, own in seconds.items():
            setattr(StorageTable, "record_uses", record if is_on else record_nothing)  # noqa: B010
            begin = time.process_time()
            capture_virtual(workload, find_gpu(GPU))
            own.append(time.process_time() - begin)
    setattr(StorageTable, "record_uses", record)  # noqa: B010
    with_uses, without = (statistics.median(seconds[is_on]) for is_on in (True, False))
    texts = f"{with_uses:.2f} s with last uses, {without:.2f} s without"
    print(f"two steps of {MODEL}: {texts}: {with_uses / without - 1:+.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    is_fast = measure_rules(repeat)
    measure_last_uses(repeat)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
