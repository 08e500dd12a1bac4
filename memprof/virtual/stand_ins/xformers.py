"""xformers.ops: memory-efficient attention on half precision, SwiGLU, unbind; xformers.profiler, which takes nothing.

Sources: xformers/ops/fmha (__init__.py, dispatch.py, flash.py, flash3.py), ops/unbind.py, ops/swiglu_op.py and
.github/workflows/wheels_build.yml of facebookresearch/xformers@v0.0.32.post2. Its wheels are built with FlashAttention
3 for compute capability 8.0 and 9.0, and take FlashAttention 2 from PyTorch. Other masks than the causal ones, single
precision and tensors as biases are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.stand_ins import flash_attn_interface as fa3
from memprof.virtual.stand_ins.flash_attn import attention as fa2
from memprof.virtual.stand_ins.registry import stand_in
from memprof.virtual.stand_ins.tools import kernel, not_here, on_card, refused

_SOURCE = "facebookresearch/xformers@v0.0.32.post2:xformers/ops/fmha"
_LEAST_HEAD, _LEAST_HEAD_BACKWARD = 32, 64
"""Of FlashAttention 3 (SUPPORTED_MIN_K in flash3.py)."""


class _Causal:
    """A mask without data."""

    def __init__(self, *tensor_args: Any, **tensor_kwargs: Any) -> None:
        pass

    def to(self, device: Any) -> Any:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_here(f"xformers.ops.{type(self).__name__}.{name}")


@stand_in(
    "xformers.ops.fmha.attn_bias.LowerTriangularMask", "xformers.ops.fmha.LowerTriangularMask",
    "xformers.ops.LowerTriangularMask", source=f"{_SOURCE}/attn_bias.py",
)  # fmt: skip
class LowerTriangularMask(_Causal):
    """Causal, from the first key: nothing is taken."""


@stand_in(
    "xformers.ops.fmha.attn_bias.LowerTriangularFromBottomRightMask",
    source=f"{_SOURCE}/attn_bias.py",
)
class LowerTriangularFromBottomRightMask(_Causal):
    """Causal, from the last key: nothing is taken."""


def _checked(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, op: Any) -> None:
    """What leads to other kernels than flash attention's is refused by name."""
    on_card(name, query, key, value)
    three = (query, key, value)
    if any(tensor.dim() != query.dim() for tensor in three):
        raise ValueError("Query/Key/Value should all have BMGHK, BMHK or BMK shape.")
    if any(tensor.dtype != query.dtype for tensor in three):
        raise ValueError("Query/Key/Value should all have the same dtype")
    if key.shape[-1] != query.shape[-1] or key.shape[:-1] != value.shape[:-1] or key.shape[0] != query.shape[0]:
        raise ValueError(f"Incompatible shapes for attention inputs: {[tuple(tensor.shape) for tensor in three]}")
    size = query.shape[-1]
    reasons = {
        f"tensors of {query.dim()} dimensions": query.dim() not in (3, 4),
        f"tensors of {query.dtype}": query.dtype not in (torch.float16, torch.bfloat16),
        f"an attn_bias of type {type(bias).__name__}": not (bias is None or isinstance(bias, _Causal)),
        f"heads of {size}": size % 8 or size > 256,
        f"values of {value.shape[-1]} for keys of {size}": value.shape[-1] != size,
        "op": op is not None,
        f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}": (
            torch.cuda.get_device_capability() < (8, 0)
        ),
        "fewer keys than queries, or more, under LowerTriangularMask": (
            type(bias) is LowerTriangularMask and query.shape[1] != key.shape[1]
        ),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise refused(name, what)


