"""Sizes and counts in text, at the edges of units and limits."""

import pytest

from memprof.errors import UsageError
from memprof.units import (
    GIB,
    format_bytes,
    format_count,
    format_ranges,
    format_rounded_gib,
    format_size_option,
    gib,
    parse_count,
    parse_gib,
    parse_integer,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80", 80 * 2**30),
        (" 23.5 ", 25_232_932_864),
        ("1B", 1),
        ("1k", 2**10), ("1KiB", 2**10), ("1kb", 1_000),
        ("1m", 2**20), ("1MiB", 2**20), ("1MB", 10**6),
        ("1g", 2**30), ("1GiB", 2**30), ("24 GB", 24 * 10**9),
        ("1t", 2**40), ("1TiB", 2**40), ("1tb", 10**12),
        ("1024TiB", 2**50),  # the most
    ],
)  # fmt: skip
def test_units_of_sizes(text, num_bytes):
    assert parse_gib(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "1.5.2GB", "1 PB", "1e3", "1" + 18 * "0"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError) as refused:
        parse_gib(text)
    assert refused.value.hint == "give GiB, such as 80 or 23.6, or 24GB"
    assert refused.value.value == repr(text)


def test_no_machine_has_more_than_a_pebibyte():
    with pytest.raises(UsageError) as refused:
        parse_gib(f"{2**50 + 1}b")
    assert refused.value.hint == "at most 1048576 (GiB)"
    assert refused.value.value == "'1125899906842625b'"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (2**10, "1.00 KiB"),
        (2**20 - 1, "1,024.00 KiB"),
        (2**20, "1.00 MiB"),
        (2**30 - 1, "1,024.00 MiB"),
        (2**30, "1.00 GiB"),
        (2**40, "1,024.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_have_the_largest_unit_of_at_least_one(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_gib_for_cells():
    assert gib(1234 * GIB + GIB // 2) == "1,234.50"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1_049.9, "1,050 GiB"), (1_044.9, "1,040 GiB"), (100, "100 GiB"), (99.4, "99 GiB"),
        (10, "10 GiB"), (9.94, "9.9 GiB"), (0.06, "0.1 GiB"),
    ],
)  # fmt: skip
def test_an_estimate_has_two_digits_or_three(size, text):
    assert format_rounded_gib(int(size * GIB)) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.00K"), (10**6 - 1, "1000.00K"), (10**6, "1.00M"), (10**9, "1.00B"), (10**12, "1.00T")],
)
def test_counts_have_the_largest_unit_of_at_least_one(count, text):
    assert format_count(count) == text


def test_a_count_in_another_form():
    assert format_count(4_022_468_096, ".0f") == "4B"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (80 * 2**30, "80"),
        (24 * 10**9, "24GB"),
        (512 * 2**20, "0.5"),
        (3 * 2**20, "3MiB"),
        (2**30 + 1, "1073741825b"),
        (99_999 * 2**30, "99999"),
        (100_000 * 2**30, "107374182400000b"),  # five digits of it are 1e+05, which is no size
        (1, "1b"),  # 9.3e-10 GiB
    ],
)
def test_a_size_in_its_shortest_exact_spelling(num_bytes, text):
    assert format_size_option(num_bytes) == text
    assert parse_gib(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70M", 70 * 10**6),
        ("1.2B", 12 * 10**8),
        ("1e9", 10**9),
        ("7_000_000", 7_000_000),
        ("2t", 2 * 10**12),
        ("1k", 1000),
    ],
)
def test_counts_of_parameters(text, count):
    assert parse_count(text) == count


def test_fewer_than_a_thousand_parameters_are_billions_without_their_letter():
    assert parse_count("1000") == 1000
    for few in ("1", "999"):
        with pytest.raises(UsageError) as refused:
            parse_count(few)
        assert refused.value.hint == f"did you mean {few}B?"
        assert refused.value.value == repr(few)


@pytest.mark.parametrize("text", ["0", "-4B", "four", "1e18", "12,34"])
def test_what_is_no_count_of_parameters(text):
    with pytest.raises(UsageError) as refused:
        parse_count(text)
    assert refused.value.hint == "write it like 70M, 1.2B or 4B"
    assert refused.value.value == repr(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8),
        (8, 8),
        ("0", 0),
        ("-1", -1),
        ("128k", 128_000),
        ("131,072", 131_072),
        ("1e6", 10**6),
        ("0.5M", 500_000),
    ],
)
def test_whole_numbers(text, number):
    assert parse_integer(text) == number


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0.5", "write it like 8, 131072, 128k or 1e6"),
        ("eight", "write it like 8, 131072, 128k or 1e6"),
        ("1e18", "give less than 1e18"),
        ("-1e18", "give less than 1e18"),
    ],
)
def test_what_is_no_whole_number(text, hint):
    with pytest.raises(UsageError) as refused:
        parse_integer(text)
    assert refused.value.hint == hint
    assert refused.value.value == repr(text)


def test_rounding_up():
    assert [round_up(value, 512) for value in (0, 1, 511, 512, 513)] == [0, 512, 512, 512, 1024]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 2, 3, 4, 5], "0, 2-5"), ([1, 2, 4, 5], "1-2, 4-5"), ([1, 3, 5], "1, 3, 5")],
)
def test_ranges_of_numbers(numbers, text):
    assert format_ranges(numbers) == text
