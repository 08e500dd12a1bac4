"""Caps of a vocabulary and what they save by arithmetic, for a corpus of a hundred tokens."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.flows.vocabulary.count import BYTES, WORDS, CorpusCount, _count_ids, count_corpus
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.flows.vocabulary.savings import (
    build_curve,
    compute_caps,
    estimate_savings,
    get_uncapped_size,
    parse_shares,
)
from memprof.flows.vocabulary.tally import Tally
from memprof.report.documents.vocabulary import TokenCap, VocabularyMemory
from memprof.report.terminal.vocabulary import sum_saved_bytes
from memprof.spec import TargetSpec

COUNTED = CorpusCount(WORDS, 999, Frequencies.of([60, 25, 10, 5]), (), reserved=2)


def test_shares_are_one_to_six_percentages() -> None:
    assert parse_shares(" 99, 99.9% ,100,99%") == [
        ("99%", Fraction(99, 100)), ("99.9%", Fraction(999, 1000)), ("100%", Fraction(1)),
    ]  # fmt: skip
    assert len(parse_shares("1,2,3,4,5,6")) == 6
    for wrong in ("", "0", "-1", "100.1", "1/0", "most", "1,2,3,4,5,6,7"):
        with pytest.raises(UsageError, match="--coverage"):
            parse_shares(wrong)


def test_a_cap_has_rows_for_its_tokens_and_for_what_is_reserved() -> None:
    caps = compute_caps(COUNTED, [("60%", Fraction(3, 5)), ("95%", Fraction(95, 100))], requested_cap=2)
    assert caps == (
        TokenCap("95%", 3, 95, 0.95, 5), TokenCap("asked", 2, 85, 0.85, 4), TokenCap("60%", 1, 60, 0.6, 3),
    )  # fmt: skip
    assert compute_caps(COUNTED, [], requested_cap=9) == (TokenCap("asked", 4, 100, 1.0, 6),)
    # The larger share comes first where both need the same tokens.
    equal = compute_caps(COUNTED, [("70%", Fraction(7, 10)), ("80%", Fraction(4, 5))])
    assert [cap.name for cap in equal] == ["80%", "70%"]
    with pytest.raises(UsageError, match="at least 1"):
        compute_caps(COUNTED, [], requested_cap=0)


def test_without_a_cap_there_are_all_words_or_all_ids() -> None:
    assert get_uncapped_size(COUNTED) == 4 + 2
    assert get_uncapped_size(dataclasses.replace(COUNTED, tokenizer="tokenizer.json", vocab_size=9)) == 9


@pytest.mark.parametrize(
    ("tokenizer", "special", "reserved"),
    [
        (BYTES, {}, 0),
        ("tokenizer.json", {}, 1),  # for all rare tokens
        ("tokenizer.json", {2: "<s>"}, 1),
        ("tokenizer.json", {2: "<s>", 4: "</s>", 5: "<pad>", 1: "<seen>"}, 3),
    ],
)
def test_rows_are_reserved_for_rare_and_for_special_tokens(tokenizer: str, special: dict, reserved: int) -> None:
    found = _count_ids(tokenizer, Tally(), [3, 7, 0, 7, 0, 0], str, 2, special)
    assert found.reserved == reserved
    assert found.most_common == (("1", 7), ("3", 7))
    assert (found.vocab_size, found.unseen, found.highest_id) == (6, 3, 3)
    assert found.unseen_ranges == ((2, 2), (4, 5))


def test_words_share_one_row_for_those_that_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b b")
    assert count_corpus([tmp_path / "a.txt"], WORDS).reserved == 1


def test_rows_of_embedding_head_and_logits_are_saved() -> None:
    spec = TargetSpec(model="-", vocab_size=1000, batch_size=2, context_length=10, optimizer="adam", dtype="float16")
    caps = (TokenCap("99%", 98, 99, 0.99, 100), TokenCap("100%", 998, 100, 1.0, 1000))
    found = estimate_savings(None, COUNTED, caps, spec)
    unknown = (None,) * 4
    assert found.before == VocabularyMemory("before", 1000, *unknown, 2 * 10 * 1000 * 2, None, None, None)
    assert found.capped == (VocabularyMemory("99%", 100, *unknown, 2 * 10 * 100 * 2, None, None, None),)
    assert found.assumptions[-1] == "100% takes 1,000 rows, and there are 1,000: nothing to save."
    assert sum_saved_bytes(found.before, found.capped[0]) == 2 * 10 * 900 * 2


@pytest.mark.parametrize(("params", "width"), [("1.2B", 2048), ("8B", 2 * 4096)])  # tied, and in embedding and head
def test_weights_gradients_and_state_of_a_model_of_so_many_parameters(params: str, width: int) -> None:
    spec = TargetSpec(model="-", vocab_size=1000)
    caps = (TokenCap("99%", 98, 99, 0.99, 100),)
    found = estimate_savings(params, COUNTED, caps, spec)
    before, after = found.before, found.capped[0]
    assert before.num_parameters - after.num_parameters == 900 * width
    for memory in (before, after):
        assert memory.parameters_bytes == memory.gradients_bytes == 2 * memory.num_parameters  # bfloat16
        assert memory.optimizer_state_bytes == 2 * memory.parameters_bytes
    # Of each weight as many bytes again for its gradient, and twice for AdamW; the logits of 2,048 tokens.
    assert sum_saved_bytes(before, after) == 4 * 2 * 900 * width + 2 * 2048 * 900
    known = [dataclasses.replace(memory, required_bytes=size) for memory, size in ((before, 70), (after, 50))]
    assert sum_saved_bytes(*known) == 20


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("sgd-momentum", 1), ("adagrad", 1), ("none", 0)])
def test_optimizers_have_states_of_their_own(optimizer: str, states: int) -> None:
    spec = TargetSpec(model="-", vocab_size=1000, optimizer=optimizer, dtype="float32")
    memory = estimate_savings("1.2B", COUNTED, (), spec).before
    assert (memory.parameters_bytes, memory.optimizer_state_bytes) == (
        4 * memory.num_parameters, states * memory.parameters_bytes,
    )  # fmt: skip
    with pytest.raises(UsageError, match="no fixed number"):
        estimate_savings("1.2B", COUNTED, (), spec.edit(optimizer="adafactor"))


@pytest.mark.parametrize(
    ("distinct", "points", "shown"),
    [
        (0, 13, []),
        (1, 13, [1]),
        (10, 13, [1, 2, 5, 10]),
        (11, 13, [1, 2, 5, 10, 11]),
        (30, 3, [10, 20, 30]),
    ],
)
def test_a_curve_has_round_numbers_and_all(distinct: int, points: int, shown: list[int]) -> None:
    frequencies = Frequencies.of([1] * distinct)
    curve = build_curve(frequencies, points)
    assert [point.tokens for point in curve] == shown
    assert [point.coverage for point in curve] == [tokens / distinct for tokens in shown]
