"""mamba_ssm: the selective scan, and the first Mamba's layer around it in one function.

Sources: mamba_ssm/ops/selective_scan_interface.py, modules/mamba_simple.py and csrc/selective_scan/selective_scan.cpp
of state-spaces/mamba@v2.3.2.post1. Mamba 2, whose kernels are Triton's, and decoding are not supported.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memprof.stubs import causal_conv1d
from memprof.stubs.registry import stub
from memprof.stubs.tools import autocast_dtype, check_on_gpu, kernel, maybe_contiguous, refuse_any, refuse_if, require

_SOURCE = "state-spaces/mamba@v2.3.2.post1:mamba_ssm/"
_SCAN = "mamba_ssm.ops.selective_scan_interface"
_CHUNK = 2048  # time steps between two saved states (n_chunks in selective_scan.cpp)


def _scan(u: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, z) -> tuple[torch.Tensor, ...]:
    """Return output, states of each chunk, and with a gate `z` the gated output (selective_scan_fwd)."""
    gated = [torch.empty_like(z)] if z is not None else []
    out = torch.empty_like(delta)
    chunks = -(-u.shape[-1] // _CHUNK)
    states = u.new_empty((*u.shape[:2], chunks, a.shape[1] * 2), dtype=a.dtype)
    return out, states, *gated


def _scan_backward(u, delta, a, b, c, d, z, bias, d_z, recomputes_gated: bool, out) -> tuple[Any, ...]:
    """Return the gradients of all inputs, and the gated output if it is recomputed (selective_scan_bwd)."""
    if z is not None and d_z is None:
        d_z = torch.empty_like(z)
    gated = torch.empty_like(out) if recomputes_gated else None
    d_u, d_delta, d_a = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    sums = [torch.zeros_like(t, dtype=torch.float32 if t.dim() > 2 else None) for t in (b, c)]
    d_d, d_bias = (None if t is None else torch.zeros_like(t) for t in (d, bias))
    d_b, d_c = (total.to(t.dtype) for total, t in zip(sums, (b, c), strict=True))
    return d_u, d_delta, d_a, d_b, d_c, d_d, d_bias, d_z, gated


@stub(f"{_SCAN}.selective_scan_fn", "mamba_ssm.selective_scan_fn", source=_SOURCE + "ops/selective_scan_interface.py")
def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """Selective scan of `u` [batch, channels, time]; saves inputs, a state per 2,048 steps, and with `z` the output."""
    name = "mamba_ssm.selective_scan_fn"
    check_on_gpu(name, u, delta, A)
    refuse_if(name, {"complex numbers": A.is_complex()})
    require(u.dim() == 3 and delta.shape == u.shape, name, "u and delta of [batch, channels, time]")
    require(A.dim() == 2 and A.shape[0] == u.shape[1], name, "A of [channels, states]")
    require(z is None or z.shape == u.shape, name, "z as u is")
    are_3d = B.dim() == 3, C.dim() == 3

    def forward(x, steps, a, b, c, d, gate, bias):
        x, steps, b, c, gate = map(maybe_contiguous, (x, steps, b, c, gate))
        d = None if d is None else d.contiguous()
        b, c = (t.unsqueeze(1) if is_flat else t for t, is_flat in zip((b, c), are_3d, strict=True))
        out, states, *gated = _scan(x, steps, a, gate)
        result = gated[0] if gated else out
        saved = (x, steps, a, b, c, d, gate, bias, states, out if gated else None)
        return ((result, states[:, :, -1, 1::2]) if return_last_state else result), saved

    def backward(saved, gradient, *state_gradient):
        gradient = maybe_contiguous(gradient)
        x, steps, a, b, c, d, gate, bias, _, out = saved
        gradients = _scan_backward(x, steps, a, b, c, d, gate, bias, None, False, out)
        d_b, d_c = (t.squeeze(1) if is_flat else t for t, is_flat in zip(gradients[3:5], are_3d, strict=True))
        return *gradients[:3], d_b, d_c, gradients[5], gradients[7], gradients[6]

    return kernel(forward, backward, u, delta, A, B, C, D, z, delta_bias)


def _rearrange_by_channel(tensor: torch.Tensor, time: int) -> torch.Tensor:
    """Return `tensor` rearranged from "d (b l)" to "b d l"."""
    return tensor.unflatten(1, (-1, time)).transpose(0, 1)


@stub(f"{_SCAN}.mamba_inner_fn", "mamba_ssm.mamba_inner_fn", source=_SOURCE + "ops/selective_scan_interface.py")
def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None,
    D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1,
    b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
):  # fmt: skip
    """Convolution, projections, scan and output projection; the backward recomputes convolution and step sizes."""
    name = "mamba_ssm.mamba_inner_fn"
    check_on_gpu(name, xz, A)
    refuse_any(
        name, B=B, C=C, B_proj_bias=B_proj_bias, C_proj_bias=C_proj_bias, b_rms_weight=b_rms_weight,
        c_rms_weight=c_rms_weight, dt_rms_weight=dt_rms_weight,
    )  # fmt: skip
    refuse_if(name, {"complex numbers": A.is_complex(), f"checkpoint_lvl={checkpoint_lvl}": checkpoint_lvl != 1})
    rank, states, time = delta_proj_weight.shape[1], A.shape[-1], xz.shape[-1]

    def forward(packed, kernel_weight, kernel_bias, x_weight, step_weight, out_weight, out_bias, a, d, bias):
        weights = (x_weight, step_weight, out_weight)
        x_weight, step_weight, out_weight = (t.to(autocast_dtype(t.dtype)) for t in weights)
        out_bias = None if out_bias is None else out_bias.to(autocast_dtype(out_bias.dtype))
        packed = maybe_contiguous(packed)
        x, gate = packed.chunk(2, dim=1)
        kernel_weight = kernel_weight.squeeze(1)
        conv_out = torch.empty_like(x)
        x_proj = functional.linear(conv_out.transpose(1, 2).reshape(-1, conv_out.shape[1]), x_weight)
        steps = _rearrange_by_channel(step_weight @ x_proj[:, :rank].t(), time)
        b, c = (
            part.unflatten(0, (-1, time)).transpose(1, 2).unsqueeze(1).contiguous()
            for part in (x_proj[:, rank : rank + states], x_proj[:, -states:])
        )
        d = None if d is None else d.contiguous()
        out, scan_states, gated = _scan(conv_out, steps, a, gate)
        saved = (
            packed, kernel_weight, kernel_bias, x_proj, x_weight, step_weight, out_weight, a, b, c, d, bias,
            scan_states, out,
        )  # fmt: skip
        return functional.linear(gated.transpose(1, 2), out_weight, out_bias), saved

    def backward(saved, gradient: torch.Tensor):
        packed, kernel_weight, kernel_bias, x_proj, x_weight, step_weight, out_weight, a, b, c, d, bias, _, out = saved
        x, gate = packed.chunk(2, dim=1)
        gradient = maybe_contiguous(gradient)
        conv_out = torch.empty_like(x)
        steps = _rearrange_by_channel(step_weight @ x_proj[:, :rank].t(), time)
        d_packed = torch.empty_like(packed)
        d_x, d_gate = d_packed.chunk(2, dim=1)
        rows = gradient.flatten(0, 1).t()
        d_out = _rearrange_by_channel(out_weight.t() @ rows, time)
        gradients = _scan_backward(conv_out, steps, a, b, c, d, gate, bias, d_gate, True, out)
        d_mixed, d_steps, d_a, d_b, d_c, d_d, d_bias, _, gated = gradients
        del gradients
        d_out_weight = torch.einsum("eB,dB->ed", rows, gated.transpose(0, 1).reshape(gated.shape[1], -1))
        d_out_bias = None if out_proj_bias is None else gradient.flatten(0, 1).sum(0)
        d_projected = torch.empty_like(x_proj)
        d_b = d_b.squeeze(1).transpose(1, 2).reshape(-1, states).contiguous()
        d_projected[:, rank : rank + states] = d_b
        del d_b
        d_c = d_c.squeeze(1).transpose(1, 2).reshape(-1, states).contiguous()
        d_projected[:, -states:] = d_c
        del d_c
        d_steps = d_steps.transpose(0, 1).reshape(d_steps.shape[1], -1)
        d_step_weight = torch.einsum("dB,Br->dr", d_steps, x_proj[:, :rank])
        d_projected[:, :rank] = torch.einsum("dB,dr->Br", d_steps, step_weight)
        d_mixed = d_mixed.transpose(0, 1).reshape(d_mixed.shape[1], -1)
        d_x_weight = torch.einsum("Br,Bd->rd", d_projected, conv_out.transpose(1, 2).reshape(-1, conv_out.shape[1]))
        torch.addmm(d_mixed, x_weight.t(), d_projected.t(), out=d_mixed)
        _, d_kernel, d_kernel_bias = causal_conv1d.run_backward(x, kernel_weight, kernel_bias, d_x)
        del d_out
        return (
            d_packed, d_kernel.unsqueeze(1), d_kernel_bias, d_x_weight, d_step_weight, d_out_weight, d_out_bias,
            d_a, d_d, d_bias,
        )  # fmt: skip

    return kernel(
        forward, backward, xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
        out_proj_bias, A, D, delta_bias,
    )  # fmt: skip


@stub("mamba_ssm.modules.mamba_simple.Mamba", "mamba_ssm.Mamba", source=_SOURCE + "modules/mamba_simple.py")
class Mamba(nn.Module):
    """A Mamba layer for training: input projection, mamba_inner_fn, and a float32 copy of A."""

    def __init__(
        self, d_model, d_state=16, d_conv=4, expand=2, dt_rank="auto", dt_min=0.001, dt_max=0.1, dt_init="random",
        dt_scale=1.0, dt_init_floor=1e-4, conv_bias=True, bias=False, use_fast_path=True, layer_idx=None, device=None,
        dtype=None,
    ):  # fmt: skip
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.in_proj = nn.Linear(d_model, self.d_inner * 2, bias=bias, **options)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1, bias=conv_bias, **options
        )
        self.activation, self.act = "silu", nn.SiLU()
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + d_state * 2, bias=False, **options)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **options)
        a = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).expand(self.d_inner, -1).contiguous()
        self.A_log = nn.Parameter(torch.log(a))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device))
        for parameter in (self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **options)

    def forward(self, hidden_states, inference_params=None):
        """Run the layer on [batch, time, channels]."""
        conditions = {"use_fast_path=False": not self.use_fast_path, "inference_params": inference_params is not None}
        refuse_if("mamba_ssm.Mamba", conditions)
        time = hidden_states.shape[1]
        xz = _rearrange_by_channel(self.in_proj.weight @ hidden_states.flatten(0, 1).t(), time)
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(dtype=xz.dtype)[:, None]
        a = -torch.exp(self.A_log.float())
        return mamba_inner_fn(
            xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.out_proj.weight,
            self.out_proj.bias, a, None, None, self.D.float(), delta_bias=self.dt_proj.bias.float(),
            delta_softplus=True,
        )  # fmt: skip
