"""Temporaries of copies between GPUs without peer access: sent by one, received by the other."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from memprof.virtual.kernels import transfers

HALF, SINGLE = torch.float16, torch.float32


def meta(dtype, *, transposed=False):
    return (
        torch.empty(6, 4, dtype=dtype, device="meta").t()
        if transposed
        else torch.empty(4, 6, dtype=dtype, device="meta")
    )


@pytest.mark.parametrize(("target", "source", "non_blocking", "received", "sent"), [
    (meta(SINGLE), meta(SINGLE), False, None, None),
    (meta(SINGLE, transposed=True), meta(SINGLE, transposed=True), False, None, None),
    # Other strides: a contiguous copy where one is not.
    (meta(SINGLE), meta(SINGLE, transposed=True), False, [], [96]),
    (meta(SINGLE, transposed=True), meta(SINGLE), False, [96], []),
    (meta(SINGLE), meta(SINGLE)[:, :1].expand(4, 6), False, [], [96]),
    # Another dtype is converted where it is received, or, without waiting, where it is sent from.
    (meta(SINGLE), meta(HALF), False, [48], []), (meta(SINGLE), meta(HALF), True, [], [96]),
    (meta(SINGLE), meta(HALF, transposed=True), False, [48], [48]),
    (meta(SINGLE), meta(HALF, transposed=True), True, [], [96, 96]),
    (meta(HALF, transposed=True), meta(SINGLE), True, [48], [48]),
])  # fmt: skip
def test_copies_between_gpus(target, source, non_blocking, received, sent):
    found = {}

    def scratch(*sizes, gpu):
        found[gpu] = list(sizes)
        return contextlib.nullcontext()

    devices = {id(target): "cuda:0", id(source): "cuda:1"}
    state = SimpleNamespace(device_of=lambda tensor: devices[id(tensor)])
    launch = SimpleNamespace(device_state=state, scratch=scratch, transients=scratch)
    transfers._allocate_peer_copy(launch, target, source, non_blocking)
    assert found == ({} if received is None else {"cuda:0": received, "cuda:1": sent})
    found.clear()
    for other in ("cuda:0", "cpu"):
        devices[id(source)] = other
        transfers._allocate_peer_copy(launch, target, source, non_blocking)
    assert found == {}
