"""The NPT component: all modes give the same numbers, and none keeps what it should not."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from memprof.device.catalog import find_gpu  # noqa: E402
from memprof.spec import NPT_COMBINES, NPT_INITS, NPT_MODES  # noqa: E402
from memprof.virtual.gpu import VirtualGpu  # noqa: E402
from memprof.workload.npt import LAST_GAIN, ModulatedDelta, NptComponent, RankOneDeltas, fill_fast  # noqa: E402
from tests.lanes import examples  # noqa: E402

sizes = st.integers(1, 7)


def component(form: str, d_model: int, d_ffn: int, rank: int, num_ranks: int, **options: object) -> NptComponent:
    if form == "modulated":
        made: NptComponent = ModulatedDelta(d_model, d_ffn, rank, dtype=torch.float64, **options)
    else:
        made = RankOneDeltas(d_model, d_ffn, rank, num_ranks, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def reference(made: NptComponent, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """h ΔW by the definition, one token after another, without einsum."""
    rows = []
    for h, a in zip(hidden.flatten(0, 1), attention.flatten(0, 1), strict=True):
        if isinstance(made, ModulatedDelta):
            delta = made.A @ torch.diag(a @ made.A) @ made.B
        else:
            delta = torch.zeros(made.d_model, made.d_ffn, dtype=h.dtype)
            for i in range(made.down.shape[1]):
                code = a @ made.down[:, i]
                delta = delta + torch.outer(made.up_model[:, i] @ code, code @ made.up_ffn[i])
        rows.append(h @ delta)
    return torch.stack(rows).unflatten(0, hidden.shape[:2])


def result_and_gradients(function, made, hidden, attention, weights):
    made.zero_grad()
    hidden, attention = hidden.clone().requires_grad_(), attention.clone().requires_grad_()
    result = function(hidden, attention)
    (result * weights).sum().backward()
    return [result.detach(), hidden.grad, attention.grad, *(p.grad.clone() for p in made.parameters())]


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["modulated", "rank-one"])
@settings(max_examples=examples(200), deadline=None)
@given(
    batch=sizes,
    tokens=sizes,
    d_model=sizes,
    d_ffn=sizes,
    rank=sizes,
    num_ranks=sizes,
    chunk=sizes,
    recompute=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_all_modes_agree(form, batch, tokens, d_model, d_ffn, rank, num_ranks, chunk, recompute, seed):
    """Results and every gradient, in float64, against the definition."""
    torch.manual_seed(seed)
    made = component(form, d_model, d_ffn, min(rank, d_model), num_ranks, chunk=chunk, recompute=recompute)
    hidden, attention = (torch.randn(batch, tokens, d_model, dtype=torch.float64) for _ in range(2))
    weights = torch.randn(batch, tokens, d_ffn, dtype=torch.float64)
    wanted = result_and_gradients(lambda h, a: reference(made, h, a), made, hidden, attention, weights)
    for made.mode, combine in itertools.product(NPT_MODES, NPT_COMBINES if form == "rank-one" else [""]):
        made.combine = combine
        found = result_and_gradients(made, made, hidden, attention, weights)
        for one, other in zip(found, wanted, strict=True):
            # Sums of at most 7^4 products of numbers of size 1, in another order.
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["modulated", "rank-one"])
@settings(max_examples=examples(60), deadline=None)
@given(
    batch=sizes,
    tokens=sizes,
    d_model=sizes,
    d_ffn=sizes,
    rank=sizes,
    num_ranks=sizes,
    chunk=sizes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_every_mode_is_as_near_to_float64_as_its_precision(
    form, batch, tokens, d_model, d_ffn, rank, num_ranks, chunk, dtype, seed
):
    """In the dtypes that are used, against dense in float64 of the same numbers."""
    torch.manual_seed(seed)
    made = component(form, d_model, d_ffn, min(rank, d_model), num_ranks, chunk=chunk)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter / 4).to(dtype))
    hidden, attention = (torch.randn(batch, tokens, d_model).to(dtype).double() for _ in range(2))
    weights = torch.randn(batch, tokens, d_ffn).to(dtype).double()
    made.mode, made.combine = "dense", "batched"
    wanted = result_and_gradients(made, made, hidden, attention, weights)
    # The same sums over absolute values: no intermediate is larger, and each rounding is a share of one.
    largest = copy.deepcopy(made)
    with torch.no_grad():
        for parameter in largest.parameters():
            parameter.abs_()
    bounds = result_and_gradients(largest, largest, hidden.abs(), attention.abs(), weights.abs())
    small = copy.deepcopy(made).to(dtype)
    for small.mode, small.combine in itertools.product(NPT_MODES, NPT_COMBINES if form == "rank-one" else [""]):
        found = result_and_gradients(small, small, hidden.to(dtype), attention.to(dtype), weights.to(dtype))
        # Products of five numbers, summed over at most four indices of 7: each is rounded about a dozen times, and sums
        # of n numbers n times more at the worst.
        roundings = 12 + batch * tokens + d_model + d_ffn + rank + num_ranks
        floor = 2**-14 if dtype == torch.float16 else 1e-30  # below it float16 has fewer digits
        for one, exact, bound in zip(found, wanted, bounds, strict=True):
            apart = (one.double() - exact).abs()
            assert bool((apart <= roundings * torch.finfo(dtype).eps * bound + floor).all())


@pytest.mark.parametrize("mode", NPT_MODES)
@pytest.mark.parametrize("form", ["modulated", "rank-one"])
def test_tuples_and_flat_hidden_states(form, mode):
    made = component(form, 6, 9, 2, 3, mode=mode, chunk=2)
    hidden, attention = (torch.randn(2, 5, 6, dtype=torch.float64) for _ in range(2))
    wanted = made(hidden, attention)
    assert wanted.shape == (2, 5, 9)
    assert torch.equal(made((hidden, None), (attention,)), wanted)
    assert torch.equal(made(hidden.flatten(0, 1), attention), wanted.flatten(0, 1))
    assert made(hidden[:, :0], attention[:, :0]).shape == (2, 0, 9)
    with pytest.raises(ValueError, match="differ"):
        made(hidden[:, :3], attention)


@pytest.mark.parametrize("init", NPT_INITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_initial_matrices_have_orthonormal_columns(init, dtype):
    made = RankOneDeltas(64, 96, 4, 5, init=init, dtype=dtype)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for weight in (made.down, made.up_model, made.up_ffn.permute(2, 0, 1) / LAST_GAIN):
        for matrix in weight.detach().double().unbind(1):
            gram = matrix.T @ matrix
            torch.testing.assert_close(gram, torch.eye(4, dtype=torch.float64), rtol=0, atol=tolerance)


def test_fast_components_are_as_different_as_independent_ones():
    torch.manual_seed(0)
    rows, components, rank = 1024, 12, 16
    weight = torch.empty(rows, components, rank, dtype=torch.float64)
    fill_fast(weight, gain=1.0)
    overlaps = [(one.T @ other).square().sum().item() for one, other in itertools.combinations(weight.unbind(1), 2)]
    # |Q^T Q'|^2 is rank^2 / rows in expectation for independent random subspaces, and rank for equal ones.
    assert sum(overlaps) / len(overlaps) == pytest.approx(rank**2 / rows, rel=0.2)
    assert max(overlaps) < 2 * rank**2 / rows
    assert torch.linalg.matrix_rank(weight.flatten(1)) == components * rank


# -- memory ---------------------------------------------------------------------------------------------------------


def peak_bytes(train: bool, **options: object) -> int:
    """Most bytes of the component's own tensors, over forward and backward, of 2 x 64 tokens."""
    with VirtualGpu(find_gpu("h100-80gb"), tensors_only=True) as gpu:
        made = ModulatedDelta(512, 1024, 4, **options).to("cuda")
        hidden, attention = (torch.randn(2, 64, 512, device="cuda", requires_grad=train) for _ in range(2))
        before = gpu.recorder.storages.live_bytes
        result = made(hidden, attention)
        if train:
            result.sum().backward()
        peak = max(gpu_peak(gpu), before)
    return peak - before


