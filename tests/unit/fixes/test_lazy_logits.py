"""The loss of lazy logits, as programs write it, against float64: no further from it than torch's own loss."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn import functional

import memprof
from tests.lanes import examples

UNIT = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Decoder(nn.Module):
    """A head over an embedding, and a loss in one of the ways that people write it."""

    def __init__(self, case: dict) -> None:
        super().__init__()
        self.case = case
        vocab, width = case["vocab"], case["hidden"]
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=case["bias"])
        if case["tied"]:
            self.head.weight = self.embed.weight
        self.register_buffer("class_weight", torch.rand(vocab) + 0.5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each token, or of all."""
        case = self.case
        x = self.embed(ids)
        if not case["contiguous"]:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        logits = self.head(x)
        if case["upcast"] and logits.dtype != torch.float64:
            logits = logits.float()
        if case["cap"]:
            logits = torch.tanh(logits / case["cap"]) * case["cap"]
        if case["shift"]:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if case["form"] == "transposed":
            logits = logits.transpose(1, 2)
        else:
            logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        weight = self.class_weight.to(logits.dtype) if case["weights"] else None
        return functional.cross_entropy(
            logits, labels, weight, ignore_index=case["ignore_index"], reduction=case["reduction"],
            label_smoothing=case["smoothing"],
        )  # fmt: skip


CASES = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "tokens": st.integers(2, 12),
        "hidden": st.integers(1, 16),
        "vocab": st.integers(2, 120),
        "chunk": st.integers(1, 40),
        "dtype": st.sampled_from(list(UNIT)),
        "autocast": st.sampled_from([None, None, torch.bfloat16, torch.float16]),
        "tied": st.booleans(),
        "bias": st.booleans(),
        "contiguous": st.booleans(),
        "upcast": st.booleans(),
        "cap": st.sampled_from([0.0, 0.0, 5.0]),
        "shift": st.booleans(),
        "form": st.sampled_from(["flat", "transposed"]),
        "weights": st.sampled_from([False, False, True]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "smoothing": st.sampled_from([0.0, 0.0, 0.2]),
        "ignore": st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        "ignore_index": st.sampled_from([-100, -1, 0]),
        "micro_batches": st.integers(1, 3),
        "seed": st.integers(0, 2**31),
    }
)
ALL = {
    "rows": 2, "tokens": 5, "hidden": 4, "vocab": 9, "chunk": 3, "dtype": torch.float32, "autocast": None, "tied": True,
    "bias": True, "contiguous": False, "upcast": True, "cap": 5.0, "shift": True, "form": "flat", "weights": False,
    "reduction": "mean", "smoothing": 0.2, "ignore": 0.3, "ignore_index": -100, "micro_batches": 2, "seed": 0,
}  # fmt: skip


def run(model: nn.Module, batches, reduction_weights, autocast=None):
    """The losses of the micro-batches, and the gradients that they add up to, in float64."""
    losses = []
    for (ids, labels), factor in zip(batches, reduction_weights, strict=True):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(ids, labels)
        (loss.flatten().double() * factor[: loss.numel()]).sum().backward()
        losses.append(loss.detach().double().flatten())
    found = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {"loss": torch.cat(losses), **found}


