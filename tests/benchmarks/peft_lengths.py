"""What PEFT's method comparison reserves over 5,000 batches of different lengths, against what it published.

    python -m tests.benchmarks.peft_lengths CHECKOUT [METHOD ...] [--sigma 0.315]

CHECKOUT is one of huggingface/peft; a METHOD is a file of its method_comparison/MetaMathQA/results, without `.json`.

run.py there reads `memory_reserved()` at the end of each step, less the 2 MiB that it found at its start; it calls
`empty_cache()` after every tenth, and its batches are made of 80 samples at a time, longest first. So ten steps reserve
what their longest batch needs, and the windows of ten are independent. Its model, methods and loop are run here as they
are there. Lengths were not published, but their sum was: 4,198,051 tokens with one more for each of 20,000 samples,
which is a mean of 209. The sigma was chosen so that the p99 of `lora--llama-3.2-3B-rank32` is met, for no other.

A step is simulated at the lengths of SIMULATED. In between, requests are polynomials of the length and of what it lacks
to a multiple of 16, of 32 and of 64 (as memory-efficient attention pads); how far that is off at the lengths themselves
is the last column.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from memprof.allocator import Block, CachingAllocator
from memprof.device.catalog import find_gpu
from memprof.spec import TargetSpec
from memprof.trace.events import GPU, EventKind
from memprof.virtual import VirtualGpu
from memprof.watch.collection import disable_garbage_collection
from memprof.workload.lengths import parse_lengths
from memprof.workload.models import find_source

MEAN, BUCKET, BATCH, LONGEST, STEPS, WINDOW = 209, 20, 4, 768, 5000, 10
AT_START_BYTES = 2 << 20
SIMULATED = (
    64, 64, 96, 112, 128, 144, 160, 176, 208, 240, 256, 272, 288, 336, 352, 400, 432, 512, 560, 640, 704, 752,
    70, 75, 90, 100, 110, 123, 141, 150, 175, 190, 211, 230, 250, 270, 300, 333, 370, 405, 444, 517, 600, 701, 763,
)  # fmt: skip
# The windows with the longest batches are all replayed, for the p99; of the others one in so many, for the mean.
TOP, EVERY = 12, 12


class Request(NamedTuple):
    """A step asks for memory (`freed` -1), releases what it requested as number `freed`, or (`before`) what the step
    before it left as number `freed`."""

    freed: int
    before: bool


class Step(NamedTuple):
    """What a step of one length does; `sizes` are bytes, one for each request for memory."""

    length: int
    requests: tuple[Request, ...]
    sizes: list[int]


class Method:
    """One method's run, with what was published of it."""

    def __init__(
        self, published: dict[str, Any], model: str = "llama-3.2-3b", lengths: Sequence[int] = SIMULATED
    ) -> None:
        self.published, self.lengths = published, lengths
        with disable_garbage_collection(), VirtualGpu(find_gpu("l40s")) as gpu:
            self.begins = _loop(published["run_info"], model, lengths, gpu)
        self.trace = gpu.trace
        steps = list(self.steps())
        self.left = steps[1][1]
        self.kinds: dict[tuple[bool, tuple[Request, ...]], list[Step]] = {}
        for step, _ in steps[2:]:  # the first two have no optimizer state, or come after one that had none
            self.kinds.setdefault((step.length % 16 == 0, step.requests), []).append(step)
        self.fits = {key: _fit(members) for key, members in self.kinds.items()}
        fitted = [
            (step, _sizes(self.fits[key], step.length))
            for key, members in self.kinds.items()
            if self.fits[key] is not None
            for step in members
        ]
        off = (abs(size - said) for step, sizes in fitted for size, said in zip(step.sizes, sizes, strict=True))
        self.misfit = max(off, default=0)
        self._made = {step.length: step for step, _ in steps[2:]}

    def steps(self) -> Iterator[tuple[Step, list[int]]]:
        """Each simulated step by itself, and the storages that outlive it."""
        before: list[int] = []
        for length, (begin, end) in zip(self.lengths, itertools.pairwise(self.begins), strict=True):
            numbers: dict[int, int] = {}
            requests, sizes = [], []
            for kind, ref in self.trace.events[begin:end]:
                if kind not in (EventKind.ALLOC, EventKind.FREE) or not self._counts(ref):
                    continue
                if kind is EventKind.ALLOC:
                    numbers[ref] = len(numbers)
                    sizes.append(self.trace.storages[ref].num_bytes)
                    requests.append(Request(-1, False))
                elif ref in numbers:
                    requests.append(Request(numbers[ref], False))
                elif ref in before:
                    requests.append(Request(before.index(ref), True))
            freed = {request.freed for request in requests if not request.before}
            before = [ref for ref, number in numbers.items() if number not in freed]
            yield Step(length, tuple(requests), sizes), before

    def _counts(self, ref: int) -> bool:
        storage = self.trace.storages[ref]
        return storage.device == GPU and storage.num_bytes > 0

    def step(self, length: int) -> Step:
        """The step of any length: if it was not simulated, as the nearest that is as much a multiple of 16 does it."""
        if length not in self._made:
            alike = [key for key in self.kinds if key[0] == (length % 16 == 0) and self.fits[key] is not None]
            key = min(alike, key=lambda key: min(abs(step.length - length) for step in self.kinds[key]))
            self._made[length] = Step(length, key[1], _sizes(self.fits[key], length))
        return self._made[length]

    def reserved(self, lengths: Sequence[int]) -> list[int]:
        """Bytes reserved at the end of each step of a run with these lengths."""
        allocator = CachingAllocator()
        live: dict[int, Block] = {}
        for kind, ref in self.trace.events[: self.begins[2]]:
            if kind is EventKind.ALLOC and self._counts(ref):
                live[ref] = allocator.malloc(self.trace.storages[ref].num_bytes)
            elif kind is EventKind.FREE and ref in live:
                allocator.free(live.pop(ref))
        before: list[Block | None] = [live[ref] for ref in self.left]
        allocator.empty_cache()
        found = []
        for number, length in enumerate(lengths, 1):
            step = self.step(length)
            sizes, blocks = iter(step.sizes), list[Block | None]()
            for freed, of_before in step.requests:
                if freed < 0:
                    blocks.append(allocator.malloc(next(sizes)))
                    continue
                owner = before if of_before else blocks
                block = owner[freed]
                assert block is not None
                allocator.free(block)
                owner[freed] = None
            before = [block for block in blocks if block is not None]
            found.append(allocator.statistics.all.reserved_bytes)
            if number % WINDOW == 0:
                allocator.empty_cache()
        return found


