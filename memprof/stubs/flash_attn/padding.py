"""flash_attn.bert_padding: removal of padding tokens, and its inverse, by PyTorch's own operators.

Source: flash_attn/bert_padding.py of Dao-AILab/flash-attention@v2.8.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from memprof.stubs.registry import register_in
from memprof.stubs.tools import check_on_gpu, kernel

_register = register_in("flash_attn.bert_padding", source="Dao-AILab/flash-attention@v2.8.3:flash_attn/bert_padding.py")


def _expand_to_columns(indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a view [indices, columns] that repeats each index for every column."""
    return indices[:, None].expand(-1, columns)


@_register
def index_first_axis(input, indices):
    """Return the rows of `input` at `indices`, by torch.gather; the backward scatters into zeros."""
    check_on_gpu("flash_attn.bert_padding.index_first_axis")

    num_rows, row_shape = input.shape[0], input.shape[1:]

    def forward(input: torch.Tensor, indices: torch.Tensor):
        rows = input.reshape(num_rows, -1)
        return torch.gather(rows, 0, _expand_to_columns(indices, rows.shape[1])).reshape(-1, *row_shape), (indices,)

    def backward(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor):
        gradient = gradient.reshape(gradient.shape[0], -1)
        d_rows = gradient.new_zeros((num_rows, gradient.shape[1]))
        d_rows.scatter_(0, _expand_to_columns(saved[0], gradient.shape[1]), gradient)
        return d_rows.reshape(num_rows, *row_shape), None

    return kernel(forward, backward, input, indices)


@_register
def index_put_first_axis(values, indices, first_axis_dim):
    """Return `first_axis_dim` rows of zeros with `values` at `indices`; the backward gathers the rows at `indices`."""
    check_on_gpu("flash_attn.bert_padding.index_put_first_axis")

    def forward(values: torch.Tensor, indices: torch.Tensor):
        output = values.new_zeros((first_axis_dim, *values.shape[1:]))
        output[indices] = values
        return output, (indices,)

    return kernel(forward, lambda saved, gradient: (gradient[saved[0]], None), values, indices)


@_register
def index_first_axis_residual(input, indices):
    """Return the rows of `input` at `indices`, and `input`; the backward adds to the gradient of `input` in place."""
    check_on_gpu("flash_attn.bert_padding.index_first_axis_residual")

    def forward(input: torch.Tensor, indices: torch.Tensor):
        return (input[indices], input.detach()), (indices,)

    def backward(saved: tuple[torch.Tensor, ...], gradient: torch.Tensor, d_input: torch.Tensor):
        indices = saved[0].reshape(-1, *(1,) * (gradient.ndim - 1)).expand_as(gradient)
        return d_input.scatter_add_(0, indices, gradient), None

    return kernel(forward, backward, input, indices)


@_register
def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Return the unmasked tokens, their indices, cu_seqlens, the maximum length, and the length of each sequence."""
    full_mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = full_mask.sum(dim=-1, dtype=torch.int32)
    used_lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    return *_unpad(hidden_states, full_mask, lengths), used_lengths


@_register
def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Unpad rows of several sequences, whose lengths are in `attention_mask_in_length`, as unpad_input does."""
    length = attention_mask_in_length.sum(dim=-1)
    tokens = attention_mask_in_length.size(-1)
    positions = torch.arange(tokens, device=length.device, dtype=length.dtype).expand(len(length), tokens)
    mask = positions < length.unsqueeze(1)
    starts = torch.nonzero(attention_mask_in_length.flatten(), as_tuple=False).flatten()
    lengths = attention_mask_in_length.flatten()[starts]
    return _unpad(hidden_states, mask, lengths)


def _unpad(hidden_states: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> tuple[Any, ...]:
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    max_length = lengths.max().item()
    bounds = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, bounds, max_length


@_register
def pad_input(hidden_states, indices, batch, seqlen):
    """Return [batch, seqlen, ...] of zeros, with the rows of `hidden_states` at `indices`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
