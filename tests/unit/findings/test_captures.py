"""The rules on real captures of the two bugs that people reported (case studies 1 and 5), without a GPU."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from memprof.device.catalog import find_gpu  # noqa: E402
from memprof.findings import Context, Finding, Severity, find_all  # noqa: E402
from memprof.ledger.ledger import build_ledger  # noqa: E402
from memprof.virtual.gpu import VirtualGpu  # noqa: E402


class RotaryCache(nn.Module):
    """Case study 5: positions made on the host, frequencies on the GPU."""

    def __init__(self, device_is_given: bool) -> None:
        super().__init__()
        self.device_is_given = device_is_given
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64)))

    def forward(self, seq_len: int) -> torch.Tensor:
        if self.device_is_given:
            t = torch.arange(seq_len, dtype=self.inv_freq.dtype, device=self.inv_freq.device)
        else:
            t = torch.arange(seq_len, dtype=self.inv_freq.dtype)  # the host
        return torch.outer(t, self.inv_freq)  # they meet


class Npt(nn.Module):
    """Case study 1: the weight delta of every token, or the same product without it."""

    def __init__(self, low_rank: bool, d_model: int = 4096, d_ffn: int = 14336, rank: int = 16) -> None:
        super().__init__()
        self.low_rank = low_rank
        self.up = nn.Linear(d_model, d_ffn, bias=False)
        self.A = nn.Parameter(torch.empty(d_model, rank))
        self.B = nn.Parameter(torch.empty(rank, d_ffn))

    def forward(self, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        modulation = attention @ self.A
        if self.low_rank:
            return self.up(hidden) + ((hidden @ self.A) * modulation) @ self.B
        delta = torch.einsum("bsr,dr,rf->bsdf", modulation, self.A, self.B)  # the delta
        return self.up(hidden) + torch.einsum("bsd,bsdf->bsf", hidden, delta)


def short(line: str) -> str:
    """`folder/file:line`, as sentences have it; the whole path is in the evidence's source."""
    return "/".join(line.split("/")[-2:])


def line_of(module: type[nn.Module], comment: str) -> str:
    """`file:line` of the line of `module` that ends in a comment."""
    lines, first = inspect.getsourcelines(module)
    offset = next(number for number, line in enumerate(lines) if line.rstrip().endswith(f"# {comment}"))
    return f"{__file__}:{first + offset}"


def rotary(device_is_given: bool) -> list[Finding]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        RotaryCache(device_is_given).to("cuda")(8192)
    return find_all(Context(build_ledger(gpu.trace), None))


def npt(low_rank: bool) -> list[Finding]:
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        model = Npt(low_rank).to("cuda")
        hidden, attention = (torch.randn(4, 512, 4096, device="cuda", requires_grad=True) for _ in range(2))
        model(hidden, attention).sum().backward()
    return find_all(Context(build_ledger(gpu.trace), None))


def test_rotary_positions_on_the_host_are_found() -> None:
    finding = next(finding for finding in rotary(False) if finding.id == "device-mismatch")
    assert finding.severity is Severity.ERROR
    made, met = line_of(RotaryCache, "the host"), line_of(RotaryCache, "they meet")
    assert f"at {short(met)} is given" in finding.title and finding.title.endswith(f"at {short(made)}")
    assert finding.evidence[0].source == f"{met} forward"
    assert finding.evidence[1].source == f"{made} forward" and finding.evidence[1].device == "cpu"
    assert finding.fixes == ("device-placement",)


def test_rotary_positions_on_the_gpu_are_fine() -> None:
    assert not rotary(True)


def test_weight_delta_of_every_token_has_its_true_bytes() -> None:
    finding = next(finding for finding in npt(False) if finding.id == "weight-delta-per-token")
    line = line_of(Npt, "the delta")
    # The case study's table says "~448 GB" for it: 448 GiB in float32, with the d_ffn of Llama-3.1-8B (14336).
    assert "448.00 GiB at " + short(line) in finding.title
    assert finding.evidence[0].num_bytes == 4 * 512 * 4096 * 14336 * 4
    assert {evidence.num_bytes for evidence in finding.evidence} == {4 * 512 * 4096 * 14336 * 4}
    # Forward's delta is still live when the backward pass makes its gradient.
    assert finding.num_bytes == 2 * 4 * 512 * 4096 * 14336 * 4


def test_low_rank_form_has_no_weight_delta() -> None:
    assert not [finding for finding in npt(True) if finding.id == "weight-delta-per-token"]