def summands(model: nn.Module, batches, factors, case):
    """For each result, the sum of the absolute values of what it is a sum of (float64): a rounding is a share of it."""
    weight, bias = model.head.weight, model.head.bias
    sizes = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    for (ids, labels), factor in zip(batches, factors, strict=True):
        x = model.embed(ids)
        products = x.abs() @ weight.abs().T + (0 if bias is None else bias.abs())
        logits = model.head(x)
        if case["cap"]:
            logits = torch.tanh(logits / case["cap"]) * case["cap"]
        if case["shift"]:
            x, ids, products, logits, labels = x[:, :-1], ids[:, :-1], products[:, :-1], logits[:, :-1], labels[:, 1:]
        # A rounding of a logit is one of its products; the loss and its gradient have that, times at most 1 each.
        spread = products.amax(-1) + logits.abs().amax(-1) + math.log(case["vocab"]) + 1
        counted = (labels != case["ignore_index"]).double()
        # Class weights are at most 1.5 and at least 0.5, and so is their quotient within 3.
        rows = counted * 3 / (counted.sum().clamp(min=1) if case["reduction"] == "mean" else 1)
        losses.append((rows * spread).flatten() if case["reduction"] == "none" else (rows * spread).sum().view(1))
        rows = rows * factor.abs().max()
        wanted = functional.one_hot(labels.clamp(0, case["vocab"] - 1), case["vocab"]) + case["smoothing"]
        pull = (logits.softmax(-1) * spread.unsqueeze(-1) + wanted) * rows.unsqueeze(-1)
        pull = pull.flatten(0, 1)
        of_weight = pull.T @ x.flatten(0, 1).abs()
        sizes["head.weight" if "head.weight" in sizes else "embed.weight"] += of_weight
        sizes["embed.weight"].index_add_(0, ids.flatten(), pull @ weight.abs())
        if bias is not None:
            sizes["head.bias"] += pull.sum(0)
    return {"loss": torch.cat(losses), **sizes}


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@example(ALL)
@example({**ALL, "ignore": 1.0})
@example({**ALL, "autocast": torch.bfloat16})
@example({**ALL, "dtype": torch.float16, "form": "transposed", "reduction": "none"})
@example({**ALL, "weights": True})
@given(CASES)
@pytest.mark.filterwarnings("ignore:chunked-loss")  # class weights need the full logits
def test_no_further_from_float64_than_the_original(case):
    torch.manual_seed(case["seed"])
    dtype, autocast = case["dtype"], case["autocast"]
    if dtype != torch.float32:
        autocast = None  # it is for float32
    model = Decoder(case).to(dtype)
    batches, factors = [], []
    for _ in range(case["micro_batches"]):
        ids = torch.randint(0, case["vocab"], (case["rows"], case["tokens"]))
        labels = torch.randint(1 if case["ignore_index"] == 0 else 0, case["vocab"], ids.shape)
        labels[torch.rand(ids.shape) < case["ignore"]] = case["ignore_index"]
        batches.append((ids, labels))
        factors.append(torch.rand(ids.numel(), dtype=torch.float64) if case["reduction"] == "none" else torch.ones(1))
    factors = [factor.double() for factor in factors]
    reference = Decoder(case).double()
    reference.load_state_dict(model.state_dict())
    exact = run(reference, batches, factors)
    original = run(model, batches, factors, autocast)
    with memprof.apply(model, "chunked-loss", chunk_size=case["chunk"]):
        chunked = run(model, batches, factors, autocast)
    with torch.no_grad():
        sizes = summands(reference, batches, factors, case)
    unit = UNIT[autocast or dtype]
    for name, truth in exact.items():
        assert torch.equal(truth.isnan(), chunked[name].isnan()), name
        truth, ours, theirs = (part[name].nan_to_num(0.0) for part in (exact, chunked, original))
        if not torch.isfinite(theirs).all():  # float16 without a loss scale
            continue
        own = (theirs - truth).abs().max() if truth.numel() else 0.0
        # Of what is below the smallest normal number, float16 has no digits.
        floor = 2**-23 if torch.float16 in (dtype, autocast) else 1e-300
        excess = (ours - truth).abs() - 2 * own - 4 * unit * sizes[name] - floor
        assert not truth.numel() or float(excess.max()) <= 0, name


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    tokens=st.integers(16, 40).map(lambda count: 64 * count),  # at least two of the largest chunks
    chunk=st.integers(1, 4).map(lambda count: 128 * count),
    tied=st.booleans(),
    upcast=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_peak_is_that_of_a_chunk(tokens, chunk, tied, upcast, dtype):
    """Of the sequence it has the hidden states; of the vocabulary no more than some chunks."""
    vocab, hidden = 20_000, 8

    def peak(tokens: int, chunk: int) -> int:
        case = {**ALL, "vocab": vocab, "hidden": hidden, "tied": tied, "upcast": upcast, "cap": 0.0, "smoothing": 0.0}
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = Decoder({**case, "bias": False, "contiguous": True}).to("cuda", dtype)
            memprof.apply(model, "chunked-loss", chunk_size=chunk)
            ids = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
            model(ids, ids).backward()
        return gpu.report().peak.allocated_bytes

    here = peak(tokens, chunk)
    # Twice the tokens: hidden states, their gradients and some numbers for each token, nothing of the vocabulary.
    per_token = (peak(2 * tokens, chunk) - here) / tokens
    assert 0 <= per_token <= 8 * hidden * 4 + 20 * 8 < vocab * dtype.itemsize / 50
    # Twice the chunk: between one and four of its logits in float32.
    row = vocab * 4
    assert chunk * row * 0.9 <= peak(tokens, 2 * chunk) - here <= 4 * chunk * row


def test_hooks_of_fully_shard_make_no_logits():
    """They gather parameters before the backward, and leave the gradient as it is."""

    def peak(*, hooked: bool) -> int:
        case = {**ALL, "vocab": 20_000, "hidden": 8, "cap": 0.0, "smoothing": 0.0, "bias": False, "contiguous": True}
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = Decoder(case).to("cuda")
            memprof.apply(model, "chunked-loss", chunk_size=128)
            if hooked:
                hook = FSDPState()._pre_backward
                model.head.register_forward_hook(lambda module, args, logits: logits.register_hook(hook) and None)
            ids = torch.zeros(1, 2048, dtype=torch.int64, device="cuda")
            model(ids, ids)
        return gpu.report().peak.allocated_bytes

    assert peak(hooked=True) == peak(hooked=False)


def test_it_may_first_be_imported_while_a_virtual_gpu_is_there():
    """The next GPU's replacements are others."""
    spec = importlib.util.find_spec("memprof.fixes.lazy_logits")
    fresh = importlib.util.module_from_spec(spec)
    with memprof.virtual_gpu("h100-80gb"):
        spec.loader.exec_module(fresh)
    asked = []
    with memprof.virtual_gpu("h100-80gb"):
        weight = torch.zeros(5, 3).requires_grad_()
        policy = fresh.LogitsPolicy(fresh.ChunkRows(chunk_size=2, budget_bytes=0), asked.append)
        fresh.LazyLogits(torch.zeros(2, 3), weight, None, policy).register_hook(FSDPState()._pre_backward)
    assert asked == []
