"""xformers.ops: memory-efficient attention, by the operator that its dispatch chooses.

Sources: xformers/ops/fmha (__init__.py, dispatch.py, flash.py, flash3.py, cutlass.py, common.py) and
.github/workflows/wheels_build.yml of facebookresearch/xformers@v0.0.32.post2. Its wheels are built with FlashAttention
3 for compute capability 8.0 and 9.0, and use FlashAttention 2 and CUTLASS's kernel from PyTorch. The latter supports
single precision, tensors as biases, and GPUs before Ampere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memprof.stubs import flash_attn_interface as fa3
from memprof.stubs.flash_attn import attention as fa2
from memprof.stubs.registry import stub
from memprof.stubs.tools import HALF, check_on_gpu, kernel, missing_stub_error, refuse_if, unsupported_error
from memprof.stubs.xformers import biases

_SOURCE = "facebookresearch/xformers@v0.0.32.post2:xformers/ops/fmha"
# Head sizes: minima of FlashAttention 3 (SUPPORTED_MIN_K in flash3.py), and the maximum of both versions.
_MIN_HEAD, _MIN_HEAD_BACKWARD, _MAX_HEAD = 32, 64, 256
_DENSE_MASKS = (
    type(None), biases.LowerTriangularMask, biases.LowerTriangularFromBottomRightMask,
    biases.LowerTriangularFromBottomRightLocalAttentionMask, biases.LocalAttentionFromBottomRightMask,
)  # fmt: skip
_BLOCK_MASKS = (
    biases.BlockDiagonalMask, biases.BlockDiagonalCausalMask, biases.BlockDiagonalCausalFromBottomRightMask,
    biases.BlockDiagonalCausalLocalAttentionMask, biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)  # fmt: skip
_PADDED_MASKS = (biases.BlockDiagonalPaddedKeysMask, biases.BlockDiagonalCausalWithOffsetPaddedKeysMask)
_TENSOR_MASKS = (torch.Tensor, torch.nn.Parameter, biases.LowerTriangularMaskWithTensorBias)
_CAUSAL_WINDOWS = (
    biases.LowerTriangularFromBottomRightLocalAttentionMask, biases.BlockDiagonalCausalLocalAttentionMask,
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)  # fmt: skip
_TOP_LEFT_MASKS = (biases.LowerTriangularMask, biases.BlockDiagonalCausalMask)
_NON_CUTLASS_MASKS = (biases.LocalAttentionFromBottomRightMask, biases.BlockDiagonalPaddedKeysMask)
_NON_CUTLASS_BACKWARD_MASKS = (
    biases.LowerTriangularMaskWithTensorBias, biases.LowerTriangularFromBottomRightLocalAttentionMask,
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)  # fmt: skip


class _Bounds(NamedTuple):
    """The cu_seqlens and maximum lengths of queries and keys; cu_seqlens are None for a batch of equal lengths."""

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    max_queries: int
    max_keys: int
    used_keys: torch.Tensor | None = None

    @classmethod
    def from_bias(cls, bias, query: torch.Tensor, key: torch.Tensor) -> _Bounds:
        if not isinstance(bias, (*_BLOCK_MASKS, *_PADDED_MASKS)):
            return cls(None, None, query.shape[1], key.shape[1])
        q, k = bias.q_seqinfo, bias.k_seqinfo
        return cls(q.seqstart, k.seqstart, q.max_seqlen, k.max_seqlen, getattr(k, "seqlen", None))


def _is_causal(bias) -> bool:
    return "Causal" in type(bias).__name__ or "LowerTriangular" in type(bias).__name__


def _get_window(bias) -> tuple[int, int]:
    if isinstance(bias, biases.LocalAttentionFromBottomRightMask):
        return bias.window_left, bias.window_right
    size = _get_window_size(bias)
    return (-1 if size is None else size - 1), -1


def _get_window_size(bias) -> int | None:
    return bias._window_size if isinstance(bias, _CAUSAL_WINDOWS) else None


def _check(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias, op) -> None:
    """Raise the errors of Inputs.validate_inputs, and MemprofError for arguments that the stub does not support."""
    check_on_gpu(name, query, key, value)
    inputs = (query, key, value)
    if any(tensor.dim() != query.dim() for tensor in inputs):
        raise ValueError("Query/Key/Value should all have BMGHK, BMHK or BMK shape.")
    if any(tensor.dtype != query.dtype for tensor in inputs):
        raise ValueError("Query/Key/Value should all have the same dtype")
    if key.shape[-1] != query.shape[-1] or key.shape[:-1] != value.shape[:-1] or key.shape[0] != query.shape[0]:
        raise ValueError(f"Incompatible shapes for attention inputs: {[tuple(tensor.shape) for tensor in inputs]}")
    if isinstance(bias, _BLOCK_MASKS) and query.shape[0] != 1:
        raise ValueError("Expected batch_size=1 when using block-diagonal bias")
    bias_tensor = _get_bias_tensor(bias)
    if bias_tensor is not None:
        check_on_gpu(name, bias_tensor)
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        if query.dim() == 4 and bias_tensor.shape != shape:
            raise ValueError(f"Invalid shape for attention bias: {tuple(bias_tensor.shape)} (expected {shape})")
        if bias_tensor.dtype != query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
    reasons = {
        f"tensors of {query.dim()} dimensions": query.dim() not in (3, 4),
        f"an attn_bias of type {type(bias).__name__}": type(bias)
        not in (*_DENSE_MASKS, *_BLOCK_MASKS, *_PADDED_MASKS, *_TENSOR_MASKS),
        f"values of {value.shape[-1]} for keys of {query.shape[-1]}": value.shape[-1] != query.shape[-1],
        "op": op is not None,
    }
    refuse_if(name, reasons)


def _get_bias_tensor(bias) -> torch.Tensor | None:
    bias = bias._bias if isinstance(bias, biases.LowerTriangularMaskWithTensorBias) else bias
    return bias if isinstance(bias, torch.Tensor) else None


class _Operators(NamedTuple):
    """The operators of forward and backward: 3 and 2 are FlashAttention's versions, 0 is CUTLASS."""

    forward: int
    backward: int


