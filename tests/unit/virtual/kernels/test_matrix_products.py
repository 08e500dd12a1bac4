"""Products whose meta kernel depends on the release of torch."""

from types import SimpleNamespace

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
