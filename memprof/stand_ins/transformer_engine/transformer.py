"""transformer_engine's TransformerLayer.

Sources: pytorch/transformer.py and pytorch/jit.py: bias, dropout and the residual are one compiled kernel, which keeps
the mask of a dropout, and whose backward sums the bias' gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memprof.stand_ins.tools import kernel, on_card
from memprof.stand_ins.transformer_engine.attention import MultiheadAttention, _refuse
from memprof.stand_ins.transformer_engine.mlp import LayerNormMLP
from memprof.stand_ins.transformer_engine.norms import LayerNorm, RMSNorm
from memprof.stand_ins.transformer_engine.precision import te

_NAME = "transformer_engine.pytorch.TransformerLayer"


def added(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, dropout: float) -> torch.Tensor:
    """_bias_dropout_add."""
    if bias is None:
        return residual + nn.functional.dropout(x, p=dropout, training=dropout > 0)

    def fore(given: torch.Tensor, shift: torch.Tensor, beside: torch.Tensor) -> Any:
        out = torch.empty_like(given)
        return out, (torch.empty_like(given, dtype=torch.bool) if dropout else None,)

    def back(saved: Any, gradient: torch.Tensor) -> Any:
        through = torch.empty_like(gradient) if dropout else gradient
        return through, gradient.new_empty(gradient.shape[-1]), gradient

    return kernel(fore, back, x, bias, residual)


@te("TransformerLayer", "transformer")
class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each with a norm before and a residual beside it."""

    def __init__(
        self, hidden_size: Any, ffn_hidden_size: Any, num_attention_heads: Any, num_gqa_groups: Any = None,
        layernorm_epsilon: Any = 1e-5, hidden_dropout: Any = 0.1, attention_dropout: Any = 0.1,
        init_method: Any = None, output_layer_init_method: Any = None, layer_number: Any = None,
        kv_channels: Any = None, self_attn_mask_type: Any = "causal", window_size: Any = None,
        bottom_right_diagonal: Any = None, enc_dec_attn_mask_type: Any = "no_mask",
        enc_dec_bottom_right_diagonal: Any = None, enc_dec_window_size: Any = None, tp_group: Any = None,
        tp_size: Any = 1, params_dtype: Any = None, get_rng_state_tracker: Any = None,
        fuse_wgrad_accumulation: Any = False, seq_length: Any = None, micro_batch_size: Any = None,
        sequence_parallel: Any = False, apply_residual_connection_post_layernorm: Any = False,
        output_layernorm: Any = False, parallel_attention_mlp: Any = False, layer_type: Any = "encoder",
        drop_path_rate: Any = 0.0, set_parallel_mode: Any = False, fuse_qkv_params: Any = False,
        rotary_pos_interleaved: Any = False, zero_centered_gamma: Any = False, qkv_weight_interleaved: Any = True,
        ub_tp_comm_overlap: Any = False, ub_overlap_ag: Any = True, ub_overlap_rs: Any = True,
        ub_overlap_rs_dgrad: Any = False, ub_bulk_dgrad: Any = True, ub_bulk_wgrad: Any = True, bias: Any = True,
        activation: Any = "gelu", activation_params: Any = None, normalization: Any = "LayerNorm",
        device: Any = "cuda", attn_input_format: Any = "sbhd", name: Any = None, qk_norm_type: Any = None,
        qk_norm_eps: Any = 1e-6, qk_norm_before_rope: Any = False, softmax_type: Any = "vanilla",
    ) -> None:  # fmt: skip
        super().__init__()
        others = {
            f"layer_type={layer_type!r}": layer_type != "encoder", "parallel_attention_mlp": parallel_attention_mlp,
            "apply_residual_connection_post_layernorm": apply_residual_connection_post_layernorm,
            f"drop_path_rate={drop_path_rate}": drop_path_rate > 0.0, "ub_tp_comm_overlap": ub_tp_comm_overlap,
        }  # fmt: skip
        _refuse(_NAME, others)
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "Gradient accumulation fusion (fuse_wgrad_accumulation=True) requires fuse_qkv_params=True, but "
                "fuse_qkv_params is False."
            )
        self.self_attn_mask_type, self.window_size, self.hidden_dropout = (
            self_attn_mask_type, window_size, hidden_dropout,
        )  # fmt: skip
        shared: dict[str, Any] = {
            "tp_group": tp_group, "tp_size": tp_size, "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype, "bias": bias, "return_bias": True, "normalization": normalization,
            "device": device, "zero_centered_gamma": zero_centered_gamma, "set_parallel_mode": set_parallel_mode,
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            layer_number=layer_number, num_gqa_groups=num_gqa_groups, input_layernorm=not output_layernorm,
            fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format, qk_norm_type=qk_norm_type, softmax_type=softmax_type, **shared,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation, **shared
        )
        self.layernorm: nn.Module | None = None
        if output_layernorm:
            kind = RMSNorm if normalization == "RMSNorm" else LayerNorm
            self.layernorm = kind(
                hidden_size, eps=layernorm_epsilon, params_dtype=params_dtype, device=device,
                zero_centered_gamma=zero_centered_gamma,
            )  # fmt: skip

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, self_attn_mask_type: Any = None, window_size: Any = None,
        bottom_right_diagonal: Any = None, encoder_output: Any = None, enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: Any = None, enc_dec_window_size: Any = None,
        enc_dec_bottom_right_diagonal: Any = None, is_first_microbatch: Any = None,
        checkpoint_core_attention: Any = False, inference_params: Any = None, rotary_pos_emb: Any = None,
        core_attention_bias_type: Any = "no_bias", core_attention_bias: Any = None, alibi_slopes: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None,
        fast_zero_fill: Any = True, pad_between_seqs: Any = None,
    ) -> Any:  # fmt: skip
        """[tokens, batch, channels] by "sbhd"."""
        on_card(_NAME, hidden_states)
        hidden_states = hidden_states.contiguous()
        if torch.is_autocast_enabled():
            hidden_states = hidden_states.to(torch.get_autocast_dtype("cuda"))
        dropout = self.hidden_dropout if self.training else 0.0
        attended, bias = self.self_attention(
            hidden_states, attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            window_size=window_size or self.window_size, is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention, inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb, core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        hidden_states = added(attended, bias, hidden_states, dropout)
        made, bias = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        out = added(made, bias, hidden_states, dropout)
        return out if self.layernorm is None else self.layernorm(out)
