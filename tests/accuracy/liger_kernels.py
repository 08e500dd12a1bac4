"""The other half of Liger-Kernel's benchmark: its own Triton kernels, run from the published package.

The package is plain Python around Triton kernels, which fill tensors and allocate none; so its own code, of the release
that was measured (the last words of a row's note), runs on the virtual GPU, with the launches passed over. What is kept
live is what the benchmark's scripts keep, as in baselines.py.

Needed, and not installed with this project: Triton, and one folder for each release of liger-kernel; see libraries.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tests.accuracy.baselines import Published, Step, rotary_inputs

# Where a row was measured with code that the release which it names does not have: a development version keeps the
# number of the last release. Three kernels were new then (b5672a15, 8e2f3a47, 5d25e468 of
# github.com/linkedin/Liger-Kernel); the last was published with the change of the kernel itself (6a2c4913), ten days
# after 0.6.0.
NEXT_RELEASE = {
    ("layer_norm", "0.2.1"): "0.3.0",
    ("jsd", "0.3.1"): "0.4.0",
    ("softmax", "0.5.8"): "0.6.0",
    ("layer_norm", "0.6.0"): "0.6.1",
}


def release(note: str, kernel: str) -> str:
    """The release of liger-kernel with the code of a row: by the end of its note, or the next that has that code."""
    name, _, version = note.rpartition(" ")
    assert name.endswith("liger"), note
    return NEXT_RELEASE.get((kernel, version), version)


def releases(notes: Iterable[tuple[str, str]]) -> set[str]:
    """All that the given rows, as pairs of note and kernel, need."""
    return {release(note, kernel) for note, kernel in notes}


def cross_entropy(row: Published) -> Step:
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    tokens = row.config["B"] * row.config["T"]
    logits = torch.randn(tokens, row.x, requires_grad=True, device="cuda")
    target = torch.randint(row.x, (tokens, 1), device="cuda").squeeze(1)
    criterion = LigerCrossEntropyLoss()

    def step() -> None:
        loss = criterion(logits, target)
        loss.backward()

    return step


def fused_linear_cross_entropy(row: Published) -> Step:
    """The head of the other contestant is live too, and so is the cuBLAS workspace of the thread that runs backwards:
    the script timed the other contestant in the same process before, and it multiplies matrices there."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    hidden, vocabulary = row.config["H"], row.config["V"]
    other, head = (nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).to("cuda") for _ in range(2))
    criterion = LigerFusedLinearCrossEntropyLoss(reduction="mean")
    states = torch.randn(row.x, hidden, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(vocabulary, (row.x, 1), device="cuda").squeeze(1)
    nn.functional.cross_entropy(other(states), target).backward()
    other.weight.grad = states.grad = None

    def step() -> nn.Module:
        loss = criterion(head.weight, states, target)
        loss.backward()
        return other

    return step


def layer_norm(row: Published) -> Step:
    from liger_kernel.transformers.layer_norm import LigerLayerNorm

    layer = LigerLayerNorm(hidden_size=row.x).to("cuda")
    other = nn.LayerNorm(row.x, eps=row.config["eps"]).to("cuda")
    states = torch.randn(row.config["M"], row.x, device="cuda")
    gradient = torch.randn_like(states)
    states.requires_grad_()

    def step() -> nn.Module:
        output = layer(states)
        output.backward(gradient, retain_graph=True)
        return other

    return step


def rope(row: Published) -> Step:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    inputs = rotary_inputs(row)

    def step() -> object:
        outputs = liger_rotary_pos_emb(inputs.query, inputs.key, inputs.cosine, inputs.sine, inputs.positions)
        torch.autograd.grad(outputs, (inputs.query, inputs.key), inputs.gradients, allow_unused=True, retain_graph=True)
        return inputs

    return step


def jsd(row: Published) -> Step:
    from liger_kernel.transformers.jsd import LigerJSD

    tokens, vocabulary = (
        (row.x, row.config["vocab_size"])
        if row.axis == "BT"
        else (
            row.config["B"] * row.config["T"],
            row.x,
        )
    )
    divergence = LigerJSD()
    student = torch.randn(tokens, vocabulary, requires_grad=True, device="cuda").log_softmax(dim=-1)
    teacher = torch.randn(tokens, vocabulary, device="cuda").log_softmax(dim=-1)

    def step() -> None:
        loss = divergence(student, teacher)
        if row.axis == "BT":
            loss.backward(torch.randn_like(loss), retain_graph=True)
        else:
            loss.backward(retain_graph=True)

    return step


def softmax(row: Published) -> Step:
    """Of one vector, as in baselines.softmax."""
    from liger_kernel.transformers.softmax import LigerSoftmax

    states = torch.randn(row.x, device="cuda", dtype=getattr(torch, row.config["dtype"].removeprefix("torch.")))
    states.requires_grad_()
    function = LigerSoftmax().to("cuda")

    def step() -> None:
        output = function(states)
        output.backward(torch.ones_like(output), retain_graph=True)

    return step


WORKLOADS = {
    "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "layer_norm": layer_norm,
    "rope": rope,
    "jsd": jsd,
    "softmax": softmax,
}
