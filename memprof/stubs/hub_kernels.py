"""Kernels that transformers downloads from the hub for quantized weights, each replaced by a stub of its allocations.

transformers' own layers run (integrations/finegrained_fp8.py, mxfp4.py, gguf); the kernels below them are Triton or
CUDA code, downloaded at run time. The packages `kernels`, which downloads them, and Triton are treated as installed.

Sources: huggingface/kernels-community at 017b01b (finegrained-fp8/torch-ext/finegrained_fp8); of gpt-oss-triton-kernels
version 1, which is triton-lang/triton's python/triton_kernels of the time of Triton 3.4: routing.py, matmul_ogs.py and
tensor_details/layout_details. The source of ggml-org/ggml-quantization was not available: its stubs follow from
transformers' calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from memprof.patching import Extension, Patch
from memprof.virtual.install_context import InstallContext

_FP8_NOTE = (
    "Float8 blocks are multiplied by the hub's Triton kernel (finegrained-fp8), which quantizes its input as it reads "
    "it and allocates its result alone; DeepGEMM, which needs a CUDA toolkit to compile, is not taken."
)
_MXFP4_NOTE = (
    "MXFP4 experts are multiplied by the hub's gpt-oss-triton-kernels, each product in one piece (no split-K)."
)
_GGUF_NOTE = (
    "GGUF blocks are multiplied and unpacked by the hub's ggml-quantization, as transformers does where its kernels "
    "package is installed; what these kernels take beside their results is not known, and not counted."
)
_GGUF_TYPES = frozenset(range(2, 30))
_HOPPER_TILE = 64
# Rows of a tile; the routing has a table for each size (triton_kernels/routing.py, ExptData.block_ms).
_BLOCK_SIZES = (16, 32, 64, 128)


class HubKernels(Extension):
    """The extension that replaces the kernels that transformers downloads by stubs."""

    imports = (
        "transformers.integrations.finegrained_fp8",
        "transformers.integrations.gguf.kernels",
        "transformers.integrations.hub_kernels",
        "transformers.quantizers.quantizer_mxfp4",
    )

    def make_module_patches(self, module: Any, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the functions of `module`, a module of transformers, that download kernels."""
        name, assume = module.__name__.rpartition(".")[2], context.assume
        if name == "finegrained_fp8":
            if not hasattr(module, "load_finegrained_fp8_kernel"):  # as in transformers 5.8, with other kernels
                return
            kernels = module.FineGrainedFP8(_matmul, _batched_matmul, _grouped_matmul)
            yield module, "_FINEGRAINED_FP8", kernels
            yield module, "load_finegrained_fp8_kernel", _return_and_assume(kernels, _FP8_NOTE, assume)
        elif name == "kernels":
            yield module, "get_gguf_kernel", _return_and_assume(_GGUF_KERNELS, _GGUF_NOTE, assume)
            yield module, "_gguf_kernel", _GGUF_KERNELS
        elif name == "quantizer_mxfp4":
            for check in ("is_kernels_available", "is_triton_available"):
                if hasattr(module, check):
                    yield module, check, lambda *args, **kwargs: True
        elif hasattr(module, "get_kernel"):  # older releases of transformers fetch no kernels for experts
            yield module, "get_kernel", _wrap_get_kernel(module.get_kernel, assume)


def _wrap_get_kernel(original: Callable[..., Any], assume: Callable[[str], None]) -> Callable[..., Any]:
    def get_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.rpartition("/")[2] != "gpt-oss-triton-kernels":
            return original(name, *args, **kwargs)
        assume(_MXFP4_NOTE)
        return _TRITON_KERNELS

    return get_kernel


def _return_and_assume(kernels: Any, assumption: str, assume: Callable[[str], None]) -> Callable[[], Any]:
    def get_kernels() -> Any:
        assume(assumption)
        return kernels

    return get_kernels


