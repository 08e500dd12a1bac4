"""The tensor of a failed allocation: which bytes the request may have, and what of a model has them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from memprof.doctor import tensors
from memprof.doctor.diagnosis import MessageSizes, PrintedSize
from memprof.doctor.dimensions import Dimensions
from memprof.doctor.tensors import (
    TensorQuery,
    _find_roundest_number,
    _is_round,
    _is_round_size,
    _iter_candidates,
    _iter_row_tensors,
    _iter_token_counts,
    _measure_roundness,
    find_candidates,
    find_request_range,
    find_roles,
)

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


def test_the_last_position_left_out():
    assert exactly(3 * 1020 * 50_000 * 2, batch=3, length=1021)[0] == ((3, 1020, 50_000), "bfloat16", "logits")


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


# -- evidence, in bits -------------------------------------------------------------------------------------------------

FULL = replace(MODEL, num_experts=6, expert_width=352, num_parameters=7_654_321)
EXACT = 30.0  # of a batch and a length that were given
WIDTHS = [
    (50_000, "logits", 2.0, "logits"),
    # A rank of twice as many is four bits less likely.
    (25_000, "logits, of one of 2 ranks", -2.0, "logits"),
    (12_500, "logits, of one of 4 ranks", -6.0, "logits"),
    (6250, "logits, of one of 8 ranks", -10.0, "logits"),
    (640, "hidden states", -2.0, "hidden"),
    (1792, "feed-forward activations", 0.0, "feed-forward"),
    (2 * 1792, "feed-forward activations, gate and up", -1.0, "feed-forward"),
    (10 * 72, "queries", -2.5, "attention"),
    (20 * 72, "queries, keys and values", -2.0, "attention"),
    (5 * 72, "keys or values", -2.5, "cache"),
    (640 * 1792, "one weight delta for each token", -3.0, "delta"),
]


def weigh(role: str, num_bytes: int, dtype: str = "bfloat16", model: Dimensions = FULL, **known: object) -> float:
    """Return the evidence for a tensor of `role` of exactly these bytes."""
    query = TensorQuery(num_bytes, num_bytes, model, **known)  # type: ignore[arg-type]
    return max(bits for bits, one in _iter_candidates(query) if (one.role, one.dtype) == (role, dtype))


@pytest.mark.parametrize(("width", "role", "prior", "hint"), WIDTHS)
def test_evidence_for_rows(width: int, role: str, prior: float, hint: str):
    run = {"batch": 3, "length": 1021}
    half, single = 3 * 1021 * width * 2, 3 * 1021 * width * 4
    assert weigh(role, half, **run) == EXACT + prior
    assert weigh(role, single, "float32", **run) == EXACT + prior
    # The traceback is worth six bits, and what it says of float32 one and a half.
    assert weigh(role, half, roles=frozenset({hint}), **run) == EXACT + prior + 6
    assert weigh(role, half, roles=frozenset({"others"}), **run) == EXACT + prior
    assert weigh(role, single, "float32", mentions_float32=True, **run) == EXACT + prior + 1.5
    assert weigh(role, half, mentions_float32=True, **run) == EXACT + prior


@pytest.mark.parametrize(("length", "less"), [(1 << 16, 0), (1 << 17, 2), (1 << 18, 4)])
def test_each_doubling_beyond_131072_tokens_costs_two_bits(length: int, less: int):
    assert weigh("hidden states", 2 * length * 640 * 2, batch=2, length=length) == EXACT - 2 - less


@pytest.mark.parametrize(
    ("shape", "role", "prior", "hint"),
    [
        ((50_000, 640), "embedding or head, its gradient or state", 0.0, "weights"),
        ((1792, 640), "a feed-forward weight", 0.0, "weights"),
        ((3584, 640), "feed-forward weights, gate and up", -1.0, "optimizer"),
        ((720, 640), "an attention weight", -1.0, "weights"),
        ((7_654_321,), "all parameters in one buffer", 0.0, "optimizer"),
        ((6, 704, 640), "the experts' gate and up weights", 0.0, "weights"),
        ((6, 640, 352), "the experts' down weights", 0.0, "optimizer"),
    ],
)
def test_evidence_for_weights(shape: tuple[int, ...], role: str, prior: float, hint: str):
    """A size of n bytes is one of n."""
    half, single = math.prod(shape) * 2, math.prod(shape) * 4
    assert weigh(role, half) == pytest.approx(math.log2(half) + prior)
    assert weigh(role, half, roles=frozenset({hint})) == pytest.approx(math.log2(half) + prior + 6)
    assert weigh(role, single, "float32", mentions_float32=True) == pytest.approx(math.log2(single) + prior + 1.5)
    found = [one.why for _, one in _iter_candidates(TensorQuery(half - 9, half, FULL)) if one.role == role]
    assert found == ["its size exactly"]
    assert not [one for _, one in _iter_candidates(TensorQuery(half + 1, half + 9, FULL)) if one.role == role]


@pytest.mark.parametrize(("role", "heads", "prior"), [("attention scores", 10, 1.0), ("attention mask", 1, -3.0)])
def test_evidence_for_scores(role: str, heads: int, prior: float):
    half = 4 * heads * 1536**2 * 2
    assert weigh(role, half, batch=4, length=1536) == EXACT + prior
    assert weigh(role, half, batch=4, length=1536, roles=frozenset({"attention"})) == EXACT + prior + 6
    assert weigh(role, 2 * half, "float32", batch=4, length=1536, mentions_float32=True) == EXACT + prior + 1.5
    # A length without a batch, of which each doubling costs a bit; 1,536 has nine zeros, of a range of 2^-12.
    assert weigh(role, half, length=1536) == 12 - 2 + prior
    assert weigh(role, half, batch=4) == 9 + 12 - 2 + prior
    assert weigh(role, half) == 10 + 12 + prior  # one sequence of 3,072


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
def test_batches_that_are_tried(batch: int):
    num_bytes = batch * 10 * 1531**2 * 2
    found = find_candidates(TensorQuery(num_bytes, num_bytes, MODEL, roles=frozenset({"attention"}), length=1531))
    assert (batch, 10, 1531, 1531) in [one.shape for one in found]


@pytest.mark.parametrize("heads", [8, 12, 16, 20, 24, 25, 32, 40, 48, 64])
def test_heads_that_are_tried_without_a_model(heads: int):
    num_bytes = 3 * heads * 1531**2 * 2
    query = TensorQuery(num_bytes, num_bytes, batch=3, length=1531, roles=frozenset({"attention"}))
    assert [(bits, one.is_guess) for bits, one in _iter_candidates(query) if one.shape == (3, heads, 1531, 1531)] == [
        (EXACT - 4 + 6, True)
    ]


def test_evidence_without_a_model(monkeypatch: pytest.MonkeyPatch):
    guess = replace(MODEL, num_parameters=1_000_000)
    monkeypatch.setattr(tensors, "list_catalog_dimensions", lambda: [guess])
    run = {"batch": 3, "length": 1021}
    for width, prior, role, words in (
        (50_000, -1.0, "logits", "50,000 is the vocabulary of m"),
        (640 * 1792, -4.0, "one weight delta for each token", "1,146,880 is hidden x feed-forward width of m"),
    ):
        num_bytes = 3 * 1021 * width * 2
        query = TensorQuery(num_bytes, num_bytes, **run)  # type: ignore[arg-type]
        bits, found = next(pair for pair in _iter_candidates(query) if pair[1].shape == (3, 1021, width))
        assert (bits, found.role, found.is_guess) == (EXACT + prior, role, True)
        assert words in found.why
    # A vocabulary of a power of two says nothing.
    monkeypatch.setattr(tensors, "list_catalog_dimensions", lambda: [replace(guess, vocabulary=49_152)])
    num_bytes = 3 * 1021 * 49_152 * 2
    assert not [one for _, one in _iter_candidates(TensorQuery(num_bytes, num_bytes, **run)) if one.role == "logits"]  # type: ignore[arg-type]


def test_a_guess_had_room_for_weights_in_4_bits_and_hidden_states():
    guess = replace(MODEL, num_parameters=1_000_000)
    num_bytes = 3 * 1021 * 50_000 * 2
    least = 500_000 + 3 * 1021 * 640 * 2
    for allocated, is_found in ((least, True), (least - 1, False), (None, True)):
        query = TensorQuery(num_bytes, num_bytes, batch=3, length=1021, allocated_bytes=allocated)
        found = [one.shape for _, one in _iter_row_tensors(query, 50_000, "logits", 0.0, "logits", guess)]
        assert ((3, 1021, 50_000) in found) == is_found
    # Of a model that is known its own weights are not asked for.
    query = TensorQuery(num_bytes, num_bytes, FULL, batch=3, length=1021, allocated_bytes=0)
    assert list(_iter_row_tensors(query, 50_000, "logits", 0.0, "logits"))
    assert not list(_iter_row_tensors(query, 0, "logits", 0.0, "logits"))


@pytest.mark.parametrize(
    ("number", "span", "bits"),
    [(8, 1, 3), (8, 4, 1), (12, 1, 2), (1, 1, 0), (1, 2, -1), (4, 2**-12, 14), (4, 0, 14), (1 << 20, 1 << 10, 10)],
)
def test_a_round_number_is_evidence(number: int, span: float, bits: float):
    assert _measure_roundness(number, span) == bits


@pytest.mark.parametrize(
    ("low", "high", "roundest"), [(5, 9, 8), (5, 7, 6), (7, 7, 7), (8, 5, 0), (1, 1, 1), (17, 31, 24), (1, 64, 64)]
)
def test_the_roundest_number(low: int, high: int, roundest: int):
    assert _find_roundest_number(low, high) == roundest


def test_powers_of_two_and_three_times_these_are_round():
    assert [number for number in range(26) if _is_round(number)] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert [_is_round_size(TensorQuery(low, high)) for low, high in ((5, 7), (5, 5), (9, 12), (9, 11))] == [
        True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "known", "expected"),
    [
        # Tokens of ten bytes each: all numbers, bits and whether all was given.
        (6000, 6000, {"batch": 3, "length": 200}, [(600, 30.0, True), (600, 3 - math.log2(1 / 30), False)]),
        (5970, 5970, {"batch": 3, "length": 200}, [(597, 30.0, True), (597, 0 - math.log2(1 / 30), False)]),
        # Four of 200, in a range of 0.1 tokens: a number of two zeros in 0.0005, and four bits for the length.
        (8000, 8000, {"length": 200}, [(800, 2 - math.log2(0.1 / 200) + 4, False), (800, 5 - math.log2(0.1), False)]),
        (2000, 2000, {"length": 200}, [(200, 0 - math.log2(0.1 / 200) + 4, False), (200, 3 - math.log2(0.1), False)]),
        (8010, 8010, {"length": 200}, [(801, 0 - math.log2(0.1), False)]),
        (100, 1000, {"length": 200}, [(64, 6 - math.log2(90.1), False)]),
        (6000, 6000, {"logged_numbers": (64, 65, 300)}, [
            (600, 3 - math.log2(0.1), False), (600, 1 - math.log2(0.1 / 300) + 2, False),
        ]),
        (6400, 6400, {"logged_numbers": (64,)}, [(640, 7 - math.log2(0.1), False)]),
        (6501, 6509, {}, []),
        (5, 9, {}, []),
        (5, 15, {}, [(1, 0 - math.log2(1.1), False)]),
    ],
)  # fmt: skip
def test_numbers_of_tokens(low: int, high: int, known: dict[str, object], expected: list[tuple[int, float, bool]]):
    query = TensorQuery(low, high, **known)  # type: ignore[arg-type]
    found = [(tokens, bits, is_exact) for tokens, bits, is_exact, _ in _iter_token_counts(query, 10)]
    assert [(tokens, is_exact) for tokens, _, is_exact in found] == [(tokens, exact) for tokens, _, exact in expected]
    assert [bits for _, bits, _ in found] == pytest.approx([max(bits, -99) for _, bits, _ in expected])


def test_candidates_are_at_most_five_and_not_far_less_likely(monkeypatch: pytest.MonkeyPatch):
    def found(bits: list[float], model: Dimensions | None = MODEL, **limit: int) -> list[str]:
        monkeypatch.setattr(
            tensors,
            "_iter_candidates",
            lambda query: [(b, tensors.Candidate((i,), "float32", f"{b:g}", 4)) for i, b in enumerate(bits)],
        )
        return [one.role for one in find_candidates(TensorQuery(1, 1, model), **limit)]

    assert found([20.0, 30.0, 20.5, 19.0]) == ["30", "20.5"]
    assert found([20.0 + i for i in range(7)]) == ["26", "25", "24", "23", "22"]
    assert found([20.0, 21.0], max_candidates=1) == ["21"]
    # Without a model hundreds of sizes are tried.
    assert found([1.0, 0.9]) == ["1"]
    assert found([7.0, 6.9], None) == ["7"]
    assert found([]) == []


def test_of_one_tensor_the_best_evidence_counts():
    num_bytes = 3 * 1021 * 50_000 * 2
    query = TensorQuery(num_bytes, num_bytes, MODEL, batch=3, length=1021)
    assert [one.shape for one in find_candidates(query)].count((3, 1021, 50_000)) == 1
    assert find_candidates(query)[0].exact
