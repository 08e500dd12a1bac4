"""Products whose meta kernel depends on the release of torch."""

from types import SimpleNamespace

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.kernels import matrix_products


def recorded():
    device = VirtualGpu(find_gpu("h100-80gb"))
    with device:
        total = torch.zeros(3, 5, device="cuda")
        one, other = (torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in ((3, 4), (4, 5)))
        made = torch.addmm(total, one, other, out_dtype=torch.float32)
        assert made.dtype is torch.float32 and made.shape == (3, 5) and made.is_cuda
        assert torch.addmm(total, one, other, out_dtype=torch.float32, out=total) is total
    return device.trace


def test_a_product_of_another_dtype_is_the_same_in_any_release(monkeypatch):
    run = recorded()
    assert [one.shape for one in run.storages if one.dtype == "float32"] == [(3, 5), (3, 5)]
    monkeypatch.setattr(matrix_products.kernels, "addmm_dtype", SimpleNamespace(exists=lambda: False))
    trace = recorded()
    assert trace.storages == run.storages
    assert trace.events == run.events


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize(("name", "groups", "rows", "dtype", "expected"), [
    # Three pointers of each group, for an even number of groups, 36 bytes of each, and 512 of each multiprocessor.
    ("h100-80gb", 8, 64, torch.bfloat16, [480, 132 * 512]), ("h100-80gb", 3, 48, torch.bfloat16, [204, 132 * 512]),
    ("b200", 2, 32, torch.bfloat16, [120, 148 * 512]), ("a100-80gb", 8, 64, torch.bfloat16, []),
    ("h100-80gb", 8, 64, torch.float32, []),
])  # fmt: skip
def test_grouped_products(name, groups, rows, dtype, expected):
    with VirtualGpu(find_gpu(name), workspaces=False) as gpu:
        tokens = torch.empty(rows, 16, device="cuda", dtype=dtype)
        weights = torch.empty(groups, 16, 32, device="cuda", dtype=dtype)
        ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (rows // groups)
        first = len(gpu.trace.storages)
        result = torch.ops.aten._grouped_mm(tokens, weights, ends)
        made = [storage.num_bytes for storage in gpu.trace.storages[first:]]
        assert (result.dtype, result.shape) == (dtype, (rows, 32)) and made == [result.nbytes, *expected]
        gradients = torch.ops.aten._grouped_mm(tokens.t(), result, ends)  # no matrices lie one behind another
        assert gradients.shape == (groups, 16, 32)
        assert [one.num_bytes for one in gpu.trace.storages[first + len(made) :]] == [gradients.nbytes, *expected]
