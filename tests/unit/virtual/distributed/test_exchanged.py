"""What ranks tell each other of tensors arrives as it was."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual.peers.multi_rank import _decode_tensor, _encode_tensor

TENSORS = {
    "a number": torch.tensor(5),
    "one element": torch.tensor([5.0]),
    "several": torch.arange(6).reshape(2, 3),
    "all alike": torch.tensor(2.0, dtype=torch.bfloat16).expand(2, 3),
    "none": torch.empty(0, 4),
}


@pytest.mark.parametrize("given", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_what_it_was(given: torch.Tensor) -> None:
    found = _decode_tensor(_encode_tensor(given))
    assert found is not None
    assert found.dtype == given.dtype
    assert torch.equal(found, given)