def _loop(run: dict[str, Any], name: str, lengths: Sequence[int], gpu: VirtualGpu) -> list[int]:
    """train() of run.py at these lengths; the first event of each step, and the first after the last."""
    import peft
    from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer

    settings, adapter = run["train_config"], run["peft_config"]
    model: Any = find_source(TargetSpec(model=name, dtype="bfloat16")).build().to("cuda")
    if adapter:
        adapts = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adapter["peft_type"])]
        known = {field.name for field in dataclasses.fields(adapts)} - {"peft_type", "auto_mapping", "peft_version"}
        config = adapts(**{name: value for name, value in adapter.items() if name in known})
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=settings["autocast_adapter_dtype"])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    made = {"lora-fa": create_lorafa_optimizer, "lora+": create_loraplus_optimizer}
    kind, options = settings["optimizer_type"], settings["optimizer_kwargs"]
    optimizer: Any = (
        made[kind](model, **options) if kind in made else getattr(torch.optim, kind)(model.parameters(), **options)
    )
    model.train()
    begins = []
    for number, length in enumerate(lengths, 1):
        begins.append(len(gpu.trace.events))
        tokens = [length - missing for missing in range(BATCH)]
        mask = (torch.arange(length) < torch.tensor(tokens)[:, None]).long()
        batch = {"input_ids": torch.zeros(BATCH, length, dtype=torch.int64), "attention_mask": mask}
        batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        labels = batch["input_ids"].clone()
        for row, count in enumerate(tokens):
            labels[row, count + 1 :] = -100
        batch["labels"] = labels
        batch["attention_mask"].sum()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=sum(tokens))
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_norm_clip"])
        optimizer.step()
        if adapter and adapter["peft_type"] in ("ADALORA", "ADAMSS"):
            model.base_model.update_and_allocate(number)
        loss.item()
    print(f"{run['experiment_name']}: {trained:,} parameters are trained", file=sys.stderr)
    return [*begins, len(gpu.trace.events)]


