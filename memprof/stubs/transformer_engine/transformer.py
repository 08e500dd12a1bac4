"""transformer_engine's TransformerLayer.

Sources: pytorch/transformer.py and pytorch/jit.py: bias, dropout and the residual are one compiled kernel, which saves
the dropout mask, and whose backward sums the bias gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.stubs.tools import autocast_dtype, check_on_gpu, kernel, refuse_if
from memprof.stubs.transformer_engine.attention import MultiheadAttention
from memprof.stubs.transformer_engine.mlp import LayerNormMLP
from memprof.stubs.transformer_engine.norms import LayerNorm, RMSNorm
from memprof.stubs.transformer_engine.precision import register

_NAME = "transformer_engine.pytorch.TransformerLayer"


def add_residual(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return residual + dropout(x + bias), as _bias_dropout_add does; saves the dropout mask."""
    if bias is None:
        return residual + nn.functional.dropout(x, p=dropout, training=dropout > 0)

    def forward_kernel(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor):
        return torch.empty_like(x), (torch.empty_like(x, dtype=torch.bool) if dropout else None,)

    def backward_kernel(saved, gradient: torch.Tensor):
        d_x = torch.empty_like(gradient) if dropout else gradient
        return d_x, gradient.new_empty(gradient.shape[-1]), gradient

    return kernel(forward_kernel, backward_kernel, x, bias, residual)


@register("transformer")
class TransformerLayer(nn.Module):
    """A pre-norm transformer layer: attention and MLP, each with a residual."""

    def __init__(
        self, hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-5,
        hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, layer_number=None,
        kv_channels=None, self_attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
        enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None, tp_group=None,
        tp_size=1, params_dtype=None, get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None,
        micro_batch_size=None, sequence_parallel=False, apply_residual_connection_post_layernorm=False,
        output_layernorm=False, parallel_attention_mlp=False, layer_type="encoder", drop_path_rate=0.0,
        set_parallel_mode=False, fuse_qkv_params=False, rotary_pos_interleaved=False, zero_centered_gamma=False,
        qkv_weight_interleaved=True, ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True,
        ub_overlap_rs_dgrad=False, ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation="gelu",
        activation_params=None, normalization="LayerNorm", device="cuda", attn_input_format="sbhd", name=None,
        qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False, softmax_type="vanilla",
    ):  # fmt: skip
        super().__init__()
        refuse_if(_NAME, {
            f"layer_type={layer_type!r}": layer_type != "encoder", "parallel_attention_mlp": parallel_attention_mlp,
            "apply_residual_connection_post_layernorm": apply_residual_connection_post_layernorm,
            f"drop_path_rate={drop_path_rate}": drop_path_rate > 0.0, "ub_tp_comm_overlap": ub_tp_comm_overlap,
        })  # fmt: skip
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "Gradient accumulation fusion (fuse_wgrad_accumulation=True) requires fuse_qkv_params=True, but "
                "fuse_qkv_params is False."
            )
        self.self_attn_mask_type, self.window_size = self_attn_mask_type, window_size
        self.hidden_dropout = hidden_dropout
        options: dict[str, Any] = {
            "tp_group": tp_group, "tp_size": tp_size, "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype, "bias": bias, "return_bias": True, "normalization": normalization,
            "device": device, "zero_centered_gamma": zero_centered_gamma, "set_parallel_mode": set_parallel_mode,
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            layer_number=layer_number, num_gqa_groups=num_gqa_groups, input_layernorm=not output_layernorm,
            fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format, qk_norm_type=qk_norm_type, softmax_type=softmax_type, **options,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation, **options
        )
        self.layernorm: nn.Module | None = None
        if output_layernorm:
            norm_class = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = norm_class(
                hidden_size, eps=layernorm_epsilon, params_dtype=params_dtype, device=device,
                zero_centered_gamma=zero_centered_gamma,
            )  # fmt: skip

    def forward(
        self, hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None,
        bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None,
        enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None, is_first_microbatch=None,
        checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None, core_attention_bias_type="no_bias",
        core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None,
    ):  # fmt: skip
        """Return the layer's output, with the shape of `hidden_states`."""
        check_on_gpu(_NAME, hidden_states)
        hidden_states = hidden_states.contiguous()
        hidden_states = hidden_states.to(autocast_dtype(hidden_states.dtype))
        dropout = self.hidden_dropout if self.training else 0.0
        attention_out, bias = self.self_attention(
            hidden_states, attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            window_size=window_size or self.window_size, is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention, inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb, core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        hidden_states = add_residual(attention_out, bias, hidden_states, dropout)
        mlp_out, bias = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        out = add_residual(mlp_out, bias, hidden_states, dropout)
        return out if self.layernorm is None else self.layernorm(out)