_OFFSETS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
_LENGTHS = "SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal"


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """An operator of torch.ops as the real package defines it: programs name it to choose what a checkpoint keeps."""

    def define(body: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(name, body, mutates_args=(), schema=f"(Tensor query, Tensor key, {schema}")
        made.register_fake(body)
        return made

    return define


def _is_dense(name: str, *of_others: Any) -> None:
    if any(one is not None for one in of_others):
        raise refused(f"torch.ops.{name}", "sequences of several lengths, or pages")


@_operator(
    "xformers_flash::flash_fwd",
    f"Tensor value, {_OFFSETS}, {_LENGTHS}, SymInt window_left, SymInt window_right, bool return_softmax, "
    "Tensor? block_tables) -> (Tensor, Tensor, Tensor)",
)
def _flash_2(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, p: float, softmax_scale: float, is_causal: bool, window_left: int, window_right: int,
    return_softmax: bool, block_tables: Any,
) -> Any:  # fmt: skip
    """fmha/flash.py, _flash_fwd: output, log of the sums, random state."""
    _is_dense("xformers_flash.flash_fwd", cu_seqlens_q, cu_seqlens_k, seqused_k, block_tables)
    options = fa2.Options(p, (window_left, window_right), None, False, False)
    out, sums, _, state = fa2._forward(query, key, value, options, False)
    return out, sums, state


@_operator(
    "xformers_flash3::flash_fwd",
    f"Tensor value, {_OFFSETS}, Tensor? leftpad_k, {_LENGTHS}, Tensor? descale_q=None, Tensor? descale_k=None, "
    "Tensor? descale_v=None, Tensor? block_table=None, bool use_kvsplit=False, SymInt window_left=-1, "
    "SymInt window_right=-1) -> (Tensor, Tensor)",
)
def _flash_3(
    query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, leftpad_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, p: float, softmax_scale: float, is_causal: bool, descale_q: Any = None,
    descale_k: Any = None, descale_v: Any = None, block_table: Any = None, use_kvsplit: bool = False,
    window_left: int = -1, window_right: int = -1,
) -> Any:  # fmt: skip
    """fmha/flash3.py, mha_fwd: output and log of the sums."""
    varying = (cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, use_kvsplit or None)
    _is_dense("xformers_flash3.flash_fwd", *varying)
    call = fa3._Call(causal=is_causal, window_size=(window_left, window_right))
    return fa3._forward(query, key, value, call)[:2]


@stand_in(
    "xformers.ops.fmha.memory_efficient_attention", "xformers.ops.memory_efficient_attention",
    source=f"{_SOURCE}/__init__.py",
)  # fmt: skip
def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: Any = None, *, op: Any = None, output_dtype: Any = None,
) -> torch.Tensor:  # fmt: skip
    """[batch, tokens, heads, size], or without heads, by flash-attn 2 or 3. The log of the sums is an output too: its
    gradient is zeros."""
    name = "xformers.ops.memory_efficient_attention"
    _checked(name, query, key, value, attn_bias, op)
    if output_dtype not in (None, query.dtype):
        raise refused(name, f"output_dtype={output_dtype}")
    shape, size = query.shape, query.shape[-1]
    if query.dim() == 3:
        query, key, value = (tensor.unsqueeze(2) for tensor in (query, key, value))
    third = p == 0 and size >= _LEAST_HEAD
    third_backward = p == 0 and size >= _LEAST_HEAD_BACKWARD
    call = fa3._Call(causal=attn_bias is not None)
    together = query.shape[0] == key.shape[0] and query.stride(-2) == 3 * size

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if k.stride(2) == 0 and v.stride(2) == 0:  # one head of keys for all queries
            k, v = k[:, :, :1], v[:, :, :1]
        causal, sizes = attn_bias is not None, (q.shape[1], k.shape[1])
        factor = size**-0.5 if scale is None else scale
        if third:
            made: tuple[torch.Tensor, ...] = _flash_3(q, k, v, None, None, None, None, *sizes, p, factor, causal)
        else:
            made = _flash_2(q, k, v, None, None, None, *sizes, p, factor, causal, -1, -1, False, None)
        return made

    if not (query.requires_grad or key.requires_grad or value.requires_grad):
        return attend(query, key, value)[0].reshape(shape)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, sums, *rest = attend(q, k, v)
        state = rest[-1] if p else None
        return (out, sums), (q, k, v, out, sums, state)

    def backward(saved: Any, gradient: torch.Tensor, of_sums: torch.Tensor) -> Any:
        q, k, v, out = saved[:4]
        gradient = gradient.contiguous()
        if together:  # of one packed tensor: so are their gradients
            d_q, d_k, d_v = q.new_empty((*q.shape[:-2], 3, *q.shape[-2:])).unbind(-3)
        else:
            d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if third_backward:
            fa3._backward(gradient, q, k, v, out, call)
        else:
            fa2._backward(gradient, q, k, v, out, d_q, d_k, d_v, False, None)
        return d_q, d_k, d_v

    return kernel(forward, backward, query, key, value)[0].reshape(shape)


