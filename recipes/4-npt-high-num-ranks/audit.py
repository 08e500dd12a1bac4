"""Which figures of case study 4 hold, and the right ones: every number here is computed, measured or out of a run."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from memprof import virtual_gpu
from memprof.units import MIB, format_bytes
from memprof.workload.npt import RankOneDeltas

D_MODEL, D_FFN, RANK, NUM_RANKS = 4096, 14336, 64, 128
BATCH, TOKENS = 2, 128
LLAMA_PARAMETERS = 8_030_261_248
"""Of Llama-3.1-8B."""
COMBINES = ("sequential", "batched", "merged")


class Claim(NamedTuple):
    """A sentence of the report, whether it holds, and what is right."""

    text: str
    verdict: str
    right: str


class Stacked(RankOneDeltas):
    """Batched as the report has it: its parameters lie apart, and each forward stacks them first."""

    def compute_modulation(self, attention: torch.Tensor) -> torch.Tensor:
        """The attention's output itself: what is made of it lives as long as the copies do."""
        return attention

    def apply_low_rank(self, hidden: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
        """Σ_i (h · u_i) v_i, with fresh copies of all three stacks."""
        down = torch.stack(self.down.unbind(1))
        up_model = torch.stack([up.T for up in self.up_model.unbind(1)])
        up_ffn = torch.stack(self.up_ffn.unbind(0))
        codes = torch.einsum("bsd,ndr->bsnr", modulation, down)
        u = torch.einsum("bsnr,nrd->bsnd", codes, up_model)
        v = torch.einsum("bsnr,nrf->bsnf", codes, up_ffn)
        return torch.einsum("bsn,bsnf->bsf", torch.einsum("bsd,bsnd->bsn", hidden, u), v)


def component(combine: str, init: str = "fast") -> RankOneDeltas:
    """The report's component."""
    kind = Stacked if combine == "stacked" else RankOneDeltas
    return kind(D_MODEL, D_FFN, RANK, NUM_RANKS, combine=combine, init=init)


def parameter_bytes() -> int:
    """Bytes of its parameters in float32."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in component("merged").parameters())


def extra_bytes(combine: str, train: bool) -> int:
    """What one forward, or forward and backward, takes beside parameters and inputs at its most (virtual GPU)."""
    with virtual_gpu("h100-80gb") as gpu:
        made = component(combine).to("cuda").requires_grad_(train)
        hidden, attention = (torch.randn(BATCH, TOKENS, D_MODEL, device="cuda", requires_grad=train) for _ in range(2))
        before = gpu.allocated_bytes
        result = made(hidden, attention)
        if train:
            result.sum().backward()
    return gpu.report().peak.allocated_bytes - before


def initialisation_seconds(made: RankOneDeltas, init: str) -> float:
    """Seconds to fill the parameters of one component on this CPU."""
    begin = time.perf_counter()
    made.reset_parameters(init)
    return time.perf_counter() - begin


@torch.no_grad()
def forward_seconds(made: RankOneDeltas, repeat: int = 2) -> dict[str, float]:
    """Seconds of one forward without gradients on this CPU, the fastest of `repeat`, by way of combining."""
    hidden, attention = torch.randn(BATCH, TOKENS, D_MODEL), torch.randn(BATCH, TOKENS, D_MODEL)
    seconds = dict.fromkeys(COMBINES, float("inf"))
    for _ in range(repeat):
        for combine in COMBINES:
            made.combine = combine
            begin = time.perf_counter()
            made(hidden, attention)
            seconds[combine] = min(seconds[combine], time.perf_counter() - begin)
    return seconds


def layers_begin_equal() -> bool:
    """Whether two layers get the same matrices if each component seeds torch with a number of its own, as there."""

    def layer() -> list[torch.Tensor]:
        matrices = []
        for i in range(4):
            torch.manual_seed(42 + i * 1337)
            matrices.append(torch.empty(8, 16).normal_())
        return matrices

    with torch.random.fork_rng(devices=[]):
        return all(torch.equal(one, other) for one, other in zip(layer(), layer(), strict=True))


def claims() -> list[Claim]:
    """The report's figures that need no clock."""
    size = parameter_bytes()
    forward = {combine: extra_bytes(combine, False) for combine in (*COMBINES, "stacked")}
    training = {combine: extra_bytes(combine, True) for combine in (*COMBINES, "stacked")}
    # Householder QR of an m x r matrix and forming Q: 2 (2 m r^2 - 2 r^3 / 3) operations (Golub, Van Loan, 5.2).
    decompositions = sum(NUM_RANKS * (4 * rows * RANK**2 - 4 * RANK**3 // 3) for rows in (D_MODEL, D_MODEL, D_FFN))
    cubes = NUM_RANKS * (2 * D_MODEL**3 + D_FFN**3)
    tokens = BATCH * TOKENS
    operations = 2 * tokens * size // 4
    return [
        Claim(
            "memory of the component: 704 MB",
            "holds, in MiB, at rest" if size == 704 * MIB else "does not hold",
            f"{size // 4:,} parameters, {format_bytes(size)} in float32, and {format_bytes(4 * size)} with gradients "
            "and AdamW's two moments",
        ),
        Claim(
            "memory unchanged by batching",
            "does not hold" if forward["stacked"] > 2 * forward["sequential"] else "holds",
            "a forward takes beside that "
            f"{format_bytes(forward['sequential'])} sequential, {format_bytes(forward['stacked'])} stacked as the "
            f"report does it (every forward copies all parameters), {format_bytes(forward['batched'])} batched without "
            f"copies, {format_bytes(forward['merged'])} merged; forward and backward, with gradients: "
            + ", ".join(f"{format_bytes(num_bytes)} {combine}" for combine, num_bytes in training.items()),
        ),
        Claim(
            "orthogonal initialisation is O(n^3)",
            "does not hold" if cubes > 100 * decompositions else "holds",
            f"QR of [rows x 64] takes rows x 64^2: {decompositions / 1e9:.0f} billion operations for all 128 "
            f"components, where n^3 would be {cubes / 1e12:.0f} million million. Slow, not hanging",
        ),
        Claim(
            "forward: 41 s to 14 s",
            "cannot be checked: no device is named",
            f"the component's forward is {operations / 1e9:.0f} billion operations for {tokens} tokens, "
            f"{operations / (2 * tokens * LLAMA_PARAMETERS):.1%} of what the model's other parameters take",
        ),
        Claim(
            "a seed for each component makes the components differ",
            "and the layers equal" if layers_begin_equal() else "holds",
            "component i of every layer begins with the same numbers, and the program's own random numbers begin anew"
            if layers_begin_equal()
            else "the layers differ too",
        ),
    ]