def _choose_operators(
    name: str, query: torch.Tensor, key: torch.Tensor, bias, p: float, needs_grad: bool
) -> _Operators:
    """Return the operators that xformers' dispatch chooses (dispatch.py).
    Raises NotImplementedError: no operator supports the arguments."""
    capability, size = torch.cuda.get_device_capability(query.device), query.shape[-1]
    if isinstance(bias, (*_BLOCK_MASKS, *_PADDED_MASKS)):
        has_equal_lengths = bias.q_seqinfo.seqstart_py == bias.k_seqinfo.seqstart_py
    else:
        has_equal_lengths = query.shape[1] == key.shape[1]
    can_use_flash = (
        query.dtype in HALF and capability >= (8, 0) and type(bias) in (*_DENSE_MASKS, *_BLOCK_MASKS, *_PADDED_MASKS)
        and size % 8 == 0 and size <= _MAX_HEAD and (has_equal_lengths or not isinstance(bias, _TOP_LEFT_MASKS))
    )  # fmt: skip
    alignment = 8 if query.dtype in HALF and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    can_use_cutlass = (
        size % alignment == 0 and not isinstance(bias, _NON_CUTLASS_MASKS) and query.dtype in (*HALF, torch.float32)
        and not (query.dtype == torch.bfloat16 and capability < (8, 0))
    )  # fmt: skip
    if not can_use_flash and not can_use_cutlass:
        raise NotImplementedError(
            f"No operator found for `memory_efficient_attention_forward` with query of {tuple(query.shape)} in "
            f"{query.dtype}, keys of {key.shape[1]} and a bias of {type(bias).__name__}"
        )
    uses_version_3 = can_use_flash and p == 0 and size >= _MIN_HEAD
    has_one_key_head = not needs_grad and key.stride(-2) == 0 and key.shape[-2] > 1
    if has_one_key_head and query.shape[1] <= 32 and key.shape[1] >= 256 and query.shape[0] * query.shape[2] < 64:
        if isinstance(bias, _BLOCK_MASKS) or not can_use_flash:
            raise unsupported_error(name, "one head of keys for few queries, which Triton's kernel runs")
        uses_version_3 = False
    forward = (3 if uses_version_3 else 2) if can_use_flash else 0
    if not needs_grad:
        return _Operators(forward, forward)
    if isinstance(bias, _PADDED_MASKS) or (not can_use_flash and isinstance(bias, _NON_CUTLASS_BACKWARD_MASKS)):
        raise NotImplementedError("No operator found for `memory_efficient_attention_backward`")
    if can_use_flash and p > 0 and size > 224 and capability not in ((8, 0), (9, 0)):
        raise unsupported_error(name, f"dropout on heads of {size}, whose backward is CUTLASS's")
    return _Operators(forward, (3 if uses_version_3 and size >= _MIN_HEAD_BACKWARD else 2) if can_use_flash else 0)


_OFFSETS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
_LENGTHS = "SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal"


