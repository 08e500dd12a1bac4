"""DeepSpeed's ZeRO: recognition of its steps, and roles of the memory of its sharded parameters.

Of a sharded parameter, `ds_tensor` is this rank's shard; the whole is in `.data` from a gather to the next release. The
optimizer of stage 3 has gradient shards in one buffer, and steps once for each parameter group; the optimizer of stages
1 and 2 steps once for each group of the program.

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
# Optimizers that DeepSpeed steps once with zero gradients, when they are made.
_PREPARING_OPTIMIZERS = {
    **_STAGE_OPTIMIZERS,
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
}
# Class of a gather handle -> attribute with the gathered parameters.
_PARAMETER_ATTRIBUTES = {"AllGatherHandle": "_AllGatherHandle__param", "AllGatherCoalescedHandle": "params"}


def make_import_patches(
    phases: Phases, claim: Callable[[torch.Tensor, Owner], None]
) -> Mapping[str, Callable[[ModuleType], Iterator[Patch]]]:
    """Return the patches by the name of the module whose import they follow. `claim` gets tensors and their owners."""

    def step_patches(module: ModuleType) -> Iterator[Patch]:
        kind = getattr(module, _PREPARING_OPTIMIZERS[module.__name__])
        if hasattr(kind, "initialize_optimizer_states"):
            yield kind, "initialize_optimizer_states", phases.wrap_preparation(kind.initialize_optimizer_states)
        if module.__name__ in _STAGE_OPTIMIZERS:
            yield kind, "step", phases.wrap_composite_step(kind.step)
            yield kind, "__init__", _wrap_with_callback(kind.__init__, functools.partial(_claim_gradients, claim))

    def gather_patches(module: ModuleType) -> Iterator[Patch]:
        for name, where in _PARAMETER_ATTRIBUTES.items():
            kind = getattr(module, name)
            yield kind, "wait", _wrap_with_callback(kind.wait, functools.partial(_claim_gathered, claim, where))

    return {
        **dict.fromkeys(_PREPARING_OPTIMIZERS, step_patches),
        f"{_ZERO_PACKAGE}partition_parameters": gather_patches,
    }


def _wrap_with_callback(original: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(self)
        return result

    return call


def _claim_gradients(claim: Callable[[torch.Tensor, Owner], None], optimizer: Any) -> None:
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        claim(buffer, Owner(Role.GRADIENT, ""))


def _claim_gathered(claim: Callable[[torch.Tensor, Owner], None], attribute: str, handle: Any) -> None:
    parameters = getattr(handle, attribute)
    gathered: Iterable[torch.Tensor] = parameters if isinstance(parameters, (list, tuple)) else [parameters]
    for parameter in gathered:
        claim(parameter.data, Owner(Role.UNSHARDED, "a parameter"))
