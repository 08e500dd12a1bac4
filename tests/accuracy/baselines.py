"""Memory that others published of plain PyTorch operators on real GPUs, and the same steps on the virtual GPU.

Liger-Kernel (benchmark/data/all_benchmark_data.csv at ead96b61) publishes what the PyTorch or Hugging Face version of
each of its kernels takes; the workloads follow what its benchmark scripts keep alive: set-up, then the same step again
and again, the highest `max_memory_allocated` of a step in MiB, rounded to 0.001.

Cut Cross-Entropy (apple/ml-cross-entropy README.md at d42911f9; benchmark/memory.py) publishes how far the peak of a
forward, a backward, or both, rises above what was allocated before, in MiB, rounded to 0.1 or to 1.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.ledger.categories import Category
from memprof.ledger.ledger import build_ledger
from memprof.virtual import VirtualGpu
from tests.unit.allocator.replaying import replay_trace

Step = Callable[[], object]

MIB = 2**20
TOLERANCE = 1e-9  # Of the comparison itself, in MiB: the figures are decimal fractions.
GPUS = {
    "A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
}
PREDICTED = ("huggingface", "torch", "baseline")  # The methods that are plain PyTorch, run eagerly.
# The methods that are those libraries' own Triton kernels: published/operators.py runs their packages.
OWN_KERNELS = ("liger", "cce")
NOT_PREDICTED = {
    "torch_compile": "compiled: torch.compile fuses operators, and this sweep runs them eagerly",
}


@dataclass(frozen=True)
class Published:
    library: str
    kernel: str
    method: str
    axis: str
    x: int
    gpu: str
    mib: float
    digits: int  # Decimals that were published.
    config: dict[str, Any]

    @property
    def rounding(self) -> float:
        """How far the published figure may be off for being rounded, in MiB.

        Liger-Kernel's went through float32 as well (its `_test_memory`): half a unit of 24 bits, up to 512 bytes at 16
        GiB, and more above.
        """
        single = 2.0 ** (math.frexp(self.mib)[1] - 25) if self.library == "Liger-Kernel" else 0.0
        return 0.5 * 10**-self.digits + single


Setup = Callable[[Published], Step]


@dataclass(frozen=True)
class Compared:
    """A published row beside its simulation, in MiB."""

    row: Published
    simulated: float
    # By how much blocks at the peak are larger than their requests, rounded to 512 bytes: of a segment the allocator
    # splits off only what is more than 1 MiB.
    unsplit_bytes: int

    @property
    def off(self) -> float:
        """Simulated minus published, as a fraction of the published figure."""
        return (self.simulated - self.row.mib) / self.row.mib

    @property
    def unexplained_bytes(self) -> int:
        """The difference; 0 if the published figure could be the simulated one, rounded."""
        missing = abs(self.simulated - self.row.mib)
        return round(missing * MIB) if missing > self.row.rounding + TOLERANCE else 0


def published(folder: Path) -> list[Published]:
    """Every row of the two projects' tables, whatever its method."""
    with (folder / "published_memory.csv").open(newline="", encoding="utf-8") as file:
        lines = [row for row in csv.DictReader(file) if any(name in row["source"] for name in PROJECTS)]
    return [published_row(line) for line in lines]


PROJECTS = ("Liger-Kernel", "ml-cross-entropy")


def published_row(row: Mapping[str, str]) -> Published:
    """A line of the table, by its columns, of one of these projects."""
    digits = len(row["value"].partition(".")[2])
    if "Liger-Kernel" in row["source"]:
        axis, _, x = row["seq"].partition("=")
        config = json.JSONDecoder().raw_decode(row["note"])[0]
        kernel, library, digits = row["model"], "Liger-Kernel", 3  # trailing zeros are left out
    else:
        axis, x = row["task"].removeprefix("op "), row["batch"].removesuffix(" tokens")
        sizes = (part.split("=") for part in row["seq"].split())
        config = {name: int(size) for name, size in sizes}
        kernel, library = "cut cross-entropy", "ml-cross-entropy"
    assert row["unit"] == "MiB", row
    return Published(library, kernel, row["method"], axis, int(x), row["gpu"], float(row["value"]), digits, config)