def _define_operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that defines the operator torch.ops.`name`, which selective checkpointing can name."""

    def define(body: Callable[..., Any]):
        operator = torch.library.custom_op(name, body, mutates_args=(), schema=f"(Tensor query, Tensor key, {schema}")
        operator.register_fake(body)
        return operator

    return define


def _refuse_arguments(name: str, *arguments) -> None:
    if any(argument is not None for argument in arguments):
        raise unsupported_error(f"torch.ops.{name}", "pages, or keys that are padded on the left or split")


def _make_lengths(queries, keys, max_queries: int, max_keys: int) -> fa2.SeqLengths | None:
    return None if queries is None else fa2.SeqLengths(queries, keys, max_queries, max_keys)


@_define_operator(
    "xformers_flash::flash_fwd",
    f"Tensor value, {_OFFSETS}, {_LENGTHS}, SymInt window_left, SymInt window_right, bool return_softmax, "
    "Tensor? block_tables) -> (Tensor, Tensor, Tensor)",
)
def _run_flash_2(
    query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q: int, max_seqlen_k: int, p: float,
    softmax_scale: float, is_causal: bool, window_left: int, window_right: int, return_softmax: bool, block_tables,
):  # fmt: skip
    """Return output, log-sum-exp and RNG state of FlashAttention 2 (fmha/flash.py, _flash_fwd)."""
    _refuse_arguments("xformers_flash.flash_fwd", block_tables)
    lengths = _make_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = fa2.AttentionOptions(p, (window_left, window_right), None, False, False, lengths)
    out, sums, _, state = fa2.run_forward(query, key, value, options, False)
    return out, sums, state


@_define_operator(
    "xformers_flash3::flash_fwd",
    f"Tensor value, {_OFFSETS}, Tensor? leftpad_k, {_LENGTHS}, Tensor? descale_q=None, Tensor? descale_k=None, "
    "Tensor? descale_v=None, Tensor? block_table=None, bool use_kvsplit=False, SymInt window_left=-1, "
    "SymInt window_right=-1) -> (Tensor, Tensor)",
)
def _run_flash_3(
    query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, max_seqlen_q: int, max_seqlen_k: int, p: float,
    softmax_scale: float, is_causal: bool, descale_q=None, descale_k=None, descale_v=None, block_table=None,
    use_kvsplit: bool = False, window_left: int = -1, window_right: int = -1,
):  # fmt: skip
    """Return output and log-sum-exp of FlashAttention 3 (fmha/flash3.py, mha_fwd)."""
    _refuse_arguments("xformers_flash3.flash_fwd", leftpad_k, block_table, use_kvsplit or None)
    options = fa3.HopperOptions(
        causal=is_causal, window_size=(window_left, window_right), cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, used_lengths=(None, seqused_k),
    )  # fmt: skip
    return fa3.run_forward(query, key, value, options)[:2]


class _OperatorClass(type):
    """The metaclass of xformers' operator classes (FwOp), which programs pass by name; other uses raise an error."""

    def __getattr__(cls, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        raise missing_stub_error(f"{cls.__module__}.{cls.__name__}.{name}")


for _module in ("flash", "flash3"):
    _forward_operator = getattr(torch.ops, f"xformers_{_module}").flash_fwd
    _class = _OperatorClass("FwOp", (), {"OPERATOR": _forward_operator})
    _class.__doc__ = "Names its operator, by which a program identifies the operator; nothing is allocated."
    stub(f"xformers.ops.fmha.{_module}.FwOp", source=f"{_SOURCE}/{_module}.py")(_class)


@stub(
    "xformers.ops.fmha.memory_efficient_attention", "xformers.ops.memory_efficient_attention",
    source=f"{_SOURCE}/__init__.py",
)  # fmt: skip
def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """Attention over [batch, tokens, heads, size] or [batch, tokens, size], by FlashAttention 2 or 3 or CUTLASS. The
    log-sum-exp is an output of the autograd node too: its gradient is zeros."""
    name = "xformers.ops.memory_efficient_attention"
    _check(name, query, key, value, attn_bias, op)
    if output_dtype not in (None, query.dtype):
        raise unsupported_error(name, f"output_dtype={output_dtype}")
    shape, size, bias_tensor = query.shape, query.shape[-1], _get_bias_tensor(attn_bias)
    if query.dim() == 3:
        query, key, value = (tensor.unsqueeze(2) for tensor in (query, key, value))
        bias_tensor = None if bias_tensor is None else bias_tensor.unsqueeze(1)
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    operators = _choose_operators(name, query, key, attn_bias, p, needs_grad)
    bounds, scale = _Bounds.from_bias(attn_bias, query, key), size**-0.5 if scale is None else scale
    if operators.forward:
        is_packed = query.shape[0] == key.shape[0] and query.stride(-2) == 3 * size
        operator = _make_flash_operator(operators, attn_bias, bounds, p, scale, is_packed)
    else:
        operator = _make_cutlass_operator(attn_bias, bounds, p, scale)
    if not needs_grad:
        return operator.forward(query, key, value, bias_tensor, False)[0].reshape(shape)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias_tensor):
        out, lse, *state = operator.forward(q, k, v, bias_tensor, True)
        out = out.reshape(q.shape)
        return (out, lse), (q, k, v, out, lse, bias_tensor, *(state if p else ()))

    def backward(saved, gradient: torch.Tensor, sums_gradient: torch.Tensor):
        gradients = operator.backward(gradient, *saved)
        return *(grad.reshape(saved[i].shape) for i, grad in enumerate(gradients[:3])), *(gradients[3:] or (None,))

    return kernel(forward, backward, query, key, value, bias_tensor)[0].reshape(shape)  # type: ignore[no-any-return]


