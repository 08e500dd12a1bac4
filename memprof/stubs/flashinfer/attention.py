"""flashinfer's attention: of one sequence, with 32 MiB of scratch, or of a batch, with a wrapper's workspaces.

Sources: flashinfer/decode.py, prefill.py and utils.py of flashinfer-ai/flashinfer@v0.6.17. A batch's kernels allocate
nothing: their scratch is in the program's workspace. A workspace that is too small is not reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from memprof.stubs.flashinfer.layers import register
from memprof.stubs.flashinfer.pages import check_layout, get_seq_lens, unpack_cache
from memprof.stubs.tools import check_on_gpu, keep_for_run, mark_written, refuse_if

_WORKSPACE_BYTES = 32 * 1024 * 1024
_INT_WORKSPACE_BYTES = 8 * 1024 * 1024
_NUM_LENGTHS = 32768
_POSITION_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_SUPPORTED_BACKENDS = ("auto", "fa2", "fa3")
_BYTE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
# Options of a decoding plan that may still be given by position.
_PLAN_OPTIONS = (
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type",
    "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size",
    "disable_split_kv", "q_len_per_req",
)  # fmt: skip


def _check_position_mode(pos_encoding_mode: str) -> None:
    if pos_encoding_mode not in _POSITION_MODES:
        raise KeyError(f"Invalid pos_encoding_mode {pos_encoding_mode}")


def _refuse_options(name: str, **options) -> None:
    refuse_if(f"flashinfer.{name}", {
        f"{option}={value!r}" if isinstance(value, str) else option: value is not None
        for option, value in options.items()
    })  # fmt: skip


def _check_supported(name: str, backend: str = "auto", dtypes: tuple[torch.dtype, ...] = ()) -> None:
    reasons = {f'backend="{backend}"': backend not in _SUPPORTED_BACKENDS}
    refuse_if(f"flashinfer.{name}", reasons | {str(dtype): dtype in _BYTE_DTYPES for dtype in dtypes})


def _make_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Return the ALiBi slope of each head in float32, as flashinfer's get_alibi_slopes does."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = torch.pow(2.0 ** (-8.0 / power), torch.arange(1, 1 + power, device=device))
    if power < heads:
        steps = torch.arange(1, 1 + 2 * (heads - power), 2, device=device)
        slopes = torch.cat([slopes, torch.pow(2.0 ** (-4.0 / power), steps)])
    return slopes.float()


def _scale_in_place(out: torch.Tensor, scale) -> torch.Tensor:
    return out if scale is None or (isinstance(scale, float) and scale == 1.0) else out.mul_(scale)


@register("decode", "single_decode_with_kv_cache")
def single_decode_with_kv_cache(
    q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False, q_scale=None, k_scale=None,
    v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    return_lse=False,
):  # fmt: skip
    """Return attention for the query of one token; scratch: 32 MiB."""
    name = "single_decode_with_kv_cache"
    check_on_gpu(f"flashinfer.{name}", q, k, v)
    _check_position_mode(pos_encoding_mode)
    check_layout(kv_layout)
    _check_shapes(name, q, 2, k, v)
    return _attend_single(q, lambda: torch.empty_like(q), pos_encoding_mode, return_lse, v_scale)


@register("prefill", "single_prefill_with_kv_cache")
def single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,
    causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
    logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None,
    k_scale=None, v_scale=None,
):  # fmt: skip
    """Return attention for the queries of one sequence; scratch: 32 MiB."""
    name = "single_prefill_with_kv_cache"
    check_on_gpu(f"flashinfer.{name}", q, k, v, packed_custom_mask)
    _check_position_mode(pos_encoding_mode)
    check_layout(kv_layout)
    _check_supported(name, backend)
    _refuse_options(name, kv_cache_sf=kv_cache_sf, custom_mask=None if packed_custom_mask is not None else custom_mask)
    _check_supported(name, dtypes=(q.dtype, k.dtype))
    _check_shapes(name, q, 3, k, v)
    shape = (*q.shape[:-1], v.shape[-1])
    make_out = functools.partial(torch.empty, shape, dtype=o_dtype or q.dtype, device=q.device)
    return _attend_single(q, make_out, pos_encoding_mode, return_lse, v_scale)


def _attend_single(q: torch.Tensor, make: Callable[[], torch.Tensor], pos_mode: str, return_lse: bool, v_scale):
    """Return attention of one sequence, in a tensor from `make`, and log-sum-exp if `return_lse`; scratch: 32 MiB."""
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    out = make()
    slopes = _make_slopes(q.shape[-2], q.device) if pos_mode == "ALIBI" else None
    del slopes
    out = _scale_in_place(out, v_scale)
    del workspace
    return (out, lse) if return_lse else out


register("prefill", "single_prefill_with_kv_cache_return_lse")(
    functools.partial(single_prefill_with_kv_cache, return_lse=True)
)


def _check_shapes(name: str, q: torch.Tensor, dimensions: int, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dim() != dimensions or k.dim() != 3 or v.dim() != 3:
        raise RuntimeError(f"flashinfer.{name}: expected {dimensions}, 3 and 3 dimensions, got {q.dim()}, {k.dim()} and {v.dim()}")  # fmt: skip  # noqa: E501
    if q.shape[-1] != k.shape[-1]:
        raise RuntimeError(f"flashinfer.{name}: heads of {q.shape[-1]} in q, of {k.shape[-1]} in k")


class _AttentionWrapper:
    """The base of the wrappers for batches: the program's workspace, and 8 MiB for indices on GPU and pinned host."""

    _name = ""

    def __init_subclass__(cls) -> None:
        cls._name = cls._name or cls.__name__
        cls.begin_forward, cls.run_return_lse = cls.plan, functools.partialmethod(cls.run, return_lse=True)  # type: ignore[attr-defined]

    def _initialize(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str) -> None:
        check_on_gpu(f"flashinfer.{self._name}", workspace)
        check_layout(kv_layout)
        _check_supported(self._name, backend)
        if workspace.numel() and workspace.data_ptr() % 16:
            raise ValueError("float_workspace_buffer must be 16-byte aligned")
        self._kv_layout, self._use_cuda_graph = kv_layout, use_cuda_graph
        self._float_workspace_buffer = workspace
        self.device = workspace.device
        self._int_workspace_buffer = torch.empty((_INT_WORKSPACE_BYTES,), dtype=torch.uint8, device=self.device)
        self._pin_memory_int_workspace_buffer = torch.empty((_INT_WORKSPACE_BYTES,), dtype=torch.uint8, pin_memory=True)
        self._is_planned = False
        self._index_tensors: dict[str, torch.Tensor | None] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Return whether the wrapper is used with CUDA graphs: indices are copied into the program's buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty(
            int_workspace_buffer.shape, dtype=int_workspace_buffer.dtype, pin_memory=True
        )

    def end_forward(self) -> None:
        """Do nothing, as in the real package."""

    def _move_indices(self, non_blocking: bool, **indices: torch.Tensor) -> None:
        """Move index tensors to the GPU, with CUDA graphs into the program's buffers of the same names."""
        for name, tensor in indices.items():
            if not self._use_cuda_graph:
                self._index_tensors[name] = tensor.to(self.device, non_blocking=non_blocking)
                continue
            buffer = self._index_tensors.get(name)
            if buffer is None:
                raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
            if len(tensor) > len(buffer):
                raise ValueError(f"The length of {name} exceeds the allocated buffer size.")
            buffer[: len(tensor)].copy_(tensor, non_blocking=non_blocking)

    def _set_dtypes(self, q, kv, o) -> None:
        q = _parse_dtype(q)
        kv = q if kv is None else _parse_dtype(kv)
        _check_supported(self._name, dtypes=(q, kv))
        self._q_dtype, self._kv_dtype, self._o_dtype = q, kv, q if o is None else _parse_dtype(o)
        self._is_planned = True

    def _check_run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra_args) -> None:
        check_on_gpu(f"flashinfer.{self._name}", q, k, v)
        if not self._is_planned:
            raise AssertionError("plan info is not initialized")
        for name, tensor, dtype in (("q", q, self._q_dtype), ("k", k, self._kv_dtype)):
            if tensor.dtype != dtype:
                raise ValueError(
                    f"The dtype of {name} {tensor.dtype} does not match the {'kv' if name == 'k' else 'q'}_data_type "
                    f"{dtype} specified in plan function."
                )
        refuse_if(f"flashinfer.{self._name}.run", {"arguments of kernels of one's own": extra_args})

    def _make_outputs(
        self, q: torch.Tensor, v: torch.Tensor, out, lse, return_lse: bool, v_scale=None, *, zeros: bool = False,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        dtype, shape = dtype or self._o_dtype, (*q.shape[:-1], v.shape[-1])
        if return_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        elif return_lse:
            _check_output(lse, q.shape[:2], torch.float32, "lse")
        if out is None:
            out = (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=q.device)
        else:
            _check_output(out, shape, dtype, "out")
        mark_written(out)
        heads = q.shape[1]
        keep_for_run(("flashinfer", "slopes", heads, self.device), lambda: _make_slopes(heads, self.device))
        out = _scale_in_place(out, v_scale)
        return (out, lse) if return_lse else out


def _parse_dtype(dtype) -> torch.dtype:
    if isinstance(dtype, str):
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a string or torch.dtype, got {type(dtype)}")
    return dtype


def _check_output(tensor: torch.Tensor, shape, dtype: torch.dtype, name: str) -> None:
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"Invalid shape of {name}: expected {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {tensor.dtype}")


