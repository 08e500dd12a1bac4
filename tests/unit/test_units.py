import pytest

from memprof.errors import UsageError
from memprof.units import parse_count


def test_fewer_than_a_thousand_parameters_are_billions_without_their_letter():
    assert parse_count("1000") == 1000
    with pytest.raises(UsageError) as refused:
        parse_count("999")
    assert refused.value.hint == "did you mean 999B?"
