"""Extension modules of flash-attention's repository outside the package: norms, rotary embeddings, cross-entropy,
products with an activation. Programs call them through copied Python code.

Sources, of Dao-AILab/flash-attention: csrc/layer_norm/ln_api.cpp and csrc/fused_dense_lib/fused_dense.cpp at v2.8.3,
csrc/rotary/rotary.cpp and csrc/xentropy at v2.8.2, the last release that has them. CUDA determines how many blocks of
the norms' backward run on a multiprocessor: one is counted.
"""

from __future__ import annotations

import torch

from memprof.stubs.registry import stub
from memprof.stubs.tools import HALF, check_on_gpu, count_multiprocessors, mark_written, require

_REPOSITORY = "Dao-AILab/flash-attention@"
_NORM_SOURCE = f"{_REPOSITORY}v2.8.3:csrc/layer_norm/ln_api.cpp"
_DENSE_SOURCE = f"{_REPOSITORY}v2.8.3:csrc/fused_dense_lib/fused_dense.cpp"
_LOSS_SOURCE = f"{_REPOSITORY}v2.8.2:csrc/xentropy/interface.cpp, csrc/xentropy/xentropy_kernel.cu"


@stub("rotary_emb.apply_rotary", source=f"{_REPOSITORY}v2.8.2:csrc/rotary/rotary.cpp")
def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    """Write the rotated tensors into `out1` and `out2`; nothing is allocated."""
    check_on_gpu("rotary_emb.apply_rotary", x1, x2, cos, sin, out1, out2)
    require(x1.dtype == cos.dtype == out1.dtype, "rotary_emb.apply_rotary", "one dtype")
    require(x1.shape == x2.shape and cos.shape == sin.shape, "rotary_emb.apply_rotary", "halves of one shape")
    mark_written(out1, out2)


@stub("xentropy_cuda_lib.forward", source=_LOSS_SOURCE)
def cross_entropy(input, labels, smoothing, total_classes=-1):
    """Return the loss and the log-sum-exp of each row, in float32."""
    name = "xentropy_cuda_lib.forward"
    check_on_gpu(name, input, labels)
    require(input.dim() == 2 and labels.shape == input.shape[:1], name, "a label for each row of logits")
    require(labels.dtype == torch.int64 and input.is_contiguous(), name, "labels of int64 and contiguous logits")
    lse = torch.empty_like(labels, dtype=torch.float32)
    return [torch.empty_like(lse), lse]


@stub("xentropy_cuda_lib.backward", source=_LOSS_SOURCE)
def cross_entropy_backward(grad_loss, logits, max_log_sum_exp, labels, smoothing, inplace, total_classes=-1):
    """Return the gradient of the logits, which overwrites them if `inplace`."""
    name = "xentropy_cuda_lib.backward"
    check_on_gpu(name, grad_loss, logits, max_log_sum_exp, labels)
    require(grad_loss.dtype == torch.float32, name, "gradients of float32")
    if not inplace:
        return torch.empty_like(logits)
    mark_written(logits)
    return logits


