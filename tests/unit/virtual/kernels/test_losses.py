"""Losses by hand: what is made before the reduction, what stays, and cross entropy under autocast."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

aten = torch.ops.aten


def requested(gpu, call):
    first = len(gpu.trace.storages)
    call()
    return [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.num_bytes]


def steps(gpu, call):
    first = len(gpu.trace.storages)
    call()
    return [(gpu.trace.op(one).removeprefix("aten."), one.num_bytes) for one in gpu.trace.storages[first:]]


LARGE = 1 << 21  # a sum of 512 threads x 256 blocks: 1,024 bytes and a semaphore


@pytest.mark.parametrize(("loss", "expected"), [
    (F.mse_loss, [4 * LARGE, 4 * LARGE, 1024, 4]), (F.smooth_l1_loss, [4 * LARGE, 4 * LARGE, 1024, 4]),
    (F.huber_loss, [4 * LARGE, 4, 1024, 4]), (F.binary_cross_entropy, [4 * LARGE, 4, 1024, 4]),
])  # fmt: skip
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_elements_are_reduced(gpu, loss, expected, reduction):
    data, target = torch.empty(LARGE, device="cuda"), torch.empty(LARGE, device="cuda")
    assert requested(gpu, lambda: loss(data, target, reduction=reduction)) == expected
    assert requested(gpu, lambda: loss(data, target, reduction="none")) == [4 * LARGE]


def test_a_loss_of_a_broadcast_target_is_as_large_as_both(gpu):
    data, target = torch.empty(4, 1, device="cuda"), torch.empty(6, device="cuda")
    assert requested(gpu, lambda: aten.mse_loss(data, target)) == [96, 96]


@pytest.mark.parametrize(("shape", "reduction", "expected"), [
    ((5, 7), 1, [4, 20]), ((5, 7), 2, [4, 20]), ((5, 7), 0, [20]), ((7,), 1, [4]),
])  # fmt: skip
def test_margin_losses_of_classes(gpu, shape, reduction, expected):
    data, target = torch.empty(shape, device="cuda"), torch.zeros(shape[:-1], dtype=torch.int64, device="cuda")
    assert requested(gpu, lambda: aten.multi_margin_loss(data, target, 1, 1, None, reduction)) == expected


@pytest.mark.parametrize(("shape", "reduction", "expected"), [
    ((5, 7), 1, [4, 140, 20]), ((5, 7), 0, [20, 140]), ((7,), 1, [4, 28]), ((7,), 0, [4, 28]),
])  # fmt: skip
def test_margin_losses_of_several_labels_keep_which_classes_are_targets(gpu, shape, reduction, expected):
    data, target = torch.empty(shape, device="cuda"), torch.zeros(shape, dtype=torch.int64, device="cuda")
    call = lambda: aten.multilabel_margin_loss_forward(data, target, reduction)  # noqa: E731
    assert requested(gpu, call) == expected


def test_gradients_of_margin_losses_are_as_large_as_the_data(gpu):
    data, target = torch.empty(7, 5, device="cuda").t(), torch.zeros(5, dtype=torch.int64, device="cuda")
    one = torch.ones((), device="cuda")
    assert requested(gpu, lambda: aten.multi_margin_loss_backward(one, data, target, 1, 1)) == [140]
    labels = torch.zeros(5, 7, dtype=torch.int64, device="cuda")
    call = lambda: aten.multilabel_margin_loss_backward(one, data, labels, 1, torch.empty_like(data))  # noqa: E731
    assert requested(gpu, call)[-1] == 140


@pytest.mark.parametrize(("targets", "lengths", "longest"), [
    ((2, 7), (5, 4), 5), ((9,), (5, 4), 5), ((2, 7), None, 7), ((9,), None, 5),
])  # fmt: skip
def test_ctc_keeps_alignments_of_the_longest_target(gpu, targets, lengths, longest):
    scores = torch.empty(20, 2, 10, device="cuda")
    labels = torch.zeros(targets, dtype=torch.int64, device="cuda")
    frames = torch.tensor([20, 20], device="cuda")
    sizes = (torch.randn(2, device="cuda") * 9).long() if lengths is None else torch.tensor(lengths, device="cuda")
    result = aten._ctc_loss(scores, labels, frames, sizes)
    assert [one.shape for one in result] == [(2,), (2, 20, 2 * longest + 1)]
    sizes_in_bytes = requested(gpu, lambda: aten._ctc_loss(scores, labels, frames, sizes))
    assert sizes_in_bytes == [16, 16, 16, 4 * 2 * 20 * (2 * longest + 1), 8]
    backward = lambda: aten._ctc_loss_backward(result[0], scores, labels, frames, sizes, *result, 0)  # noqa: E731
    assert requested(gpu, backward) == [4 * 2 * 20 * (2 * longest + 1), 4 * 400, 16, 16, 16]


def test_ctc_of_nothing_has_one_blank(gpu):
    scores, labels = torch.empty(20, 2, 10, device="cuda"), torch.zeros(2, 0, dtype=torch.int64, device="cuda")
    assert aten._ctc_loss(scores, labels, [20, 20], [0, 0])[1].shape == (2, 20, 1)


BATCH, CLASSES = 6, 10
HALF_SCORES, SCORES, LOSSES = 2 * 60, 4 * 60, 4 * 6
NONE = [("nll_loss_forward", LOSSES), ("nll_loss_forward", 4)]  # without reduction: the losses, and a total weight


@pytest.mark.parametrize(("options", "expected"), [
    # The log-softmax is in half precision, and what follows in float32.
    ({}, [("_log_softmax", HALF_SCORES), ("_to_copy", SCORES), ("nll_loss_forward", 4), ("nll_loss_forward", 4)]),
    ({"reduction": "none"}, [("_log_softmax", HALF_SCORES), ("_to_copy", SCORES), *NONE]),
    ({"label_smoothing": 0.1}, [
        ("_log_softmax", HALF_SCORES), ("_to_copy", SCORES), ("nll_loss_forward", 4), ("nll_loss_forward", 4),
        ("sum", LOSSES), ("neg", LOSSES), ("eq", 6), ("bitwise_not", 6), ("sum", 8), ("sum", 48), ("sum", 4),
        ("div", 4), ("mul", 4), ("mul", 4), ("add", 4),
    ]),
    ({"label_smoothing": 0.1, "reduction": "sum"}, [
        ("_log_softmax", HALF_SCORES), ("_to_copy", SCORES), ("nll_loss_forward", 4), ("nll_loss_forward", 4),
        ("sum", LOSSES), ("neg", LOSSES), ("eq", 6), ("sum", 4), ("mul", 4), ("mul", 4), ("add", 4),
    ]),
    ({"label_smoothing": 0.1, "reduction": "none"}, [
        ("_log_softmax", HALF_SCORES), ("_to_copy", SCORES), *NONE,
        ("sum", LOSSES), ("neg", LOSSES), ("eq", 6), ("mul", LOSSES), ("mul", LOSSES), ("add", LOSSES),
    ]),
])  # fmt: skip
def test_cross_entropy_under_autocast(gpu, options, expected):
    scores = torch.empty(BATCH, CLASSES, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = steps(gpu, lambda: F.cross_entropy(scores, target, **options))
    assert [step for step in found if step[1]] == expected


@pytest.mark.parametrize(("options", "expected"), [
    ({"reduction": "none"}, [("mul", HALF_SCORES), ("sum", LOSSES), ("neg", LOSSES)]),
    ({"reduction": "sum"}, [("mul", HALF_SCORES), ("sum", 4), ("neg", 4)]),
    ({}, [("mul", HALF_SCORES), ("sum", 4), ("neg", 4), ("div", 4)]),
    ({"weight": True}, [("mul", HALF_SCORES), ("mul", HALF_SCORES), ("sum", 4), ("neg", 4), ("div", 4)]),
    ({"label_smoothing": 0.1}, [
        ("mul", HALF_SCORES), ("add", HALF_SCORES), ("mul", HALF_SCORES), ("sum", 4), ("neg", 4), ("div", 4),
    ]),
])  # fmt: skip
def test_cross_entropy_of_probabilities_under_autocast(gpu, options, expected):
    scores = torch.empty(BATCH, CLASSES, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(CLASSES, device="cuda", dtype=torch.bfloat16) if "weight" in options else None
    target = torch.empty(BATCH, CLASSES, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        found = steps(gpu, lambda: F.cross_entropy(scores, target, **options | {"weight": weight}))
    assert found == [("_log_softmax", HALF_SCORES), *expected]


def test_pairwise_distances_under_autocast_are_floats(gpu):
    first, second = (torch.empty(6, 10, device="cuda", dtype=torch.float16) for _ in range(2))
    with torch.autocast("cuda", torch.float16):
        distance = F.pairwise_distance(first, second, keepdim=True)
        assert (distance.dtype, distance.shape) == (torch.float32, (6, 1))
    assert F.pairwise_distance(first, second).dtype is torch.float16
