"""The NPT component: a weight delta for every token, made from the attention's output, and four ways to apply it.

A layer of such a model adds h_t ΔW_t to the input projection h_t W of its MLP, with another ΔW_t for every token t. ΔW
is a [d_model x d_ffn] matrix of low rank, in one of two forms (R: rank, N: components; a_t: the attention's output):

* modulated (`ModulatedDelta`): ΔW_t = A diag(m_t) B, with m_t = a_t A, A [d_model x R] and B [R x d_ffn];
* a sum of rank-1 updates (`RankOneDeltas`): ΔW_t = Σ_i u_it^T v_it, where c_it = a_t D_i, u_it = c_it U_i^T and
  v_it = c_it V_i, with D_i and U_i [d_model x R] and V_i [R x d_ffn], i = 1 … N.

The modes differ in what exists at one time; their results are equal but for rounding:

* dense: ΔW of all tokens, [batch x tokens x d_model x d_ffn]; this is what explodes;
* chunked, per-token: ΔW of some tokens, or of one, of each sequence. In training each part is recomputed in the
  backward: otherwise autograd would save the ΔW of all parts, together as large as the dense one;
* low-rank: h W + ((h A) * m) B, or its equivalent for the other form: no ΔW at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Gain of the last initial matrix, that of the others being 1: the first delta is small, and no gradient is zero.
INIT_SCALE = 0.01


class NptComponent(nn.Module):
    """The base of both forms: the modes.

    Args:
        d_model: features of a token.
        d_ffn: columns of the weight that the delta is for.
        mode: dense, per-token, chunked or low-rank; may be changed between calls.
        chunk: tokens of each sequence that are handled together in mode chunked.
        recompute: whether parts are computed again in the backward. Without, autograd keeps what they saved.
    """

    def __init__(
        self, d_model: int, d_ffn: int, *, mode: str = "low-rank", chunk: int = 16, recompute: bool = True
    ) -> None:
        super().__init__()
        self.d_model, self.d_ffn = d_model, d_ffn
        self.mode, self.chunk, self.recompute = mode, chunk, recompute

    def forward(self, hidden: Tensor | tuple[Any, ...], attention: Tensor | tuple[Any, ...]) -> Tensor:
        """Return h ΔW, [..., d_ffn], for hidden states and attention outputs [batch, tokens, d_model].

        Either may be the first of a tuple, as layers return it; hidden states may be [batch * tokens, d_model]. Raises
        ValueError if hidden states and attention outputs have different numbers of elements.
        """
        hidden, attention = _get_first_tensor(hidden), _get_first_tensor(attention)
        leading = hidden.shape[:-1]
        if hidden.shape != attention.shape:
            if hidden.numel() != attention.numel():
                raise ValueError(f"hidden states {list(hidden.shape)} and attention {list(attention.shape)} differ")
            hidden = hidden.reshape(attention.shape)
        modulation = self.modulation(attention)
        if self.mode == "low-rank":
            result = self.apply_low_rank(hidden, modulation)
        elif self.mode == "dense":
            result = self._apply_delta(hidden, modulation)
        else:
            result = self._apply_parts(hidden, modulation, 1 if self.mode == "per-token" else self.chunk)
        return result.reshape(*leading, self.d_ffn)

    def modulation(self, attention: Tensor) -> Tensor:
        """Return the low-rank codes of each token's delta, [batch, tokens, …], from the attention's output."""
        raise NotImplementedError

    def delta(self, modulation: Tensor) -> Tensor:
        """Return ΔW of the tokens of `modulation`, [batch, tokens, d_model, d_ffn]."""
        raise NotImplementedError

    def apply_low_rank(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        """Return h ΔW without computing ΔW."""
        raise NotImplementedError

    def _apply_delta(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        return torch.einsum("bsd,bsdf->bsf", hidden, self.delta(modulation))

    def _apply_parts(self, hidden: Tensor, modulation: Tensor, size: int) -> Tensor:
        recomputes = self.recompute and torch.is_grad_enabled()
        parts = []
        for begin in range(0, max(hidden.shape[1], 1), size):
            part = hidden[:, begin : begin + size], modulation[:, begin : begin + size]
            if recomputes:
                parts.append(checkpoint(self._apply_delta, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._apply_delta(*part))
        return torch.cat(parts, dim=1)


class ModulatedDelta(NptComponent):
    """ΔW_t = A diag(a_t A) B, of rank R; parameters are in `dtype` on `device`, and `options` those of NptComponent.

    `init` is orthogonal, or fast (see `fill_orthogonal` and `fill_fast`).
    """

    def __init__(
        self, d_model: int, d_ffn: int, rank: int, *, init: str = "orthogonal", dtype: Any = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, d_ffn, **options)
        self.A = nn.Parameter(torch.empty(d_model, rank, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.empty(rank, d_ffn, dtype=dtype, device=device))
        self.reset_parameters(init)

    def reset_parameters(self, init: str) -> None:
        """Fill the matrices anew, orthogonal or fast."""
        FILLS[init](self.A.unsqueeze(1), 1.0)
        FILLS[init](self.B.T.unsqueeze(1), INIT_SCALE)

    def modulation(self, attention: Tensor) -> Tensor:
        """Return m, [batch, tokens, R]."""
        return attention @ self.A

    def delta(self, modulation: Tensor) -> Tensor:
        """Return ΔW, [batch, tokens, d_model, d_ffn]."""
        return torch.einsum("bsr,dr,rf->bsdf", modulation, self.A, self.B)

    def apply_low_rank(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        """Return ((h A) * m) B: nothing larger than the result, [batch, tokens, d_ffn]."""
        return ((hidden @ self.A) * modulation) @ self.B


class RankOneDeltas(NptComponent):
    """ΔW_t = Σ_i u_it^T v_it: N rank-1 updates whose vectors are made from the attention's output through rank R.

    `combine` says how the N components of the low-rank mode are computed:

    * sequential: one after another;
    * batched: all vectors u [batch, tokens, N, d_model] and v [batch, tokens, N, d_ffn] at once, by einsum;
    * merged: three matrix products over all components. With p_it = h_t U_i, h_t · u_it is p_it · c_it, so that neither
      u nor v need exist: nothing is larger than [batch, tokens, N x R] or the result.

    With a delta (the other modes), merged is batched.

    Args:
        rank: R.
        num_ranks: N.
        combine: sequential, batched or merged; may be changed between calls.
        init, dtype, device, options: as in ModulatedDelta.
    """

    def __init__(
        self, d_model: int, d_ffn: int, rank: int, num_ranks: int, *, combine: str = "merged", init: str = "fast",
        dtype: Any = None, device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model, d_ffn, **options)
        self.combine = combine
        # Laid out so that all components together are one matrix, without a copy.
        self.down = nn.Parameter(torch.empty(d_model, num_ranks, rank, dtype=dtype, device=device))
        self.up_model = nn.Parameter(torch.empty(d_model, num_ranks, rank, dtype=dtype, device=device))
        self.up_ffn = nn.Parameter(torch.empty(num_ranks, rank, d_ffn, dtype=dtype, device=device))
        self.reset_parameters(init)

    def reset_parameters(self, init: str) -> None:
        """Fill the matrices anew, orthogonal or fast."""
        FILLS[init](self.down, 1.0)
        FILLS[init](self.up_model, 1.0)
        FILLS[init](self.up_ffn.permute(2, 0, 1), INIT_SCALE)

    def modulation(self, attention: Tensor) -> Tensor:
        """Return the codes c, [batch, tokens, N, R]."""
        if self.combine == "sequential":
            return torch.stack([attention @ down for down in self.down.unbind(1)], dim=-2)
        return (attention @ self.down.flatten(1)).unflatten(-1, self.down.shape[1:])

    def delta(self, modulation: Tensor) -> Tensor:
        """Return ΔW, [batch, tokens, d_model, d_ffn]."""
        if self.combine == "sequential":
            vectors = self._iterate_vectors(modulation)
            first = next(vectors)
            total = torch.einsum("bsd,bsf->bsdf", *first)
            for u, v in vectors:
                total = total + torch.einsum("bsd,bsf->bsdf", u, v)
            return total
        return torch.einsum("bsnd,bsnf->bsdf", *self._compute_vectors(modulation))

    def apply_low_rank(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        """Return Σ_i (h · u_i) v_i."""
        if self.combine == "sequential":
            return sum((hidden * u).sum(-1, keepdim=True) * v for u, v in self._iterate_vectors(modulation))
        if self.combine == "batched":
            u, v = self._compute_vectors(modulation)
            return torch.einsum("bsn,bsnf->bsf", torch.einsum("bsd,bsnd->bsn", hidden, u), v)
        products = (hidden @ self.up_model.flatten(1)).unflatten(-1, self.down.shape[1:])
        dots = (products * modulation).sum(-1, keepdim=True)
        return (dots * modulation).flatten(-2) @ self.up_ffn.flatten(0, 1)

    def _compute_vectors(self, modulation: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.einsum("bsnr,dnr->bsnd", modulation, self.up_model)
        return u, torch.einsum("bsnr,nrf->bsnf", modulation, self.up_ffn)

    def _iterate_vectors(self, modulation: Tensor) -> Any:
        # unbind and not indices: the backward of an index makes the gradient of the whole, that of unbind stacks once.
        for code, up_model, up_ffn in zip(
            modulation.unbind(-2), self.up_model.unbind(1), self.up_ffn.unbind(0), strict=True
        ):
            yield code @ up_model.T, code @ up_ffn


@torch.no_grad()
def fill_orthogonal(weight: Tensor, gain: float) -> None:
    """Fill `weight` [rows, N, R] with orthonormal columns, times `gain`, for each of the N matrices [rows x R].

    One QR decomposition for each, of 2 rows R² operations or so (twice that with Q formed).
    """
    for component in weight.unbind(1):
        # torch.nn.init has no QR in half precision.
        matrix = torch.empty(component.shape, dtype=_promote_to_float32(weight.dtype), device=weight.device)
        component.copy_(nn.init.orthogonal_(matrix, gain=gain))


@torch.no_grad()
def fill_fast(weight: Tensor, gain: float) -> None:
    """Fill as `fill_orthogonal`, by one QR decomposition: component i is S_i Q, S_i a diagonal of random signs.

    A diagonal of signs is orthogonal, so that the columns of S_i Q are as orthonormal as those of Q; and the signs,
    drawn for each row and component, turn Q's columns into another subspace for each.
    """
    rows, components, rank = weight.shape
    matrix = torch.empty(rows, rank, dtype=_promote_to_float32(weight.dtype), device=weight.device)
    matrix = nn.init.orthogonal_(matrix, gain=gain).to(weight.dtype)
    signs = torch.empty(components, rows, dtype=weight.dtype, device=weight.device).bernoulli_().mul_(2).sub_(1).T
    if weight.stride(0) == 1:
        matrix = matrix.T.contiguous().T  # read and written in the same order, it is as fast as a copy
    else:
        signs = signs.contiguous()
    torch.mul(matrix.unsqueeze(1), signs.unsqueeze(2), out=weight)


FILLS = {"orthogonal": fill_orthogonal, "fast": fill_fast}


def _promote_to_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _get_first_tensor(states: Tensor | tuple[Any, ...]) -> Tensor:
    return states[0] if isinstance(states, (tuple, list)) else states
