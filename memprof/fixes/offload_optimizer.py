"""cpu-offload-optimizer: the optimizer's state and its step in host memory, as ZeRO-Offload has it.

Every trained parameter has a twin in (pinned) host memory. A step copies the gradients there, has the CPU update the
twins, and copies these back. Sources: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021);
torchao's CPUOffloadOptimizer for what users know it by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memprof.errors import UsageError
from memprof.fixes.applied import Changes
from memprof.fixes.catalog.fix import NO_OPTIMIZER, ONE_OPTIMIZER, OPTIMIZER, Fix, Numerics, Tier
from memprof.fixes.optimizers import adamw, make_optimizer, refuse_gradients, trained_parameters


@Fix(
    name="cpu-offload-optimizer", order=230, numerics=Numerics.EXACT, saves=("optimizer state", "temporaries"),
    changes="optimizer state and the step in host memory; the GPU has parameters and gradients alone",
    cost="gradients and parameters cross the bus once a step each; the CPU computes the step",
    options={
        "optimizer": OPTIMIZER + "; AdamW at 1e-4 if not given",
        "offload_gradients": "True: gradients go to host memory, and are freed, as soon as they are there",
    },
    training_only=True,
    conflicts={
        "optimizer-in-backward": ONE_OPTIMIZER,
        "8-bit-optimizer": ONE_OPTIMIZER,
        "cpu-offload-weights": "any optimizer over layers in host memory steps there",
    },
    useless_if=NO_OPTIMIZER, ladder=120, search=110, tiers=(Tier.CPU_OPTIMIZER,),
    helps={"optimizer state": 20, "doctor: parameters": 10, "doctor: smaller": 60},
)  # fmt: skip
def install(
    model: nn.Module,
    changes: Changes,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = adamw,
    offload_gradients: bool = False,
) -> None:
    """Make the optimizer, a `HostOptimizer`; it is the result. Raises UsageError: nothing is trained, or the function
    makes no optimizer over the parameters that it is given."""
    parameters = trained_parameters(model, changes.fix)
    made = HostOptimizer(parameters, optimizer)
    if offload_gradients:
        refuse_gradients(parameters, changes.fix, "offload_gradients=True")
        hooks = contextlib.ExitStack()
        changes.on_undo(hooks.close)
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(made.take_gradient).remove)
    num_bytes = sum(twin.numel() * twin.element_size() for twin in made.twins)
    changes.result(made)
    changes.note(
        f"{type(made.inner).__name__} steps in host memory: {len(parameters)} parameters, {num_bytes:,} bytes"
        + (", and takes gradients as they come" if offload_gradients else "")
    )


class HostOptimizer(Optimizer):
    """A torch optimizer over parameters on a GPU whose state and arithmetic are in host memory.

    Groups, `state_dict` and `load_state_dict` are those of the optimizer that it stands for: checkpoints go from one to
    the other. What a scheduler writes into the groups holds for the next step. A step waits for the gradients and does
    not run beside anything else; the copies back are in order with what the GPU does next.

    Args:
        parameters: on any devices.
        factory: from a list of parameters (in host memory) to the optimizer that steps there.

    Raises:
        UsageError: `factory` makes no optimizer, or one over other parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], factory: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.twins = [nn.Parameter(_on_host(parameter), parameter.requires_grad) for parameter in parameters]
        self.inner = make_optimizer(factory, self.twins)
        held = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        twin_of = {id(twin): parameter for twin, parameter in zip(self.twins, parameters, strict=True)}
        if {id(parameter) for parameter in held} != set(twin_of):
            raise UsageError(
                "optimizer must be made of the parameters that it is given",
                value=f"{len(held)} of {len(parameters)}",
                hint="such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
            )
        groups = [
            {**group, "params": [twin_of[id(parameter)] for parameter in group["params"]]}
            for group in self.inner.param_groups
        ]
        super().__init__(groups, self.inner.defaults)
        self._pairs = list(zip(parameters, self.twins, strict=True))
        self._twin_by_id = {id(parameter): twin for parameter, twin in self._pairs}
        self._seen = [_identity(parameter) for parameter in parameters]
        self.state = _States(self.inner, self._pairs)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._write_groups()
        devices = set()
        for index, (parameter, twin) in enumerate(self._pairs):
            if _identity(parameter) != self._seen[index]:  # loaded or edited since the last step
                twin.data.copy_(parameter)
            if parameter.grad is not None:
                # Beside what `take_gradient` has put there before.
                self._add_gradient(twin, parameter.grad)
                devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        stepped = [twin.grad is not None for twin in self.twins]
        self.inner.step()
        for index, (parameter, twin) in enumerate(self._pairs):
            if stepped[index]:
                parameter.copy_(twin, non_blocking=True)
                twin.grad = None
            self._seen[index] = _identity(parameter)
        return loss

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Move an accumulated gradient to host memory, and free it: a hook."""
        assert parameter.grad is not None
        self._add_gradient(self._twin_by_id[id(parameter)], parameter.grad)
        parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as any optimizer does, and those that wait in host memory."""
        super().zero_grad(set_to_none)
        for twin in self.twins:
            twin.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, only while this is made. Raises UsageError: later."""
        if "_pairs" in vars(self):
            raise UsageError(
                "a HostOptimizer takes no further parameters", value=f"{len(self._pairs)} it has", hint="make another"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer it stands for; its tensors are in host memory."""
        self._write_groups()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, of this or of the optimizer that it stands for."""
        self.inner.load_state_dict(state_dict)
        for own, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update((key, value) for key, value in group.items() if key != "params")

    def _write_groups(self) -> None:
        for own, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update((key, value) for key, value in own.items() if key != "params")

    def _add_gradient(self, twin: nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            raise UsageError("cpu-offload-optimizer takes no sparse gradients", value=f"shape {list(gradient.shape)}")
        if twin.grad is None:
            host = torch.empty_like(twin, memory_format=torch.preserve_format, pin_memory=gradient.is_cuda)
            twin.grad = host.copy_(gradient, non_blocking=True)
        else:
            if gradient.is_cuda:  # the first has arrived
                torch.cuda.current_stream(gradient.device).synchronize()
            twin.grad.add_(gradient.to(twin.device))


class _States(MutableMapping[torch.Tensor, Any]):
    """The inner optimizer's state, by the parameters on the GPU; made when it is first there, as in torch."""

    def __init__(self, inner: Optimizer, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._inner = inner
        self._twins = dict(pairs)

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._inner.state[self._twins[parameter]]  # type: ignore[index]

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        self._inner.state[self._twins[parameter]] = value  # type: ignore[index]

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._inner.state[self._twins[parameter]]  # type: ignore[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, twin in self._twins.items() if twin in self._inner.state)

    def __len__(self) -> int:
        return len(self._inner.state)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
    return host.copy_(parameter.detach())


def _identity(parameter: torch.Tensor) -> tuple[int, int]:
    """Return what changes when somebody else writes into a parameter."""
    return parameter.data_ptr(), parameter._version