def compared(row: Published) -> Compared:
    if row.library == "ml-cross-entropy":
        return cut_cross_entropy(row)
    setup = WORKLOADS[row.kernel, row.axis]
    with VirtualGpu(find_gpu(GPUS[row.gpu])) as gpu:
        step = setup(row)
        for _ in range(3):
            step()
    ledger = build_ledger(gpu.trace)
    return Compared(row, ledger.peak_bytes / MIB, ledger.sum_by_category().get(Category.FRAGMENTATION, 0))


# -- Liger-Kernel's baselines ------------------------------------------------------------------------------------------


def fused_linear_cross_entropy(row: Published) -> Step:
    """A head and its loss in bfloat16; the head of the other contestant, of the same size, is live too."""
    hidden, vocabulary = row.config["H"], row.config["V"]
    other, head = (nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).to("cuda") for _ in range(2))
    criterion = nn.CrossEntropyLoss()
    states = torch.randn(row.x, hidden, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(vocabulary, (row.x, 1), device="cuda").squeeze(1)

    def step() -> nn.Module:
        loss = criterion(head(states), target)
        loss.backward()
        return other

    return step


def cross_entropy(row: Published) -> Step:
    tokens = row.config["B"] * row.config["T"]
    logits = torch.randn(tokens, row.x, requires_grad=True, device="cuda")
    target = torch.randint(row.x, (tokens, 1), device="cuda").squeeze(1)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        loss = criterion(logits, target)
        loss.backward()

    return step


def layer_norm(row: Published) -> Step:
    """The other contestant's layer is live too."""
    other, layer = (nn.LayerNorm(row.x, eps=row.config["eps"]).to("cuda") for _ in range(2))
    states = torch.randn(row.config["M"], row.x, device="cuda")
    gradient = torch.randn_like(states)
    states.requires_grad_()

    def step() -> nn.Module:
        output = layer(states)
        output.backward(gradient, retain_graph=True)
        return other

    return step


@dataclass(frozen=True)
class RotaryInputs:
    """What a rotary embedding of queries and keys is given, and what else stays alive beside it."""

    query: torch.Tensor
    key: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    gradients: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    frequencies: torch.Tensor


def rotary_inputs(row: Published) -> RotaryInputs:
    hidden = row.x if row.axis == "H" else row.config["hidden_size"]
    length = row.x if row.axis == "T" else row.config["seq_len"]
    heads = {"query": row.config["num_q_heads"], "key": row.config["num_kv_heads"]}
    size = hidden // heads["query"]
    query, key = (
        torch.randn(1, length, count, size, device="cuda", requires_grad=True, dtype=torch.bfloat16).transpose(1, 2)
        for count in heads.values()
    )
    gradients = torch.randn_like(query), torch.randn_like(key)
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    frequencies = (10000.0 ** (-torch.arange(0, size, 2) / size)).to("cuda")
    # A matrix product, as in transformers: it brings a cuBLAS workspace of 8.125 MiB with it.
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()
    return RotaryInputs(query, key, cosine, sine, gradients, positions, frequencies)


def rope(row: Published) -> Step:
    """Rotary embedding of queries and keys; frequencies and positions stay alive."""
    inputs = rotary_inputs(row)
    size = inputs.query.shape[-1]
    cosine, sine = inputs.cosine.unsqueeze(1), inputs.sine.unsqueeze(1)

    def turned(states: torch.Tensor) -> torch.Tensor:
        # Two slices, as transformers writes it: chunk() has another backward, which takes less.
        half = torch.cat((-states[..., size // 2 :], states[..., : size // 2]), dim=-1)
        return states * cosine + half * sine

    def step() -> object:
        outputs = turned(inputs.query), turned(inputs.key)
        torch.autograd.grad(outputs, (inputs.query, inputs.key), inputs.gradients, retain_graph=True)
        return inputs

    return step


def _distributions(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a student, with a gradient, and of a teacher."""
    student = torch.randn(tokens, vocabulary, requires_grad=True, device="cuda").log_softmax(dim=-1)
    return student, torch.randn(tokens, vocabulary, device="cuda").log_softmax(dim=-1)


def jsd(row: Published) -> Step:
    """Jensen-Shannon divergence from two batchmean KL divergences, as that benchmark wrote it in release 0.3.1."""
    student, teacher = _distributions(row.config["B"] * row.config["T"], row.x)
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def step() -> None:
        mixed = torch.lerp(student.exp(), teacher.exp(), 0.5)
        loss = 0.5 * divergence(mixed.log(), teacher) + 0.5 * divergence(mixed.log(), student)
        loss.backward(retain_graph=True)

    return step


def jsd_by_rows(row: Published) -> Step:
    """The same from KL divergences without reduction, summed over the vocabulary: release 0.8.0."""
    student, teacher = _distributions(row.x, row.config["vocab_size"])
    divergence = nn.KLDivLoss(reduction="none", log_target=True)

    def by_row(logarithm: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return 0.5 * divergence(logarithm, other).sum(dim=-1)

    def forward() -> torch.Tensor:
        mixed = torch.lerp(student.exp(), teacher.exp(), 0.5)
        return ((by_row(mixed.log(), teacher) + by_row(mixed.log(), student)) / student.shape[0]).sum()

    def step() -> None:
        loss = forward()
        loss.backward(torch.randn_like(loss), retain_graph=True)

    return step


def softmax(row: Published) -> Step:
    """A vector of N elements: that benchmark's memory script takes N for the whole shape (benchmark_softmax.py at
    5d25e468), so that its figures are of a few KiB, and `M` is in its speed test alone."""
    states = torch.randn(row.x, device="cuda", dtype=getattr(torch, row.config["dtype"].removeprefix("torch.")))
    states.requires_grad_()
    function = nn.Softmax(dim=-1)

    def step() -> None:
        output = function(states)
        output.backward(torch.ones_like(output), retain_graph=True)

    return step


# By kernel and the axis that its rows vary.
WORKLOADS: dict[tuple[str, str], Setup] = {
    ("fused_linear_cross_entropy", "BT"): fused_linear_cross_entropy,
    ("cross_entropy", "V"): cross_entropy,
    ("layer_norm", "N"): layer_norm,
    ("rope", "H"): rope,
    ("rope", "T"): rope,
    ("jsd", "V"): jsd,
    ("jsd", "BT"): jsd_by_rows,
    ("softmax", "N"): softmax,
}


# -- Cut Cross-Entropy's baseline --------------------------------------------------------------------------------------


# `final_logit_softcapping` in the configuration of google/gemma-2-2b-it, whose head that benchmark takes.
SOFTCAP = 30.0


def cut_cross_entropy(row: Published) -> Compared:
    """How far allocated bytes rise in a forward (fw), a backward (bw) or both, above what was allocated before."""
    with VirtualGpu(find_gpu(GPUS[row.gpu])) as gpu:
        states = torch.randn(row.x, row.config["D"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
        head = torch.randn(row.config["V"], row.config["D"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
        target = torch.randint(row.config["V"], (row.x,), device="cuda")

        def forward() -> torch.Tensor:
            logits = states @ head.T
            logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
            return F.cross_entropy(logits.float(), target)

        # Once unmeasured, as there: cuBLAS has its workspaces from then on.
        forward().backward()
        states.grad = head.grad = None
        before = len(gpu.trace.events)
        loss = forward()
        between = len(gpu.trace.events)
        if row.axis != "fw":
            loss.backward()
        after = len(gpu.trace.events)
    begin = between if row.axis == "bw" else before

    def rise(allocated: Sequence[int]) -> int:
        return max(allocated[begin:after]) - allocated[begin - 1]

    blocks = rise(replay_trace(gpu.trace).allocated)
    return Compared(row, blocks / MIB, blocks - rise(build_ledger(gpu.trace).allocated))