class _AttentionOperator(NamedTuple):
    """An attention operator: forward(q, k, v, bias, needs_lse), and backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _make_flash_operator(
    operators: _Operators, bias, bounds: _Bounds, p: float, scale: float, is_packed: bool
) -> _AttentionOperator:
    """Return the operator of FlashAttention, which gets concatenated sequences as [tokens, heads, size]."""
    causal, window = _is_causal(bias), _get_window(bias)
    lengths = (bounds.max_queries, bounds.max_keys)

    def flatten(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t.reshape(-1, *t.shape[2:]) if bounds.queries is not None else t for t in tensors]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _, needs_lse: bool):
        if k.stride(2) == 0 and v.stride(2) == 0:  # one head of keys for all queries
            k, v = k[:, :, :1], v[:, :, :1]
        q, k, v = flatten(q, k, v)
        offsets = (bounds.queries, bounds.keys, bounds.used_keys)
        if operators.forward == 3:
            outputs = _run_flash_3(
                q, k, v, *offsets, None, *lengths, p, scale, causal, window_left=window[0], window_right=window[1]
            )
        else:
            outputs = _run_flash_2(q, k, v, *offsets, *lengths, p, scale, causal, *window, False, None)
        return outputs if bounds.queries is None else (outputs[0], outputs[1].unsqueeze(0), *outputs[2:])

    def backward(gradient: torch.Tensor, q, k, v, out, *_):
        gradient, q, k, v, out = flatten(gradient, q, k, v, out)
        gradient = gradient.contiguous()
        if is_packed:  # of one packed tensor: so are their gradients
            d_q, d_k, d_v = q.new_empty((*q.shape[:-2], 3, *q.shape[-2:])).unbind(-3)
        else:
            d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if operators.backward == 3:
            queries, keys = lengths if bounds.queries is not None else (None, None)
            options = fa3.HopperOptions(causal, window, 0.0, 1, False, bounds.queries, bounds.keys, queries, keys)
            fa3.allocate_backward_scratch(gradient, q, k, v, out, options)
        else:
            fa2_lengths = _make_lengths(bounds.queries, bounds.keys, *lengths)
            fa2.run_backward(gradient, q, k, v, out, (d_k, d_v), False, fa2_lengths)
        return d_q, d_k, d_v

    return _AttentionOperator(forward, backward)


def _make_cutlass_operator(bias, bounds: _Bounds, p: float, scale: float) -> _AttentionOperator:
    """Return the operator of CUTLASS, PyTorch's own memory-efficient attention (cutlass.py)."""
    mask = 1 if isinstance(bias, _TOP_LEFT_MASKS) else 2 if _is_causal(bias) else 0
    offsets = (bounds.queries, bounds.keys)
    lengths = (bounds.max_queries, bounds.max_keys) if bounds.queries is not None else (-1, -1)
    options = {"scale": scale, "window_size": _get_window_size(bias)}
    needs_bias_gradient = isinstance(bias, torch.Tensor) and bias.requires_grad

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias_tensor, needs_lse: bool):
        operator = torch.ops.aten._efficient_attention_forward
        keys = bounds.used_keys
        return operator(q, k, v, bias_tensor, *offsets, *lengths, p, mask, needs_lse, seqlen_k=keys, **options)[:4]

    def backward(gradient: torch.Tensor, q, k, v, out, lse, bias_tensor, *state):
        seed, offset = state or (torch.Tensor(), torch.Tensor())
        gradients = torch.ops.aten._efficient_attention_backward(
            gradient, q, k, v, bias_tensor, out, *offsets, *lengths, lse, p, seed, offset, mask, needs_bias_gradient,
            **options,
        )  # fmt: skip
        return gradients if needs_bias_gradient else gradients[:3]

    return _AttentionOperator(forward, backward)
