"""Which objects refer to some, by the collector's own search or one pass over all objects."""

import pytest

from memprof.watch.collection import find_referrers


class Part:
    pass


@pytest.mark.parametrize("count", [1, 32, 33, 300])
def test_what_refers_to_values_is_found(count: int) -> None:
    parts = [Part() for _ in range(count)]
    in_a_dict, in_a_tuple, other = {"last": parts[-1]}, (parts[0], 1), [Part()]
    found = {id(one) for one in find_referrers(parts)}
    assert {id(parts), id(in_a_dict), id(in_a_tuple)} <= found
    assert id(other) not in found
