"""Every operator of torch's own operator database, on the CPU without a mode and on the virtual GPU, side by side.

`python tests/accuracy/operator_sweep.py [operator ...]` prints what differs. torch's profiler sees every allocation of
the CPU allocator, whatever made it. Memory that no tensor shows on the virtual GPU may answer to what the CPU
allocates, and need not: scratch memory is not the same on both.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

from memprof.device.catalog import find_gpu
from memprof.trace.events import GPU, EventKind
from memprof.virtual import VirtualGpu

SAMPLES = 4  # Sample inputs of each operator that are compared, spread over the first GENERATED.
GENERATED = 20
SCALAR_BYTES = 8  # Numbers that the CPU wraps in tensors lie on the host in a CUDA run as well.
GENERATOR_BYTES = 5056  # The state of the CPU's generator, which the database saves around random operators.
GPU_MODEL = "a100-80gb"


class Allocation(NamedTuple):
    """Bytes, and the operator that made them; on the CPU all operators around it (`outer>inner`), without factories."""

    num_bytes: int
    op: str


class Difference(NamedTuple):
    """What one sample of one operator allocates on one side only."""

    operator: str
    variant: str
    sample: int
    extra: list[Allocation]  # On the virtual GPU only.
    # On the CPU only; of each size, all CPU allocations, since nothing says which of equal ones is missing.
    missing: list[Allocation]
    missing_counts: dict[int, int]
    failure: str = ""

    @property
    def name(self) -> str:
        """The operator and the database's variant of it."""
        return f"{self.operator} {self.variant}".strip()


def call(op: Any, sample: Any) -> None:
    """Forward, and backward from all outputs that have a gradient."""
    outputs: list[torch.Tensor] = []

    def collect(value: Any) -> Any:
        if (
            isinstance(value, torch.Tensor)
            and value.requires_grad
            and (value.is_floating_point() or value.is_complex())
        ):
            outputs.append(value)
        return value

    result = op(sample.input, *sample.args, **sample.kwargs)
    tree_map(collect, result)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def on(device: str, sample: Any) -> Any:
    """The sample's tensors copied to `device`, leaves as before."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.detach().clone().to(device)
            return moved.requires_grad_() if value.requires_grad else moved
        return device if isinstance(value, (str, torch.device)) and str(value) == "cpu" else value

    parts = (sample.input, tuple(sample.args), dict(sample.kwargs))
    data, args, kwargs = (tree_map(move, part) for part in parts)
    return type(sample)(data, args=args, kwargs=kwargs)


def on_cpu(op: Any, sample: Any) -> list[Allocation]:
    sample = on("cpu", sample)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call(op, sample)
    found: list[Allocation] = []

    def walk(node: Any, op: str) -> None:
        if node.typed[0].name == "Allocation":
            size = node.extra_fields.alloc_size
            if size > 0 and (op or size != GENERATOR_BYTES):
                found.append(Allocation(size, op))
        elif node.name.startswith("aten::") and node.name not in _FACTORIES:
            op = f"{op}>{node.name[6:]}" if op else node.name[6:]
        for child in node.children:
            walk(child, op)

    for root in recorded.profiler.kineto_results.experimental_event_tree():
        walk(root, "")
    return found


_FACTORIES = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "to")
)


def on_virtual_gpu(op: Any, sample: Any, gpu: VirtualGpu) -> tuple[list[Allocation], list[int]]:
    """The virtual GPU's allocations that are tensors, and the bytes of those that no tensor shows."""
    sample = on("cuda", sample)
    trace = gpu.trace
    start = len(trace.events)
    call(op, sample)
    events = trace.events[start:]
    storages = [trace.storages[event.ref] for event in events if event.kind is EventKind.ALLOC]
    on_gpu = [storage for storage in storages if storage.device == GPU and storage.num_bytes]
    shown = [Allocation(storage.num_bytes, trace.op(storage)) for storage in on_gpu if not storage.hidden]
    return shown, [storage.num_bytes for storage in on_gpu if storage.hidden]


def samples_of(op: Any) -> list[Any]:
    """Some of the operator's sample inputs in float32, with gradients if it has any."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    # The database looks for a unittest class up the stack, in the source of every frame and in vain, and
    # torch.manual_seed notes the stack for each kind of accelerator that is not there.
    with (
        mock.patch.object(common_utils, "extract_test_fn", return_value=None),
        mock.patch.object(core, "extract_test_fn", return_value=None),
        mock.patch.object(common_utils, "set_rng_seed", torch.default_generator.manual_seed),
    ):
        generated = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        samples = list(itertools.islice(generated, GENERATED))
    return samples[:: -(-len(samples) // SAMPLES)] if samples else []


def compare(op: Any) -> Iterator[Difference | None]:
    """For each sample that the CPU can run: None if both sides allocate the same, else the difference."""
    sides: list[tuple[int, Any, list[Allocation]]] = []
    for number, sample in enumerate(samples_of(op)):
        # The database has samples of what the CPU cannot do.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError, AssertionError):
            sides.append((number, sample, on_cpu(op, sample)))
    # To enter a virtual GPU takes a third of the time: one for all samples of an operator.
    with VirtualGpu(find_gpu(GPU_MODEL), workspaces=False) as gpu:
        made = [try_on_virtual_gpu(op, sample, gpu) for _, sample, _ in sides]
    for (number, _, expected), (found, hidden, failure) in zip(sides, made, strict=True):
        if failure:
            yield Difference(op.name, op.variant_test_name, number, [], [], {}, failure)
            continue
        wanted, got = Counter(a.num_bytes for a in expected), Counter(a.num_bytes for a in found)
        extra, missing = got - wanted, wanted - got - Counter(hidden)
        missing = Counter({size: count for size, count in missing.items() if size > SCALAR_BYTES})
        if not extra and not missing:
            yield None
            continue
        yield Difference(
            op.name,
            op.variant_test_name,
            number,
            [a for a in found if a.num_bytes in extra],
            [a for a in expected if a.num_bytes in missing],
            dict(missing),
        )


def try_on_virtual_gpu(op: Any, sample: Any, gpu: VirtualGpu) -> tuple[list[Allocation], list[int], str]:
    """As `on_virtual_gpu`, and how it failed if it did."""
    try:
        return *on_virtual_gpu(op, sample, gpu), ""
    except Exception as error:  # whatever it is, it is the finding
        return [], [], f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def operators(names: set[str] | None = None) -> list[Any]:
    """The database's operators that take float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes and (not names or op.name in names)]


def main() -> None:
    warnings.filterwarnings("ignore")
    seen = set()
    for op in operators(set(sys.argv[1:])):
        gc.collect()
        for difference in compare(op):
            if difference is None:
                continue
            extra = sorted({a.op for a in difference.extra})
            missing = sorted({a.op for a in difference.missing})
            line = (difference.name, difference.failure, tuple(extra), tuple(missing))
            if line in seen:
                continue
            seen.add(line)
            sizes = sorted(a.num_bytes for a in difference.extra)
            print(difference.name, difference.sample, difference.failure, end=" ")
            print(*(["EXTRA", sizes, *extra] if extra else []), end=" ")
            print(*(["MISSING", difference.missing_counts, *missing] if missing else []), flush=True)


if __name__ == "__main__":
    main()
