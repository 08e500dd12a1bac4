"""The tensor of a failed allocation: which bytes the request may have, and what of a model has them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from memprof.doctor.diagnosis import MessageSizes, PrintedSize
from memprof.doctor.dimensions import Dimensions
from memprof.doctor.tensors import TensorQuery, find_candidates, find_request_range, find_roles

MIB = 1 << 20


def printed(low: int, high: int) -> PrintedSize:
    return PrintedSize("", (low + high) // 2, low, high)


@pytest.mark.parametrize(
    ("low", "high", "is_segment", "request_range"),
    [
        # Segments are multiples of 2 MiB, and the request is larger than the next smaller one.
        (4 * MIB, 4 * MIB, True, (2 * MIB + 1, 4 * MIB)),
        (4 * MIB - 9, 7 * MIB, True, (2 * MIB + 1, 6 * MIB)),
        (4 * MIB + 1, 8 * MIB, True, (4 * MIB + 1, 8 * MIB)),
        # One of 2 or 20 MiB is for many small requests.
        (1 * MIB, 3 * MIB, True, None),
        (20 * MIB, 20 * MIB, True, None),
        (18 * MIB, 20 * MIB, True, (16 * MIB + 1, 20 * MIB)),
        (20 * MIB, 22 * MIB, True, (18 * MIB + 1, 22 * MIB)),
        # What is no segment is the request, rounded up to 512 bytes.
        (3 * MIB, 4 * MIB - 1, True, (3 * MIB - 512, 4 * MIB - 1)),
        (4 * MIB, 4 * MIB, False, (4 * MIB - 512, 4 * MIB)),
        (513, MIB, False, (1, MIB)),
        (514, MIB, False, (2, MIB)),
        (100, MIB, False, (1, MIB)),
        (MIB - 1, MIB - 1, False, None),
    ],
)
def test_the_bytes_of_the_request(low: int, high: int, is_segment: bool, request_range: tuple[int, int] | None):
    sizes = MessageSizes(tried=printed(low, high), tried_is_segment=is_segment)
    assert find_request_range(sizes) == request_range


def test_a_message_without_a_request_has_no_range():
    assert find_request_range(MessageSizes()) is None


@pytest.mark.parametrize(
    ("frames", "roles"),
    [
        (["train.py:5: loss = cross_entropy(x, y)"], {"logits"}),
        (["a.py:1: scores = q @ k", "b.py:2: self.down_proj(x)"], {"attention", "feed-forward"}),
        (["fsdp.py:7: flat_param = x"], {"optimizer"}),
        (["module.py:8: self._apply(convert)"], {"weights"}),
        (["cache_utils.py:9: torch.cat(x)"], {"cache"}),
        (["a.py:1: y = x + 1"], set()),
        ([], set()),
    ],
)
def test_the_roles_that_a_traceback_mentions(frames: list[str], roles: set[str]):
    assert find_roles(frames) == roles


MODEL = Dimensions(
    "m", vocabulary=50_000, hidden=640, intermediate=1792, heads=10, kv_heads=5, head_dim=72, max_positions=4096
)  # fmt: skip


def exactly(num_bytes: int, model: Dimensions | None = MODEL, **known: object) -> list[tuple[object, ...]]:
    """Shape, dtype and role of the candidates for a request of `num_bytes`, likeliest first."""
    found = find_candidates(TensorQuery(num_bytes, num_bytes, model, **known))  # type: ignore[arg-type]
    return [(one.shape, one.dtype, one.role) for one in found]


@pytest.mark.parametrize(
    ("width", "role"),
    [
        (50_000, "logits"),
        (25_000, "logits, of one of 2 ranks"),
        (640, "hidden states"),
        (1792, "feed-forward activations"),
        (2 * 1792, "feed-forward activations, gate and up"),
        (10 * 72, "queries"),
        (20 * 72, "queries, keys and values"),
        (5 * 72, "keys or values"),
        (640 * 1792, "one weight delta for each token"),
    ],
)
def test_the_width_of_a_row_says_what_it_is(width: int, role: str):
    assert ((3, 1021, width), "bfloat16", role) in exactly(3 * 1021 * width * 2, batch=3, length=1021)
    assert ((3, 1021, width), "float32", role) in exactly(3 * 1021 * width * 4, batch=3, length=1021)


def test_the_last_position_left_out():
    assert exactly(3 * 1020 * 50_000 * 2, batch=3, length=1021)[0] == ((3, 1020, 50_000), "bfloat16", "logits")


@pytest.mark.parametrize(
    ("shape", "role"),
    [
        ((50_000, 640), "embedding or head, its gradient or state"),
        ((1792, 640), "a feed-forward weight"),
        ((3584, 640), "feed-forward weights, gate and up"),
        ((720, 640), "an attention weight"),
        ((7_654_321,), "all parameters in one buffer"),
        ((6, 2 * 352, 640), "the experts' gate and up weights"),
        ((6, 640, 352), "the experts' down weights"),
    ],
)
@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_the_weights_of_a_model(shape: tuple[int, ...], role: str, dtype: str, item: int):
    model = replace(MODEL, num_experts=6, expert_width=352, num_parameters=7_654_321)
    found = find_candidates(
        TensorQuery(math.prod(shape) * item, math.prod(shape) * item, model, roles=frozenset({"weights"}))
    )
    (candidate,) = [one for one in found if one.shape == shape and one.dtype == dtype]
    assert (candidate.role, candidate.num_bytes) == (role, math.prod(shape) * item)
    assert candidate.exact
    assert candidate.in_traceback


def rows(tokens: int, **known: object) -> tuple[object, ...]:
    """Shape and reason of the likeliest tensor for `tokens` rows of logits in half precision."""
    num_bytes = tokens * 50_000 * 2
    first = find_candidates(TensorQuery(num_bytes, num_bytes, MODEL, **known))[0]  # type: ignore[arg-type]
    assert first.role == "logits"
    return first.shape[:2], first.exact, first.why


@pytest.mark.parametrize(
    ("tokens", "known", "shape", "is_exact", "why"),
    [
        (3 * 1021, {"batch": 3, "length": 1021}, (3, 1021), True, "batch and length given"),
        (3 * 1020, {"batch": 3, "length": 1021}, (3, 1020), True, "last position left out"),
        (5 * 1000, {"length": 1000}, (5, 1000), False, "5 sequences of 1,000"),
        (5 * 1000 + 1, {"length": 1000}, (1, 5001), False, "5,001 tokens fit"),
        (3 * 1024, {"batch": 3}, (3, 1024), False, "3,072 tokens fit"),
        (3 * 1024, {}, (1, 3072), False, "3,072 tokens fit"),
        (5 * 1000, {"logged_numbers": (1000,)}, (5, 1000), False, "5,000 tokens fit"),
        (5 * 1000, {"logged_numbers": (1250, 1000)}, (4, 1250), False, "a multiple of 1,250"),
        (65 * 65, {"logged_numbers": (65,)}, (65, 65), False, "a multiple of 65"),
        (64 * 63, {"logged_numbers": (64,)}, (1, 4032), False, "4,032 tokens fit"),
        # The smallest batch whose sequences the model takes: of 4,096 at most.
        (4096, {}, (1, 4096), False, "4,096 tokens fit"),
        (8192, {}, (2, 4096), False, "8,192 tokens fit"),
        (8194, {}, (1, 8194), False, "8,194 tokens fit"),
        (12288, {}, (4, 3072), False, "12,288 tokens fit"),
    ],
)
def test_how_many_tokens_it_has(
    tokens: int, known: dict[str, object], shape: tuple[int, int], is_exact: bool, why: str
):
    found_shape, found_exact, found_why = rows(tokens, **known)
    assert (found_shape, found_exact) == (shape, is_exact)
    assert why in str(found_why)


@pytest.mark.parametrize(
    ("known", "is_exact"),
    [({"batch": 2, "length": 1531}, True), ({"length": 1531}, False), ({"batch": 2}, False), ({}, False)],
)
def test_scores_have_the_square_of_the_length(known: dict[str, int], is_exact: bool):
    num_bytes = 2 * 10 * 1531**2 * 2
    query = TensorQuery(num_bytes, num_bytes, MODEL, roles=frozenset({"attention"}), **known)  # type: ignore[arg-type]
    (scores,) = [one for one in find_candidates(query) if one.shape == (2, 10, 1531, 1531)]
    assert (scores.role, scores.dtype, scores.num_bytes) == ("attention scores", "bfloat16", num_bytes)
    assert (scores.exact, scores.in_traceback, scores.model) == (is_exact, True, "m")


@pytest.mark.parametrize("length", [1530, 1532])
def test_scores_of_another_length(length: int):
    num_bytes = 2 * 10 * 1531**2 * 2
    found = find_candidates(TensorQuery(num_bytes, num_bytes, MODEL, batch=2, length=length))
    assert "attention scores" not in [one.role for one in found]