def _check_norm(name: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    require(x.dim() == 2 and x.is_contiguous(), name, "contiguous rows")
    require(gamma.numel() == x.shape[1], name, f"weights of {x.shape[1]}")
    require(x.shape[1] % 8 == 0 and x.shape[1] <= 8192, name, "rows of at most 8192 elements, a multiple of 8")


@stub("dropout_layer_norm.dropout_add_ln_fwd", source=_NORM_SOURCE)
def dropout_add_ln_fwd(
    x0, residual_, gamma, beta_, rowscale_, colscale_, x0_subset_, z_subset_, dropout_p, epsilon, rowscale_const,
    z_numrows, gen_, residual_in_fp32=False, is_rms_norm=False,
):  # fmt: skip
    """Return norm, sum of input and residual, uint8 dropout mask (None if not needed), mean and rstd of each row."""
    name = "dropout_layer_norm.dropout_add_ln_fwd"
    check_on_gpu(name, x0, residual_, gamma, beta_)
    _check_norm(name, x0, gamma)
    rows, cols = (x0 if x0_subset_ is None else x0_subset_).shape[0], x0.shape[1]
    dtype = residual_.dtype if residual_ is not None else torch.float32 if residual_in_fp32 else x0.dtype
    changes_x = any(tensor is not None for tensor in (residual_, rowscale_, colscale_, x0_subset_))
    x = x0.new_empty((rows, cols), dtype=dtype) if dropout_p > 0 or dtype != x0.dtype or changes_x else None
    mask = torch.empty_like(x0, dtype=torch.uint8) if dropout_p > 0 else None
    z = x0.new_empty((rows if z_subset_ is None else z_numrows, cols))
    mu, sigma = (x0.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return [z, x, mask, mu, sigma]


@stub("dropout_layer_norm.dropout_add_ln_bwd", source=_NORM_SOURCE)
def dropout_add_ln_bwd(
    dz, dx_, x, x0_, dmask_, mu, rsigma, gamma, rowscale_, colscale_, x0_subset_, z_subset_, dropout_p, rowscale_const,
    x0_numrows, has_residual, is_rms_norm=False,
):  # fmt: skip
    """Return the gradients of input, residual and parameters, and the partial sums of the parameters' gradients."""
    name = "dropout_layer_norm.dropout_add_ln_bwd"
    check_on_gpu(name, dz, x, gamma)
    _check_norm(name, x, gamma)
    cols = x.shape[1]
    d_x0 = x.new_empty((x.shape[0] if x0_subset_ is None else x0_numrows, cols), dtype=dz.dtype)
    d_residual = torch.empty_like(x) if has_residual else None
    gradients = [d_x0, d_residual, torch.empty_like(gamma), torch.empty_like(gamma)]
    d_scale = [] if colscale_ is None else [torch.empty_like(colscale_)]
    parts = [x.new_empty((count_multiprocessors(), cols), dtype=torch.float32) for _ in range(2 + len(d_scale))]
    return [*gradients, *parts[:2], *d_scale, *parts[2:]]


def _run_product(name: str, *tensors) -> None:
    """Check the arguments of a matrix product, and allocate and free cuBLASLt's workspace for it."""
    check_on_gpu(name, *tensors)
    matrices = [tensor for tensor in tensors if tensor is not None]
    require(matrices[0].dtype in HALF and matrices[0].dtype == matrices[1].dtype, name, "half precision")
    require(all(tensor.is_contiguous() for tensor in matrices), name, "contiguous tensors")
    is_hopper = torch.cuda.get_device_capability(matrices[0].device) >= (9, 0)
    torch.empty((32 if is_hopper else 4) * 2**20, dtype=torch.uint8, device=matrices[0].device)


@stub("fused_dense_lib.linear_bias_wgrad", source=_DENSE_SOURCE)
def linear_bias_wgrad(input, d_output, has_d_bias):
    """Return the gradients of a linear layer's weight and bias, by one product; scratch: 4 MiB (Hopper: 32)."""
    d_weight = input.new_empty((d_output.shape[1], input.shape[1]))
    d_bias = input.new_empty(d_output.shape[1]) if has_d_bias else None
    _run_product("fused_dense_lib.linear_bias_wgrad", input, d_output)
    return [d_weight, d_bias]


@stub("fused_dense_lib.linear_act_forward", source=_DENSE_SOURCE)
def linear_act_forward(input, weight, bias_, is_gelu, save_pre_act, heuristic):
    """Return the activation's output and, if `save_pre_act`, its input (for ReLU bits); scratch: 4 MiB (Hopper: 32)."""
    rows, columns = input.shape[0], weight.shape[0]
    outputs = [input.new_empty((rows, columns))]
    if save_pre_act:
        size, dtype = (columns, input.dtype) if is_gelu else (columns // 8, torch.uint8)
        outputs.append(input.new_empty((rows, size), dtype=dtype))
    _run_product("fused_dense_lib.linear_act_forward", input, weight, bias_)
    return outputs


@stub("fused_dense_lib.bias_act_linear_dgrad_bgrad", source=_DENSE_SOURCE)
def bias_act_linear_dgrad_bgrad(weight, d_output, pre_act, is_gelu, heuristic):
    """Return the gradients of the activation's input and of the bias; scratch: 4 MiB (Hopper: 32)."""
    d_bias = weight.new_empty(weight.shape[1])
    d_input = weight.new_empty((d_output.shape[0], weight.shape[1]))
    _run_product("fused_dense_lib.bias_act_linear_dgrad_bgrad", weight, d_output)
    return [d_input, d_bias]
