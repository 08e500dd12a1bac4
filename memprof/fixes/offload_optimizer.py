"""Fix cpu-offload-optimizer: the optimizer's state and its step in host memory, as in ZeRO-Offload.

Every trained parameter has a copy in pinned host memory. A step copies the gradients to host memory, updates the copies
on the CPU, and writes them to the parameters. Sources: Ren et al., "ZeRO-Offload: Democratizing
Billion-Scale Model Training" (2021); torchao's CPUOffloadOptimizer for the interface.
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
from memprof.fixes.optimizers import adamw, list_trained_parameters, make_optimizer, refuse_gradients


@Fix(
    name="cpu-offload-optimizer", order=230, numerics=Numerics.EXACT, saves=("optimizer state", "temporaries"),
    changes="keep optimizer state in host memory, and step there; the GPU has only parameters and gradients",
    in_code='use memprof.apply(model, "cpu-offload-optimizer", optimizer=...), whose result is an optimizer with its '
    "state and its step in host memory",
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
    useless_if=NO_OPTIMIZER, ladder_order=120, search_order=110, tiers=(Tier.CPU_OPTIMIZER,),
    helps={"doctor: parameters": 10, "doctor: smaller": 60}, moves_to_host=True,
)  # fmt: skip
def install(
    model: nn.Module,
    changes: Changes,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = adamw,
    offload_gradients: bool = False,
) -> None:
    """Create a `HostOptimizer` as the fix's result. Raises UsageError if the model has no trained parameter, or
    `optimizer` returns no torch optimizer of the given parameters."""
    parameters = list_trained_parameters(model, changes.fix)
    host_optimizer = HostOptimizer(parameters, optimizer)
    if offload_gradients:
        refuse_gradients(parameters, changes.fix, "offload_gradients=True")
        hooks = contextlib.ExitStack()
        changes.on_undo(hooks.close)
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(host_optimizer.take_gradient).remove)
    num_bytes = sum(host_copy.numel() * host_copy.element_size() for host_copy in host_optimizer.host_copies)
    changes.result(host_optimizer)
    changes.note(
        f"{type(host_optimizer.inner).__name__} steps in host memory: {len(parameters)} parameters, {num_bytes:,} bytes"
        + (", and takes gradients as they come" if offload_gradients else "")
    )


class HostOptimizer(Optimizer):
    """Torch optimizer of parameters on a GPU that keeps its state in host memory and computes its steps on the CPU.

    Groups, `state_dict` and `load_state_dict` have the inner optimizer's formats, so that checkpoints are
    interchangeable. A scheduler may write the groups; the next step uses the new values. A step waits for the gradients
    and does not overlap with the GPU's work; the copies to the GPU are in order with later kernels.

    Args:
        parameters: on any devices.
        factory: a function from a list of parameters in host memory to their optimizer, the inner optimizer.

    Raises:
        UsageError: `factory` returns no torch optimizer, or an optimizer of other parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], factory: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.host_copies = [nn.Parameter(_copy_to_host(parameter), parameter.requires_grad) for parameter in parameters]
        self.inner = make_optimizer(factory, self.host_copies)
        inner_parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        parameter_by_copy = {id(copy): parameter for copy, parameter in zip(self.host_copies, parameters, strict=True)}
        if {id(parameter) for parameter in inner_parameters} != set(parameter_by_copy):
            raise UsageError(
                "optimizer must be made of the parameters that it is given",
                value=f"{len(inner_parameters)} of {len(parameters)}",
                hint="such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
            )
        groups = [
            {**group, "params": [parameter_by_copy[id(parameter)] for parameter in group["params"]]}
            for group in self.inner.param_groups
        ]
        super().__init__(groups, self.inner.defaults)
        self._pairs = list(zip(parameters, self.host_copies, strict=True))
        self._copy_by_id = {id(parameter): copy for parameter, copy in self._pairs}
        self._versions = [_get_version(parameter) for parameter in parameters]
        self.state = _StateMapping(self.inner, self._pairs)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient; return the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._write_groups()
        devices = set()
        for index, (parameter, host_copy) in enumerate(self._pairs):
            if _get_version(parameter) != self._versions[index]:  # loaded or edited since the last step
                host_copy.data.copy_(parameter)
            if parameter.grad is not None:
                # Added to gradients that `take_gradient` has moved before.
                self._add_gradient(host_copy, parameter.grad)
                devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        has_gradient = [host_copy.grad is not None for host_copy in self.host_copies]
        self.inner.step()
        for index, (parameter, host_copy) in enumerate(self._pairs):
            if has_gradient[index]:
                parameter.copy_(host_copy, non_blocking=True)
                host_copy.grad = None
            self._versions[index] = _get_version(parameter)
        return loss

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Move the gradient of `parameter` to host memory, and free it on the GPU; a post-accumulate-grad hook."""
        assert parameter.grad is not None
        self._add_gradient(self._copy_by_id[id(parameter)], parameter.grad)
        parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' gradients, and free the gradients in host memory."""
        super().zero_grad(set_to_none)
        for host_copy in self.host_copies:
            host_copy.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, for `Optimizer.__init__` only; raise UsageError if the optimizer exists already."""
        if "_pairs" in vars(self):
            raise UsageError(
                "a HostOptimizer takes no further parameters", value=f"{len(self._pairs)} it has", hint="make another"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, with tensors in host memory."""
        self._write_groups()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict` of a `HostOptimizer` or of an inner optimizer returned."""
        self.inner.load_state_dict(state_dict)
        for outer, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update((key, value) for key, value in group.items() if key != "params")

    def _write_groups(self) -> None:
        for outer, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update((key, value) for key, value in outer.items() if key != "params")

    def _add_gradient(self, host_copy: nn.Parameter, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            raise UsageError("cpu-offload-optimizer takes no sparse gradients", value=f"shape {list(gradient.shape)}")
        if host_copy.grad is None:
            host = torch.empty_like(host_copy, memory_format=torch.preserve_format, pin_memory=gradient.is_cuda)
            host_copy.grad = host.copy_(gradient, non_blocking=True)
        else:
            if gradient.is_cuda:  # the first gradient must have arrived
                torch.cuda.current_stream(gradient.device).synchronize()
            host_copy.grad.add_(gradient.to(host_copy.device))


class _StateMapping(MutableMapping[torch.Tensor, Any]):
    """View of the inner optimizer's state that has the parameters on the GPU as keys."""

    def __init__(self, inner: Optimizer, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._inner = inner
        self._host_copies = dict(pairs)

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._inner.state[self._host_copies[parameter]]  # type: ignore[index]

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        self._inner.state[self._host_copies[parameter]] = value  # type: ignore[index]

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._inner.state[self._host_copies[parameter]]  # type: ignore[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, host_copy in self._host_copies.items() if host_copy in self._inner.state)

    def __len__(self) -> int:
        return len(self._inner.state)


def _copy_to_host(parameter: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
    return host.copy_(parameter.detach())


def _get_version(parameter: torch.Tensor) -> tuple[int, int]:
    """Return data pointer and version counter of `parameter`; they change when other code writes to the parameter."""
    return parameter.data_ptr(), parameter._version
