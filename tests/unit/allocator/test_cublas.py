"""The workspaces of torch's cuBLAS handles, by GPU, release and environment."""

from __future__ import annotations

import pytest

from memprof.allocator.cublas import LT_WORKSPACE, WORKSPACE, CublasWorkspace

MIB = 1 << 20


@pytest.mark.parametrize(
    ("capability", "release", "num_bytes", "lt_num_bytes", "is_permanent", "is_lt_permanent"),
    [
        ((9, 0), (2, 4), 33_554_432, MIB, True, False),  # recorded: 1 MiB in each product with a bias
        ((8, 9), (2, 8), 8_519_680, MIB, True, False),
        ((8, 9), (2, 9), 8_519_680, MIB, True, True),  # recorded: torch 2.6 to 2.11 on GPUs before Hopper
        ((9, 0), (2, 11), 33_554_432, MIB, True, True),  # recorded: H100
        ((9, 0), (2, 12), 33_554_432, 0, True, True),
        ((10, 0), (2, 11), 8_519_680, MIB, True, True),
        ((12, 0), (2, 12), 33_554_432, 0, True, True),
        ((10, 3), (2, 14), 33_554_432, 0, True, True),
        ((8, 0), (2, 15), 8_519_680, 0, False, True),
    ],
)
def test_the_workspace_that_was_recorded(
    monkeypatch, capability, release, num_bytes, lt_num_bytes, is_permanent, is_lt_permanent
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    expected = CublasWorkspace(num_bytes, lt_num_bytes, is_permanent, is_lt_permanent)
    assert CublasWorkspace.for_gpu(capability, release) == expected


@pytest.mark.parametrize(
    ("gcn_arch", "mib"),
    [("gfx942:sramecc+:xnack-", 128), ("gfx950:sramecc+:xnack-", 128), ("gfx90a", 32), ("gfx1100", 32)],
)
def test_rocm_has_workspaces_of_its_own(monkeypatch, gcn_arch, mib):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    expected = CublasWorkspace(mib * MIB, 76 * MIB, True, True)
    assert CublasWorkspace.for_gpu((9, 0), (2, 13), gcn_arch) == expected
    monkeypatch.setenv("HIPBLAS_WORKSPACE_CONFIG", ":0:0")
    assert CublasWorkspace.for_gpu((9, 0), (2, 13), gcn_arch).num_bytes == 0


def test_environment_variables_set_its_size_and_keep_it(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert CublasWorkspace.for_gpu((9, 0), (2, 15)) == CublasWorkspace((4096 * 2 + 16 * 8) * 1024, 0, True, True)


def test_an_allocation_of_a_product_is_a_workspace_by_its_size():
    workspace = CublasWorkspace(8, 4, True, True)
    assert [workspace.find_name("aten.addmv_", size) for size in (8, 4, 2)] == [WORKSPACE, LT_WORKSPACE, None]
    assert workspace.find_name("aten.add", 8) is None


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"])
def test_cublas_runs_products_of_matrices_and_vectors(op):
    names = [op, f"{op}_"] if "add" in op else [op]
    assert {CublasWorkspace(8, 4, True, True).find_name(f"aten.{name}", 8) for name in names} == {WORKSPACE}
