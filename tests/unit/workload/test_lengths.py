"""`--lengths`: what is drawn, how it is batched, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.workload.lengths import is_distribution, parse_lengths


def taken(text: str, batch_size: int, count: int, longest: int = 10**9) -> list[tuple[list[int], int]]:
    return list(itertools.islice(parse_lengths(text).batches(batch_size, longest), count))


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(str(10 * number) for number in range(1, 41)))
    return str(file)


def test_a_distribution_has_its_mean_and_sigma() -> None:
    lengths = [length for batch, _ in taken("lognormal:250,0.6", 4, 5000) for length in batch]
    assert statistics.fmean(lengths) == pytest.approx(250, rel=0.03)
    logs = statistics.NormalDist.from_samples([math.log(length) for length in lengths])
    assert logs.stdev == pytest.approx(0.6, rel=0.03)


def test_alpaca_is_as_published() -> None:
    """The notebook's own figures: a mean of 6.67 million tokens over 52,002 samples, the longest of 1,304."""
    lengths = [length for batch, _ in taken("alpaca", 4, 13_000) for length in batch]
    assert statistics.fmean(lengths) == pytest.approx(6.67e6 / 52_002, rel=0.02)
    assert min(lengths) >= 42 and 800 < max(lengths) <= 1304
    assert sum(length <= 257 for length in lengths) / len(lengths) == pytest.approx(49_878 / 52_002, abs=0.003)


def test_every_sample_is_fed_once_an_epoch(dataset: str) -> None:
    epochs = [length for batch, _ in taken(dataset, 4, 20) for length in batch]
    expected = [10 * number for number in range(1, 41)]
    assert sorted(epochs[:40]) == sorted(epochs[40:]) == expected
    assert epochs[:40] != expected and epochs[:40] != epochs[40:]
    assert taken(dataset, 4, 20) == taken(dataset, 4, 20)


def test_batches_are_as_long_as_their_longest(dataset: str) -> None:
    for batch, longest in taken(dataset, 4, 10):
        assert longest == max(batch)
    for batch, longest in taken(f"{dataset},multiple=64", 4, 10, longest=400):
        assert longest == min(-(-max(batch) // 64) * 64, 400)
    for batch, longest in taken(dataset, 4, 10, longest=100):
        assert longest == max(batch) <= 100


def test_buckets_have_samples_alike(dataset: str) -> None:
    batches = taken(f"{dataset},bucket=10", 4, 10)
    assert Counter(length for batch, _ in batches for length in batch) == Counter(range(10, 410, 10))
    assert all(max(batch) - min(batch) == 30 for batch, _ in batches)
    assert [longest for _, longest in batches] == sorted((longest for _, longest in batches), reverse=True)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.sampled_from([" ", "\n", ",", " ,\n"]))
def test_files_are_read(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], between: str) -> None:
    folder = tmp_path_factory.mktemp("lengths")
    (folder / "plain").write_text(between.join(map(str, lengths)))
    (folder / "json").write_text(json.dumps(lengths))
    for name in ("plain", "json"):
        drawn = [length for batch, _ in taken(str(folder / name), 1, len(lengths)) for length in batch]
        assert Counter(drawn) == Counter(lengths)


def test_a_list_needs_no_file() -> None:
    assert sorted(length for batch, _ in taken("[30, 10, 20],multiple=8", 1, 3) for length in batch) == [10, 20, 30]
    with pytest.raises(UsageError, match="has to hold lengths"):
        parse_lengths("[30, x]")


@pytest.mark.parametrize(
    ("text", "drawn"),
    [("alpaca", True), ("alpaca,bucket=4", True), ("lognormal:9,1", True), ("alpaca.txt", False), ("alpaca/a", False)],
)
def test_a_file_may_begin_like_a_distribution(text: str, drawn: bool) -> None:
    assert is_distribution(text) is drawn


@pytest.mark.parametrize(
    "content", ["", "[]", "1 2 x", "1 -2", "[1, 2", "[1, true]", "[1, 2.5]", "{}", "[" * 100_000, "9" * 5000, "\0", "0"]
)
def test_what_has_no_lengths_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "lengths"
    file.write_text(content)
    with pytest.raises(UsageError, match="has to hold lengths"):
        parse_lengths(str(file))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nosuch", "No such file"),
        ("/", "Is a directory"),
        ("no\0such", "no text"),
        ("lognormal:", "a mean and a sigma"),
        ("lognormal:5", "a mean and a sigma"),
        ("lognormal:5,x", "a mean and a sigma"),
        ("lognormal:nan,1", "no such distribution"),
        ("lognormal:100,99", "no such distribution"),
        ("lognormal:100,1,bucket=0", "takes bucket once"),
        ("lognormal:100,1,bucket=2,bucket=3", "takes bucket once"),
    ],
)
def test_what_is_no_lengths_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_lengths(text)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text"):
        parse_lengths(str(file))
