import pytest

from memprof.errors import UsageError
from memprof.report.matching.tolerance import Tolerance, parse_tolerance


@pytest.mark.parametrize(
    ("text", "a", "b", "is_allowed"),
    [
        ("0", 7, 7, True),
        ("0", 100, 101, False),
        ("16", 100, 116, True),
        ("16", 116, 99, False),
        ("1KiB", 0, 1024, True),
        ("1KiB", 0, 1025, False),
        ("16MiB", 0, 16 << 20, True),
        ("16MiB", 0, (16 << 20) + 1, False),
        ("1G", 0, 1 << 30, True),
        # Of the larger value: 10% of 100, not of 90.
        ("10%", 90, 100, True),
        ("10%", 100, 90, True),
        ("10%", 89, 100, False),
        ("10%", -100, -90, True),
        ("5%", 0, 1, False),
        ("0.1%", 100_000, 100_101, False),
    ],
)
def test_the_edge_of_a_tolerance(text, a, b, is_allowed):
    assert parse_tolerance(text).allows(a, b) is is_allowed


def test_of_bytes_and_a_share_the_larger_is_allowed():
    both = Tolerance(bytes=10, share=0.1)
    assert [both.allows(50, 50 + more) for more in (10, 11)] == [True, False]
    assert [both.allows(100, 100 + more) for more in (11, 14)] == [True, False]


def test_a_percentage_is_a_hundredth():
    assert parse_tolerance(" 0.5 % ") == Tolerance("0.5 %", share=0.005)


@pytest.mark.parametrize(
    "text", ["", "-1", "-1%", "%", "x%", "nan%", "many", "1.5", "16 furlongs", "0x10", "1% 2", "5%x"]
)
def test_what_is_no_tolerance(text):
    with pytest.raises(UsageError, match="not a tolerance") as refused:
        parse_tolerance(text)
    assert refused.value.value == f"--tolerance {text}"
