"""Kernels that transformers fetches from the hub for stored weights, each stood in for by what it allocates.

transformers' own layers run (integrations/finegrained_fp8.py, mxfp4.py, gguf); the kernels below them are Triton's or
CUDA's, and come from the hub at run time. The package that fetches them (`kernels`), and Triton, are taken to be there.

Sources: huggingface/kernels-community at 017b01b (finegrained-fp8/torch-ext/finegrained_fp8); of gpt-oss-triton-kernels
version 1, which is triton-lang/triton's python/triton_kernels of the time of Triton 3.4: routing.py, matmul_ogs.py and
tensor_details/layout_details. The source of ggml-org/ggml-quantization was not at hand: what stands here is what
transformers' calls say of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.patching.extension import Extension
from memprof.patching.patch_set import Patch
from memprof.virtual.install_context import InstallContext

_FP8 = (
    "Float8 blocks are multiplied by the hub's Triton kernel (finegrained-fp8), which quantizes its input as it reads "
    "it and allocates its result alone; DeepGEMM, which needs a CUDA toolkit to compile, is not taken."
)
_MXFP4 = "MXFP4 experts are multiplied by the hub's gpt-oss-triton-kernels, each product in one piece (no split-K)."
_GGUF = (
    "GGUF blocks are multiplied and unpacked by the hub's ggml-quantization, as transformers does where its kernels "
    "package is installed; what these kernels take beside their results is not known, and not counted."
)
_GGUF_TYPES = frozenset(range(2, 30))
_HOPPER_TILE = 64
_BLOCK_SIZES = (16, 32, 64, 128)
"""Rows of a tile, for each of which the routing has a table (triton_kernels/routing.py, ExptData.block_ms)."""


class HubKernels(Extension):
    """The functions of transformers that fetch kernels."""

    imports = (
        "transformers.integrations.finegrained_fp8",
        "transformers.integrations.gguf.kernels",
        "transformers.integrations.hub_kernels",
        "transformers.quantizers.quantizer_mxfp4",
    )

    def patches_of(self, module: Any, context: InstallContext) -> Iterator[Patch]:
        """Replace what fetches kernels in one of these modules."""
        of = {"finegrained_fp8": _float8, "kernels": _gguf, "hub_kernels": _by_name, "quantizer_mxfp4": _mxfp4}
        yield from of[module.__name__.rpartition(".")[2]](module, context.assume)


def _float8(module: Any, assume: Callable[[str], None]) -> Iterator[Patch]:
    if hasattr(module, "FineGrainedFP8"):
        kernels = module.FineGrainedFP8(_matmul, _batched_matmul, _grouped_matmul)
        yield module, "_FINEGRAINED_FP8", kernels
        yield module, "load_finegrained_fp8_kernel", _saying(lambda: kernels, _FP8, assume)


def _gguf(module: Any, assume: Callable[[str], None]) -> Iterator[Patch]:
    yield module, "get_gguf_kernel", _saying(lambda: _GGUF_KERNELS, _GGUF, assume)
    yield module, "_gguf_kernel", _GGUF_KERNELS


def _mxfp4(module: Any, assume: Callable[[str], None]) -> Iterator[Patch]:
    for name in ("is_kernels_available", "is_triton_available"):
        if hasattr(module, name):
            yield module, name, lambda *args, **kwargs: True


def _by_name(module: Any, assume: Callable[[str], None]) -> Iterator[Patch]:
    fetch = getattr(module, "get_kernel", None)
    if fetch is None:  # older releases of transformers fetch no kernels for experts
        return

    def get_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.rpartition("/")[2] != "gpt-oss-triton-kernels":
            return fetch(name, *args, **kwargs)
        assume(_MXFP4)
        return _TRITON_KERNELS

    yield module, "get_kernel", get_kernel


def _saying(made: Callable[[], Any], sentence: str, assume: Callable[[str], None]) -> Callable[[], Any]:
    def call() -> Any:
        assume(sentence)
        return made()

    return call


# -- float8 in blocks ----------------------------------------------------------------------------------------------


def _matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """matmul.py: blocks are quantized on the way in; with one scale for the whole weight, rows are before."""
    quantized = None
    if block_size is None or list(block_size) == list(b.shape):
        quantized = _rows_quantized(a)
    result = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=output_dtype or torch.float32)
    del quantized
    return result


def _rows_quantized(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """utils.py, fp8_act_quant: the rows in float8, and a scale for each."""
    return torch.empty_like(a, dtype=torch.float8_e4m3fn), a.new_empty((*a.shape[:-1], 1), dtype=torch.float32)


def _batched_matmul(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, **rest: Any) -> torch.Tensor:
    return _matmul(a, b, scales, rest.get("block_size"), a.dtype)


def _grouped_matmul(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, **rest: Any) -> torch.Tensor:
    """grouped.py: a table of where each expert's tiles begin, and the result."""
    tiles = rest["tokens_per_expert"].cumsum(0, dtype=torch.int32)
    result = _batched_matmul(a, b, scales, **rest)
    del tiles
    return result


# -- GGUF ----------------------------------------------------------------------------------------------------------


