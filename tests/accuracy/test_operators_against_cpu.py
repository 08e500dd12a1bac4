"""Every operator of torch's operator database allocates on the virtual GPU what it allocates on the CPU, or why not.

The tables below are all the exceptions; one that is no longer needed fails as well.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from typing import NamedTuple

import pytest

from tests.accuracy import operator_sweep as sweep

CASTS = "the CPU converts arguments to a common dtype first, CUDA as it loads (native/TensorIterator.cpp)"
HOST = "indices on the host, on CUDA too"
GENERATOR = "the state of the CPU's generator, saved by the database"
COLUMNS = "unfolded patches or oneDNN's reordered copies; cuDNN takes a workspace"
BUFFERS = "buffers of the CPU's kernel, which CUDA's has not"
LAPACK = "LAPACK's workspace; cuSOLVER's is not counted"
TABLES = "the CPU's tables of positions and weights; its result may be laid out for channels last"

KERNELS: dict[str, str] = {
    **dict.fromkeys(("slow_conv_transpose2d", "slow_conv_transpose3d", "_slow_conv2d_forward"), COLUMNS),
    **dict.fromkeys(("_slow_conv2d_backward", "slow_conv3d_forward", "slow_conv_dilated2d"), COLUMNS),
    **dict.fromkeys(("slow_conv_dilated3d", "convolution_backward", "_convolution"), COLUMNS),
    "mkldnn_convolution": COLUMNS,
    "resize_as_": COLUMNS,
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm", "native_batch_norm"), BUFFERS),
    **dict.fromkeys(("native_batch_norm_backward", "_native_batch_norm_legit", "histc"), BUFFERS),
    **dict.fromkeys(("_batch_norm_with_update", "batch_norm_backward", "kthvalue"), BUFFERS),
    **dict.fromkeys(("native_group_norm_backward", "median", "nanmedian", "renorm"), BUFFERS),
    **dict.fromkeys(("log_sigmoid_forward", "masked_select", "multinomial"), BUFFERS),
    **dict.fromkeys(("_unique2", "unique_consecutive", "normal", "rrelu_with_noise"), BUFFERS),
    **dict.fromkeys(("geqrf", "linalg_qr", "_linalg_svd", "_linalg_eigh"), LAPACK),
    **dict.fromkeys(("ormqr",), LAPACK),
    **dict.fromkeys(
        (
            f"{name}{dims}d{part}"
            for name in ("upsample_nearest", "_upsample_nearest_exact")
            for dims in (1, 2, 3)
            for part in ("", "_backward")
        ),
        TABLES,
    ),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"), TABLES),
    **dict.fromkeys(("upsample_bilinear2d_backward", "upsample_trilinear3d"), TABLES),
    "_upsample_bilinear2d_aa": TABLES,
    **dict.fromkeys((f"{name}>_to_copy" for name in ("mul", "div", "sub", "clamp", "exp2")), CASTS),
    "masked_select>_to_copy": BUFFERS,
    "repeat": HOST,
}
"""Operator on the CPU -> why what it allocates inside has no like on the card."""


OPERATORS: dict[str, str] = {}
"""Operator of the database -> why it may differ in any way."""


def kernels_of(made: sweep.Allocation) -> set[str]:
    """The entries of KERNELS that say why the CPU made this."""
    inside = made.op.split(">")
    return {name for name in (*inside, ">".join(inside[-2:])) if name in KERNELS}


def explained(difference: sweep.Difference) -> bool:
    """Whether the tables say why each allocation is missing, and nothing is made that the CPU does not make."""
    if difference.name in OPERATORS:
        return True
    if difference.failure or difference.extra:
        return False
    by_kernels = Counter(
        made.num_bytes
        for made in difference.missing
        if kernels_of(made) or (not made.op and made.num_bytes == GENERATOR_BYTES)
    )
    return all(by_kernels[size] >= count for size, count in difference.missing_counts.items())


GENERATOR_BYTES = 5056


class Swept(NamedTuple):
    """The whole comparison."""

    compared: int
    equal: int
    differences: list[sweep.Difference]


@pytest.fixture(scope="module")
def swept() -> Swept:
    pytest.importorskip("expecttest", reason="torch's operator database needs expecttest")
    operators = sweep.operators()
    compared = equal = 0
    differences: list[sweep.Difference] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators:
            found = list(sweep.compare(operator))
            different = [one for one in found if one is not None]
            compared += bool(found)
            equal += bool(found) and not different
            differences += different
    gc.collect()
    return Swept(compared, equal, differences)


def describe(difference: sweep.Difference) -> str:
    extra = Counter(difference.extra)
    return (
        f"{difference.name} sample {difference.sample} {difference.failure}"
        f" extra {dict(extra)} missing {difference.missing_counts} of {difference.missing}"
    )


def test_differences_are_explained(swept: Swept) -> None:
    unexplained = [one for one in swept.differences if not explained(one)]
    assert not unexplained, "\n".join(map(describe, unexplained))


def test_no_exception_is_left_over(swept: Swept) -> None:
    names = {one.name for one in swept.differences}
    assert not OPERATORS.keys() - names, "these operators agree now"
    kernels = {name for one in swept.differences for made in one.missing for name in kernels_of(made)}
    assert not KERNELS.keys() - kernels, "nothing is missing of these any more"


def test_counts(swept: Swept) -> None:
    print(f"{swept.compared} operators compared, {swept.equal} equal throughout")
    assert swept.compared > 600
    assert swept.equal > 0.8 * swept.compared