@register("decode", "BatchDecodeWithPagedKVCacheWrapper")
class BatchDecodeWithPagedKVCacheWrapper(_AttentionWrapper):
    """Attention for one token per sequence: allocates the output; keeps 8 MiB, index tensors and ALiBi slopes."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        _refuse_options(self._name, jit_args=jit_args)
        self._initialize(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._index_tensors = {
            "indptr": paged_kv_indptr_buffer, "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }  # fmt: skip
        self._use_tensor_cores = use_tensor_cores
        if use_cuda_graph and paged_kv_last_page_len_buffer is None:
            raise ValueError("paged_kv_last_page_len_buffer should be a torch.Tensor in cudagraph mode")
        if use_tensor_cores and use_cuda_graph:
            rows = len(paged_kv_last_page_len_buffer) + 1
            self._index_tensors["rows"] = torch.arange(rows, dtype=torch.int32, device=self.device)

    @property
    def use_tensor_cores(self):
        return self._use_tensor_cores

    @property
    def _paged_kv_indices_buf(self):  # engines write into it before they plan
        return self._index_tensors["indices"]

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ):  # fmt: skip
        if len(deprecated_positional_args) > len(_PLAN_OPTIONS):
            raise TypeError(f"{self._name}.plan() accepts at most {len(_PLAN_OPTIONS)} more arguments by position")
        options = dict(zip(_PLAN_OPTIONS, deprecated_positional_args, strict=False))
        duplicates = options.keys() & kwargs.keys()
        if duplicates:
            raise TypeError(f"{self._name}.plan() got multiple values for argument {min(duplicates)!r}")
        self._plan_decode(indptr, indices, last_page_len, page_size, **options, **kwargs)

    def _plan_decode(
        self, indptr, indices, last_page_len, page_size, *, pos_encoding_mode="NONE", window_left=-1, window_right=0,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None,
        rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None,
        disable_split_kv=False, q_len_per_req=1,
    ):  # fmt: skip
        _check_position_mode(pos_encoding_mode)
        if window_right:
            raise NotImplementedError(f"{self._name} only supports window_right != 0 with backend='cute-dsl'")
        if q_len_per_req < 1 or (q_len_per_req > 1 and not self._use_tensor_cores):
            raise ValueError(f"q_len_per_req={q_len_per_req} requires tensor-core decode (use_tensor_cores=True)")
        if len(indptr) != len(last_page_len) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._move_indices(non_blocking, indptr=indptr, indices=indices, last_page_len=last_page_len)
        if not self._use_cuda_graph:
            self._index_tensors["rows"] = torch.empty(len(indptr), dtype=torch.int32, device=self.device)
        self._batch, self._tokens = len(last_page_len), q_len_per_req
        if q_data_type is None:
            q_data_type = data_type
        self._set_dtypes(q_data_type, data_type if kv_data_type is None else kv_data_type, o_data_type)
        if seq_lens is None:
            get_seq_lens(indptr.to("cpu"), last_page_len.to("cpu"), page_size)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        _refuse_options(f"{self._name}.run", kv_cache_sf=kv_cache_sf)
        keys, values = unpack_cache(paged_kv_cache, self._kv_layout)
        self._check_run(q, keys, values, *args)
        if q.shape[0] != self._batch * self._tokens:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match batch_size * q_len_per_req")
        return self._make_outputs(q, values, out, lse, return_lse, v_scale)

    def forward(
        self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


@register("decode", "fast_decode_plan")
def fast_decode_plan(
    self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
    window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None,
    rope_scale=None, rope_theta=None, non_blocking=True, fixed_split_size=None, disable_split_kv=False,
    q_len_per_req=1, global_override_indptr_cpu=None,
):  # fmt: skip
    """Plan as the decoding wrapper `self` does, without copies of indices to the GPU: the caller has written them."""
    _check_position_mode(pos_encoding_mode)
    self._batch, self._tokens = len(last_page_len), q_len_per_req
    self._set_dtypes(q_data_type or data_type or "float16", kv_data_type or data_type, None)


@register("prefill", "BatchPrefillWithPagedKVCacheWrapper")
class BatchPrefillWithPagedKVCacheWrapper(_AttentionWrapper):
    """Attention for several tokens per sequence with paged keys and values: allocates an output of zeros; keeps 8 MiB,
    lengths of 32,768 sequences, index tensors and ALiBi slopes."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        _refuse_options(self._name, jit_args=jit_args, custom_mask_buf=custom_mask_buf)
        self._initialize(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._kv_lens_buffer = torch.empty((_NUM_LENGTHS,), dtype=torch.int32, device=self.device)
        self._index_tensors = {
            "qo_indptr": qo_indptr_buf, "paged_kv_indptr": paged_kv_indptr_buf,
            "paged_kv_indices": paged_kv_indices_buf, "paged_kv_last_page_len": paged_kv_last_page_len_buf,
        }  # fmt: skip

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        _refuse_options(f"{self._name}.plan", custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        _check_position_mode(pos_encoding_mode)
        self._move_indices(non_blocking, qo_indptr=qo_indptr, paged_kv_indptr=paged_kv_indptr,
                    paged_kv_indices=paged_kv_indices, paged_kv_last_page_len=paged_kv_last_page_len)  # fmt: skip
        self._set_dtypes(q_data_type, kv_data_type, o_data_type)
        sequences = len(qo_indptr) - 1
        if max_sequence_kv is None:
            if sequences > len(self._kv_lens_buffer):
                self._kv_lens_buffer = torch.empty((sequences,), dtype=torch.int32, device=self.device)
            if seq_lens is None:
                seq_lens = get_seq_lens(paged_kv_indptr.to("cpu"), paged_kv_last_page_len.to("cpu"), page_size)
            self._kv_lens_buffer[:sequences].copy_(seq_lens.cpu().flatten(), non_blocking=non_blocking)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        _refuse_options(f"{self._name}.run", kv_cache_sf=kv_cache_sf)
        keys, values = unpack_cache(paged_kv_cache, self._kv_layout)
        self._check_run(q, keys, values, *args)
        return self._make_outputs(q, values, out, lse, return_lse, v_scale, zeros=True)

    def forward(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, k_scale=None,
        v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)


@register("prefill", "BatchPrefillWithRaggedKVCacheWrapper")
class BatchPrefillWithRaggedKVCacheWrapper(_AttentionWrapper):
    """Attention for several tokens per sequence with ragged keys and values: allocates the output; keeps 8 MiB, index
    tensors and ALiBi slopes."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        _refuse_options(self._name, jit_args=jit_args, custom_mask_buf=custom_mask_buf)
        self._initialize(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._index_tensors = {"qo_indptr": qo_indptr_buf, "kv_indptr": kv_indptr_buf}

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None,
        max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None,
    ):  # fmt: skip
        _refuse_options(f"{self._name}.plan", custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        refuse_if(f"flashinfer.{self._name}.plan", {"use_fp16_qk_reduction=True": use_fp16_qk_reduction})
        _check_position_mode(pos_encoding_mode)
        if len(kv_indptr) != len(qo_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        self._move_indices(non_blocking, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        optional_indptrs = {"v": v_indptr, "o": o_indptr}
        self._indptrs = {key: tensor.to(self.device) for key, tensor in optional_indptrs.items() if tensor is not None}
        self._set_dtypes(q_data_type, kv_data_type, o_data_type)

    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, kv_cache_sf=None,
    ):  # fmt: skip
        """Return the output in the dtype of the queries, and if `return_lse` the log-sum-exp in float32."""
        _refuse_options(f"{self._name}.run", kv_cache_sf=kv_cache_sf)
        self._check_run(q, k, v, *args)
        return self._make_outputs(q, v, out, lse, return_lse, dtype=q.dtype if out is None else None)

    def forward(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        return self.run(q, k, v)
