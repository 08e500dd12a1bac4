"""Private names of C++ functions that kernels replace or call, and of functions that choose between kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.torch_private.names import PrivateName, bind

parse_to: Callable[..., Any] = bind("torch._C:_nn._parse_to")
cross_entropy_loss: Callable[..., Any] = bind("torch._C:_nn.cross_entropy_loss")
linear: Callable[..., Any] = bind("torch._C:_nn.linear")
nll_loss_nd: Callable[..., Any] = bind("torch._C:_nn.nll_loss_nd")
one_hot: Callable[..., Any] = bind("torch._C:_nn.one_hot")
scaled_dot_product_attention: Callable[..., Any] = bind("torch._C:_nn.scaled_dot_product_attention")
addmm_activation: Callable[..., Any] = bind("torch:_addmm_activation")
masked_softmax: Callable[..., Any] = bind("torch:_masked_softmax")
native_multi_head_attention: Callable[..., Any] = bind("torch:_native_multi_head_attention")
istft: Callable[..., Any] = bind("torch:_VF.istft")
norm: Callable[..., Any] = bind("torch:_VF.norm")
safe_softmax: Callable[..., Any] = bind("torch:_safe_softmax")
stft: Callable[..., Any] = bind("torch:_VF.stft")
transformer_encoder_layer_fwd: Callable[..., Any] = bind("torch:_transformer_encoder_layer_fwd")

get_cudnn_enabled: Callable[[], bool] = bind("torch._C:_get_cudnn_enabled")
get_cudnn_allow_tf32: Callable[[], bool] = bind("torch._C:_get_cudnn_allow_tf32")
get_sdp_priority_order: Callable[[], list[int]] = bind("torch._C:_get_sdp_priority_order")

# Looked up on each use: the names may be absent, or replaced by patches.
addmm_dtype = PrivateName(
    "torch._decomp.decompositions:addmm_dtype",
    fallback="addmm of two dtypes runs by memprof's own meta kernel",
    since="2.13",
)
VF_of_rnn = PrivateName("torch.nn.modules.rnn:_VF")
rnn_impls = PrivateName("torch.nn.modules.rnn:_rnn_impls")
use_cudnn_rnn_flatten_weight = PrivateName("torch:_use_cudnn_rnn_flatten_weight")
