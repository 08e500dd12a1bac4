"""The loss by rows against float64: as near to it as torch's own, whatever the shapes, dtypes, labels and chunks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from memprof.fixes.head_loss import ChunkRows, LogitsStep, row_losses
from tests.lanes import examples

EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
CAP = (LogitsStep("div", 5.0), LogitsStep("tanh"), LogitsStep("mul", 5.0))


def own(hidden, weight, bias, target, steps, reduction, **options):
    """Torch's own way, with the full logits."""
    x = functional.linear(hidden, weight, bias)
    for step in steps:
        x = step.forward(x)
    return functional.cross_entropy(x, target, reduction=reduction, **options)


def chunked(hidden, weight, bias, target, steps, reduction, size, **options):
    losses = row_losses(hidden, weight, bias, target, steps=steps, rows=ChunkRows(size, 0), **options)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != options["ignore_index"]).sum()


def run(compute, inputs, dtype, scale):
    """Loss and gradients of a computation on `inputs` in `dtype`, as float64."""
    leaves = [None if part is None else part.to(dtype).requires_grad_() for part in inputs]
    loss = compute(*leaves)
    grads = torch.autograd.grad((loss.double() * scale).sum(), [leaf for leaf in leaves if leaf is not None])
    return [loss.detach().double(), *(grad.double() for grad in grads)]


def sizes_of_summands(inputs, target, steps, reduction, scale, options):
    """For the loss and each gradient, the sum of the absolute values of what it is a sum of, in float64."""
    hidden, weight, bias = inputs
    x = functional.linear(hidden, weight, bias)
    for step in steps:
        x = step.forward(x)
    counted = (target != options["ignore_index"]).double()
    rows = counted * scale / (counted.sum().clamp(min=1) if reduction == "mean" else 1)
    smoothing = options["label_smoothing"]
    wanted = functional.one_hot(target.clamp(min=0), x.shape[1]) * (1 - smoothing) + smoothing / x.shape[1]
    # The exponential turns a rounding of the logits into one of its result.
    pull = (x.softmax(1) * (1 + 2 * x.abs().amax(1, keepdim=True)) + wanted) * rows.unsqueeze(1)
    losses = rows * (2 * x.abs().amax(1) + x.shape[1])
    sizes = [losses / scale if reduction == "none" else losses.sum(), pull @ weight.abs(), pull.t() @ hidden.abs()]
    return sizes if bias is None else [*sizes, pull.sum(0)]


CASES = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 40),
        "hidden": st.integers(1, 24),
        "vocab": st.integers(2, 200),
        "chunk": st.integers(1, 50),
        "dtype": st.sampled_from(list(EPS)),
        "bias": st.booleans(),
        "cap": st.booleans(),
        "upcast": st.booleans(),
        "ignore": st.sampled_from(["none", "some", "most", "first chunk", "all"]),
        "ignore_index": st.sampled_from([-100, -1, 0]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "smoothing": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "magnitude": st.sampled_from([0.1, 1.0, 8.0]),
        "seed": st.integers(0, 2**31),
    }
)


