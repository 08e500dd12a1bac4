"""xformers.ops.fmha.attn_bias: causal and local masks, and block-diagonal masks of concatenated sequences.

Source: xformers/ops/fmha/attn_bias.py of facebookresearch/xformers@v0.0.32.post2. Masks of keys with gaps and of pages
are not supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from memprof.stubs.registry import register_in
from memprof.stubs.tools import missing_stub_error

_MODULE = "xformers.ops.fmha.attn_bias"
_Self = TypeVar("_Self", bound="BlockDiagonalMask")
_SOURCE = "facebookresearch/xformers@v0.0.32.post2:xformers/ops/fmha/attn_bias.py"
_register = register_in(_MODULE, source=_SOURCE)
_register_in_ops = register_in(_MODULE, "xformers.ops.fmha", "xformers.ops", source=_SOURCE)


@_register_in_ops
class AttentionBias:
    """The base of attention biases; nothing is allocated."""

    def to(self, device):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing_stub_error(f"xformers.ops.fmha.attn_bias.{type(self).__name__}.{name}")


@_register_in_ops
class LowerTriangularMask(AttentionBias):
    """A causal mask aligned to the first key; nothing is allocated."""

    def add_bias(self, bias):
        return LowerTriangularMaskWithTensorBias(bias)


@_register
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """A causal mask plus the caller's tensor."""

    def __init__(self, bias):
        self._bias = bias

    def to(self, device):
        return type(self)(self._bias.to(device))


