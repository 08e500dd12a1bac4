"""apex.optimizers: Adam, LAMB and SGD, with one kernel for all parameters of a dtype.

Sources: apex/optimizers/fused_adam.py, fused_lamb.py and fused_sgd.py of NVIDIA/apex@25.05.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import required  # type: ignore[attr-defined]

from memprof.stubs.apex.multi_tensor import multi_tensor_l2norm, multi_tensor_lamb, multi_tensor_step
from memprof.stubs.fused_optimizers import CHUNK_SIZE, FusedOptimizer
from memprof.stubs.registry import register_in
from memprof.stubs.tools import refuse_if


def _register(file: str):
    return register_in(
        f"apex.optimizers.{file}", "apex.optimizers", source=f"NVIDIA/apex@25.05:apex/optimizers/{file}.py"
    )


@_register("fused_adam")
class FusedAdam(FusedOptimizer):
    """Adam with two moments in float32 for any parameter dtype; `master_weights` adds a copy in float32."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0,
        amsgrad=False, set_grad_none=True, capturable=False, master_weights=False,
    ):  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        lr = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        self.param_groups_master = [
            {"params": [p.clone().detach().float() if master_weights else None for p in group["params"]]}
            for group in self.param_groups
        ]
        if capturable:
            for group in self.param_groups:
                if group["params"]:
                    group["lr"] = group["lr"].to(device=group["params"][0].device)
            self._step_supports_amp_scaling = True
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):  # type: ignore[override]
        self._refuse_arguments(grads, output_params, scale, grad_norms)
        loss = None if closure is None else closure()
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            if not group["params"]:
                continue
            device = group["params"][0].device
            if not self.capturable:
                group["step"] = group.get("step", 0) + 1
            elif "step" in group:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            else:
                group["step"] = torch.tensor([1], dtype=torch.int, device=device)
            master_by_id = dict(zip(map(id, group["params"]), masters["params"], strict=True))
            rows = []
            for parameter in self._iter_parameters(group):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter.data).float()
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data).float()
                row = (parameter.grad, parameter.data, state["exp_avg"], state["exp_avg_sq"])
                master = master_by_id[id(parameter)]
                rows.append(row if master is None or parameter.dtype == torch.bfloat16 else (*row, master))
            scales = self._make_scales(grad_scaler, device) if self.capturable else None
            for lists in self._group_by_dtype(rows, (torch.float16, torch.bfloat16, torch.float32)):
                multi_tensor_step(CHUNK_SIZE, self._dummy_overflow_buf, lists)
            del scales
        return loss

    def _make_scales(self, scaler, device):
        """Return the scale of a gradient scaler and its inverse, as tensors; ones without a scaler."""
        has_overflow = torch.zeros(1, device=device) if scaler is None else scaler._check_inf_per_device(self)[device]
        self._dummy_overflow_buf.copy_(has_overflow)
        if scaler is None:
            return torch.ones(1, device=device), torch.ones(1, device=device)
        scale = scaler._get_scale_async()
        return scale, scale.double().reciprocal().float()


@_register("fused_lamb")
class FusedLAMB(FusedOptimizer):
    """LAMB with two moments in the parameter's dtype; scratch: norms of gradients, parameters and updates."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
        adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False,
    ):  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults)
        device = self.param_groups[0]["params"][0].device
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device=device)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb

    def step(self, closure=None):
        loss = None if closure is None else closure()
        parameters = [p for group in self.param_groups for p in self._iter_parameters(group)]
        device = self.param_groups[0]["params"][0].device
        norms = {dtype: torch.zeros(1, device=device) for dtype in (torch.float32, torch.float16)}
        for dtype in norms:
            gradients = [p.grad for p in parameters if p.dtype == dtype]
            if gradients:
                norms[dtype] = multi_tensor_l2norm(CHUNK_SIZE, self._dummy_overflow_buf, [gradients], False)[0]
        global_norm = multi_tensor_l2norm(CHUNK_SIZE, self._dummy_overflow_buf, [list(norms.values())], False)[0]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rows = []
            for parameter in self._iter_parameters(group):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
                rows.append((parameter.grad, parameter.data, state["exp_avg"], state["exp_avg_sq"]))
            for lists in self._group_by_dtype(rows, (torch.float16, torch.float32)):
                multi_tensor_lamb(CHUNK_SIZE, self._dummy_overflow_buf, lists)
        del global_norm
        return loss


@_register("fused_sgd")
class FusedSGD(FusedOptimizer):
    """SGD with a momentum buffer in the dtype of each parameter, even if the momentum is 0."""

    def __init__(
        self, params, lr=required, momentum=0, dampening=0, weight_decay=0, nesterov=False, wd_after_momentum=False,
        materialize_master_grads=True, set_grad_none=False,
    ):  # fmt: skip
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov})
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        first = self.param_groups[0]["params"][0]
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device=first.device)

    def step(self, closure=None):
        refuse_if("apex.optimizers.FusedSGD", {"master weights of apex.amp": hasattr(self, "_amp_stash")})
        loss = None if closure is None else closure()
        for group in self.param_groups:
            rows = []
            for parameter in self._iter_parameters(group):
                if parameter.dtype not in (torch.float16, torch.float32):
                    continue  # other gradients stay unchanged
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.data)
                rows.append((parameter.grad, parameter.data, state["momentum_buffer"]))
            for lists in self._group_by_dtype(rows, (torch.float16, torch.float32)):
                multi_tensor_step(CHUNK_SIZE, self._dummy_overflow_buf, lists)
        return loss
