"""Inductor's wrapper as it runs here: its buffers are virtual, its kernels are passed over."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dispatch, dynamo, inductor
from memprof.virtual.compiled.origins import UNKNOWN, Origins
from memprof.virtual.device_state import DeviceState

_META = torch.device("meta")
_SIGNATURE = re.compile(r"^def \w+\((.*?)\):", re.MULTILINE | re.DOTALL)
_ALIGNMENT = 16  # bytes that generated kernels take an input to be aligned to (torch/_inductor/utils.py)
_READ_AND_WRITTEN = "in_out_ptr"
_WRITTEN = ("out_ptr", _READ_AND_WRITTEN)


class SkippedKernel:
    """A kernel that Inductor generated: what it writes is unknown from then on.

    Args:
        source: its Python.
        written: told of each tensor that a launch writes.
        counted: told of what a launch moves: each tensor once, twice if it is read and written.
    """

    def __init__(
        self, source: str, written: Callable[[torch.Tensor], None], counted: Callable[[list[torch.Tensor]], None]
    ) -> None:
        found = _SIGNATURE.search(source)
        names = [name.split(":")[0].strip() for name in found[1].split(",")] if found else []
        self._outputs = [at for at, name in enumerate(names) if name.startswith(_WRITTEN)]
        self._updated = [at for at, name in enumerate(names) if name.startswith(_READ_AND_WRITTEN)]
        self._written = written
        self._counted = counted

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run it as the wrapper calls it."""
        tensors = {at: value for at, value in enumerate(args) if isinstance(value, torch.Tensor)}
        with torch.DisableTorchFunction():  # what asks for sizes is not the program
            for at in self._outputs:
                if at in tensors:
                    self._written(tensors[at])
            self._counted([*tensors.values(), *(tensors[at] for at in self._updated if at in tensors)])


def patches(machine: DeviceState, origins: Origins, made: Callable[[str], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) of what a generated wrapper takes from torch."""

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with torch.DisableTorchFunction(), dispatch.DisableTorchDispatch():
            made = torch.empty_strided(size, stride, dtype=dtype, device=_META)
            frame = sys._getframe(1)
            op, place = origins.place(frame, machine.recorder.attribution.place(frame))
            machine.record([made], op, place, machine.gpus.named())
        return made

    def copy_if_misaligned(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        with torch.DisableTorchFunction():
            is_aligned = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT == 0
        return tensor if is_aligned else inductor.clone_preserve_strides(tensor)

    def written(tensor: torch.Tensor) -> None:
        machine.values.store.drop(tensor.untyped_storage()._cdata)

    def triton(compiler: Any, name: str, source: str, device_str: str = "cuda") -> SkippedKernel:
        made(source)
        return SkippedKernel(source, written, lambda tensors: machine.meter.kernel(UNKNOWN, tensors))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("part of it runs on the CPU")

    for name in (inductor.codegen_node, inductor.codegen_template):
        yield name.patch(refuse)
    yield inductor.empty_strided_cuda.patch(empty_strided)
    if inductor.copy_if_misaligned.exists():
        yield inductor.copy_if_misaligned.patch(copy_if_misaligned)
    yield inductor.compile_triton.patch(triton)
    yield inductor.wait.patch(lambda compiler, scope: None)


def add_rules(mode: type) -> None:
    """Operators that a graph calls around others to save the state of random numbers, under the run's own mode.

    No number is drawn here, and the states are on the host (torch/_prims/rng_prims.py).
    """

    rules: dict[str, Callable[..., Any]] = {
        "run_and_save_rng_state": lambda operator, *args, **given: (
            torch.cuda.get_rng_state(),
            operator(*args, **given),
        ),
        "run_with_rng_state": lambda state, operator, *args, **given: operator(*args, **given),
        "graphsafe_run_with_rng_state": lambda operator, *args, rng_state=None, **given: operator(*args, **given),
    }

    def under_mode(rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(active: Any, *args: Any, **kwargs: Any) -> Any:
            with active:
                return rule(*args, **kwargs)

        return run

    for name, rule in rules.items():
        operator = getattr(dynamo.rng_prims.get(), name, None)
        if operator is not None and mode not in operator.python_key_table:
            operator.py_impl(mode)(under_mode(rule))
