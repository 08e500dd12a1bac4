"""Which backend attention takes on a GPU under a release, and what cuDNN's takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import attention
from memprof.virtual.kernels.attention import prefers_cudnn

HALF = torch.bfloat16


aten = torch.ops.aten


def properties(capability=(9, 0), release=(2, 11)):
    return DeviceProperties(capability, 132, 2048, release)


def meta(*shape, dtype=HALF):
    return torch.empty(shape, dtype=dtype, device="meta")


def backend(
    on,
    query=(2, 8, 64, 64),
    key=None,
    value=None,
    *,
    dtype=HALF,
    mask=None,
    dropout=0.0,
    grad=False,
    gqa=False,
    causal=False,
):
    """The backend for meta tensors of these shapes on GPU `on`."""
    shapes = query, key or query, value or key or query
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape in shapes]
    return attention.choose_backend(on, attention.AttentionArguments(*tensors, mask, dropout, causal, enable_gqa=gqa))


@pytest.mark.parametrize(
    ("capability", "release", "preferred"),
    [
        ((9, 0), (2, 10), False),
        ((9, 0), (2, 11), True),
        ((10, 0), (2, 13), True),
        ((10, 3), (2, 13), True),
        ((8, 0), (2, 13), False),
        ((12, 0), (2, 13), False),
    ],
)
def test_cudnn_comes_first_on_hopper_and_data_centre_blackwell_from_2_11_on(
    capability, release, preferred, monkeypatch
):
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert prefers_cudnn(properties(capability, release)) is preferred
    assert backend(properties(capability, release)) == ("cudnn" if preferred else "flash")


def test_the_environment_puts_cudnn_last(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert backend(properties()) == "flash"


def test_what_cudnn_cannot_goes_to_the_others():
    assert backend(properties(), (2, 8, 64, 256)) == "cudnn"
    assert backend(properties((10, 0)), (2, 8, 64, 256)) == "flash"  # a head too large for it there
    assert backend(properties(), (2, 8, 64, 264)) == "efficient"
    assert backend(properties(), (2, 8, 64, 100)) == "flash"  # not a multiple of 8; flash pads it
    assert backend(properties(), (2, 8, 64, 64), (2, 8, 1, 64)) == "flash"  # a single key
    assert backend(properties(), (2, 8, 1, 64), (2, 8, 9, 64), dropout=0.1) == "flash"
    assert backend(properties(), dtype=torch.float32) == "efficient"
    assert backend(properties(), (2, 8, 64, 192), (2, 8, 64, 192), (2, 8, 64, 128)) == "cudnn"
    assert backend(properties((8, 0)), (2, 8, 64, 192), (2, 8, 64, 192), (2, 8, 64, 128)) == "efficient"


def test_a_mask_goes_to_cudnn_unless_it_is_trained():
    mask = torch.empty(64, 64, dtype=HALF, device="meta")
    assert backend(properties(), mask=mask) == "cudnn"
    assert backend(properties(), mask=mask.requires_grad_()) == "efficient"
    assert backend(properties((8, 0)), mask=mask.detach()) == "efficient"


def test_a_mask_whose_last_dimension_is_strided_is_left_to_math():
    biases = torch.empty(64, 64, 8, device="meta").permute(2, 0, 1)[None]  # T5's, of positions
    assert backend(properties(), dtype=torch.float32, mask=biases) == "math"
    assert backend(properties(), dtype=torch.float32, mask=biases.contiguous()) == "efficient"


@pytest.mark.parametrize(("release", "expected"), [((2, 13), "math"), ((2, 15), "efficient")])
def test_masked_grouped_queries_fall_back_to_math_until_the_efficient_kernel_takes_them(release, expected):
    mask = torch.empty(64, 64, dtype=HALF, device="meta")
    grouped = {"query": (2, 8, 64, 64), "key": (2, 2, 64, 64)}
    assert backend(properties((8, 0), release), **grouped, mask=mask, gqa=True) == expected
    assert backend(properties((8, 0), release), **grouped, gqa=True) == "flash"
    assert backend(properties((9, 0), release), **grouped, mask=mask, gqa=True) == "cudnn"


def test_heads_that_differ_without_being_grouped_are_left_to_math():
    assert backend(properties(), (2, 8, 64, 64), (2, 1, 64, 64)) == "math"


BEYOND_FLASH = [
    ((2, 8, 64, 256), {}, "flash"), ((2, 8, 64, 264), {}, "efficient"),
    ((2, 8, 64, 64), {"causal": True}, "flash"),
    ((2, 8, 64, 64), {"causal": True, "key": (2, 8, 65, 64)}, "efficient"),
    ((2, 8, 64, 64), {"value": (2, 8, 64, 32)}, "efficient"), ((2, 8, 64, 64), {"key": (2, 8, 64, 32)}, "math"),
    # Without FlashAttention, widths are multiples of 16 bytes.
    ((2, 8, 64, 64), {"value": (2, 8, 64, 36)}, "math"), ((2, 8, 64, 268), {}, "math"),
    ((2, 8, 64, 4), {"dtype": torch.float32}, "efficient"), ((2, 8, 64, 6), {"dtype": torch.float32}, "math"),
    ((2, 8, 64, 4), {"dtype": torch.float32, "value": (2, 8, 64, 6)}, "math"),
    ((2, 8, 64, 64), {"dtype": torch.float64}, "math"),
    ((8, 64, 64), {}, "math"), ((2, 8, 64, 64), {"key": (8, 64, 64)}, "math"),
    ((2, 8, 0, 64), {}, "math"), ((2, 8, 64, 64), {"key": (2, 8, 0, 64)}, "math"),
    ((2, 8, 64, 64), {"key": (2, 2, 64, 64), "gqa": True}, "flash"),
    ((2, 8, 64, 64), {"key": (2, 2, 64, 64)}, "math"), ((2, 8, 64, 64), {"key": (2, 3, 64, 64), "gqa": True}, "math"),
    ((2, 8, 64, 64), {"key": (2, 2, 64, 64), "value": (2, 4, 64, 64), "gqa": True}, "math"),
]  # fmt: skip


def test_what_flash_attention_cannot_goes_to_efficient_and_then_to_math():
    for shape, options, expected in BEYOND_FLASH:
        assert backend(properties((8, 0), (2, 13)), shape, **options) == expected


@pytest.mark.parametrize(("capability", "dtype", "head", "expected"), [
    ((7, 5), torch.float16, 64, "efficient"), ((7, 5), HALF, 64, "math"), ((7, 5), torch.float32, 5, "efficient"),
    ((5, 0), torch.float32, 5, "efficient"), ((4, 9), torch.float32, 5, "math"), ((8, 0), torch.float16, 64, "flash"),
])  # fmt: skip
def test_older_gpus_have_no_flash_attention_and_no_bfloat16(capability, dtype, head, expected):
    assert backend(properties(capability), (2, 8, 64, head), dtype=dtype) == expected


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0), (12, 1)])
def test_little_shared_memory_limits_the_width_of_heads_that_are_trained(capability):
    on = properties(capability, (2, 10))
    trained = {width: backend(on, (2, 8, 64, width), grad=True) for width in (192, 200, 224, 232, 256)}
    assert trained == {192: "flash", 200: "efficient", 224: "efficient", 232: "flash", 256: "flash"}
    assert backend(on, (2, 8, 64, 200)) == "flash"
    assert backend(on, (2, 8, 64, 232), grad=True, dropout=0.1) == "efficient"
    assert backend(on, (2, 8, 64, 224), dropout=0.1) == "flash"
    with torch.no_grad():
        assert backend(on, (2, 8, 64, 200), grad=True) == "flash"
    assert backend(properties((8, 0), (2, 10)), (2, 8, 64, 200), grad=True) == "flash"


def test_the_flags_of_torch_leave_backends_out(monkeypatch):
    on = properties((8, 0))
    for name, after in (("flash", "efficient"), ("mem_efficient", "math"), ("math", "cudnn")):
        monkeypatch.setattr(torch.backends.cuda, f"{name}_sdp_enabled", lambda: False)
        assert backend(on) == after
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    with pytest.raises(RuntimeError, match="No available kernel"):
        backend(on)


def call(query, key=None, value=None, dtype=HALF, **options):
    tensors = (meta(*shape, dtype=dtype) for shape in (query, key or query, value or key or query))
    return attention.AttentionArguments(*tensors, **options)


CUDNN = [
    ((8, 0), (2, 11), {}, True), ((7, 5), (2, 11), {}, False), ((12, 1), (2, 11), {}, True),
    ((12, 2), (2, 11), {}, False),
    ((8, 0), (2, 11), {"query": (2, 8, 64, 128)}, True), ((8, 0), (2, 11), {"query": (2, 8, 64, 136)}, False),
    ((9, 0), (2, 10), {"query": (2, 8, 64, 256)}, True), ((9, 0), (2, 10), {"query": (2, 8, 64, 264)}, False),
    ((9, 1), (2, 10), {"query": (2, 8, 64, 136)}, False),
    ((10, 0), (2, 11), {"query": (2, 8, 64, 192), "value": (2, 8, 64, 128)}, True),
    ((10, 0), (2, 11), {"query": (2, 8, 64, 128), "value": (2, 8, 64, 192)}, False),
    ((10, 0), (2, 11), {"query": (2, 8, 64, 192)}, False),
    ((11, 0), (2, 11), {"query": (2, 8, 64, 192), "value": (2, 8, 64, 128)}, False),
    ((9, 0), (2, 11), {"value": (2, 8, 64, 60)}, False), ((9, 0), (2, 11), {"key": (2, 8, 64, 32)}, False),
    ((9, 0), (2, 11), {"dtype": torch.float32}, False), ((9, 0), (2, 11), {"dtype": torch.float16}, True),
    ((9, 0), (2, 11), {"key": (2, 8, 1, 64)}, False), ((9, 0), (2, 11), {"key": (2, 8, 2, 64)}, True),
    ((9, 0), (2, 11), {"query": (2, 8, 1, 64), "key": (2, 8, 9, 64)}, True),
    ((9, 0), (2, 11), {"query": (2, 8, 1, 64), "key": (2, 8, 9, 64), "dropout_p": 0.1}, False),
    ((9, 0), (2, 11), {"query": (2, 8, 2, 64), "key": (2, 8, 9, 64), "dropout_p": 0.1}, True),
]  # fmt: skip


def test_what_cudnn_can():
    for capability, release, arguments, expected in CUDNN:
        assert (
            attention._can_use_cudnn(properties(capability, release), call(**{"query": (2, 8, 64, 64), **arguments}))
            is expected
        )


def test_cudnn_is_not_deterministic(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not attention._can_use_cudnn(properties(), call((2, 8, 64, 64)))
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: True)
    assert attention._can_use_cudnn(properties(), call((2, 8, 64, 64)))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not attention._can_use_cudnn(properties(), call((2, 8, 64, 64)))


def test_the_program_sets_the_order(monkeypatch):
    monkeypatch.setattr(attention.kernels, "get_sdp_priority_order", lambda: [0, 1, 9, 1])
    assert attention._find_backend_order(properties()) == ("math", "flash")
    monkeypatch.setattr(attention.kernels, "get_sdp_priority_order", lambda: [1, 2, 0, 3])
    assert attention._find_backend_order(properties((8, 0))) == ("flash", "efficient", "math", "cudnn")
    assert attention._find_backend_order(properties()) == ("cudnn", "flash", "efficient", "math")


BACKWARD_TILES = [
    ((8, 0), True, 32, False, (64, 64, 32)), ((8, 0), True, 33, False, (64, 64, 64)),
    ((8, 0), True, 65, False, (128, 128, 128)), ((8, 0), True, 128, False, (128, 128, 128)),
    ((8, 0), True, 129, False, (128, 64, 65_536)), ((8, 0), False, 128, False, (128, 64, 128)),
    ((9, 0), True, 128, False, (128, 128, 128)), ((10, 0), False, 65, False, (128, 64, 128)),
    ((12, 0), True, 128, False, (64, 64, 128)), ((12, 0), False, 128, False, (64, 64, 128)),
    ((8, 6), True, 64, False, (64, 64, 64)), ((8, 6), True, 65, False, (128, 64, 96)),
    ((8, 9), True, 96, False, (128, 64, 96)), ((8, 6), True, 97, False, (64, 64, 128)),
    ((8, 9), True, 80, True, (64, 64, 128)), ((8, 6), False, 80, False, (64, 64, 128)),
    ((7, 5), True, 128, False, (64, 64, 128)), ((7, 0), True, 128, False, (128, 64, 128)),
    ((7, 0), True, 64, False, (64, 64, 64)), ((7, 0), False, 128, False, (64, 64, 128)),
]  # fmt: skip


def test_tiles_of_the_efficient_backward():
    for capability, is_half, head, dropout, expected in BACKWARD_TILES:
        assert attention._choose_efficient_tile(properties(capability), is_half, head, dropout) == expected


@pytest.mark.parametrize(("capability", "tile", "sizes", "head", "value_head", "split", "values"), [
    # Gradients of queries: a tile, and four counters, for each part of the rows and of the head.
    ((8, 0), (64, 64, 64), (2, 8, 64, 64), 64, 64, False, 1 * 1 * 4100),
    ((8, 0), (64, 64, 64), (2, 8, 65, 64), 64, 64, False, 2 * 1 * 4100),
    ((8, 0), (128, 64, 96), (2, 8, 129, 64), 80, 80, False, 2 * 2 * 8196),
    # Those of keys and values for each part of the keys, by 64 columns, and each as wide as whole tiles of 64 rows.
    ((8, 0), (64, 64, 128), (2, 8, 64, 300), 128, 96, True, 5 * 64 * (128 + 128) + 2 * 4100),
    ((8, 0), (64, 64, 128), (2, 8, 64, 320), 65, 64, True, 5 * 64 * (128 + 64) + 2 * 4100),
    ((8, 0), (64, 64, 128), (2, 8, 64, 321), 65, 64, True, 6 * 64 * (128 + 64) + 2 * 4100),
    ((8, 0), (64, 64, 128), (5, 8, 64, 900), 128, 128, True, 5 * 64 * 256 + 2 * 4100),  # no more than 200 in all
    ((8, 0), (64, 64, 128), (201, 1, 64, 900), 128, 128, True, 1 * 64 * 256 + 2 * 4100),
    ((6, 1), (64, 64, 64), (2, 8, 64, 64), 64, 64, False, 4100),
    ((7, 0), (64, 64, 64), (2, 8, 64, 64), 64, 64, False, 4100),
])  # fmt: skip
def test_workspace_of_the_efficient_backward(capability, tile, sizes, head, value_head, split, values):
    query, value = meta(1, head), meta(1, value_head)
    found = attention._compute_backward_workspace(
        properties(capability), attention._Tile(*tile), sizes, query, value, is_split=split
    )
    assert found == 4 * sizes[0] * sizes[1] * values


def test_workspace_of_the_efficient_backward_without_tiles_or_splits(monkeypatch):
    tile, single = attention._Tile(64, 64, 64), meta(1, 64, dtype=torch.float32)
    sizes = (2, 8, 64, 300)
    assert attention._compute_backward_workspace(properties((6, 1)), tile, sizes, single, single, is_split=False) == 0
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found = attention._compute_backward_workspace(properties(), tile, sizes, meta(1, 64), meta(1, 64), is_split=True)
    assert found == 4 * 16 * (64 * 128 + 4100)


@pytest.mark.parametrize(("capability", "head", "sums_by_kernel"), [
    ((7, 0), 128, True), ((7, 0), 129, False), ((7, 2), 129, False), ((7, 5), 129, True), ((6, 1), 129, True),
])  # fmt: skip
def test_row_sums_of_the_efficient_backward_are_made_by_the_kernel_or_before(gpu, capability, head, sums_by_kernel):
    gpu.dispatch_mode.gpu = dataclasses.replace(gpu.dispatch_mode.gpu, compute_capability=capability)
    query = torch.empty(2, 8, 64, head, device="cuda", dtype=torch.float16)
    sums, seed = torch.empty(2, 8, 64, device="cuda"), torch.zeros((), dtype=torch.int64)
    first = len(gpu.trace.storages)
    arguments = (query, query, query, query, None, query, sums, seed, seed, 0.0, [True, True, True, False])
    aten._scaled_dot_product_efficient_attention_backward(*arguments)
    sizes = [storage.num_bytes for storage in gpu.trace.storages[first:]]
    assert sizes[:3] == [query.nbytes] * 3
    product = [4 * query.numel()] * 3
    assert sizes[3:-1] == ([4096] if sums_by_kernel else [*product, 4096, 4096])


def test_gradients_of_a_bias_are_aligned_to_16(gpu):
    query = torch.empty(2, 24, 8, 64, device="cuda", dtype=HALF)
    key = torch.empty(2, 20, 8, 64, device="cuda", dtype=HALF)
    bias, sums = torch.empty(2, 8, 24, 20, device="cuda", dtype=HALF), torch.empty(2, 8, 32, device="cuda")
    seed = torch.zeros((), dtype=torch.int64)
    first = len(gpu.trace.storages)
    grads = aten._efficient_attention_backward(
        query, query, key, key, bias, query, None, None, 24, 20, sums, 0.0, seed, seed, 0, True
    )
    assert (grads[3].shape, grads[3].stride(2)) == ((2, 8, 24, 20), 32)
    sizes = [storage.num_bytes for storage in gpu.trace.storages[first:]]
    tiles = 4 * 16 * 4100
    assert sizes == [query.nbytes, key.nbytes, key.nbytes, 2 * 2 * 8 * 24 * 32, 4 * 2 * 8 * 24, tiles]


@pytest.mark.parametrize(("length", "head", "rows", "width"), [
    (128, 128, 128, 128), (129, 129, 256, 192), (1, 32, 128, 32), (1, 33, 128, 64), (1, 96, 128, 96),
    (1, 256, 128, 256),
])  # fmt: skip
def test_the_backward_of_flash_attention_rounds_up(length, head, rows, width):
    query = meta(2, 8, length, head)
    found = attention.compute_flash_backward_scratch((None, query, query), properties())
    assert found == [4 * 16 * rows, 4 * 16 * rows * width]


def test_flash_attention_trains_with_it():
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        query = torch.empty(2, 8, 100, 64, device="cuda", dtype=HALF, requires_grad=True)
        made = scaled_dot_product_attention(query, query, query).sum()
        first = len(gpu.trace.storages)
        made.backward()
    assert {4 * 16 * 128, 4 * 16 * 128 * 64} <= {storage.num_bytes for storage in gpu.trace.storages[first:]}


def test_masks_of_the_efficient_kernel_have_rows_of_multiples_of_16():
    query, key = meta(2, 8, 5, 64), meta(2, 8, 17, 64)
    found = attention._align_mask(meta(5, 17), query, key)
    assert (found.shape, found.stride()) == ((2, 8, 5, 17), (0, 0, 32, 1))
    assert attention._align_mask(meta(5, 32), query, meta(2, 8, 32, 64)).stride() == (0, 0, 32, 1)
    found = attention._align_mask(meta(5, 15, dtype=torch.bool), query, meta(2, 8, 15, 64))
    assert (found.dtype, found.stride()) == (HALF, (0, 0, 16, 1))


def test_heads_of_flash_attention_are_padded_to_multiples_of_8():
    assert [attention._pad_head_dim(meta(1, width)).shape[-1] for width in (8, 9, 15, 16)] == [8, 16, 16, 16]


def test_an_output_of_another_width_has_its_dimensions_in_the_order_of_the_queries():
    query = meta(2, 5, 8, 64).transpose(1, 2)
    assert attention._empty_like_query(query, (2, 8, 5, 64)).stride() == query.stride() == (2560, 64, 512, 1)
    assert attention._empty_like_query(query, (2, 8, 5, 32)).stride() == (1280, 32, 256, 1)


FLOATS = 2 * 4 * 16 * 32 * 4  # of queries in float32; keys are 24, scores 16 x 24
KEYS, SCORES, MASK = 2 * 4 * 24 * 32 * 4, 2 * 4 * 16 * 24 * 4, 16 * 24


# The steps of the math backend: scaled queries and keys, scores, their softmax with two masks, and the product.
SOFTMAX = [SCORES, SCORES // 4, 2 * 4 * 16, 4]


@pytest.mark.parametrize(("dtype", "options", "expected"), [
    (torch.float32, {}, [FLOATS, KEYS, SCORES, *SOFTMAX, FLOATS]),
    # In half precision all is computed in float32, and cast back; the scores are, too.
    (HALF, {}, [FLOATS, KEYS, KEYS, FLOATS, KEYS, SCORES, *SOFTMAX, FLOATS, FLOATS // 2, SCORES // 2]),
    (torch.float32, {"attn_mask": "float"}, [FLOATS, KEYS, SCORES, *SOFTMAX, FLOATS]),
    (torch.float32, {"attn_mask": "bool"}, [FLOATS, 4, 4, 4 * MASK, KEYS, SCORES, *SOFTMAX, FLOATS]),
    (torch.float32, {"is_causal": True}, [FLOATS, MASK, MASK, 4, 4, 4 * MASK, KEYS, SCORES, *SOFTMAX, FLOATS]),
    (torch.float32, {"dropout_p": 0.1}, [FLOATS, KEYS, SCORES, *SOFTMAX, SCORES // 4, SCORES, FLOATS]),
    (torch.float32, {"dropout_p": 1.0}, [FLOATS, KEYS, SCORES, *SOFTMAX, 4, SCORES, FLOATS]),
    (torch.float32, {"scale": 0.5}, [FLOATS, KEYS, SCORES, *SOFTMAX, FLOATS]),
    # Keys and values are repeated for each of two heads that share them.
    (torch.float32, {"enable_gqa": True}, [FLOATS, KEYS, KEYS, KEYS, SCORES, *SOFTMAX, FLOATS]),
])  # fmt: skip
def test_steps_of_the_math_backend(gpu, dtype, options, expected):
    heads = 2 if options.get("enable_gqa") else 4
    query = torch.empty(2, 4, 16, 32, device="cuda", dtype=dtype)
    key = torch.empty(2, heads, 24, 32, device="cuda", dtype=dtype)
    if "attn_mask" in options:
        kind = torch.bool if options["attn_mask"] == "bool" else dtype
        options = {"attn_mask": torch.empty(16, 24, device="cuda", dtype=kind)}
    first = len(gpu.trace.storages)
    with sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(query, key, key, **options)
    assert [storage.num_bytes for storage in gpu.trace.storages[first:]] == expected


def test_a_last_dimension_that_is_strided_is_left_to_math():
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        strided = torch.randn(2, 8, 64, 64, device="cuda", dtype=HALF).transpose(2, 3)
        scaled_dot_product_attention(strided, strided, strided)
        assert any("math backend" in sentence for sentence in gpu.trace.assumptions)


@pytest.fixture
def gpu():
    gpu = VirtualGpu(find_gpu("h100-80gb"), workspaces=False)
    gpu.dispatch_mode.gpu = dataclasses.replace(gpu.dispatch_mode.gpu, release=(2, 11))
    with gpu:
        yield gpu


def made(gpu, first, op):
    return [
        (storage.num_bytes, storage.hidden)
        for storage in gpu.trace.storages[first:]
        if gpu.trace.op(storage) == f"aten.{op}"
    ]


@pytest.mark.parametrize("heads", [8, 2])
def test_cudnn_attention_keeps_row_sums_and_makes_the_gradient_of_the_queries_in_float32(gpu, heads):
    query = torch.randn(2, 64, 8, 64, device="cuda", dtype=HALF).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(2, heads, 96, 64, device="cuda", dtype=HALF, requires_grad=True) for _ in range(2))
    first = len(gpu.trace.storages)
    output = scaled_dot_product_attention(query, key, value, enable_gqa=heads != 8)
    rows = 2 * 8 * 64
    forward = made(gpu, first, "_scaled_dot_product_cudnn_attention")
    assert forward == [(8, False), (8, False), (2 * rows * 64, False), (4 * rows, False), (256, True)]
    assert output.stride() == query.stride()
    first = len(gpu.trace.storages)
    output.backward(torch.ones_like(output))
    backward = made(gpu, first, "_scaled_dot_product_cudnn_attention_backward")
    keys = 2 * key.numel()
    # Recorded on an H100 with cuDNN 9.19: with grouped queries keys and values for each of their heads.
    grouped = 2 * keys * 8 // heads if heads != 8 else 0
    assert backward == [(2 * rows * 64, False), (keys, False), (keys, False), (4 * rows * 65 + grouped + 256, True)]
    assert key.grad.shape == key.shape
    assert any("cuDNN's attention" in sentence for sentence in gpu.trace.assumptions)


def test_cudnn_attention_keeps_no_row_sums_without_a_backward(gpu):
    query = torch.randn(2, 8, 64, 64, device="cuda", dtype=HALF)
    first = len(gpu.trace.storages)
    scaled_dot_product_attention(query, query, query, is_causal=True)
    assert [size for size, _ in made(gpu, first, "_scaled_dot_product_cudnn_attention")] == [8, 8, 131_072, 256]


def test_the_program_may_choose(gpu):
    query = torch.randn(2, 8, 64, 64, device="cuda", dtype=HALF)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(query, query, query)
    assert any("flash backend" in sentence for sentence in gpu.trace.assumptions)


def test_values_of_another_width_keep_the_order_of_the_queries(gpu):
    query = torch.randn(2, 64, 8, 192, device="cuda", dtype=HALF).transpose(1, 2)
    value = torch.randn(2, 8, 64, 128, device="cuda", dtype=HALF)
    output = scaled_dot_product_attention(query, query, value)
    assert output.shape == (2, 8, 64, 128)
    assert output.transpose(1, 2).is_contiguous()


XPU = dataclasses.replace(properties(), device_type="xpu")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "overrideable"),
        ({"dtype": torch.float32}, "overrideable"),
        ({"dtype": torch.float64}, "math"),
        ({"dropout": 0.1}, "math"),
        ({"query": (2, 8, 64, 576)}, "overrideable"),
        ({"query": (2, 8, 64, 577)}, "math"),
        ({"query": (2, 8, 64, 64), "value": (2, 8, 64, 576)}, "overrideable"),
        ({"query": (2, 8, 64, 64), "value": (2, 8, 64, 577)}, "math"),
        ({"query": (2, 8, 64, 64), "key": (2, 8, 64, 32), "value": (2, 8, 64, 64)}, "math"),
        ({"key": (2, 2, 64, 64), "gqa": True}, "overrideable"),
        ({"key": (2, 2, 64, 64), "gqa": True, "grad": True}, "math"),
        ({"grad": True}, "overrideable"),
        ({"mask": meta(64, 64)}, "overrideable"),
        ({"mask": meta(64, 64).requires_grad_()}, "math"),
    ],
)
def test_what_the_kernel_of_xpu_takes(options, expected):
    """native/mkldnn/xpu/Attention.cpp, use_overrideable_xpu."""
    assert backend(XPU, **options) == expected


def test_mps_has_no_fused_kernel_with_a_backward():
    assert backend(dataclasses.replace(XPU, device_type="mps")) == "math"
