"""DeepSpeed's ZeRO: patches that recognize its optimizer steps, and set the roles of its parameters and gradients.

A sharded parameter has this rank's shard in `ds_tensor`, and the full parameter in `.data` while it is gathered. The
stage-3 optimizer has its gradient shards in one buffer. A step of a ZeRO optimizer steps its torch optimizer several
times: stage 3 once per subgroup, stages 1 and 2 once per parameter group of the program.

Sources: deepspeed/runtime/zero (stage3.py, stage_1_and_2.py, partition_parameters.py) and deepspeed/runtime/fp16 of
deepspeedai/DeepSpeed@v0.19.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Patch
from memprof.trace.events import Owner, Role
from memprof.watch.phases import Phases

_ZERO_PACKAGE = "deepspeed.runtime.zero."
_STAGE_OPTIMIZERS = {
    f"{_ZERO_PACKAGE}stage3": "DeepSpeedZeroOptimizer_Stage3",
    f"{_ZERO_PACKAGE}stage_1_and_2": "DeepSpeedZeroOptimizer",
}
# Optimizers that DeepSpeed steps once with zero gradients at construction, to allocate their state.
_PREPARING_OPTIMIZERS = {
    **_STAGE_OPTIMIZERS,
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
}
# Class of a gather handle -> attribute with the gathered parameters.
_PARAMETER_ATTRIBUTES = {"AllGatherHandle": "_AllGatherHandle__param", "AllGatherCoalescedHandle": "params"}


def make_import_patches(
    phases: Phases, set_owner: Callable[[torch.Tensor, Owner], None]
) -> Mapping[str, Callable[[ModuleType], Iterator[Patch]]]:
    """Return module name -> function that yields the patches to apply once that module is imported.

    `set_owner` is called with each recognized tensor and its owner.
    """

    def step_patches(module: ModuleType) -> Iterator[Patch]:
        kind = getattr(module, _PREPARING_OPTIMIZERS[module.__name__])
        if hasattr(kind, "initialize_optimizer_states"):
            yield kind, "initialize_optimizer_states", phases.wrap_preparation(kind.initialize_optimizer_states)
        if module.__name__ in _STAGE_OPTIMIZERS:
            yield kind, "step", phases.wrap_composite_step(kind.step)
            yield kind, "__init__", _wrap_with_callback(kind.__init__, functools.partial(_mark_gradients, set_owner))

    def gather_patches(module: ModuleType) -> Iterator[Patch]:
        for name, attribute in _PARAMETER_ATTRIBUTES.items():
            kind = getattr(module, name)
            yield kind, "wait", _wrap_with_callback(kind.wait, functools.partial(_mark_gathered, set_owner, attribute))

    return {
        **dict.fromkeys(_PREPARING_OPTIMIZERS, step_patches),
        f"{_ZERO_PACKAGE}partition_parameters": gather_patches,
    }


def _wrap_with_callback(original: Callable[..., Any], callback: Callable[[Any], None]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        callback(self)
        return result

    return call


def _mark_gradients(set_owner: Callable[[torch.Tensor, Owner], None], optimizer: Any) -> None:
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        set_owner(buffer, Owner(Role.GRADIENT, ""))


def _mark_gathered(set_owner: Callable[[torch.Tensor, Owner], None], attribute: str, handle: Any) -> None:
    parameters = getattr(handle, attribute)
    gathered: Iterable[torch.Tensor] = parameters if isinstance(parameters, (list, tuple)) else [parameters]
    for parameter in gathered:
        set_owner(parameter.data, Owner(Role.UNSHARDED, "a parameter"))