class _Unbind(torch.autograd.Function):
    """The gradients are stacked, unless they lie in one tensor in this order already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> Any:
        ctx.dim = dim
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = _together(gradients, ctx.dim)
        return torch.stack(gradients, dim=ctx.dim) if found is None else found, None


def _together(tensors: Any, dim: int) -> torch.Tensor | None:
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else 0
    alike = all(
        one.shape == first.shape
        and one.stride() == first.stride()
        and one.storage_offset() == first.storage_offset() + number * step
        and one.untyped_storage()._cdata == first.untyped_storage()._cdata
        for number, one in enumerate(tensors)
    )
    if len(tensors) < 2 or not alike:
        return None
    shape, strides = list(first.shape), list(first.stride())
    shape.insert(dim, len(tensors))
    strides.insert(dim, step)
    return first.as_strided(shape, strides)


@stand_in("xformers.ops.unbind", source="facebookresearch/xformers@v0.0.32.post2:xformers/ops/unbind.py")
def unbind(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """As torch.unbind, whose gradients are one tensor where they lie side by side."""
    made: tuple[torch.Tensor, ...] = _Unbind.apply(x, dim)
    return made


# -- SwiGLU ---------------------------------------------------------------------------------------------------------

_SWIGLU = "facebookresearch/xformers@v0.0.32.post2:xformers/ops/swiglu_op.py, xformers/csrc/swiglu"
_HALF = (torch.float16, torch.bfloat16)


class _Fused(torch.autograd.Function):
    """`_SwiGLUFusedFunc`; where both weights are one tensor `SwiGLUPackedWeights` of csrc/swiglu/swiglu_packedw.cpp.

    Two products in one kernel give both gates and what the third is multiplied with, which the backward makes again.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any) -> Any:
        x1, x2, hidden = (x.new_empty(x.shape[0], w1.shape[0]) for _ in range(3))
        out = torch.nn.functional.linear(hidden, w3, b3)
        ctx.save_for_backward(x, w1, w2, w3, x1, x2)
        ctx.bias = b1 is not None, b3 is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, w1, w2, w3, x1, x2 = ctx.saved_tensors
        d_hidden = gradient @ w3
        both, hidden = x2.new_empty(x2.shape[0], 2, x2.shape[1]), torch.empty_like(x2)
        del x1, x2, d_hidden
        d_w3, d_b3 = _of_weight(gradient, hidden, ctx.bias[1])
        del hidden, gradient
        together = _together((w1, w2), 0)
        if together is not None:
            rows = both.flatten(1)
            d_x = rows @ together.flatten(0, 1)
            d_w, d_b = _of_weight(rows, x, ctx.bias[0])
            d_w1, d_w2 = d_w.view(2, *w1.shape).unbind(0)
            d_b1, d_b2 = (None, None) if d_b is None else d_b.view(2, -1).unbind(0)
        else:
            d_1, d_2 = both.unbind(1)
            d_x = d_2 @ w2
            torch.addmm(d_x, d_1, w1, out=d_x)
            d_w2, d_b2 = _of_weight(d_2, x, ctx.bias[0])
            d_w1, d_b1 = _of_weight(d_1, x, ctx.bias[0])
        return d_x, d_w1, d_b1, d_w2, d_b2, d_w3, d_b3


