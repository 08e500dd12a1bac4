"""With its tensors on two devices, every operator of torch's operator database is judged as CUDA would, or why not.

CUDA allows: numbers (tensors without dimensions) of the host where TensorIterator does the work; indices of the host;
copies between devices, which are all that the `_scatter` of a view does; shapes taken from a tensor anywhere
(`resize_as_`, `new_zeros`); the lengths of ctc_loss and of packed sequences on the host. The reference, which is in
device_sweep.py, knows all but what is below.
"""

from __future__ import annotations

import gc
import warnings

import pytest

from tests.accuracy import device_sweep as sweep

pytestmark = pytest.mark.slow

CONVOLUTION = "FakeTensor chooses a convolution without looking at devices; cuDNN's kernels are checked"
COPIES = "a clone and a copy into it (native/TensorShape.cpp), which FakeTensor does not look into"
COMPARED = "C++ compares the devices, of numbers as well, which fake tensors of one number do not show"
HOST_INDEXED = "a host tensor may not be indexed by tensors on the GPU (native/TensorAdvancedIndexing.cpp)"
NOT_LOOKED_INTO = "its products are of both devices; FakeTensor runs it as one"
EMPTY = "a tolerance on the GPU for no matrix at all"

# Operator -> why the virtual GPU and the reference may differ, and the virtual GPU is right.
EXCEPTIONS: dict[str, str] = {
    **{f"nn.functional.conv{kind}{rank}d": CONVOLUTION for kind in ("", "_transpose") for rank in (1, 2, 3)},
    "as_strided_scatter": COPIES,
    "select_scatter": COPIES,
    "block_diag": COMPARED,
    "polar": COMPARED,
    "__getitem__": HOST_INDEXED,
    "nn.functional.linear_cross_entropy chunked": NOT_LOOKED_INTO,
    "nn.functional.linear_cross_entropy chunked_none": NOT_LOOKED_INTO,
    "linalg.pinv": EMPTY,
}


def _swept(one_in: int) -> list[sweep.Verdict]:
    pytest.importorskip("expecttest", reason="torch's operator database needs expecttest")
    operators = sweep.operators()[::one_in]
    gc.freeze()  # the database has a million objects that live for good
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [verdict for operator in operators for verdict in sweep.verdicts(operator)]
    gc.collect()
    return found


@pytest.fixture(scope="module")
def swept() -> list[sweep.Verdict]:
    return _swept(1)


@pytest.mark.nightly
def test_verdicts_of_a_part_are_cudas() -> None:
    """By day every eleventh operator."""
    found = _swept(11)
    assert not [one for one in found if one.failure or (one.expected != one.found and one.operator not in EXCEPTIONS)]
    assert sum(one.expected for one in found) > 35 and sum(not one.expected for one in found) > 12


@pytest.mark.nightly
def test_every_verdict_is_cudas(swept: list[sweep.Verdict]) -> None:
    wrong = [one for one in swept if one.expected != one.found and one.operator not in EXCEPTIONS]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.nightly
def test_the_run_goes_on(swept: list[sweep.Verdict]) -> None:
    failed = [one for one in swept if one.failure]
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.nightly
def test_no_exception_is_left_over(swept: list[sweep.Verdict]) -> None:
    assert sorted(EXCEPTIONS.keys() - {one.operator for one in swept if one.expected != one.found}) == []


@pytest.mark.nightly
def test_counts(swept: list[sweep.Verdict]) -> None:
    print(f"{len({one.operator for one in swept})} operators, {len(swept)} placements")
    assert len({one.operator for one in swept}) > 150
    assert sum(one.expected for one in swept) > 500
    assert sum(not one.expected for one in swept) > 200
