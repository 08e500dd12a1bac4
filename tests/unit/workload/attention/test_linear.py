"""Linear attention in chunks against its definition."""

from __future__ import annotations

import pytest
import torch

from memprof.workload.attention.linear import linear_attention


@pytest.mark.parametrize(("tokens", "before"), [(300, 0), (128, 0), (5, 200)])
def test_chunks_are_the_sum_over_all_keys(tokens: int, before: int) -> None:
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    query = torch.randn(2, 6, tokens, 8, **options)
    key, value = (torch.randn(2, 3, before + tokens, width, **options) for width in (8, 5))
    mapped = [torch.nn.functional.elu(x) + 1 for x in (query, key.repeat_interleave(2, 1))]
    weights = (mapped[0] @ mapped[1].transpose(-1, -2)).tril(before)
    expected = weights @ value.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True)
    found = linear_attention(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.arange(found.numel(), dtype=torch.float64).view_as(found).sin()
    mine, theirs = (torch.autograd.grad((x * factor).sum(), [query, key, value]) for x in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)
