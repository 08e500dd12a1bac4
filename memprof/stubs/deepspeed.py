"""deepspeed.ops.adam: Adam in one kernel for all parameters of a dtype, and Adam for tensors in host memory.

Sources: deepspeed/ops/adam/fused_adam.py, cpu_adam.py and multi_tensor_apply.py, csrc/adam/multi_tensor_adam.cu and
cpu_adam_impl.cpp of deepspeedai/DeepSpeed@v0.19.5. The package also installs without a GPU; then `get_patches` replaces
only the kernel that the package would compile for the GPU. DeepSpeedCPUAdam needs a compiler, and is a stub too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.patching import Patch
from memprof.stubs import fused_optimizers
from memprof.stubs.packages import NO_STUBS_HINT
from memprof.stubs.registry import stub
from memprof.stubs.tools import check_on_gpu, mark_written

_SOURCE = "deepspeedai/DeepSpeed@v0.19.5:deepspeed/ops/adam/"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MODULE = "deepspeed.ops.adam"
_NOT_COMPILED = (
    f"DeepSpeed's kernel of FusedAdam is not compiled here: it is replaced by a stub, as of 0.19.5 {NO_STUBS_HINT}"
)


@stub(f"{_MODULE}.multi_tensor_apply.MultiTensorApply", source=f"{_SOURCE}multi_tensor_apply.py")
class MultiTensorApply(fused_optimizers.MultiTensorApply):
    """A callable that calls a kernel over lists of tensors with its chunk size; nothing is allocated."""


_apply = stub(f"{_MODULE}.fused_adam.multi_tensor_applier", source=f"{_SOURCE}fused_adam.py")(
    MultiTensorApply(fused_optimizers.CHUNK_SIZE)
)


def multi_tensor_adam(chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *options) -> None:
    """Mark parameters and both moments in `lists` as written in place; nothing is allocated."""
    check_on_gpu("deepspeed.ops.adam.FusedAdam", flag, *itertools.chain(*lists))
    mark_written(*itertools.chain(*lists[1:]))


@stub(f"{_MODULE}.fused_adam.FusedAdam", f"{_MODULE}.FusedAdam", source=f"{_SOURCE}fused_adam.py")
class FusedAdam(fused_optimizers.FusedOptimizer):
    """Adam with both moments in the parameter's dtype, and one kernel call per parameter group and dtype."""

    sparse_error = "FusedAdam does not support sparse gradients"
    dtype_error = "FusedAdam only support fp16, bf16 and fp32."

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0,
        amsgrad=False, set_grad_none=True,
    ):  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")
        self.multi_tensor_adam = multi_tensor_adam

    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):  # type: ignore[override]
        self._refuse_arguments(grads, output_params, scale, grad_norms)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group.setdefault("step", 0)
            rows = []
            state: dict[str, Any] = {}
            for parameter in self._iter_parameters(group, _DTYPES):
                state = _init_state(self.state[parameter], parameter, parameter.dtype, group["step"])
                rows.append((parameter.grad.data, parameter.data, state["exp_avg"], state["exp_avg_sq"]))  # type: ignore[union-attr]
            for lists in self._group_by_dtype(rows, _DTYPES):
                state["step"] += 1  # of the last parameter, as in deepspeed
                _apply(self.multi_tensor_adam, self._dummy_overflow_buf, lists, group["lr"], *group["betas"])
        return loss


def _init_state(state: dict[str, Any], parameter: torch.Tensor, dtype: torch.dtype, step: int = 0) -> dict[str, Any]:
    if not state:
        state["step"] = step
        state["exp_avg"] = torch.zeros_like(parameter.data, dtype=dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter.data, dtype=dtype)
    return state


@stub(f"{_MODULE}.cpu_adam.DeepSpeedCPUAdam", f"{_MODULE}.DeepSpeedCPUAdam", source=f"{_SOURCE}cpu_adam.py")
class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """Adam on the host: parameters, gradients and both moments are host tensors, and their values are computed."""

    def __init__(
        self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False,
        adamw_mode=True, fp32_optimizer_states=True,
    ):  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, defaults | {"bias_correction": bias_correction, "amsgrad": amsgrad})
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states

    @torch.no_grad()
    def step(self, closure=None):
        return self.step_subgroup(None, closure)

    @torch.no_grad()
    def step_subgroup(self, subgroup_id, closure=None):
        """Run a step with the moments stored under `subgroup_id`, or under each parameter if it is None."""
        check_on_gpu("deepspeed.ops.adam.DeepSpeedCPUAdam")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.device.type != "cpu":
                    raise AssertionError(
                        f"CPUAdam param is on {parameter.device} and must be 'cpu', make sure you enabled "
                        "'offload_optimizer': 'cpu' in your ZeRO config."
                    )
                dtype = torch.float32 if self.fp32_optimizer_states else parameter.dtype
                key = parameter if subgroup_id is None else subgroup_id
                state = _init_state(self.state[key], parameter, dtype)
                state["step"] += 1
                self._update(group, parameter.data, parameter.grad.data, state)
        return loss

    def _update(self, group, data, gradient, state):
        """Update one parameter in float32, as `Adam_Optimizer::Step_1` does."""
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        is_corrected = group["bias_correction"]
        value, gradient = data.float(), gradient.float()
        if decay > 0 and not self.adam_w_mode:
            gradient = gradient + decay * value
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = lr / (1 - beta1 ** state["step"] if is_corrected else 1.0)
        denominator = square.float().sqrt() / ((1 - beta2 ** state["step"]) ** 0.5 if is_corrected else 1.0)
        if decay > 0 and self.adam_w_mode:
            value = value * (1 - lr * decay)
        data.copy_(value.addcdiv(mean.float(), denominator + group["eps"], value=-step_size))


def get_patches(module, assume: Callable[[str], None]) -> Iterator[Patch]:
    """Yield a patch of `load` in `module`, deepspeed.ops.op_builder.fused_adam, which compiles the fused kernel."""

    def load(self, verbose: bool = True):
        assume(_NOT_COMPILED)
        return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)

    yield module.FusedAdamBuilder, "load", load
