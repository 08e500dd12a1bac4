"""Each tensor that a backward makes, in its order, as the real source makes it: of the stubs whose other tests do
not say it. What calls `kernel` has a row here, or a test that is named here: the last test sees that none is without.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs import registry, tools
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import half, single, tensor

FOLDER = Path(registry.__file__).parent
EDGES, NODES, CHANNELS = 1000, 100, 16
OF_EDGES, OF_NODES = single(EDGES, CHANNELS), single(NODES, CHANNELS)
ONE_MORE = single(EDGES + 1, CHANNELS)
Case = tuple[Any, list[torch.Tensor]]  # What a stub gave, and what gradients are requested.


def segments(name: str) -> Case:
    import torch_scatter

    rows = tensor(EDGES, CHANNELS, dtype=torch.float32)
    each = EDGES // NODES
    by = torch.arange(0, EDGES + 1, each) if name.endswith("csr") else torch.arange(EDGES) // each
    options = {} if name.endswith("csr") else {"dim_size": NODES}
    found = getattr(torch_scatter, name)(rows, by.cuda(), **options)
    return found[0] if isinstance(found, tuple) else found, [rows]


def gathered(name: str) -> Case:
    import torch_scatter

    rows, each = tensor(NODES, CHANNELS, dtype=torch.float32), EDGES // NODES
    by = torch.arange(0, EDGES + 1, each) if name.endswith("csr") else torch.arange(EDGES) // each
    return getattr(torch_scatter, name)(rows, by.cuda()), [rows]


def scattered(name: str, **options: Any) -> Case:
    import torch_scatter

    rows = tensor(EDGES, CHANNELS, dtype=torch.float32)
    by = (torch.arange(EDGES) % NODES).cuda()
    found = getattr(torch_scatter, name)(rows, by, dim=0, dim_size=NODES, **options)
    return found[0] if isinstance(found, tuple) else found, [rows]


def padded(name: str) -> Case:
    from flash_attn import bert_padding

    chosen, x = torch.arange(0, 60, 2, device="cuda"), tensor(60, 4, 8)
    if name == "index_put_first_axis":
        x = tensor(30, 4, 8)
        return bert_padding.index_put_first_axis(x, chosen, 60), [x]
    found = getattr(bert_padding, name)(x, chosen)
    return found[0] if isinstance(found, tuple) else found, [x]


def turned_in_place() -> Case:
    from flash_attn.layers.rotary import apply_rotary_emb_qkv_

    qkv = tensor(2, 64, 3, 4, 32)
    cos, sin = (torch.empty(64, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return apply_rotary_emb_qkv_(qkv * 1, cos, sin), [qkv]


def normed() -> Case:
    import transformer_engine.pytorch as te

    norm, x = te.LayerNorm(256, params_dtype=torch.bfloat16), tensor(512, 256)
    return norm(x), [x, norm.weight, norm.bias]


def attended() -> Case:
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(4, 64, attn_mask_type="causal")
    parts = [tensor(128, 2, 4, 64) for _ in range(3)]
    return attention(*parts), parts


def turned() -> Case:
    from memprof.stubs.transformer_engine.attention import apply_rotary

    x, angles = tensor(128, 2, 4, 64), torch.empty(128, 1, 1, 64, device="cuda")
    return apply_rotary(x, angles), [x]


def added(dropout: float) -> Case:
    from memprof.stubs.transformer_engine.transformer import add_residual

    x, bias, residual = tensor(512, 256), tensor(256), tensor(512, 256)
    return add_residual(x, bias, residual, dropout), [x, bias, residual]


BATCH, INNER, TIME, STATES, RANK, MODEL = 2, 64, 3000, 16, 2, 32


def scanned() -> Case:
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

    halves = [
        tensor(*shape)
        for shape in ((BATCH, 2 * INNER, TIME), (INNER, 1, 4), (INNER,), (RANK + 2 * STATES, INNER), (INNER, RANK),
                      (MODEL, INNER))
    ]  # fmt: skip
    floats = [tensor(*shape, dtype=torch.float32) for shape in ((INNER, STATES), (INNER,), (INNER,))]
    a, d, bias = floats
    return mamba_inner_fn(*halves, None, a, None, None, d, bias, delta_softplus=True), [*halves, *floats]


def joined() -> Case:
    from memprof.stubs.transformer_engine.linear import join_adjacent

    parts = [tensor(64, 32), tensor(32, 32)]
    return join_adjacent(parts), parts


OF_INNER, OF_STATES = half(BATCH, INNER, TIME), single(BATCH, STATES, TIME)
SCATTER, PADDING, TE = "torch_scatter.py", "flash_attn/padding.py", "transformer_engine/"
# Zeros for the places, which have no gradient; the gradient with a row more, for what came from nowhere.
LEAST = [2 * OF_NODES, ONE_MORE]
ROWS, SIZE = 512, 256
CASES: dict[str, tuple[str, Callable[[], Case], list[int]]] = {
    # rusty1s/pytorch_scatter@2.1.2: csrc/segment_csr.cpp, segment_coo.cpp, scatter.cpp
    **{
        f"segment_{name}_{by}": (
            f"{SCATTER}:_reduce", lambda name=name, by=by: segments(f"segment_{name}_{by}"), made,
        )
        for name, made in (("sum", [OF_EDGES]), ("add", [OF_EDGES]), ("min", LEAST), ("max", LEAST))
        for by in ("csr", "coo")
    },
    # How many there are, as integers, as numbers, and for each; kept from the forward where an index says it.
    "segment_mean_csr": (
        f"{SCATTER}:_reduce", lambda: segments("segment_mean_csr"), [OF_EDGES, 8 * NODES, 4 * NODES, 4 * EDGES],
    ),
    "segment_mean_coo": (f"{SCATTER}:_reduce", lambda: segments("segment_mean_coo"), [OF_EDGES, 4 * EDGES]),
    "gather_csr": (f"{SCATTER}:_gather", lambda: gathered("gather_csr"), [OF_NODES]),
    "gather_coo": (f"{SCATTER}:_gather", lambda: gathered("gather_coo"), [OF_NODES]),
    "scatter_mul": (f"{SCATTER}:_scatter", lambda: scattered("scatter_mul"), [OF_NODES, OF_EDGES, OF_EDGES // 4]),
    "scatter_min": (f"{SCATTER}:_scatter", lambda: scattered("scatter_min"), LEAST),
    "scatter_max": (f"{SCATTER}:_scatter", lambda: scattered("scatter_max"), LEAST),
    # Dao-AILab/flash-attention@v2.8.3: flash_attn/bert_padding.py, layers/rotary.py
    "index_first_axis": (f"{PADDING}:index_first_axis", lambda: padded("index_first_axis"), [half(60, 4, 8)]),
    "index_put_first_axis": (
        f"{PADDING}:index_put_first_axis", lambda: padded("index_put_first_axis"), [half(30, 4, 8)],
    ),
    # Zeros for the gradient of the input that was released, which rows are added into.
    "index_first_axis_residual": (
        f"{PADDING}:index_first_axis_residual", lambda: padded("index_first_axis_residual"), [half(60, 4, 8)],
    ),
    # That of the product before it: the rotation turns the gradient where it lies.
    "apply_rotary_emb_qkv_": (
        "flash_attn/layers.py:apply_rotary_emb_qkv_", turned_in_place, [half(2, 64, 3, 4, 32)],
    ),
    # state-spaces/mamba@v2.3.2.post1: mamba_ssm/ops/selective_scan_interface.py, MambaInnerFn: what was not kept is
    # computed again; gradients of input and gate are one, those of B and C in float32; products copy what they take.
    "mamba_inner_fn": (
        "mamba_ssm/scan.py:mamba_inner_fn", scanned,
        [
            OF_INNER, OF_INNER, 2 * OF_INNER, *4 * [OF_INNER], single(INNER, STATES), OF_STATES, OF_STATES,
            single(INNER), single(INNER), OF_STATES // 2, OF_STATES // 2, half(MODEL, INNER),
            half(BATCH, TIME, RANK + 2 * STATES), OF_STATES // 2, OF_STATES // 2, half(INNER, RANK),
            half(BATCH, TIME, RANK), OF_INNER, OF_INNER, half(RANK + 2 * STATES, INNER), single(INNER, 4),
            single(INNER), half(INNER, 4), half(INNER),
        ],
    ),
    # NVIDIA/TransformerEngine@v2.18: its layernorm_bwd has sums of parameters' gradients for each multiprocessor
    "LayerNorm": (
        f"{TE}norms.py:_Norm.forward", normed, [half(ROWS, SIZE), half(SIZE), half(SIZE), 2 * single(132, SIZE)],
    ),
    # cuDNN: three gradients, and in float32 what is added up, with a sum for each row
    "DotProductAttention": (
        f"{TE}attention.py:DotProductAttention.forward", attended,
        [*3 * [half(128, 2, 4, 64)], single(2, 4, 128, 65)],
    ),
    "rotated": (f"{TE}attention.py:apply_rotary", turned, [half(128, 2, 4, 64)]),
    "added": (f"{TE}transformer.py:add_residual", lambda: added(0.0), [half(SIZE)]),
    "added with dropout": (f"{TE}transformer.py:add_residual", lambda: added(0.1), [half(ROWS, SIZE), half(SIZE)]),
    "joined": (f"{TE}linear.py:join_adjacent", joined, []),
}  # fmt: skip
# Where the bytes of a backward are tested that have no row.
ELSEWHERE = {
    "apex/norms.py:_norm": "test_apex.test_a_norm_keeps_a_number_a_row_and_sums_its_gradients_in_parts",
    "causal_conv1d.py:causal_conv1d_fn": (
        "test_mamba.test_a_convolution_sums_the_gradients_of_its_weight_in_single_precision"
    ),
    "flash_attn/attention.py:_attend": "test_flash_attention.test_grouped_queries_and_padded_rows",
    "flash_attn/layers.py:apply_rotary_emb": (
        "test_flash_layers.test_rotary_positions_in_a_tensor_of_their_own_or_in_place"
    ),
    "flash_attn/layers.py:norm": "test_flash_layers.test_a_norm_in_triton_is_timed_at_its_first_call",
    "flash_attn/layers.py:cross_entropy_loss": (
        "test_flash_layers.test_the_gradient_of_cross_entropy_may_take_the_place_of_the_logits"
    ),
    "flash_attn_interface.py:_attend": "test_flash_attention.test_flash_attention_3_on_hopper",
    "mamba_ssm/scan.py:selective_scan_fn": "test_mamba.test_a_scan_keeps_a_state_for_each_chunk",
    f"{TE}linear.py:Linear.forward": "test_transformer_engine.test_a_product_saves_its_input",
    f"{TE}linear.py:LayerNormLinear.forward": (
        "test_transformer_engine.test_a_norm_before_it_is_saved_with_its_numbers"
    ),
    f"{TE}mlp.py:LayerNormMLP.forward": (
        "test_transformer_engine.test_the_feed_forward_network_keeps_two_wide_tensors"
    ),
    "xformers/attention.py:memory_efficient_attention": "test_xformers.test_flash_attention_3_and_its_sums",
    "xformers/swiglu.py:_FusedSwiGLU": "test_xformers.test_swiglu_keeps_both_gates_and_makes_their_product_again",
    "xformers/indexing.py:_IndexAdd": "test_xformers.test_rows_by_an_index_as_stochastic_depth_has_them",
    "xformers/indexing.py:index_select_cat": "test_xformers.test_rows_by_an_index_as_stochastic_depth_has_them",
    "xformers/swiglu.py:_CastPackedWeights": "test_xformers.test_swiglu_under_autocast_casts_each_weight",
    "xformers/swiglu.py:_Unbind": "test_xformers.test_gradients_of_a_packed_tensor_are_one",
    f"{TE}attention.py:_Split": "test_transformer_engine.test_attention_copies_what_lies_in_no_known_way",
    "flash_attn/dense.py:fused_dense_func": "test_flash_dense.test_a_product_has_both_gradients_by_one_call",
    "flash_attn/dense.py:fused_mlp_func": "test_flash_dense.test_what_a_network_keeps_by_its_level",
    "flash_attn/dense.py:swiglu": "test_flash_dense.test_swiglu_saves_both",
    "flash_attn/norms.py:_norm": "test_flash_dense.test_a_norm_of_a_sum_keeps_it",
}


GPU = find_gpu("h100-80gb")


@pytest.mark.parametrize("name", CASES)
def test_a_backward_makes_what_the_real_one_makes(gpu: VirtualGpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site, make, expected = CASES[name]
    callers = []

    def seen(*args: Any) -> Any:
        callers.append(sys._getframe(1).f_code.co_name)
        return tools.kernel(*args)

    file, _, function = site.partition(":")
    module = importlib.import_module(f"memprof.stubs.{file.removesuffix('.py').replace('/', '.')}")
    monkeypatch.setattr(module, "kernel", seen)
    out, inputs = make()
    gradient = torch.empty_like(out)
    first = len(gpu.trace.storages)
    torch.autograd.grad(out, inputs, gradient)
    assert [storage.num_bytes for storage in gpu.trace.storages[first:]] == expected
    assert function.rpartition(".")[2] in callers


def sites() -> Iterator[str]:
    """FILE:FUNCTION of each call of `kernel` in the stubs, and FILE:CLASS of each function of autograd."""

    def within(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = (*names, child.name) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else names
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") == "kernel":
                yield ".".join(names)
            if isinstance(child, ast.ClassDef) and any("autograd" in ast.unparse(base) for base in child.bases):
                yield ".".join(inside)
            yield from within(child, inside)

    for file in sorted(FOLDER.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if ("kernel" in text or "autograd" in text) and file.name not in ("tools.py", "multi_tensor.py"):
            yield from (f"{file.relative_to(FOLDER)}:{name}" for name in within(ast.parse(text), ()))


def test_each_stub_with_a_backward_has_a_test_of_its_bytes() -> None:
    tested = {site for site, _, _ in CASES.values()} | ELSEWHERE.keys()
    assert set(sites()) == tested
    for name in ELSEWHERE.values():
        module, _, function = name.partition(".")
        found = getattr(importlib.import_module(f"tests.unit.stubs.{module}"), function)
        assert re.search(r"backward\(|autograd\.grad\(", inspect.getsource(found)), name