@settings(max_examples=examples(250), deadline=None, derandomize=True)
@example(
    {
        "rows": 5, "hidden": 4, "vocab": 7, "chunk": 2, "dtype": torch.float32, "bias": True, "cap": True,
        "upcast": True, "ignore": "all", "ignore_index": -100, "reduction": "mean", "smoothing": 0.0,
        "magnitude": 1.0, "seed": 0,
    }
)  # fmt: skip
@given(CASES)
def test_as_near_to_float64_as_torch(case):
    dtype = case["dtype"]
    make = torch.Generator().manual_seed(case["seed"])
    hidden = torch.randn(case["rows"], case["hidden"], generator=make, dtype=torch.float64)
    weight = torch.randn(case["vocab"], case["hidden"], generator=make, dtype=torch.float64)
    weight *= case["magnitude"] / math.sqrt(case["hidden"])
    bias = torch.randn(case["vocab"], generator=make, dtype=torch.float64) if case["bias"] else None
    # Numbers that the dtype has, so that all three start from the same ones.
    inputs = [None if part is None else part.to(dtype).double() for part in (hidden, weight, bias)]
    low = 1 if case["ignore_index"] == 0 else 0
    target = torch.randint(low, case["vocab"], (case["rows"],), generator=make)
    share = {"none": 0.0, "some": 0.3, "most": 0.9, "first chunk": 0.0, "all": 1.0}[case["ignore"]]
    target[torch.rand(case["rows"], generator=make) < share] = case["ignore_index"]
    if case["ignore"] == "first chunk":
        target[: case["chunk"]] = case["ignore_index"]
    steps = CAP if case["cap"] else ()
    options = {"ignore_index": case["ignore_index"], "label_smoothing": case["smoothing"]}
    reduction = case["reduction"]
    scale = torch.rand(case["rows"], generator=make).double() if reduction == "none" else 1.0

    upcast = (LogitsStep("cast", torch.float32),) if case["upcast"] and dtype != torch.float64 else ()
    wanted = run(lambda h, w, b=None: own(h, w, b, target, steps, reduction, **options), inputs, torch.float64, scale)
    theirs = run(
        lambda h, w, b=None: own(h, w, b, target, (*steps, *upcast), reduction, **options), inputs, dtype, scale
    )
    ours = run(
        lambda h, w, b=None: chunked(h, w, b, target, (*steps, *upcast), reduction, case["chunk"], **options),
        inputs, dtype, scale,
    )  # fmt: skip
    # The original's own deviation, twice over (which of two roundings is luckier is chance), and a few roundings of the
    # summands, which may cancel.
    summands = sizes_of_summands(inputs, target, steps, reduction, scale, options)
    for exact, original, mine, size in zip(wanted, theirs, ours, summands, strict=True):
        assert torch.equal(exact.isnan(), mine.isnan())
        assert torch.equal(original.isnan(), mine.isnan())
        if exact.isnan().any():
            continue
        bound = 2 * (original - exact).abs().max() + 8 * EPS[dtype] * size + 1e-300
        assert bool(((mine - exact).abs() <= bound).all())


def test_gradients_pass_gradcheck():
    torch.manual_seed(0)
    hidden = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 0, -100, 10, 4, -100, 3])

    def loss(h, w, b):
        return row_losses(h, w, b, target, steps=CAP, label_smoothing=0.1, rows=ChunkRows(3, 0))

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_weight_gradient_is_summed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 16).bfloat16(), torch.randn(64, 16).bfloat16().requires_grad_()
    target = torch.randint(0, 64, (1024,))
    row_losses(hidden, weight, None, target, rows=ChunkRows(8, 0)).sum().backward()
    many = weight.grad.double()
    weight.grad = None
    row_losses(hidden, weight, None, target, rows=ChunkRows(1024, 0)).sum().backward()
    # 128 sums, each rounded to bfloat16, would be off by several times its unit.
    assert float((many - weight.grad.double()).abs().max()) <= 2**-7 * float(weight.grad.abs().max())


def test_small_gradients_survive_with_a_scaled_loss():
    """In float16 small gradients vanish, unless the scale is there when they are rounded."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 8).half().requires_grad_()
    weight = (torch.randn(300, 8) / 50).half()
    target = torch.randint(0, 300, (64,))
    loss = row_losses(
        hidden, weight, None, target, steps=(LogitsStep("cast", torch.float32),), rows=ChunkRows(16, 0)
    ).mean()
    (loss * 2**-14 * 2**14).backward()
    wanted = hidden.grad.clone()
    hidden.grad = None
    loss = row_losses(
        hidden, weight, None, target, steps=(LogitsStep("cast", torch.float32),), rows=ChunkRows(16, 0)
    ).mean()
    (loss * 2**-20).backward()
    lost = float((hidden.grad.double() * 2**20 - wanted.double()).abs().max())
    assert lost > float(wanted.abs().max()) / 8  # without a scale they do vanish
    hidden.grad = None
    loss = row_losses(
        hidden, weight, None, target, steps=(LogitsStep("cast", torch.float32),), rows=ChunkRows(16, 0)
    ).mean()
    (loss * 2**-20 * 2**20).backward()
    assert torch.equal(hidden.grad, wanted)


def test_backward_twice():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    loss = row_losses(hidden, weight, None, torch.arange(6), rows=ChunkRows(4, 0)).sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], first)


@pytest.mark.parametrize("label", [9, -1])
def test_a_label_out_of_range_is_an_error(label):
    target = torch.tensor([0, label])
    with pytest.raises((RuntimeError, IndexError)):
        row_losses(torch.randn(2, 4), torch.randn(9, 4), None, target, rows=ChunkRows(1, 0))


def test_no_rows():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    losses = row_losses(hidden, weight, None, torch.zeros(0, dtype=torch.int64), rows=ChunkRows(4, 0))
    losses.sum().backward()
    assert losses.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros(9, 4))
