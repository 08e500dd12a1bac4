"""Every operator of torch's own database with its tensors on two devices, and what a CUDA run would say of each call.

`python tests/accuracy/device_sweep.py [operator ...]` prints where the virtual GPU's verdict differs from the
reference's. That is FakeTensor: torch's own rules, for a GPU that need not be there. What it does not know of CUDA is
in the table of test_operators_across_devices.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from tests.accuracy.operator_sweep import GPU_MODEL, operators, samples_of

_MOST_TENSORS = 3  # Each of so many tensors of a call lies on the host in turn.


class Verdict(NamedTuple):
    """What was found of one placement of one sample's tensors."""

    operator: str
    # `n host`: tensor n on the host, the others on the GPU; `n scalar`: that tensor is one number on the host;
    # `n strided`: on the host and not contiguous.
    placement: str
    expected: bool  # Whether a CUDA run raises, by FakeTensor.
    found: bool  # Whether the virtual GPU says so.
    operators: tuple[str, ...]  # Those that the virtual GPU noted.
    failure: str  # How the call on the virtual GPU ended, if not well.


def placements(sample: Any) -> Iterator[tuple[str, list[Any], Any, set[int]]]:
    """(name, leaves, tree, positions on the host) of each placement of a sample with several tensors."""
    leaves, tree = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    tensors = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if any(leaves[position].layout is not torch.strided for position in tensors):
        return
    if len(tensors) < 2 or any(isinstance(leaf, (str, torch.device)) and str(leaf) == "cpu" for leaf in leaves):
        return
    for number, position in enumerate(tensors[:_MOST_TENSORS]):
        yield f"{number} host", leaves, tree, {position}
        tensor = leaves[position].detach()
        if tensor.dim():
            one = tensor.new_zeros(()) if not tensor.is_floating_point() else tensor.new_ones(())
            yield f"{number} scalar", [*leaves[:position], one, *leaves[position + 1 :]], tree, {position}
        if tensor.dim() > 1:
            strided = tensor.transpose(0, -1).contiguous().transpose(0, -1)
            yield f"{number} strided", [*leaves[:position], strided, *leaves[position + 1 :]], tree, {position}


def _call(op: Any, leaves: list[Any], tree: Any, host: set[int]) -> None:
    placed = [
        leaf.detach().to("cpu" if position in host else "cuda", copy=True) if isinstance(leaf, torch.Tensor) else leaf
        for position, leaf in enumerate(leaves)
    ]
    data, args, kwargs = tree_unflatten(placed, tree)
    op(data, *args, **kwargs)


def runs_on_host(op: Any, leaves: list[Any], tree: Any) -> bool:
    """Whether the call is right but for devices."""
    with contextlib.suppress(Exception):
        data, args, kwargs = tree_unflatten(
            [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree
        )
        op(data, *args, **kwargs)
        return True
    return False


class _Checks(TorchDispatchMode):
    """The checks that torch generates for CUDA kernels: all tensors by position on one device, scalars as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in checked():
            devices = {leaf.device.type for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)}
            if len(devices) > 1:
                raise RuntimeError(f"{func}: not on one device: cpu, cuda")
        return func(*args, **(kwargs or {}))


@functools.cache
def checked() -> frozenset[Any]:
    """The operators whose CUDA kernels are generated with a check of devices, as torch's own generator reads them."""
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DeviceCheckType, DispatchKey
    from torchgen.packaged.ATen import __path__ as folders

    native = Path(next(iter(folders))) / "native"
    parsed = parse_native_yaml(str(native / "native_functions.yaml"), str(native / "tags.yaml"))
    kernels = parsed.backend_indices[DispatchKey.CUDA]
    found = set()
    for function in parsed.native_functions:
        has_kernel = kernels.has_kernel(function) or function.structured_delegate is not None
        if has_kernel and function.device_check is not DeviceCheckType.NoCheck:
            packet = getattr(torch.ops.aten, str(function.func.name.name), None)
            overload = getattr(packet, function.func.name.overload_name or "default", None)
            if overload is not None:
                found.add(overload)
    return frozenset(found)


def by_torch(op: Any, leaves: list[Any], tree: Any, host: set[int]) -> bool | None:
    """Whether torch's fake tensors are of two devices in one call; None where they fail for another reason."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            placed = [_fake(mode, leaf, position in host) for position, leaf in enumerate(leaves)]
            data, args, kwargs = tree_unflatten(placed, tree)
            with _Checks():
                op(data, *args, **kwargs)
    except Exception as error:  # whatever a meta kernel raises
        text = str(error)  # "not linked": a copy to the GPU itself, of an index
        return True if "device" in text and "cuda" in text and "not linked" not in text else None
    return False


def _fake(mode: FakeTensorMode, leaf: Any, on_host: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fake = mode.from_tensor(leaf.detach())
    return fake if on_host else torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="cuda")


def verdicts(op: Any) -> list[Verdict]:
    """Those of all placements that run on the CPU and that FakeTensor can judge."""
    judged = []
    for sample in samples_of(op):
        for placement, leaves, tree, host in placements(sample):
            expected = by_torch(op, leaves, tree, host) if runs_on_host(op, leaves, tree) else None
            if expected is not None:
                judged.append((placement, leaves, tree, host, expected))
    if not judged:
        return []
    found = []
    with VirtualGpu(find_gpu(GPU_MODEL), workspaces=False) as gpu:
        for placement, leaves, tree, host, expected in judged:
            before = len(gpu.trace.mismatches)
            failure = ""
            try:
                _call(op, leaves, tree, host)
            except Exception as error:  # whatever it is, it is the finding
                failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
            noted = gpu.trace.mismatches[before:]
            names = tuple(sorted({gpu.trace.ops[mismatch.op] for mismatch in noted}))
            name = f"{op.name} {op.variant_test_name}".strip()
            found.append(Verdict(name, placement, expected, bool(noted), names, failure))
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    seen = set()
    for op in operators(set(sys.argv[1:])):
        for verdict in verdicts(op):
            if (verdict.expected != verdict.found or verdict.failure) and verdict not in seen:
                seen.add(verdict)
                print(*verdict, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