def _basis(length: int) -> list[int]:
    """Its mask is padded to multiples of 16, its sums over keys to 32, and the workspace of its backward to 64."""
    missing = -length % 16
    return [1, length, length * length, -length % 32, -length % 64, *([length * missing] if missing else [])]


def _fit(steps: Sequence[Step]) -> Any:
    """The coefficients of `_basis`; None of fewer steps than it has terms, which any would meet."""
    if len(steps) < len(_basis(steps[0].length)):
        return None
    rows = np.array([_basis(step.length) for step in steps], dtype=float)
    scale = np.maximum(rows.max(0), 1)
    return (
        np.linalg.lstsq(rows / scale, np.array([step.sizes for step in steps], dtype=float), rcond=None)[0]
        / scale[:, None]
    )


def _sizes(fit: Any, length: int) -> list[int]:
    return [max(size, 1) for size in np.rint(np.array(_basis(length)) @ fit).astype(int).tolist()]


def compare(method: Method, sigma: float) -> tuple[float, float, float, float]:
    """Published and simulated p99, published and simulated mean, in bytes."""
    batches = parse_lengths(f"lognormal:{MEAN},{sigma},bucket={BUCKET}").batches(BATCH, LONGEST)
    lengths = [longest for _, longest in itertools.islice(batches, STEPS)]
    windows = sorted((lengths[begin : begin + WINDOW] for begin in range(0, STEPS, WINDOW)), reverse=True)
    chosen = [*range(TOP), *range(TOP, len(windows), EVERY)]
    reserved = method.reserved([length for place in chosen for length in windows[place]])
    means = [statistics.fmean(reserved[begin : begin + WINDOW]) for begin in range(0, len(reserved), WINDOW)]
    line = statistics.linear_regression([windows[place][0] for place in chosen], means)
    between = [line.slope * windows[place][0] + line.intercept for place in range(TOP, len(windows))]
    mean = (sum(means[:TOP]) + sum(between)) / len(windows)
    of_top = sorted(reserved[: TOP * WINDOW], reverse=True)
    above = (STEPS - 1) / 100
    p99 = of_top[int(above)] + (above % 1) * (of_top[int(above) + 1] - of_top[int(above)])
    info = method.published["train_info"]
    published = (info["accelerator_memory_reserved_99th"], info["accelerator_memory_reserved_avg"])
    return published[0], p99 - AT_START_BYTES, published[1], mean - AT_START_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=["lora--llama-3.2-3B-rank32"])
    parser.add_argument("--sigma", type=float, default=0.315)
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.checkout / "src"))
    warnings.simplefilter("ignore")
    print("| method | p99, GiB | simulated | | mean, GiB | simulated | | misfit, KiB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in asked.methods:
        results = asked.checkout / "method_comparison" / "MetaMathQA" / "results"
        method = Method(json.loads((results / f"{name}.json").read_text()))
        cells = []
        figures = compare(method, asked.sigma)
        for published, simulated in (figures[:2], figures[2:]):
            cells += [f"{published / 2**30:.3f}", f"{simulated / 2**30:.3f}", f"{simulated / published - 1:+.2%}"]
        print("|", " | ".join([name, *cells, f"{method.misfit / 1024:.1f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