def _unpacked(weight: torch.Tensor, kind: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return weight.new_empty((rows, columns), dtype=dtype)


def _rows(weight: torch.Tensor, indices: torch.Tensor, kind: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return weight.new_empty((indices.numel(), columns), dtype=dtype)


def _vectors(weight: torch.Tensor, x: torch.Tensor, kind: int, columns: int) -> torch.Tensor:
    """In float32, whatever the input is (integrations/gguf/utils.py, GgufLinear.forward)."""
    return x.new_empty((x.shape[0], columns), dtype=torch.float32)


def _of_experts(weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, kind: int, columns: int) -> torch.Tensor:
    return x.new_empty((*ids.shape, columns), dtype=torch.float32)


_GGUF_KERNELS = SimpleNamespace(
    mul_mat_vec=_vectors,
    mul_mat_id=_of_experts,
    dequantize=_unpacked,
    get_rows=_rows,
    gemv_types=_GGUF_TYPES,
    supports=_GGUF_TYPES.__contains__,
)


# -- MXFP4 ---------------------------------------------------------------------------------------------------------


class _Layout:
    """How a kernel wants a weight to lie (tensor_details/layout.py)."""


class _Strided(_Layout):
    """As it is."""


class _HopperValues(_Layout):
    """hopper_value.py: tiles of 64 x 64 bytes, in an order of the matrix unit's; both dimensions are padded to them."""


class _Weight:
    """tensor.py, Tensor: a tensor's bytes in some layout; transformers overwrites its shape."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.shape = data.shape

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device


def _default_layout(mx_axis: int) -> tuple[type[_Layout], dict[str, Any]]:
    hopper = torch.cuda.get_device_capability()[0] == 9
    return (_HopperValues if hopper else _Strided), ({"mx_axis": mx_axis} if hopper else {})


def _converted(weight: _Weight, layout: type[_Layout], **options: Any) -> _Weight:
    """The weight in another layout. Hopper's takes a padded copy, one in the order of the tiles, and, as the bits are
    interleaved four bytes at a time, integers of 32 bits of which six are alive at once."""
    if layout is not _HopperValues:
        return _Weight(weight.data)
    data = weight.data.transpose(-1, -2)
    rows, columns = data.shape[-2:]
    data = torch.nn.functional.pad(data, (0, -columns % _HOPPER_TILE, 0, -rows % _HOPPER_TILE))
    data = data.clone()
    integers = [data.new_empty(data.numel() // 4, dtype=torch.int32) for _ in range(6)]
    return _Weight(integers[0].view(torch.uint8))


def _routing(logits: torch.Tensor, active: int, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """routing.py: the chosen experts, and the order in which their tokens are read and written."""
    tokens, experts = logits.shape
    gates = tokens * active
    scores = logits.new_empty((tokens, active))
    chosen = logits.new_empty((tokens, active), dtype=torch.int16)
    bits = logits.new_empty(((experts + 31) // 32, -(-tokens // 32) * 32), dtype=torch.int32)
    histogram = logits.new_empty(experts, dtype=torch.int32)
    partial = logits.new_empty((-(-tokens // 32), experts), dtype=torch.int32)
    data = _tables(histogram, experts, gates)
    indices = logits.new_empty(2 * gates, dtype=torch.int32)
    scales = logits.new_empty(gates)
    del scores, chosen, bits, partial
    combine, dispatch = indices[:gates], indices[gates:]
    routing = SimpleNamespace(gate_scal=scales, n_expts_act=active, expt_data=data)
    return routing, _Indices(combine, dispatch), _Indices(dispatch, combine)


def _tables(histogram: torch.Tensor, experts: int, gates: int) -> Any:
    """routing.py, compute_expt_data: where each expert's tokens begin, and which tile is whose, for each tile size."""
    most = gates if gates <= experts else experts - 1 + -(-(gates - experts + 1) // _BLOCK_SIZES[0])
    offsets = histogram.new_empty((len(_BLOCK_SIZES) + 1, -(-(experts + 1) // 512) * 512), dtype=torch.int32)
    return histogram, offsets, histogram.new_empty((len(_BLOCK_SIZES), -(-most // 512) * 512), dtype=torch.int32)


class _Indices:
    def __init__(self, src_indx: torch.Tensor, dst_indx: torch.Tensor) -> None:
        self.src_indx = src_indx
        self.dst_indx = dst_indx


def _expert_matmul(
    x: torch.Tensor,
    weight: _Weight,
    bias: torch.Tensor,
    routing: Any,
    gather_indx: _Indices | None = None,
    scatter_indx: _Indices | None = None,
    fused_activation: Any = None,
    **rest: Any,
) -> torch.Tensor:
    """matmul_ogs.py, init_allocation: the result, and before tokens are summed over their experts all products."""
    rows = x.shape[-2] if gather_indx is None else gather_indx.src_indx.shape[0]
    columns = weight.shape[-1]
    halves = 1 if fused_activation is None else fused_activation.reduction
    sums = rows if scatter_indx is None else rows // routing.n_expts_act
    result = x.new_empty((sums, columns // halves))
    products = None if scatter_indx is None else x.new_empty((rows, columns))
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
        routing=_routing,
        GatherIndx=_Indices,
        ScatterIndx=_Indices,
        RoutingData=lambda scales, histogram, total, active, data: SimpleNamespace(
            gate_scal=scales, n_expts_act=active, expt_data=data
        ),
        compute_expt_data_torch=_tables,
    ),
    tensor=SimpleNamespace(
        FP4=None, convert_layout=_converted, wrap_torch_tensor=lambda data, dtype=None: _Weight(data)
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(StridedLayout=_Strided, make_default_matmul_mxfp4_w_layout=_default_layout)
    ),
)
