"""Solvers and factorisations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import linear_algebra, solver_buffers
from tests.gpu.library_table import OF_ANY_MATRIX, OF_SQUARE_MATRICES

GPU = find_gpu("a100-80gb")
A100, HOPPER = (DeviceProperties.from_gpu(find_gpu(name)) for name in ("a100-80gb", "h100-80gb"))
SHAPES = [
    ((6, 4), (6, 2)), ((6, 4), (6,)), ((4, 6), (4, 2)), ((5, 5), (5, 1)), ((3, 6, 4), (3, 6)), ((3, 4, 6), (3, 4, 2)),
    ((1, 6, 4), (3, 6, 2)), ((3, 6, 4), (1, 6, 2)), ((2, 1, 4, 6), (1, 5, 4, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("matrix", "other"), SHAPES)
def test_least_squares_are_as_on_the_host_with_the_same_driver(matrix, other):
    def solve(device, **driver):
        made = torch.linalg.lstsq(torch.randn(matrix, device=device), torch.randn(other, device=device), **driver)
        return [(one.shape, one.stride(), one.dtype) for one in made]

    expected = solve("cpu", driver="gels")
    with VirtualGpu(GPU):
        assert solve("cuda") == expected


@pytest.mark.parametrize(("matrix", "other", "says"), [
    ((6, 4), (5, 2), r"input\.size\(-2\) should match other\.size\(-2\)"),
    ((3, 6, 4), (3, 5), r"input\.size\(-2\) should match other\.size\(-1\)"),
    ((6, 4), (3, 6, 2), r"\(input\.dim\(\) - other\.dim\(\)\) <= 1"),
    ((2, 6, 4), (6,), r"\(input\.dim\(\) - other\.dim\(\)\) <= 1"),
    ((6, 4), (), r"\(input\.dim\(\) - other\.dim\(\)\) <= 1"), ((6,), (6,), "at least 2 dimensions"),
])  # fmt: skip
def test_least_squares_that_cuda_refuses(matrix, other, says):
    with VirtualGpu(GPU), pytest.raises(RuntimeError, match=rf"^torch\.linalg\.lstsq: .*{says}"):
        torch.linalg.lstsq(torch.randn(matrix, device="cuda"), torch.randn(other, device="cuda"))


def test_least_squares_have_one_driver_and_one_dtype():
    with VirtualGpu(GPU):
        data = torch.randn(6, 4, device="cuda")
        torch.linalg.lstsq(data, data, driver="gels")
        with pytest.raises(RuntimeError, match="`driver` other than `gels` is not supported on CUDA"):
            torch.linalg.lstsq(data, data, driver="gelsd")
        with pytest.raises(RuntimeError, match=r"input's dtype torch\.float32 and other's dtype torch\.float64"):
            torch.linalg.lstsq(data, data.double())


def test_least_squares_keep_the_rows_of_the_residuals():
    """And hold a copy of the matrix and a factor for each reflector meanwhile; of a wide one its transpose, too."""
    with VirtualGpu(GPU, workspaces=False) as gpu:
        for rows, columns in ((4096, 1024), (1024, 4096)):
            matrix, other = torch.randn(rows, columns, device="cuda"), torch.randn(rows, 8, device="cuda")
            before = gpu.recorder.storages.live_bytes
            made = torch.linalg.lstsq(matrix, other)
            residuals = 4 * 8 if rows > columns else 0
            assert gpu.recorder.storages.live_bytes - before == 4 * 8 * 4096 + residuals
            copies = (1 if rows > columns else 2) * 4 * rows * columns
            error_codes = 4 + 4
            assert gpu.recorder.storages.peak_bytes - before == error_codes + 4 * 8 * 4096 + copies + 4 * 1024
            assert made.solution.shape == (columns, 8)
            del made


# What an H100 (torch 2.11.0+cu130) requested, results among it, in order: of matrices of one size or several, on both
# sides of the sizes at which CUDA takes another algorithm (tests/accuracy/truth, factorisations.jsonl).
CALLS = OF_SQUARE_MATRICES | OF_ANY_MATRIX
REQUESTS = {
        "solve 8x8": [256, 256, 32, 4, 768, 8, 8, 1, 1],
        "solve 33x33": [4356, 4356, 132, 4, 1280, 264, 264, 264, 4356, *4 * [8], 1, 1],
        "solve 64x64": [16_384, 16_384, 256, 4, 1280, 512, 512, 512, 16_384, 1, 1],
        "solve 4x16x16": [4096, 4096, 256, 16, 32, 32, 32, 1],
        "solve 8x64x64": [131_072, 131_072, 2048, 32, 64, 512, 4096, 512, 4096, 131_072, 1],
        "solve 16x128x128": [1_048_576, 1_048_576, 8192, 64, 128, 1024, 16_384, 1024, 16_384, 1_048_576, *4 * [128],
        1],
        "solve 3x300x300": [1_080_000, 1_080_000, 3600, 12, 2400, 7200, 2400, 7200, 1_080_000, 1],
        "solve 64x32x32 float64": [524_288, 524_288, 8192, 256, 256, 16_384, 256, 16_384, 524_288, *4 * [512], 1],
        "solve a vector 8x8": [32, 256, 32, 4, 768, 32, 8, 8, 1, 1],
        "solve a vector 33x33": [132, 4356, 132, 4, 1280, 132, 4, 1, 1],
        "solve a vector 128x128": [512, 65_536, 512, 4, 2304, 512, 4, 1, 1],
        "solve a vector 200x200": [800, 160_000, 800, 4, 4096, 800, 1600, 1600, 1600, 800, 1, 1],
        "solve a vector 4x16x16": [256, 4096, 256, 16, 32, 256, 32, 32, 1],
        "solve a vector 16x128x128": [8192, 1_048_576, 8192, 64, 128, 8192, 128, 128, 1],
        "solve a vector 3x300x300": [3600, 1_080_000, 3600, 12, 3600, 2400, 7200, 2400, 7200, 3600, 1],
        "solve a vector 256x256 float64": [2048, 524_288, 1024, 4, 4352, *5 * [2048], 1, 1],
        "inv 8x8": [256, 4, 256, 32, 768, 8, 8, 1, 1],
        "inv 4x16x16": [4096, 16, 4096, 256, 32, 32, 32, 1],
        "inv 3x300x300": [1_080_000, 12, 1_080_000, 3600, 2400, 7200, 2400, 7200, 1_080_000, 1],
        "cholesky 8x8": [256, 4, 160, 1, 1],
        "cholesky 3x300x300": [1_080_000, 12, 24, 1],
        "cholesky 512x512": [1_048_576, 4, 1152, 1, 1],
        "cholesky_inverse 33x33": [4356, 4356, 4],
        "cholesky_inverse 4x16x16": [4096, 4096],
        "cholesky_solve 8x8": [4, 256, 256],
        "cholesky_solve 64x32x32": [262_144, 262_144],
        "solve_triangular 33x33": [4356, 8, 8],
        "solve_triangular 64x64": [16_384],
        "solve_triangular 8x64x64": [131_072],
        "solve_triangular 16x128x128": [1_048_576, 128, 128],
        "solve_triangular 768x768": [2_359_296],
        "solve_triangular 64x32x32": [262_144, 512, 512],
        "eigh 33x33": [4356, 132, 4, 16_848, 1, 1],
        "eigh 512x512": [1_048_576, 2048, 4, 1_124_416, 1, 1],
        "eigh 768x768": [2_359_296, 3072, 4, 9_959_308, 1, 1],
        "eigh 1024x1024 float64": [8_388_608, 8192, 4, 34_858_648, 1, 1],
        "eigh 8x64x64": [131_072, 2048, 32, *8 * [29_000], 1],
        "eigvalsh 3x300x300": [3600, 1_080_000, 12, *3 * [407_896], 1],
        "eigvalsh 33x33": [132, 4356, 4, 16_848, 1, 1],
        "det 8x8": [4, 256, 32, 4, 768, 4, 32, 8, 8, 64],
        "det 64x32x32 float64": [512, 524_288, 8192, 256, 512, 128, 2048, 512, 16_384],
        "det 3x300x300": [12, 1_080_000, 3600, 12, 12, 1200, 900, 24, 7200],
        "slogdet 8x8": [4, 4, 256, 32, 4, 768, 32, 8, 8, 64, 32, 4, 32],
        "slogdet 64x32x32 float64": [512, 512, 524_288, 8192, 256, 128, 2048, 512, 16_384, 16_384, 512, 16_384],
        "lu_factor 8x8": [256, 32, 4, 768, 1, 1],
        "lu_factor 4x16x16": [4096, 256, 16, 32, 1],
        "lu_factor 8x64x64": [131_072, 2048, 32, 64, 1],
        "lu_factor 16x128x128": [1_048_576, 8192, 64, 128, 1],
        "lu_factor 2x1024x1024": [8_388_608, 8192, 8, 1],
        "lu_factor 512x512": [1_048_576, 2048, 4, 8448, 1, 1],
        "ldl_factor 8x8": [256, 32, 4, 98_432, 1, 1],
        "ldl_factor 1024x1024 float64": [8_388_608, 4096, 4, 524_800, 1, 1],
        "eig 512x512": [1_048_576, *3 * [262_144], 1, 32, 4, 4, 2_097_152, 4096, 4096, 1_048_576, 1_048_576,
        1_057_280, 512, 1, 4096, 2_097_152, 1, 1],
        "eig 2x1024x1024": [8_388_608, *3 * [2_097_152], 1, 256, 4, 8, 16_777_216, 16_384, 16_384, 8_388_608,
        8_388_608, 4_211_200, 2048, 1, 16_384, 16_777_216, 1],
        "qr 8x8": [256, 256, 32, 4, 3_145_856, 4, 132_352],
        "qr 4x16x16": [4096, 4096, 256, 32, 32, 4, *4 * [133_120]],
        "qr 16x128x128": [1_048_576, 1_048_576, 8192, 128, 128, 4, *16 * [263_168]],
        "qr 3x300x300": [1_080_000, 1_080_000, 3600, 4, *3 * [3_326_080], 4, *3 * [527_360]],
        "qr 512x128": [262_144, 65_536, 512, 4, 3_145_856, 4, 459_776],
        "qr 128x512": [65_536, 262_144, 512, 4, 4_194_432, 4, 263_168],
        "qr 4096x256": [4_194_304, 262_144, 1024, 4, 3_145_856, 4, 2_425_856],
        "qr 16x64x16": [65_536, 16_384, 1024, 128, 128, 4, *16 * [136_192]],
        "qr complete 512x128": [1_048_576, 262_144, 512, 4, 3_145_856, 4, 852_992],
        "qr complete 2048x64": [16_777_216, 524_288, 256, 4, 3_145_856, 4, 1_639_424],
        "qr 1024x1024 float64": [8_388_608, 8_388_608, 8192, 4, 12_583_040, 4, 3_278_848],
        "svd 33x33": [4356, 4356, 132, 4, 4356, 29_568, 1, 1],
        "svd 64x32x32 float64": [524_288, 524_288, 16_384, 256, 524_288, 7936, 1],
        "svd 512x128": [262_144, 65_536, 512, 4, 262_144, 3_146_368, 1, 1],
        "svd 128x512": [65_536, 262_144, 512, 4, 262_144, 3_408_512, 1, 1],
        "svd full 512x128": [1_048_576, 65_536, 512, 4, 262_144, 3_146_368, 1, 1],
        "svd full 16x64x16": [262_144, 16_384, 1024, 64, 65_536, 3_145_984, 1],
        "svd 16x64x16": [65_536, 16_384, 1024, 64, 65_536, 3_145_984, 1],
        "svdvals 33x33": [132, 4, 4356, 4356, 4356, 29_568, 1, 1],
        "svdvals 64x32x32": [8192, 256, *3 * [262_144], 3968, 1],
        "svdvals 3x300x300": [3600, 12, 1_080_000, 360_000, 360_000, 808_960, 1],
        "svdvals 512x128": [512, 4, 262_144, 262_144, 65_536, 3_146_368, 1, 1],
        "svdvals 16x64x16": [1024, 64, 65_536, 4096, 1024, 3_145_984, 1],
        "lstsq 33x33": [4, 1056, 4356, 132, 4, 3_145_856, 4, 322_304, 8, 8, 1, 1],
        "lstsq 64x64": [4, 2048, 16_384, 256, 4, 3_145_856, 4, 377_984, 1, 1],
        "lstsq 4x16x16": [16, 2048, 4096, 4096, 32, 32, 1],
        "lstsq 16x128x128": [64, 65_536, 1_048_576, 1_048_576, 128, 128, 1],
        "lstsq 3x300x300": [12, 28_800, 1_080_000, 3600, 4, *3 * [3_326_080], 4, *3 * [1_306_880], 1],
        "lstsq 512x128 float64": [4, 32_768, 524_288, 1024, 4, 6_291_584, 4, 2_263_296, 64, 1, 1],
        "lstsq 128x512": [4, 16_384, 262_144, 512, 262_144, 4, 3_145_856, 4, 1_131_648, 1, 1],
        "lstsq 8x512x64": [32, 131_072, 1_048_576, 2048, 4, *8 * [3_145_856], 4, *8 * [951_424], 256, 1],
        "lstsq 16x64x16": [64, 32_768, 65_536, 65_536, 128, 128, 512, 1],
}  # fmt: skip


def requested(call, shape, dtype=torch.float32, gpu="h100-80gb"):
    with VirtualGpu(find_gpu(gpu), workspaces=False) as virtual:
        matrix = torch.empty(shape, dtype=dtype, device="cuda")
        first = len(virtual.trace.storages)
        call(matrix)
        return [storage.num_bytes for storage in virtual.trace.storages[first:] if storage.num_bytes]


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_those_of_an_h100(name):
    call, _, shape = name.removesuffix(" float64").rpartition(" ")
    dtype = torch.float64 if name.endswith("float64") else torch.float32
    assert requested(CALLS[call], tuple(map(int, shape.split("x"))), dtype) == REQUESTS[name]


# By hand, for what was not recorded.
REFLECTORS = 128 + 4 * (1024 * 256 + (1 << 19))


@pytest.mark.parametrize(("call", "expected"), [
    # Small rectangles are solved as squares, of 16 x 16 here; 992 values of cuSOLVER for up to 32 rows.
    (lambda: torch.linalg.svd(matrix(4, 16, 8), full_matrices=False),
     [16 * 32 * 4, 32 * 8 * 4, 4 * 32, 16, 2048, 4 * 4 * 256, 3968, 1]),
    (lambda: torch.linalg.svd(matrix(4, 16, 8)), [4 * 4 * 256, 32 * 8 * 4, 4 * 32, 16, 2048, 3968, 1]),
    (lambda: torch.linalg.svdvals(matrix(4, 32, 8)), [128, 16, 4096, 4096, 1024, 4 * 4 * 1024, 3968, 1]),
    (lambda: torch.linalg.svdvals(matrix(1, 16, 8)), [32, 4, 512, 512, 256, 3968, 1, 1]),
    # Jacobi's method is for 32 to 512 rows in float32.
    (lambda: torch.linalg.eigvalsh(matrix(31, 31)), [124, 3844, 4, 128 + 4 * (4 * 961 + 127 * 31 + 32_963), 1, 1]),
    (lambda: torch.linalg.eigvalsh(matrix(32, 32)), [128, 4096, 4, 4 * (1024 + 1024 + 32 + 4 + 1 + 1024), 1, 1]),
    (lambda: torch.linalg.eigvalsh(matrix(513, 513)),
     [2052, 1_052_676, 4, 128 + 4 * (4 * 263_169 + 127 * 513 + 32_963), 1, 1]),
    (lambda: torch.linalg.eigvalsh(matrix(64, 64).double()),
     [32_768, 512, 32_768, 4, 128 + 8 * (4 * 4096 + 127 * 64 + 32_963), 1, 1]),
    # The buffer of batches of up to 32 rows is not known.
    (lambda: torch.linalg.eigh(matrix(2, 32, 32)), [8192, 256, 8, 1]),
    (lambda: torch.linalg.eigh(matrix(2, 33, 33)), [8712, 264, 8, 16_848, 16_848, 1]),
    (lambda: torch.linalg.lu(matrix(2, 6, 4)), [2 * 36 * 4, 192, 2 * 16 * 4, 192, 32, 8, 96]),
    (lambda: torch.geqrf(matrix(3, 4, 6)), [288, 48]),
    # More right-hand sides than matrices, which are copied for each: of many rows, by cuBLAS, and of wide matrices.
    (lambda: torch.linalg.lstsq(matrix(1, 6, 4), matrix(3, 6, 2)), [4, 144, 96, 288, 24, 24, 24, 1, 1]),
    (lambda: torch.linalg.lstsq(matrix(1, 300, 4), matrix(2, 300, 1)),
     [4, 2400, 4800, 16, 4, REFLECTORS, 9600, 32, 4, *2 * [4 * 144_352], 16, 16, 8, 1, 1]),
    (lambda: torch.linalg.lstsq(matrix(1, 4, 6), matrix(3, 4, 2)),
     [4, 144, 96, 16, 96, 4, REFLECTORS, 288, 48, 24, 24, 4, *3 * [4 * 68_448], 1, 1]),
    # Up to 25 rows distances are computed one by one, from 26 on by a product.
    (lambda: torch.cdist(matrix(25, 3), matrix(25, 3)), [2500]),
    (lambda: torch.cdist(matrix(26, 3), matrix(26, 3), p=1), [2704]),
    (lambda: torch.cdist(matrix(26, 3), matrix(26, 3), compute_mode="donot_use_mm_for_euclid_dist"), [2704]),
])  # fmt: skip
def test_requests_by_hand(call, expected):
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False) as gpu:
        call()
        sizes = [storage.num_bytes for storage in gpu.trace.storages if gpu.trace.op(storage) != "aten.empty"]
    assert sizes == expected


def matrix(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(("first", "second", "mode"), [(26, 3, 0), (3, 26, 0), (3, 3, 1)])
def test_distances_of_many_rows_are_a_product(first, second, mode):
    with VirtualGpu(GPU, workspaces=False) as gpu:
        torch.ops.aten._cdist_forward(matrix(first, 4), matrix(second, 4), 2.0, mode)
        assert "aten.cat" in {gpu.trace.op(storage) for storage in gpu.trace.storages}


@pytest.mark.usefixtures("recorded_release")
def test_complex_eigenvalues_need_no_copies_of_real_numbers():
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False) as gpu:
        torch.linalg.eig(matrix(64, 64, dtype=torch.complex64))
        hidden = [one.num_bytes for one in gpu.trace.storages if one.hidden and gpu.trace.op(one) == "aten.linalg_eig"]
    # An error code, vectors and values, the matrix, cuSOLVER's buffer: 33,024 + 64 x 64 values.
    assert hidden == [4, 32_768, 512, 32_768, 8 * 37_120, 1, 1]


@pytest.mark.parametrize(("release", "counted"), [((2, 10), False), ((2, 11), True)])
def test_eigenvalues_were_computed_on_the_host_before_2_11(release, counted):
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False) as gpu:
        gpu.dispatch_mode.gpu = dataclasses.replace(gpu.dispatch_mode.gpu, release=release)
        torch.linalg.eig(matrix(64, 64))
        assert any(storage.hidden for storage in gpu.trace.storages) is counted


def test_many_small_matrices_are_decomposed_at_once():
    shapes = [(256, 16), (256, 15), (257, 99), (16, 1), (16, 2), (64, 4), (64, 3)]
    assert [linear_algebra._is_batched_by_cublas(*shape) for shape in shapes] == [
        True,
        False,
        False,
        False,
        True,
        True,
        False,
    ]


def test_triangles_are_solved_one_by_one_where_they_are_few_or_large():
    shapes = [(63, 8), (64, 8), (64, 9), (512, 9), (513, 9), (8, 1)]
    pointers = [linear_algebra._triangular_solve_pointers(*shape) for shape in shapes]
    assert pointers == [[64, 64], [], [72, 72], [72, 72], [], [8, 8]]


def test_lu_factors_by_cusolver_cublas_and_magma():
    shapes = [(17, 17), (99, 16, 16), (99, 17, 17), (16, 17, 17), (16, 128, 128), (17, 128, 128), (2, 129, 129), (4, 3)]
    sizes = [linear_algebra._lu_buffers(torch.empty(shape, device="meta"), HOPPER) for shape in shapes]
    assert sizes == [[256 + 256 + 256], [792], [], [128], [128], [], [], []]


@pytest.mark.parametrize(("rows", "num_rhs", "batch", "expected"), [
    # A row index, its permutation, the permuted rows; pointers for each triangle.
    (16, 16, 1, [8, 8]), (17, 17, 1, [136, 136, 136, 1156, 8, 8, 8, 8]),
    (17, 17, 2, [136, 272, 136, 272, 2312, *4 * [16]]), (8, 3, 1, [8, 8]), (9, 3, 1, [4]), (9, 3, 2, [4]),
    (9, 8, 3, [24, 24]), (9, 10, 3, [72, 216, 72, 216, 1080, *4 * [24]]),
    (32, 65, 1, [4]), (33, 64, 1, [4]), (33, 65, 1, [264, 264, 264, 8580, 8, 8, 8, 8]),
    (64, 1, 3, [24, 24]), (64, 3, 1, [4]), (65, 2, 2, [4]), (65, 2, 3, [24, 24]),
    (65, 3, 2, [520, 1040, 520, 1040, 1560]),
    (128, 2, 2, [4]), (129, 1, 1, [1032, 1032, 1032, 516]),
])  # fmt: skip
def test_buffers_of_a_solve_with_lu_factors(rows, num_rhs, batch, expected):
    assert linear_algebra._lu_solve_buffers(rows, num_rhs, batch, 4) == expected


def test_right_hand_sides_are_columns_or_rows_or_a_vector():
    def scratch(matrix, rhs, *left):
        return linear_algebra.compute_solve_scratch(
            (*(torch.empty(each, device="meta") for each in (matrix, rhs)), *left), A100
        )

    assert scratch((128, 128), (128, 2)) == scratch((128, 128), (2, 128), False) == [4]
    assert scratch((128, 128), (128, 3), True)[-1] == 4 * 128 * 3
    assert scratch((2, 128, 128), (2, 128)) == [16, 1024, 4]
    assert scratch((3, 129, 129), (129,))[:3] == [516, 1032, 3096]


# Recorded on the same GPU (factorisations.jsonl).
@pytest.mark.parametrize(("function", "arguments", "num_bytes"), [
    ("potrf", (8,), 160), ("potrf", (128,), 192), ("potrf", (200,), 352), ("potrf", (3000,), 35_488),
    ("getrf", (8,), 768), ("getrf", (33,), 1280), ("getrf", (128,), 2304), ("getrf", (200,), 4096),
    ("getrf", (512,), 8448), ("getrf", (1024,), 12_544),
    ("sytrf", (8, 4), 98_432), ("sytrf", (32, 8), 106_624), ("sytrf", (512, 4), 131_328), ("sytrf", (3000, 4), 768_256),
    ("geqrf", (8, 4), 3_145_856), ("geqrf", (300, 4), 3_326_080), ("geqrf", (1024, 8), 12_583_040),
    ("orgqr", (8, 8, 8, 4), 132_352), ("orgqr", (33, 33, 33, 4), 136_576), ("orgqr", (32, 32, 32, 8), 272_384),
    ("orgqr", (2048, 64, 64, 4), 656_384), ("orgqr", (128, 128, 128, 4), 263_168),
    ("orgqr", (512, 128, 128, 4), 459_776), ("orgqr", (4096, 4096, 256, 4), 6_358_016),
    ("ormqr", (33, 33, 8, 4), 322_304), ("ormqr", (512, 128, 8, 8), 2_263_296),
    ("ormqr", (1000, 300, 8, 4), 2_863_744),
    ("syevj", (33,), 16_848), ("syevj", (64,), 29_000), ("syevj", (300,), 407_896), ("syevj", (512,), 1_124_416),
    ("syevd", (768, 4), 9_959_308), ("syevd", (1024, 8), 34_858_648),
    ("geev", (512, 4), 1_057_280), ("geev", (1024, 8), 8_421_888),
    ("gesvdj", (8, 8, 4), 3968), ("gesvdj", (32, 32, 8), 7936), ("gesvdj", (33, 33, 4), 29_568),
    ("gesvdj", (200, 200, 4), 383_104), ("gesvdj", (256, 256, 8), 1_192_192), ("gesvdj", (300, 300, 4), 808_960),
    ("gesvdj", (512, 128, 4), 3_146_368), ("gesvdj", (128, 512, 4), 3_408_512), ("gesvdj", (2048, 64, 4), 3_146_112),
    ("gesvdj", (64, 16, 4), 3_145_984), ("gesvdj", (512, 128, 8), 6_292_736),
])  # fmt: skip
def test_buffers_of_cusolver(function, arguments, num_bytes):
    assert getattr(solver_buffers, f"{function}_buffer_bytes")(*arguments) == num_bytes


def test_buffers_of_cusolver_that_are_not_exact_are_as_near_as_they_are_said_to_be():
    for rows, num_bytes in ((8, 132_608), (64, 149_504), (200, 375_808), (256, 462_848)):
        assert abs(solver_buffers.geev_buffer_bytes(rows, 4) - num_bytes) <= 12 << 10
    assert solver_buffers.getrf_buffer_bytes(3000) == 63_232 - (34 << 10)
    assert abs(solver_buffers.syevd_buffer_bytes(3000, 4) - 145_656_012) <= 32


def test_solvers_buffers_of_other_gpus_are_not_counted_and_the_rule_is_told():
    with VirtualGpu(GPU) as gpu:
        matrix = torch.randn(256, 256, device="cuda")
        first = len(gpu.trace.storages)
        torch.linalg.eigh(matrix)
        hidden = [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.hidden]
    assert hidden == [4, 1, 1]
    assert solver_buffers.BUFFERS_ASSUMPTION in gpu.trace.assumptions


def test_vectors_are_computed_where_values_are_differentiated():
    for function in (torch.linalg.svdvals, torch.linalg.eigvalsh):
        with VirtualGpu(GPU):
            matrix = torch.randn(64, 64, device="cuda", requires_grad=True)
            function(matrix).sum().backward()
            assert matrix.grad.shape == matrix.shape


def test_no_rows_have_no_distances(gpu):
    assert torch.cdist(matrix(0, 3), matrix(4, 3)).shape == (0, 4)