def _matmul(
    a: torch.Tensor, b: torch.Tensor, scales: Any, block_size: Any, output_dtype: Any = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return the product of `a` and `b` (matmul.py); with one scale per weight, first allocate `a` in float8."""
    x_float8 = x_scales = None
    if block_size is None or list(block_size) == list(b.shape):  # rows in float8, with a scale for each (fp8_act_quant)
        x_float8 = torch.empty_like(a, dtype=torch.float8_e4m3fn)
        x_scales = a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)
    result = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=output_dtype or torch.float32)
    del x_float8, x_scales
    return result


def _batched_matmul(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, **options: Any) -> torch.Tensor:
    return _matmul(a, b, scales, options.get("block_size"), a.dtype)


def _grouped_matmul(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the products of all experts; scratch: the cumulative number of tiles (grouped.py)."""
    tile_sums = options["tokens_per_expert"].cumsum(0, dtype=torch.int32)
    result = _batched_matmul(a, b, scales, **options)
    del tile_sums
    return result


# Functions that allocate results alone; products are float32 (integrations/gguf/utils.py, GgufLinear.forward).
_GGUF_KERNELS = SimpleNamespace(
    mul_mat_vec=lambda weight, x, type, columns: x.new_empty((x.shape[0], columns), dtype=torch.float32),
    mul_mat_id=lambda weight, x, ids, type, columns: x.new_empty((*ids.shape, columns), dtype=torch.float32),
    dequantize=lambda weight, type, rows, columns, dtype: weight.new_empty((rows, columns), dtype=dtype),
    get_rows=lambda weight, ids, type, columns, dtype: weight.new_empty((ids.numel(), columns), dtype=dtype),
    gemv_types=_GGUF_TYPES,
    supports=_GGUF_TYPES.__contains__,
)


class _StridedLayout:
    """The row-major layout of a weight (tensor_details/layout.py)."""


class _HopperLayout:
    """The layout of a weight for Hopper: tiles of 64 x 64 bytes, with padding in both dimensions (hopper_value.py)."""


def _wrap_weight(data: torch.Tensor, dtype: Any = None) -> Any:
    """Return a weight object as triton_kernels' Tensor (tensor.py), with `data` as its bytes."""
    return SimpleNamespace(data=data, shape=data.shape, device=data.device)


def _choose_layout(mx_axis: int) -> tuple[type, dict[str, Any]]:
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return (_HopperLayout, {"mx_axis": mx_axis}) if is_hopper else (_StridedLayout, {})


def _convert_layout(weight: Any, layout: type, **options: Any) -> Any:
    """Return the weight in `layout`. Hopper's needs a padded copy, a copy in the order of tiles, and six tensors of
    32-bit integers, by which bits are interleaved."""
    if layout is not _HopperLayout:
        return _wrap_weight(weight.data)
    data = weight.data.transpose(-1, -2)
    rows, columns = data.shape[-2:]
    data = torch.nn.functional.pad(data, (0, -columns % _HOPPER_TILE, 0, -rows % _HOPPER_TILE))
    data = data.clone()
    integers = [data.new_empty(data.numel() // 4, dtype=torch.int32) for _ in range(6)]
    return _wrap_weight(integers[0].view(torch.uint8))


def _route(logits: torch.Tensor, experts_per_token: int, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the routing data, and the gather and scatter indices of tokens sorted by expert (routing.py)."""
    tokens, experts = logits.shape
    num_gates = tokens * experts_per_token
    scores = logits.new_empty((tokens, experts_per_token))
    expert_ids = logits.new_empty((tokens, experts_per_token), dtype=torch.int16)
    bitmask = logits.new_empty(((experts + 31) // 32, -(-tokens // 32) * 32), dtype=torch.int32)
    histogram = logits.new_empty(experts, dtype=torch.int32)
    block_histograms = logits.new_empty((-(-tokens // 32), experts), dtype=torch.int32)
    tables = _make_routing_tables(histogram, experts, num_gates)
    indices = logits.new_empty(2 * num_gates, dtype=torch.int32)
    scales = logits.new_empty(num_gates)
    del scores, expert_ids, bitmask, block_histograms
    combine, dispatch = indices[:num_gates], indices[num_gates:]
    routing = SimpleNamespace(gate_scal=scales, n_expts_act=experts_per_token, expt_data=tables)
    return routing, _Indices(combine, dispatch), _Indices(dispatch, combine)


def _make_routing_tables(histogram: torch.Tensor, experts: int, num_gates: int) -> Any:
    """Return the histogram, and for each tile size the offsets of the experts and the expert of each tile."""
    max_tiles = num_gates if num_gates <= experts else experts - 1 + -(-(num_gates - experts + 1) // _BLOCK_SIZES[0])
    offsets = histogram.new_empty((len(_BLOCK_SIZES) + 1, -(-(experts + 1) // 512) * 512), dtype=torch.int32)
    return histogram, offsets, histogram.new_empty((len(_BLOCK_SIZES), -(-max_tiles // 512) * 512), dtype=torch.int32)


class _Indices(NamedTuple):
    """The indices by which triton_kernels gathers or scatters tokens (GatherIndx, ScatterIndx)."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


def _expert_matmul(x: torch.Tensor, weight: Any, bias: torch.Tensor, routing: Any, **options: Any) -> torch.Tensor:
    """Return the products of tokens and their experts, summed per token if they are scattered (matmul_ogs.py)."""
    gather_indices, activation = options.get("gather_indx"), options.get("fused_activation")
    sums_experts = options.get("scatter_indx") is not None
    rows = x.shape[-2] if gather_indices is None else gather_indices.src_indx.shape[0]
    columns = weight.shape[-1]
    out_rows = rows // routing.n_expts_act if sums_experts else rows
    result = x.new_empty((out_rows, columns // (1 if activation is None else activation.reduction)))
    products = x.new_empty((rows, columns)) if sums_experts else None
    del products
    return result


_TRITON_KERNELS = SimpleNamespace(
    matmul_ogs=SimpleNamespace(
        FnSpecs=lambda *args, **kwargs: None,
        FusedActivation=lambda specs, arguments, reduction=1: SimpleNamespace(reduction=reduction),
        matmul_ogs=_expert_matmul,
        PrecisionConfig=SimpleNamespace,
        FlexCtx=SimpleNamespace,
        InFlexData=SimpleNamespace,
    ),
    swiglu=SimpleNamespace(swiglu_fn=None),
    routing=SimpleNamespace(
        routing=_route,
        GatherIndx=_Indices,
        ScatterIndx=_Indices,
        RoutingData=lambda scales, histogram, total, experts_per_token, data: SimpleNamespace(
            gate_scal=scales, n_expts_act=experts_per_token, expt_data=data
        ),
        compute_expt_data_torch=_make_routing_tables,
    ),
    tensor=SimpleNamespace(FP4=None, convert_layout=_convert_layout, wrap_torch_tensor=_wrap_weight),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(StridedLayout=_StridedLayout, make_default_matmul_mxfp4_w_layout=_choose_layout)
    ),
)
