"""Operators whose results depend on values: what they run on the GPU, and on host tensors that are virtual too."""

from __future__ import annotations

import pytest
import torch

from memprof.trace.events import HOST

LARGE = 1 << 19  # elements of 8 bytes: such host tensors are virtual


def steps(gpu, call):
    first = len(gpu.trace.storages)
    result = call()
    made = [one for one in gpu.trace.storages[first:] if one.device != HOST]
    return result, [(gpu.trace.op(one).removeprefix("aten."), one.num_bytes) for one in made]


def test_tensors_are_compared_element_by_element(gpu):
    data, other = torch.arange(9, device="cuda"), torch.arange(9, device="cuda")
    assert steps(gpu, lambda: torch.equal(data, other)) == (True, [("eq", 9), ("all", 1)])
    assert steps(gpu, lambda: torch.equal(data, data)) == (True, [])
    assert steps(gpu, lambda: torch.equal(data, data[:8])) == (False, [])
    assert steps(gpu, lambda: torch.equal(data[:0], other[:0])) == (True, [])
    unknown = torch.randn(9, device="cuda")
    assert not torch.equal(unknown, torch.randn(9, device="cuda")) and torch.allclose(unknown, unknown * 2)
    result, made = steps(gpu, lambda: torch.allclose(data.double(), other.double() + 1))
    assert not result and made[-1] == ("all", 1) and ("eq", 9) in made


def test_host_tensors_are_compared_without_the_gpu(gpu):
    data, other = torch.arange(float(LARGE)), torch.arange(float(LARGE))
    assert steps(gpu, lambda: torch.allclose(data, other)) == (True, [])
    assert steps(gpu, lambda: torch.equal(data, other)) == (True, [])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_results_are_as_long_as_values_say(gpu, device):
    count = torch.arange(LARGE, device=device)
    twice = count.repeat_interleave(torch.full((LARGE,), 2, device=device))
    assert twice.shape == (2 * LARGE,) and twice[3].item() == 1
    assert (count % 3).unique().tolist() == [0, 1, 2]
    assert (count // 2).unique_consecutive().shape == (LARGE // 2,)
    assert (count % 5).bincount(minlength=7).shape == (7,)
    assert (count % 9).bincount().shape == (9,)
    assert torch.stack([count % 2, count % 2]).unique(dim=1).shape == (2, 2)


def test_unknown_values_all_differ_or_are_repeated_alike(gpu):
    unknown = torch.randn(6, device="cuda").long()
    assert unknown.unique().shape == unknown.unique_consecutive().shape == (6,)
    assert unknown.view(2, 3).unique(dim=1).shape == (2, 3) and unknown.bincount().shape == (6,)
    assert unknown.bincount(minlength=4).tolist() == [2, 2, 1, 1]
    data = torch.arange(6, device="cuda")
    assert data.repeat_interleave(unknown).shape == (6,)
    assert data.repeat_interleave(unknown, output_size=15).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5]
    said = " ".join(gpu.trace.assumptions)
    assert "as if all elements differed" in said and "below its minlength" in said and "as if all were alike" in said


def test_zeros_that_autograd_makes_take_no_memory(gpu):
    zeros = torch.ops.aten._efficientzerotensor([5, 3], device="cuda")
    assert zeros.shape == (5, 3) and zeros.untyped_storage().nbytes() == 0
