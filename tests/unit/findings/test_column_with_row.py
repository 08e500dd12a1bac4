"""[N, 1] with [N], in small programs on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from memprof.device.catalog import find_gpu
from memprof.findings import Context, Finding, find_all
from memprof.ledger.ledger import build_ledger
from memprof.units import MIB
from memprof.virtual import VirtualGpu
from tests.unit.full_gpu import run_out_of_memory

N = 8192  # 256 MiB for all pairs

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def program(compute: Compute) -> None:
    x = torch.randn(N, 32, device="cuda")
    weight = torch.randn(32, 1, device="cuda", requires_grad=True)
    compute(x @ weight, torch.randn(N, device="cuda")).float().mean()


def told(context: Context) -> list[Finding]:
    return [finding for finding in find_all(context) if finding.id == "column-with-row"]


def run(compute: Compute) -> list[Finding]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        program(compute)
    return told(Context(build_ledger(gpu.trace), None))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "compute", [lambda y, t: (y - t) ** 2, lambda y, t: t - y, functional.mse_loss, lambda y, t: (y > 0) == (t > 0)]
)
def test_all_pairs_of_a_column_and_a_row(compute: Compute) -> None:
    (finding,) = run(compute)
    place = "findings/test_column_with_row.py:"
    assert finding.title.startswith(f"[{N} x 1] with [{N}] makes [{N} x {N}] at {place}")
    assert finding.evidence[0].text.endswith(f"if [{N} x {N}] was not meant: squeeze(1) on [{N} x 1]")


@pytest.mark.parametrize(
    "compute",
    [
        lambda y, t: (y.squeeze(1) - t) ** 2,
        lambda y, t: t.unsqueeze(1) - t,
        lambda y, t: y - t.unsqueeze(0),
        lambda y, t: y + t,
        lambda y, t: y - t[: N // 2],
    ],
)
def test_what_is_meant(compute: Compute) -> None:
    """Differences of pairs, sums as of squared norms, and two lengths."""
    assert not run(compute)


@pytest.mark.parametrize("compute", [lambda y, t: y + t, lambda y, t: t * y, lambda y, t: y - t])
def test_dimensions_are_aligned_from_the_right(compute: Compute) -> None:
    """[N, 1, 1] with [N, 1]: also sums and products, which are the cause where memory runs out in them."""

    def run_compute() -> None:
        program(lambda y, t: compute(y[:, :, None].clone(), t[:, None].clone()))

    (finding,) = told(run_out_of_memory(run_compute, 200 * MIB))
    assert f"[{N} x 1 x 1] with [{N} x 1] makes [{N} x {N} x 1]" in finding.title and finding.is_decisive
    assert finding.evidence[0].text.endswith(f"squeeze(-1) on [{N} x 1 x 1]")


def test_other_dimensions_are_no_ones() -> None:
    assert not run(lambda y, t: y[:, :, None] + torch.stack([t, t], 1))


def test_it_is_not_the_cause_for_all_pairs_may_be_meant() -> None:
    context = run_out_of_memory(lambda: program(lambda y, t: (y - t) ** 2), 400 * MIB)
    (finding,) = told(context)
    assert finding.title.endswith("squeeze(1)") and not finding.is_decisive
