"""Inductor's generated wrapper on the virtual GPU: buffers are virtual tensors, kernels are not launched."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dispatch, dynamo, inductor
from memprof.virtual.compiled.origins import UNKNOWN_OPERATOR, BufferOrigins
from memprof.virtual.device_state import DeviceState

_META = torch.device("meta")
_SIGNATURE = re.compile(r"^def \w+\((.*?)\):", re.MULTILINE | re.DOTALL)
_ALIGNMENT = 16  # alignment in bytes that generated kernels require of inputs (torch/_inductor/utils.py)
_UPDATED_PREFIX = "in_out_ptr"
_WRITTEN_PREFIXES = ("out_ptr", _UPDATED_PREFIX)


class SkippedKernel:
    """Kernel that Inductor generated; launches are skipped, and the values of written tensors become unknown.

    Args:
        source: Python source of the kernel.
        on_write: called with each tensor that a launch writes.
        on_launch: called with the tensors that a launch reads or writes; a tensor that is both is listed twice.
    """

    def __init__(
        self, source: str, on_write: Callable[[torch.Tensor], None], on_launch: Callable[[list[torch.Tensor]], None]
    ) -> None:
        match = _SIGNATURE.search(source)
        names = [name.split(":")[0].strip() for name in match[1].split(",")] if match else []
        self._written_positions = [i for i, name in enumerate(names) if name.startswith(_WRITTEN_PREFIXES)]
        self._updated_positions = [i for i, name in enumerate(names) if name.startswith(_UPDATED_PREFIX)]
        self._on_write = on_write
        self._on_launch = on_launch

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Call `on_write` and `on_launch` with the tensors among `args`, in place of a launch."""
        tensors = {i: value for i, value in enumerate(args) if isinstance(value, torch.Tensor)}
        with torch.DisableTorchFunction():  # sizes are not read by the program
            for i in self._written_positions:
                if i in tensors:
                    self._on_write(tensors[i])
            self._on_launch([*tensors.values(), *(tensors[i] for i in self._updated_positions if i in tensors)])


def patches(
    device_state: DeviceState, origins: BufferOrigins, on_kernel: Callable[[str], None]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement) of the functions of torch that a generated wrapper calls."""

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with torch.DisableTorchFunction(), dispatch.DisableTorchDispatch():
            buffer = torch.empty_strided(size, stride, dtype=dtype, device=_META)
            frame = sys._getframe(1)
            op, call_site = origins.find_call_site(frame, device_state.recorder.attribution.find_call_site(frame))
            device_state.record([buffer], op, call_site, device_state.gpus.get_name())
        return buffer

    def copy_if_misaligned(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        with torch.DisableTorchFunction():
            is_aligned = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT == 0
        return tensor if is_aligned else inductor.clone_preserve_strides(tensor)

    def forget_values(tensor: torch.Tensor) -> None:
        device_state.values.store.drop(tensor.untyped_storage()._cdata)

    def make_kernel(compiler: Any, name: str, source: str, device_str: str = "cuda") -> SkippedKernel:
        on_kernel(source)
        return SkippedKernel(
            source, forget_values, lambda tensors: device_state.meter.count_kernel(UNKNOWN_OPERATOR, tensors)
        )

    def reject_host_code(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("part of it runs on the CPU")

    for name in (inductor.codegen_node, inductor.codegen_template):
        yield name.patch(reject_host_code)
    yield inductor.empty_strided_cuda.patch(empty_strided)
    if inductor.copy_if_misaligned.exists():
        yield inductor.copy_if_misaligned.patch(copy_if_misaligned)
    yield inductor.compile_triton.patch(make_kernel)
    yield inductor.wait.patch(lambda compiler, scope: None)


def register_rng_operators(mode_class: type) -> None:
    """Register rules for `mode_class` of the operators by which a graph saves and restores the random state.

    No random number is drawn, and the states are on the host (torch/_prims/rng_prims.py).
    """

    rules: dict[str, Callable[..., Any]] = {
        "run_and_save_rng_state": lambda operator, *args, **options: (
            torch.cuda.get_rng_state(),
            operator(*args, **options),
        ),
        "run_with_rng_state": lambda state, operator, *args, **options: operator(*args, **options),
        "graphsafe_run_with_rng_state": lambda operator, *args, rng_state=None, **options: operator(*args, **options),
    }

    def wrap_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(active_mode: Any, *args: Any, **kwargs: Any) -> Any:
            with active_mode:
                return rule(*args, **kwargs)

        return run

    for name, rule in rules.items():
        operator = getattr(dynamo.rng_prims.get(), name, None)
        if operator is not None and mode_class not in operator.python_key_table:
            operator.py_impl(mode_class)(wrap_rule(rule))
