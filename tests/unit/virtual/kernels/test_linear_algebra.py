"""Solvers and factorisations."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.kernels import solver_buffers

GPU = find_gpu("a100-80gb")
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


@pytest.mark.parametrize(("matrix", "other", "driver"), [
    ((6, 4), (5, 2), "gels"), ((6, 4), (3, 6, 2), "gels"), ((6,), (6,), "gels"), ((6, 4), (6, 2), "gelsd"),
])  # fmt: skip
def test_least_squares_that_cuda_refuses(matrix, other, driver):
    with VirtualGpu(GPU), pytest.raises(RuntimeError, match=r"torch\.linalg\.lstsq"):
        torch.linalg.lstsq(torch.randn(matrix, device="cuda"), torch.randn(other, device="cuda"), driver=driver)


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


# What an H100 (torch 2.11.0+cu130) requested beside results, of a matrix of 256 rows.
BESIDE_RESULTS = {
    "svd": (torch.linalg.svd, [4, 262_144, 596_096, 1, 1]),
    "singular values": (torch.linalg.svdvals, [4, 262_144, 262_144, 262_144, 596_096, 1, 1]),
    "eigh": (torch.linalg.eigh, [4, 301_088, 1, 1]),
    "eigenvalues": (torch.linalg.eigvalsh, [262_144, 4, 301_088, 1, 1]),
    "qr": (torch.linalg.qr, [1024, 4, 3_145_856, 4, 459_776]),
    "qr of a batch": (
        lambda m: torch.linalg.qr(m.expand(4, -1, -1)),
        [4096, 4, 3_145_856, 3_145_856, 3_145_856, 3_145_856, 4, 459_776, 459_776, 459_776, 459_776],
    ),
    "cholesky": (torch.linalg.cholesky, [384, 1, 1]),
    "lu": (torch.linalg.lu, [262_144, 1024, 4, 4352, 2048]),
    "det": (torch.linalg.det, [4, 4352, 4, 1024, 256, 8, 2048]),
    "inv": (torch.linalg.inv, [262_144, 1024, 4352, 2048, 2048, 2048, 262_144, 1, 1]),
    "inv of a batch": (
        lambda m: torch.linalg.inv(m.expand(16, -1, -1)),
        [4_194_304, 16_384, 2048, 32_768, 2048, 32_768, 4_194_304, 128, 128, 128, 128, 1],
    ),
    "solve": (lambda m: torch.linalg.solve(m, m), [4352, 2048, 2048, 2048, 262_144, 1, 1]),
    "solve for a vector": (lambda m: torch.linalg.solve(m[:64, :64], m[0, :64]), [1280, 256, 4, 1, 1]),
    "lstsq": (lambda m: torch.linalg.lstsq(m, m), [4, 262_144, 1024, 4, 3_145_856, 4, 1_574_912, 1, 1]),
    "ldl": (torch.linalg.ldl_factor, [98_432, 1, 1]),
}


@pytest.mark.parametrize(("call", "expected"), BESIDE_RESULTS.values(), ids=BESIDE_RESULTS)
def test_memory_beside_results(call, expected):
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=False) as gpu:
        matrix = torch.randn(256, 256, device="cuda")
        first = len(gpu.trace.storages)
        call(matrix)
        assert [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.hidden] == expected


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