def _of_weight(gradient: torch.Tensor, x: torch.Tensor, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Its gradient, and the bias's of the same kernel (gemm_fused_operand_sum.cu)."""
    if not bias:
        return gradient.transpose(-2, -1) @ x, None
    sums = gradient.new_empty(gradient.shape[1])
    return gradient.new_empty(gradient.shape[1], x.shape[1]), sums


@stand_in("xformers.ops.swiglu_op.swiglu", "xformers.ops.swiglu", source=_SWIGLU)
def swiglu(
    x: torch.Tensor, w1: torch.Tensor, b1: Any, w2: torch.Tensor, b2: Any, w3: torch.Tensor, b3: Any, *, op: Any = None
) -> torch.Tensor:
    """Fused on half precision from compute capability 8 on, else three linear layers."""
    name = "xformers.ops.swiglu"
    on_card(name, x, w1, w2, w3)
    if op is not None:
        raise refused(name, "op")
    shape, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    if torch.is_autocast_enabled("cuda") and x.is_cuda:
        raise refused(name, "autocast")
    if torch.cuda.get_device_capability() >= (8, 0) and (x.dtype in _HALF or w1.dtype in _HALF):
        return _Fused.apply(x, w1, b1, w2, b2, w3, b3).reshape(*shape, -1)  # type: ignore[no-any-return]
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    return linear(silu(linear(x, w1, b1)) * linear(x, w2, b2), w3, b3).reshape(*shape, -1)


@stand_in("xformers.ops.swiglu_op.SwiGLU", "xformers.ops.SwiGLU", source=_SWIGLU)
class SwiGLU(torch.nn.Module):
    """Three linear layers, of which two are one unless they are not to be packed."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, *,
        _pack_weights: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features or in_features
        self.out_features = out_features or in_features
        self.w12 = torch.nn.Linear(in_features, 2 * self.hidden_features, bias=bias) if _pack_weights else None
        if not _pack_weights:
            self.w1 = torch.nn.Linear(in_features, self.hidden_features, bias=bias)
            self.w2 = torch.nn.Linear(in_features, self.hidden_features, bias=bias)
        self.w3 = torch.nn.Linear(self.hidden_features, self.out_features, bias=bias)
        self.op: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.w12 is None:
            w1, b1, w2, b2 = self.w1.weight, self.w1.bias, self.w2.weight, self.w2.bias
        else:
            w1, w2 = unbind(self.w12.weight.unflatten(0, (2, -1)), 0)
            b1, b2 = (None, None) if self.w12.bias is None else unbind(self.w12.bias.unflatten(0, (2, -1)), 0)  # type: ignore[assignment]
        return swiglu(x, w1, b1, w2, b2, self.w3.weight, self.w3.bias, op=self.op)


class _OnePart:
    """A part of a schedule; programs derive from them."""

    ACTIVITIES = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)

    def __init__(self, main_profiler: Any) -> None:
        self.main_profiler = main_profiler

    def __enter__(self) -> None:
        """Nothing is traced."""

    def __exit__(self, *error: object) -> None:
        """Nothing is written."""

    def step(self) -> None:
        """A step has ended."""


DEFAULT_SCHEDULE: tuple[Any, ...] = ()
_PROFILER = "facebookresearch/xformers@v0.0.32.post2:xformers/profiler"
for _name in ("MemSnapshotsProfiler", "NsightProfiler", "PyTorchProfiler"):
    stand_in(
        f"xformers.profiler.profiler.{_name}", f"xformers.profiler.api.{_name}", f"xformers.profiler.{_name}",
        source=f"{_PROFILER}/profiler.py",
    )(type(_name, (_OnePart,), {}))  # fmt: skip


@stand_in("xformers.profiler.api.profile", "xformers.profiler.profile", source=f"{_PROFILER}/api.py")
class _Profile:
    """Traces steps of a program, and keeps tensors of none; here it does nothing."""

    def __init__(self, output_dir: str, module: Any = None, schedule: Any = DEFAULT_SCHEDULE) -> None:
        self.output_dir = output_dir

    def __enter__(self) -> Any:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing has begun."""

    def start(self) -> None:
        """Nothing begins."""

    stop = __exit__

    def step(self) -> None:
        """A step has ended."""


@stand_in("xformers.profiler.api.step", "xformers.profiler.step", source=f"{_PROFILER}/api.py")
def _step() -> None:
    """A step has ended."""
