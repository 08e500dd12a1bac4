"""causal_conv1d: a depthwise causal convolution over time, with SiLU.

Sources: causal_conv1d/causal_conv1d_interface.py, cpp_functions.py and csrc/causal_conv1d.cpp of
Dao-AILab/causal-conv1d@v1.6.1.post4. It has workspaces only under torch.use_deterministic_algorithms.
"""

from __future__ import annotations

import torch

from memprof.stubs.registry import stub
from memprof.stubs.tools import check_on_gpu, kernel, mark_written, require, unsupported_error

_SOURCE = "Dao-AILab/causal-conv1d@v1.6.1.post4:causal_conv1d/causal_conv1d_interface.py, csrc/causal_conv1d.cpp"
_NAME = "causal_conv1d.causal_conv1d_fn"


def _make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a contiguous copy if neither its channels nor its time have stride 1."""
    return tensor.contiguous() if tensor.stride(2) != 1 and tensor.stride(1) != 1 else tensor


def run_backward(x: torch.Tensor, weight: torch.Tensor, bias, d_x: torch.Tensor | None = None):
    """Return the gradients of `x` (in `d_x` if given), `weight` and `bias`; the last two are summed in float32."""
    if torch.are_deterministic_algorithms_enabled():
        raise unsupported_error(_NAME, "deterministic algorithms")
    d_x = torch.empty_like(x) if d_x is None else d_x
    d_weight = torch.zeros_like(weight, dtype=torch.float32)
    d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    return d_x, d_weight.type_as(weight), None if d_bias is None else d_bias.type_as(bias)


@stub("causal_conv1d.causal_conv1d_interface.causal_conv1d_fn", _NAME, source=_SOURCE, in_graph=True)
def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    """Convolve `x` [batch, channels, time] with `weight` [channels, width]; saves both, and the bias."""
    check_on_gpu(_NAME, x, weight)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    require(x.dim() == 3 and weight.dim() == 2, _NAME, "x of 3 dimensions, and a weight of 2")
    require(x.shape[1] == weight.shape[0], _NAME, f"a weight of {x.shape[1]} channels, as x has")
    require(2 <= weight.shape[1] <= 4, _NAME, "a width between 2 and 4")
    if initial_states is not None or return_final_states:
        raise unsupported_error(_NAME, "states")

    def forward(x: torch.Tensor, weight: torch.Tensor, bias):
        x = _make_contiguous(x)
        bias = None if bias is None else bias.contiguous()
        indices = None if seq_idx is None else seq_idx.contiguous()
        return torch.empty_like(x), (x, weight, bias, indices)

    def backward(saved, gradient: torch.Tensor):
        gradient = _make_contiguous(gradient)
        return run_backward(*saved[:3])

    return kernel(forward, backward, x, weight, bias)


@stub(
    "causal_conv1d.causal_conv1d_interface.causal_conv1d_update", "causal_conv1d.causal_conv1d_update", source=_SOURCE
)
def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    """Convolve `x`, one or a few new tokens; allocates the output, and writes `conv_state` in place."""
    check_on_gpu("causal_conv1d.causal_conv1d_update", x, conv_state)
    mark_written(conv_state)
    return torch.empty_like(x)