def gpu_peak(gpu: VirtualGpu) -> int:
    from memprof.ledger.ledger import build_ledger

    return build_ledger(gpu.trace).peak_bytes


DELTA = 512 * 1024 * 4


@pytest.mark.parametrize("train", [False, True])
def test_memory_of_the_modes(train):
    dense = peak_bytes(train, mode="dense")
    chunked = peak_bytes(train, mode="chunked", chunk=8)
    token = peak_bytes(train, mode="per-token")
    low_rank = peak_bytes(train, mode="low-rank")
    copies = 2 if train else 1  # the delta, and its gradient
    assert copies * 128 * DELTA <= dense < 1.3 * copies * 128 * DELTA
    assert copies * 16 * DELTA <= chunked < 1.6 * copies * 16 * DELTA
    assert copies * 2 * DELTA <= token < 1.5 * copies * 2 * DELTA + 4 * 2**20
    assert low_rank < 3 * 2**20


def test_parts_without_recomputation_save_nothing_in_training():
    """What the report's per-token loop does: autograd keeps the delta of every token."""
    assert peak_bytes(True, mode="per-token", recompute=False) >= 128 * DELTA
    assert peak_bytes(False, mode="per-token", recompute=False) < 8 * DELTA


def test_a_layer_recomputed_as_a_whole_gives_the_same_gradients():
    made = component("modulated", 6, 9, 2, 0, mode="chunked", chunk=2)
    hidden, attention = (torch.randn(2, 5, 6, dtype=torch.float64) for _ in range(2))
    weights = torch.randn(2, 5, 9, dtype=torch.float64)
    plain = result_and_gradients(made, made, hidden, attention, weights)
    nested = result_and_gradients(
        lambda h, a: checkpoint(made, h, a, use_reentrant=False), made, hidden, attention, weights
    )
    for one, other in zip(plain, nested, strict=True):
        torch.testing.assert_close(one, other)
