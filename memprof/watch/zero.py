"""DeepSpeed's ZeRO: what is a step of it, and what it keeps of parameters that are spread.

Of a spread parameter `ds_tensor` is this rank's part; the whole is its `.data` from a gather to the next release. The
optimizer of stage 3 keeps parts of gradients in one buffer, and steps once for each group of parameters; that of stages
1 and 2 once for each group of the program's.

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

_ZERO = "deepspeed.runtime.zero."
_STEPS = {f"{_ZERO}stage3": "DeepSpeedZeroOptimizer_Stage3", f"{_ZERO}stage_1_and_2": "DeepSpeedZeroOptimizer"}
# Where an optimizer is stepped once by gradients of zeros, when it is made.
_PREPARE = {
    **_STEPS,
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
}
# What waits for parameters to be whole, and where it has them.
_GATHERS = {"AllGatherHandle": "_AllGatherHandle__param", "AllGatherCoalescedHandle": "params"}


def of_imports(
    phases: Phases, claim: Callable[[torch.Tensor, Owner], None]
) -> Mapping[str, Callable[[ModuleType], Iterator[Patch]]]:
    """Return the patches by the module that has to be imported first. `claim` is told whose tensors are."""

    def stepping(module: ModuleType) -> Iterator[Patch]:
        kind = getattr(module, _PREPARE[module.__name__])
        if hasattr(kind, "initialize_optimizer_states"):
            yield kind, "initialize_optimizer_states", phases.wrap_preparation(kind.initialize_optimizer_states)
        if module.__name__ in _STEPS:
            yield kind, "step", phases.wrap_whole_step(kind.step)
            yield kind, "__init__", _then(kind.__init__, functools.partial(_claim_gradients, claim))

    def gathering(module: ModuleType) -> Iterator[Patch]:
        for name, where in _GATHERS.items():
            kind = getattr(module, name)
            yield kind, "wait", _then(kind.wait, functools.partial(_claim_whole, claim, where))

    return {**dict.fromkeys(_PREPARE, stepping), f"{_ZERO}partition_parameters": gathering}


def _then(original: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(self)
        return result

    return call


def _claim_gradients(claim: Callable[[torch.Tensor, Owner], None], optimizer: Any) -> None:
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        claim(buffer, Owner(Role.GRADIENT, ""))


def _claim_whole(claim: Callable[[torch.Tensor, Owner], None], where: str, handle: Any) -> None:
    parameters = getattr(handle, where)
    several: Iterable[torch.Tensor] = parameters if isinstance(parameters, (list, tuple)) else [parameters]
    for parameter in several:
        claim(parameter.data, Owner(Role.UNSHARDED, "a parameter"))
