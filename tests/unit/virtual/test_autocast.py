"""Autocast: every call runs the operators, casts included, that torch's own autocast runs on CUDA.

The truth needs no GPU: fake tensors on "cuda" go through torch's own dispatcher, lists and all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu, autocast
from tests.lanes import by_day
from tests.unit.virtual.streams import Operators, on_fake_cuda

Make = Callable[..., torch.Tensor]


def classes(make: Make, *shape: int) -> torch.Tensor:
    return make(*shape).to(torch.int64)


CALLS: dict[str, Callable[[Make], Any]] = {
    # lower precision
    "linear": lambda t: F.linear(t(4, 8), t(3, 8), t(3)),
    "matmul": lambda t: t(4, 8) @ t(8, 3),
    "mm": lambda t: torch.mm(t(4, 8), t(8, 3)),
    "bmm": lambda t: torch.bmm(t(2, 4, 8), t(2, 8, 3)),
    "mv": lambda t: torch.mv(t(4, 8), t(8)),
    "addmm": lambda t: torch.addmm(t(3), t(4, 8), t(8, 3)),
    "addmv": lambda t: torch.addmv(t(4), t(4, 8), t(8)),
    "addr": lambda t: torch.addr(t(4, 8), t(4), t(8)),
    "addbmm": lambda t: torch.addbmm(t(4, 3), t(2, 4, 8), t(2, 8, 3)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 4, 3), t(2, 4, 8), t(2, 8, 3)),
    "chain_matmul": lambda t: torch.linalg.multi_dot([t(4, 8), t(8, 3), t(3, 2)]),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 8), t(8, 3)),
    "conv1d": lambda t: F.conv1d(t(2, 4, 8), t(3, 4, 3)),
    "conv2d": lambda t: F.conv2d(t(2, 4, 8, 8), t(3, 4, 3, 3), t(3)),
    "conv3d": lambda t: F.conv3d(t(2, 4, 8, 8, 8), t(3, 4, 3, 3, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(2, 4, 8, 8), t(4, 3, 3, 3)),
    "prelu": lambda t: F.prelu(t(2, 4), t(1)),
    # float32
    "exp": lambda t: t(4).exp(),
    "log": lambda t: torch.log(t(4)),
    "pow": lambda t: t(4) ** 2,
    "pow_tensor": lambda t: t(4).pow(t(4)),
    "rpow": lambda t: 2 ** t(4),
    "rsqrt": lambda t: torch.rsqrt(t(4)),
    "reciprocal": lambda t: t(4).reciprocal(),
    "softplus": lambda t: F.softplus(t(4)),
    "layer_norm": lambda t: F.layer_norm(t(4, 8), (8,), t(8), t(8)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 8), 2),
    "logsumexp": lambda t: torch.logsumexp(t(4, 8), -1),
    "mse_loss": lambda t: F.mse_loss(t(4), t(4)),
    "l1_loss": lambda t: F.l1_loss(t(4), t(4)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(4), t(4)),
    "kl_div": lambda t: F.kl_div(t(4, 8), t(4, 8), reduction="batchmean"),
    "bce_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(4), t(4)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(4, 8), t(4, 8)),
    "cdist": lambda t: torch.cdist(t(4, 8), t(3, 8)),
    "interpolate": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    # float32 results
    "softmax": lambda t: t(4, 8).softmax(-1),
    "softmax_dtype": lambda t: torch.softmax(t(4, 8), -1, dtype=torch.float32),
    "log_softmax": lambda t: F.log_softmax(t(4, 8), -1),
    "sum": lambda t: t(4, 8).sum(),
    "sum_dim": lambda t: t(4, 8).sum(-1),
    "prod": lambda t: t(4, 8).prod(),
    "cumsum": lambda t: t(4, 8).cumsum(-1),
    "norm": lambda t: torch.linalg.vector_norm(t(4, 8)),
    # widest, and such as are in no list
    "addcmul": lambda t: torch.addcmul(t(4), t(4), t(4)),
    "atan2": lambda t: torch.atan2(t(4), t(4)),
    "dot": lambda t: torch.dot(t(4), t(4)),
    "add": lambda t: t(4) + t(4),
    "relu": lambda t: t(4).relu(),
    "mean": lambda t: t(4).mean(),
    "gelu": lambda t: F.gelu(t(4)),
    "cat": lambda t: torch.cat([t(4), t(4)]),
    "cross_entropy": lambda t: F.cross_entropy(t(4, 8), t(4).to(torch.int64)),
    # other names, and in-place and `out` variants, which are in no list
    "linalg_matmul": lambda t: torch.linalg.matmul(t(4, 8), t(8, 3)),
    "arccos": lambda t: t(4).arccos(),
    "special_expm1": lambda t: torch.special.expm1(t(4)),
    "special_softmax": lambda t: torch.special.softmax(t(4, 8), -1),
    "special_log_softmax": lambda t: torch.special.log_softmax(t(4, 8), -1),
    "special_logsumexp": lambda t: torch.special.logsumexp(t(4, 8), -1),
    "mm_out": lambda t: torch.mm(t(4, 8), t(8, 3), out=t(4, 3)),
    "exp_out": lambda t: torch.exp(t(4), out=t(4)),
    "sum_out": lambda t: torch.sum(t(4, 8), -1, out=t(4)),
    "exp_": lambda t: t(4).exp_(),
    "addmm_": lambda t: t(4, 3).addmm_(t(4, 8), t(8, 3)),
    # C++ functions with listed operators inside
    "inner": lambda t: torch.inner(t(4, 8), t(3, 8)),
    "tensordot": lambda t: torch.tensordot(t(4, 8), t(8, 3), dims=1),
    "einsum_of_three": lambda t: torch.einsum("ij,jk,kl->il", t(4, 8), t(8, 3), t(3, 2)),
    "bilinear": lambda t: F.bilinear(t(4, 8), t(4, 6), t(3, 8, 6), t(3)),
    "normalize": lambda t: F.normalize(t(4, 8)),
    "linalg_norm": lambda t: torch.linalg.norm(t(4, 8)),
    "pairwise_distance": lambda t: F.pairwise_distance(t(4, 8), t(4, 8)),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(4, 8), t(4, 8), t(4, 8)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(4, 8), t(4, 8), t(4)),
    "multilabel_soft_margin_loss": lambda t: F.multilabel_soft_margin_loss(t(4, 8), t(4, 8)),
    "gelu_of_conv_same": lambda t: F.gelu(F.conv2d(t(2, 4, 8, 8), t(3, 4, 3, 3), t(3), padding="same")),
    "logsigmoid": lambda t: F.logsigmoid(t(4)),
    "grouped_attention": lambda t: F.multi_head_attention_forward(
        t(3, 2, 8), t(3, 2, 8), t(3, 2, 8), 8, 2, t(24, 8), t(24), None, None, False, 0.0, t(8, 8), t(8)
    )[0],
    "cross_entropy_weight": lambda t: F.cross_entropy(t(4, 8), classes(t, 4), weight=t(8)),
    "cross_entropy_smooth": lambda t: F.cross_entropy(t(4, 8), classes(t, 4), label_smoothing=0.1),
    "cross_entropy_smooth_sum": lambda t: F.cross_entropy(t(4, 8), classes(t, 4), reduction="sum", label_smoothing=0.1),
    "cross_entropy_smooth_none": lambda t: F.cross_entropy(
        t(4, 8), classes(t, 4), t(8), reduction="none", label_smoothing=0.1
    ),
    "cross_entropy_of_probabilities": lambda t: F.cross_entropy(t(4, 8), t(4, 8)),
    "cross_entropy_of_probabilities_weight": lambda t: F.cross_entropy(t(4, 8), t(4, 8), t(8), label_smoothing=0.1),
    "cross_entropy_of_probabilities_sum": lambda t: F.cross_entropy(t(4, 8), t(4, 8), reduction="sum"),
    "cross_entropy_of_probabilities_none": lambda t: F.cross_entropy(t(2, 8, 3), t(2, 8, 3), reduction="none"),
    "cross_entropy_of_images": lambda t: F.cross_entropy(t(2, 8, 3, 3), classes(t, 2, 3, 3)),
}


# The dtypes of a call's tensors, in turn.
GIVEN = {
    "float32": [torch.float32],
    "float16": [torch.float16],
    "bfloat16": [torch.bfloat16],
    "float64": [torch.float64],
    "float32 first": [torch.float32, torch.bfloat16],
    "bfloat16 first": [torch.bfloat16, torch.float32],
}


@pytest.mark.parametrize("lower", by_day([torch.float16, torch.bfloat16], torch.float16), ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_operators_are_those_of_cuda(name: str, lower: torch.dtype) -> None:
    """Names, dtypes and shapes, casts included, in order; or the same kind of error."""

    def program(given: str) -> type | None:
        dtypes = itertools.cycle(GIVEN[given])
        try:
            CALLS[name](lambda *shape: torch.zeros(shape, dtype=next(dtypes), device="cuda"))
        except RuntimeError as error:
            return type(error)
        return None

    with VirtualGpu(find_gpu("a100-80gb")):
        actual = {}
        for given in GIVEN:
            operators = Operators()
            with torch.autocast("cuda", dtype=lower), operators:
                error = program(given)
            actual[given] = operators.ops if error is None else error
    for given in GIVEN:
        errors: list[type | None] = []
        ops = on_fake_cuda(lambda: errors.append(program(given)), lower)  # noqa: B023
        if errors[0] is getattr(torch, "AcceleratorError", None) and not torch.cuda.is_available():
            pytest.skip("fake tensors of this build of torch ask for a GPU")
        assert actual[given] == (errors[0] or ops), given


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"),
    reason="autocast of this torch leaves RMS norm",
)
def test_rms_norm_is_one_kernel_in_float32() -> None:
    """For fake tensors a CPU build takes it to pieces, which a GPU does not."""
    operators = Operators()
    with VirtualGpu(find_gpu("a100-80gb")), torch.autocast("cuda", dtype=torch.bfloat16):
        data = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda")
        with operators:
            assert F.rms_norm(data, (8,)).dtype is torch.float32
    assert [op.name for op in operators.ops] == ["_to_copy", "_fused_rms_norm"]


def test_every_operator_that_torch_autocasts_is_in_a_list() -> None:
    assert autocast.find_autocast_operators() - set(autocast.POLICIES) == set()


def test_weights_are_cast_once_a_region() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        layer = nn.Linear(64, 32, bias=False, device="cuda")
        x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
        storages = gpu.trace.storages
        for _ in range(2):
            before = len(storages)
            with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
                layer(x)
                layer(x)
            assert [s.num_bytes for s in storages[before:]] == [64 * 32 * 2, 4 * 32 * 2, 4 * 32 * 2]
        live = gpu.recorder.storages.live_bytes
    assert live == 64 * 32 * 4 + 4 * 64 * 2


def test_regions_nest_and_switch_off() -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        x = torch.ones(4, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype is torch.float32
            with torch.autocast("cuda", dtype=torch.float16):
                assert (x @ x).dtype is torch.float16
            assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float32


def test_cross_entropy_casts_after_the_log_softmax() -> None:
    """As CUDA has it: log_softmax in bfloat16, then a float32 copy for nll_loss."""
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        logits = torch.zeros(8, 100, device="cuda", dtype=torch.bfloat16)
        target = torch.zeros(8, device="cuda", dtype=torch.int64)
        before = len(gpu.trace.storages)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            F.cross_entropy(logits, target)
        new = [(gpu.trace.op(s), s.num_bytes, s.dtype) for s in gpu.trace.storages[before:]]
    assert new[:2] == [("aten._log_softmax", 1600, "bfloat16"), ("aten._to_copy", 3200, "float32")]


def test_grad_scaler_steps() -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        layer = nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = layer(torch.ones(4, 8, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert len(optimizer.state) == 2
        assert scaler.get_scale() == 65536


@pytest.mark.parametrize("inside", [False, True])
def test_what_the_engine_calls_inside_the_region_is_cast_too(inside):
    """Seen in a recording of a real GPU: a sum of half gradients is made in float32 there, and then cast back."""
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        data = torch.randn(16, 32, device="cuda", requires_grad=True)
        shift = torch.randn(16, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (torch.mm(data, data.t()) - shift).mean()
            begin = len(gpu.trace.storages)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        made = [(s.dtype, s.num_bytes) for s in gpu.trace.storages[begin:] if gpu.trace.op(s) == "aten.sum"]
        assert made == [("float32", 64) if inside else ("bfloat16", 32)]
        assert shift.grad.dtype is torch.bfloat16
        assert data.grad.dtype is torch.float32