@_register
@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window around each query, aligned to the last key; nothing is allocated."""

    window_left: int
    window_right: int

    def __post_init__(self):
        for side in ("left", "right"):
            if getattr(self, f"window_{side}") < 0:
                raise ValueError(f"Invalid window_{side}={getattr(self, f'window_{side}')}")


@_register
class LowerTriangularFromBottomRightMask(AttentionBias):
    """A causal mask aligned to the last key; nothing is allocated."""

    def make_local_attention(self, window_size):
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@_register
@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """A causal mask with a window, aligned to the last key; nothing is allocated."""

    _window_size: int

    def __post_init__(self):
        _check_window(self._window_size)


def _check_window(size: int) -> None:
    if size <= 0:
        raise ValueError(f"Expected `window_size > 0`, but window_size={size}")


def _to_device(integers: Iterable[int], device) -> torch.Tensor:
    tensor = torch.tensor(list(integers), dtype=torch.int32, pin_memory=torch.device(device).type != "cpu")
    return tensor.to(device, non_blocking=True)


@_register
@dataclass
class _SeqLenInfo:
    """The start offsets of concatenated sequences: an int32 tensor on the GPU, and a list."""

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def to(self, device):
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: Any = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)

    def intervals(self):
        yield from pairwise(self.seqstart_py)

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        lengths, starts = list(seqlens), [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        max_length, min_length = max(lengths, default=-1), min(lengths, default=-1)
        return cls(_to_device(starts, device or "cuda"), max_length, min_length, starts)

    def split(self, x, batch_sizes=None):
        """Return views [batch, tokens, *] of the sequences in `x` [1, tokens, *], grouped by `batch_sizes`."""
        if self.seqstart_py[-1] != x.shape[1] or x.shape[0] != 1:
            raise ValueError(f"Invalid `torch.Tensor` of shape {x.shape}, expected (1, {self.seqstart_py[-1]}, *)")
        sizes, begin, lengths = batch_sizes or [1] * (len(self.seqstart_py) - 1), 0, []
        for size in sizes:
            lengths.append(self.seqstart_py[begin + size] - self.seqstart_py[begin])
            begin += size
        views = x.split(lengths, dim=1)
        return [view.reshape(size, -1, *view.shape[2:]) for size, view in zip(sizes, views, strict=True)]


@_register
@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """The start offsets of sequences that are padded to one length; of each, the first `seqlen` keys are used."""

    seqlen: torch.Tensor
    seqlen_py: list[int]
    padding: int

    def intervals(self):
        for (start, _), length in zip(super().intervals(), self.seqlen_py, strict=True):
            yield start, start + length

    @classmethod
    def from_seqlens_padded(cls, seqlens, padding, *, device=None):
        """Return the offsets of sequences with `seqlens` keys, each padded to `padding` keys."""
        assert all(length <= padding for length in seqlens), f"Seqlens {seqlens} Padding {padding}"
        device, starts = device or "cuda", list(range(0, len(seqlens) * padding + 1, padding))
        lengths = _to_device(seqlens, device)
        return cls(_to_device(starts, device), max(seqlens), min(seqlens), starts, lengths, list(seqlens), padding)


@register_in(_MODULE, "xformers.ops.fmha", source=_SOURCE)
@dataclass
class BlockDiagonalMask(AttentionBias):
    """A mask of concatenated sequences that do not attend to each other; allocates their int32 start offsets."""

    q_seqinfo: Any
    k_seqinfo: Any
    _batch_sizes: Sequence[int] | None = None

    def to(self, device):
        return replace(self, q_seqinfo=self.q_seqinfo.to(device), k_seqinfo=self.k_seqinfo.to(device))

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert kv_seqlen is None or len(q_seqlen) == len(kv_seqlen)
        query_info = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or q_seqlen == kv_seqlen:
            return cls(query_info, query_info)
        return cls(query_info, _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors):
        """Return the mask of the sequences in `tensors`, and a copy of all as one tensor [1, tokens, *]."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])])
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _concat(tensors)

    @classmethod
    def from_tensor_lists_qkv(cls, tensors_q, tensors_k, tensors_v=None):
        assert len(tensors_q) == len(tensors_k) and (tensors_v is None or len(tensors_v) == len(tensors_q))
        lengths = ([x.shape[1] for x in tensors for _ in range(x.shape[0])] for tensors in (tensors_q, tensors_k))
        mask = cls.from_seqlens(*lengths)
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        return mask, _concat(tensors_q), _concat(tensors_k), None if tensors_v is None else _concat(tensors_v)

    def split_queries(self, tensor):
        """Return views of the query sequences in `tensor` [1, tokens, *], one for each tensor behind the mask."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)  # type: ignore[no-any-return]

    def split_kv(self, tensor):
        return self.k_seqinfo.split(tensor, self._batch_sizes)  # type: ignore[no-any-return]

    def split(self, tensor):
        assert self.q_seqinfo is self.k_seqinfo
        return self.split_queries(tensor)

    def make_causal(self):
        return self._convert_to(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self):
        return self._convert_to(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size):
        return self._convert_to(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size):
        return self._convert_to(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)

    def _convert_to(self, mask_class, *window_size: int):
        return mask_class(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *window_size)


def _concat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)


@_register
@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """A block-diagonal mask, causal within each sequence from its first key on."""


@_register
@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """A block-diagonal mask, causal within each sequence and aligned to its last key."""

    def __post_init__(self):
        spans = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=False)
        for i, ((begin, end), (key_begin, key_end)) in enumerate(spans):
            if key_end - key_begin < end - begin:
                raise ValueError(
                    f"Block #{i} has num_keys={key_end - key_begin} and num_queries={end - begin}."
                    " Expected `num_keys >= num_queries`"
                )


@_register
@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """A block-diagonal mask, causal and windowed within each sequence."""

    _window_size: int = 0

    def __post_init__(self):
        _check_window(self._window_size)


@_register
@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """A block-diagonal mask, causal and windowed within each sequence and aligned to its last key."""

    _window_size: int = 0

    def __post_init__(self):
        super().__post_init__()
        _check_window(self._window_size)


@_register
@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """A block-diagonal mask with padded keys, as in a KV cache: allocates int32 offsets and lengths; no backward."""

    q_seqinfo: Any
    k_seqinfo: Any

    def to(self, device):
        return type(self)(self.q_seqinfo.to(device), self.k_seqinfo.to(device))

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding, kv_seqlen, causal_diagonal=None, *, device=None):
        assert kv_seqlen is None or len(q_seqlen) == len(kv_seqlen), (q_seqlen, kv_seqlen)
        key_info = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), key_info)


@_register
@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """A block-diagonal mask with padded keys, causal and aligned to the last key of each sequence; no backward."""

    causal_diagonal: Any = None
