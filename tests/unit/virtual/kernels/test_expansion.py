"""Composite operators whose C++ allocates more than the result: what they run inside is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memprof.virtual import VirtualGpu
from memprof.virtual.kernels.expansion import find_expansion

aten = torch.ops.aten


def data(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (4, 6)), device="cuda")


def mask() -> torch.Tensor:
    return torch.ones(4, 6, device="cuda", dtype=torch.bool)


def places() -> torch.Tensor:
    return torch.zeros(4, device="cuda", dtype=torch.int64)


WINDOW = {"device": torch.device("cuda")}
CALLS: dict[str, Callable[[], object]] = {
    "binary_cross_entropy_with_logits": lambda: aten.binary_cross_entropy_with_logits(data(), data()),
    "soft_margin_loss": lambda: aten.soft_margin_loss(data(), data()),
    "soft_margin_loss_backward": lambda: aten.soft_margin_loss_backward(data(), data(), data(), 1),
    "logsumexp": lambda: aten.logsumexp(data(), [1]),
    "dist": lambda: aten.dist(data(), data()),
    "_euclidean_dist": lambda: aten._euclidean_dist(data(), data()),
    "isinf": lambda: aten.isinf(data()),
    "mvlgamma": lambda: aten.mvlgamma(data(), 2),
    "ldexp": lambda: aten.ldexp(data(), data()),
    "_is_all_true": lambda: aten._is_all_true(mask()),
    "_is_any_true": lambda: aten._is_any_true(mask()),
    "block_diag": lambda: aten.block_diag([data(), data()]),
    "rot90": lambda: aten.rot90(data(), 1, [0, 1]),
    "affine_grid_generator": lambda: aten.affine_grid_generator(data(2, 2, 3), [2, 3, 4, 4], False),
    "rrelu_with_noise_backward": lambda: aten.rrelu_with_noise_backward(data(), data(), data(), 0.1, 0.3, True, False),
    "slice_scatter": lambda: aten.slice_scatter(data(), data(2, 6), 0, 1, 3),
    "select_scatter": lambda: aten.select_scatter(data(), data(6), 0, 1),
    "diagonal_scatter": lambda: aten.diagonal_scatter(data(), data(4)),
    "as_strided_scatter": lambda: aten.as_strided_scatter(data(), data(4), [4], [1]),
    "bartlett_window": lambda: aten.bartlett_window(16, **WINDOW),
    "blackman_window": lambda: aten.blackman_window(16, **WINDOW),
    "hann_window": lambda: aten.hann_window(16, **WINDOW),
    "hamming_window": lambda: aten.hamming_window(16, **WINDOW),
    "kaiser_window": lambda: aten.kaiser_window(16, **WINDOW),
    "_trilinear": lambda: aten._trilinear(data(2, 3), data(2, 3), data(2, 3), [], [], [], [1]),
    "cholesky_solve": lambda: aten.cholesky_solve(data(4, 2), data(4, 4)),
    "linalg_pinv": lambda: aten.linalg_pinv(data(4, 4)),
    "fft_fftfreq": lambda: aten.fft_fftfreq(16, **WINDOW),
    "fft_rfftfreq": lambda: aten.fft_rfftfreq(16, **WINDOW),
    "masked_scatter_backward": lambda: aten.masked_scatter_backward(data(), mask(), [24]),
    "_unsafe_masked_index": lambda: aten._unsafe_masked_index(data(6), mask()[:, 0], [places()], 0),
    "_unsafe_masked_index_put_accumulate": lambda: aten._unsafe_masked_index_put_accumulate(
        data(6), mask()[:, 0], [places()], data(4)
    ),
    "repeat": lambda: aten.repeat(data(), [2, 2]),
    "diag_embed": lambda: aten.diag_embed(data()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_what_a_composite_runs_is_seen(gpu: VirtualGpu, name: str) -> None:
    CALLS[name]()
    made = {gpu.trace.op(storage) for storage in gpu.trace.storages}
    assert f"aten.{name}" not in made


def test_operators_with_a_kernel_run_as_one() -> None:
    for operator in (aten.add.Tensor, aten.silu_backward.default, aten.zeros_like.default, aten.sum.default):
        assert find_expansion(operator) is None
