"""Values at any size: what is computed when it is read, what is never, and that nothing jumps at a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.values import budget
from memprof.virtual.values.evaluation import Evaluator
from tests.lanes import by_day
from tests.unit.virtual.test_values import setitem, written

GPU = find_gpu("a100-80gb")


SIDE = 1100  # Its square is more than the host keeps real, and than is computed at no charge.


def planted(device: str) -> torch.Tensor:
    mask = torch.zeros(SIDE, SIDE, device=device)
    mask.view(-1)[torch.randperm(SIDE * SIDE, device=device)[:1000]] = 1
    return mask


DETERMINED: dict[str, tuple[Callable[[str], torch.Tensor], int]] = {
    "where of a mask": (lambda d: torch.where(planted(d) == 1.0)[0], 1000),
    "triangle": (lambda d: torch.tril(torch.ones(SIDE, SIDE, device=d)).nonzero(), SIDE * (SIDE + 1) // 2),
    "window": (
        lambda d: ((torch.arange(SIDE, device=d)[:, None] - torch.arange(SIDE, device=d)).abs() < 2).nonzero(),
        3 * SIDE - 2,
    ),
    "column": (lambda d: setitem(torch.zeros(SIDE, SIDE, device=d), (slice(None), 3), 1.0).nonzero(), SIDE),
    "full": (lambda d: (torch.full((SIDE, SIDE), -1.0, device=d) < 0).nonzero(), SIDE * SIDE),
    "bytes": (lambda d: torch.zeros(SIDE, SIDE, dtype=torch.uint8, device=d).nonzero(), 0),
    "no row": (lambda d: (torch.zeros(SIDE, SIDE, device=d).add_(1).mul_(2) != 2).nonzero(), 0),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", DETERMINED)
def test_masks_are_computed_whatever_their_size(gpu: VirtualGpu, name: str, device: str) -> None:
    make, number = DETERMINED[name]
    assert len(make(device)) == number


def filled(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    made = torch.zeros(size, dtype=dtype, device=device)
    made[torch.arange(100, device=device)] = 1
    return made


def square(size: int) -> int:
    """The side of a square with about so many elements."""
    return round(size**0.5)


SIZES: dict[str, Callable[[int, str], float]] = {
    "floats": lambda n, d: len((filled(n, torch.float32, d) > 0.5).nonzero()) / 100,
    "bytes": lambda n, d: len(filled(n, torch.uint8, d).nonzero()) / 100,
    "bytes of the host": lambda n, d: len((filled(n, torch.uint8, "cpu").to(d) == 1).nonzero()) / 100,
    "integers": lambda n, d: len(filled(n, torch.int64, d).nonzero()) / 100,
    "masks": lambda n, d: len(filled(n, torch.bool, d).nonzero()) / 100,
    "positions": lambda n, d: len((torch.arange(n, device=d) / n < 0.5).nonzero()) * 2 / n,
    "product": lambda n, d: 1 + len((torch.ones(n // 4, 4, device=d) @ torch.eye(4, device=d) > 2).nonzero()),
    "softmax": lambda n, d: 1 + len((torch.zeros(n, device=d).softmax(0) > 0.5).nonzero()),
    "mean": lambda n, d: 1 + int((torch.arange(n, device=d).float().mean() > n).sum()),
    "pooling": lambda n, d: int(
        (torch.nn.functional.max_pool2d(filled(square(n) ** 2, torch.float32, d).view(1, square(n), -1), 2) > 0).sum()
    ),
    "routing": lambda n, d: (
        len(torch.nn.functional.one_hot(torch.randn(n // 32, 16, device="cuda").topk(2)[1].to(d), 16)[..., 3].nonzero())
        * 256
        / n
    ),
    "choices": lambda n, d: int((torch.randn(n // 2, 16, device="cuda").topk(2)[1].to(d) == 3).sum()) * 8 / n,
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("limit", by_day([1 << 12, 1 << 18, 1 << 20, 1 << 21], 1 << 18, 1 << 21))
@pytest.mark.parametrize("name", SIZES)
def test_nothing_jumps_at_a_limit(monkeypatch: Any, gpu: VirtualGpu, name: str, limit: int, device: str) -> None:
    """From a few elements less to a few more than what is small, moderate, or real on the host."""
    monkeypatch.setattr(budget, "MODERATE_ELEMENTS", 1 << 21)
    below, at, above = (SIZES[name](limit + more, device) for more in (-64, 0, 64))
    assert at == pytest.approx(below, rel=0.2) and above == pytest.approx(at, rel=0.2)


def test_what_is_put_off_takes_no_room(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SHADOW_BYTES", 1 << 25)
    positions = [torch.arange(1 << 20, device="cuda").float() / 3 for _ in range(9)]
    assert len((positions[8] < 1).nonzero()) == 3 and len(planted("cuda").nonzero()) == 1000


@pytest.mark.parametrize("num_elements", [1 << 13, 1 << 25])
def test_unknown_numbers_are_finite_at_any_size(gpu: VirtualGpu, num_elements: int) -> None:
    data = torch.randn(num_elements, device="cuda")
    assert data.isnan().sum().item() == 0 and not data.isinf().any()
    assert data.isfinite().all() and (~data.isfinite()).sum() == 0


def tokens_of_each_expert(num_tokens: int) -> list[int]:
    scores = torch.randn(num_tokens, 16, device="cuda").softmax(-1)
    mask = torch.nn.functional.one_hot(scores.topk(2, dim=-1)[1], 16)
    assert mask.sum((0, 1)).tolist() == [num_tokens // 8] * 16
    return [len(torch.where(mask.permute(2, 1, 0)[expert])[0]) for expert in range(16)]


@pytest.mark.parametrize("limit", [None, 1 << 17, 0])
def test_balance_on_both_sides_of_the_limits(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """32 choices a token: the mask is beyond the limit for the second number of tokens, the choices are not."""
    if limit is not None:
        monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", limit)
        monkeypatch.setattr(budget, "SMALL_INTEGER_ELEMENTS", 1 << 14)
    with VirtualGpu(GPU, workspaces=False):
        for num_tokens in (256, 1024, 8192):
            assert tokens_of_each_expert(num_tokens) == [num_tokens // 8] * 16


def test_the_work_of_a_run_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_VISITED_ELEMENTS", 5 * SIDE * SIDE)
    with VirtualGpu(GPU, workspaces=False) as gpu:
        counts = [int((planted("cuda") == 1.0).sum()) for _ in range(4)]
        assert counts[0] == 1000 and counts[-1] == SIDE * SIDE
        assert any("too many large ones" in sentence for sentence in gpu.trace.assumptions)


def test_what_an_optimizer_writes_is_not_known_any_more(gpu: VirtualGpu) -> None:
    moments = [torch.zeros(8, device="cuda") for _ in range(2)]
    torch._foreach_add_(moments, [torch.randn(8, device="cuda") for _ in range(2)])
    assert moments[0][0].item() == 1.0


def test_random_numbers_like_known_ones_are_unknown(gpu: VirtualGpu) -> None:
    before = torch.random.get_rng_state()
    assert torch.rand_like(torch.zeros(8, device="cuda")).tolist() == [1.0] * 8
    assert torch.nn.functional.dropout(torch.ones(8, device="cuda"))[0].item() == 1.0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64, torch.float32])
def test_a_program_fills_a_host_tensor_itself(gpu: VirtualGpu, tmp_path, pinned: bool, dtype: torch.dtype) -> None:
    count = (1 << 21) // dtype.itemsize
    numbers = numpy.arange(count) % 1000
    (tmp_path / "shard").write_bytes(numbers.astype(str(dtype).removeprefix("torch.")).tobytes())
    tokens = torch.empty(count, dtype=dtype, pin_memory=pinned)
    with open(tmp_path / "shard", "rb", buffering=0) as file:
        assert file.readinto(tokens.numpy()) == 1 << 21
    assert tokens[990:1010].tolist() == [*range(990, 1000), *range(10)]
    assert tokens[:2000].to(device="cuda", dtype=torch.int32)[1500].item() == 500


def test_small_and_large_host_tensors_keep_their_values_together(gpu: VirtualGpu) -> None:
    large, small = torch.arange(1 << 18).view(-1, 2) * 1, torch.tensor([0, 1])
    row = torch.zeros(1 << 17, 2, dtype=torch.int64)
    assert int((row + small).sum()) == 1 << 17
    assert int((large + small)[0, 1]) == 2


def positions(device: str) -> torch.Tensor:
    return torch.arange(9000, device=device).float()


def changed_after_use(device: str, change: Callable[[torch.Tensor], object]) -> Any:
    numbers = torch.arange(9000, device=device)
    half = numbers.float() * 0.5
    change(numbers)
    return half > 100, numbers


def chained(device: str, length: int) -> torch.Tensor:
    result = positions(device)
    for _ in range(length):
        result = result + 1
    return result.sum() == sum(range(length, length + 9000))


def changed_host(device: str) -> torch.Tensor:
    factor = torch.tensor(2.0)
    doubled = positions(device) * factor
    factor.fill_(3.0)
    return doubled[:5]


LATE: dict[str, Callable[[str], Any]] = {
    "of a schedule": lambda d: (positions(d) / 9000).cos() < 0.5,
    "of a table": lambda d: torch.cat([positions(d), positions(d).sin()]).view(2, -1)[1, 10:20],
    "transposed": lambda d: (positions(d).view(90, 100).t() + 1)[3, :5],
    "in place": lambda d: written(positions(d) * 2, lambda numbers: numbers.add_(1))[:4],
    "in place, through a view": lambda d: written(positions(d) * 2, lambda numbers: numbers[2:].mul_(3))[:4],
    "a host tensor that changes": changed_host,
    "an input that is added to": lambda d: changed_after_use(d, lambda numbers: numbers.add_(1000)),
    "an input that is filled": lambda d: changed_after_use(d, lambda numbers: numbers.zero_()),
    "a long chain": lambda d: chained(d, 3000),
}


@pytest.mark.parametrize("name", LATE)
def test_large_floats_are_computed_when_they_are_read(gpu: VirtualGpu, name: str) -> None:
    ours, real = LATE[name]("cuda"), LATE[name]("cpu")
    torch.testing.assert_close(torch.utils._pytree.tree_map(torch.Tensor.cpu, ours), real)


def test_what_nothing_reads_is_not_computed(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "_charge_budget", lambda self, work: pytest.fail("computed"))
    table = torch.outer(torch.arange(1 << 12, device="cuda").float(), torch.ones(1 << 8, device="cuda")).cos()
    (torch.randn(1 << 12, 1 << 8, device="cuda") * table).sum()


def test_what_is_too_much_when_it_is_read_is_unknown(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    late = positions("cuda") * 2
    monkeypatch.setattr(budget, "MAX_VISITED_ELEMENTS", 0)
    assert late[4].item() == 1.0


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((5,), 0), ((2, 3), -1), ((2, 3), 0), ((3, 2, 4), 1)])
def test_what_an_unknown_mask_sums_up_to(gpu: VirtualGpu, shape: tuple[int, ...], dim: int) -> None:
    mask = torch.randn(shape, device="cuda") > 0
    assert torch.equal(mask.cumsum(dim).cpu(), torch.ones(shape, dtype=torch.bool).cumsum(dim))


def test_sums_of_a_mask_beyond_all_memory_are_not_made(gpu: VirtualGpu) -> None:
    """As a batch of millions makes them, where transformers looks for packed sequences."""
    mask = torch.randn(1 << 30, 1 << 12, device="cuda") > 0
    sums = mask.cumsum(-1)
    assert sums.shape == mask.shape and bool((sums[:, -1] == 0).all())
    assert int(mask.sum()) == 1 << 42


def test_what_is_moved_is_not_computed_for_it(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As activations are, to the host and back."""
    source = (torch.arange(1 << 20, device="cuda").float() / 4).cos()
    whole = source.clone()
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_charge_budget", lambda self, work: pytest.fail("computed"))
        host = torch.empty(1 << 20, dtype=torch.bfloat16, pin_memory=True)
        host.copy_(source)
        back = host.to("cuda", non_blocking=True)
    source.zero_()
    assert back[7].item() == torch.tensor(7 / 4).cos().to(torch.bfloat16).item()
    host.zero_()
    assert (
        (back != 0).all() and (host == 0).all() and torch.equal(whole[:3], (torch.arange(3, device="cuda") / 4).cos())
    )
    part = torch.zeros(1 << 21, device="cuda")
    part[: 1 << 20].copy_(whole)
    assert part[7].item() == whole[7].item() and part[-1].item() == 0


def test_the_same_mask_is_made_once_and_is_each_ones_own(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    call = Evaluator._call
    monkeypatch.setattr(Evaluator, "_call", lambda self, func, *rest: (made.append(func), call(self, func, *rest))[1])

    def mask(value: int = 1, diagonal: int = 0) -> torch.Tensor:
        return torch.full((SIDE, SIDE), value, dtype=torch.bool, device="cuda").tril(diagonal)

    half = SIDE * (SIDE + 1) // 2
    first, second = mask(), mask()
    assert made.count(torch.ops.aten.tril.default) == 1
    first[:, 0] = False
    third = mask()
    assert [len(one.nonzero()) for one in (first, second, third)] == [half - SIDE, half, half]
    third[0] = True
    assert len(mask().nonzero()) == half and len(mask(diagonal=1).nonzero()) == half + SIDE - 1
    assert len(torch.ones(SIDE, SIDE, dtype=torch.bool, device="cuda").triu(1).nonzero()) == half - SIDE
    assert len(mask(value=0).nonzero()) == 0


HUGE = 1 << 17  # Its square has indices of 256 GiB: no host is requested them.


def huge_mask() -> torch.Tensor:
    return torch.randn(HUGE, HUGE, device="cuda") > 0


BEYOND_THE_HOST: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "nonzero of ones": (lambda: torch.ones(HUGE, HUGE, device="cuda").nonzero(), (HUGE**2, 2)),
    "nonzero of zeros": (lambda: torch.zeros(HUGE, HUGE, device="cuda").nonzero(), (0, 2)),
    "nonzero of what is not known": (lambda: huge_mask().nonzero(), (HUGE**2, 2)),
    "where": (lambda: torch.where(huge_mask())[1], (HUGE**2,)),
    "index": (lambda: torch.zeros(HUGE, HUGE, device="cuda")[huge_mask()], (HUGE**2,)),
    "masked_select": (lambda: torch.zeros(HUGE, HUGE, device="cuda").masked_select(huge_mask()), (HUGE**2,)),
    "to_sparse": (lambda: torch.randn(HUGE, HUGE, device="cuda").to_sparse()._indices(), (2, HUGE**2)),
    "combinations": (lambda: torch.combinations(torch.arange(5000, device="cuda"), 3), (5000**3, 3)),
    "unique": (lambda: torch.randn(HUGE**2, device="cuda").unique(return_inverse=True)[1], (HUGE**2,)),
    "counts of unique": (lambda: torch.randn(HUGE, HUGE, device="cuda").unique(return_counts=True)[1], (HUGE**2,)),
    "unique of zeros": (lambda: torch.zeros(HUGE**2, device="cuda").unique(), (1,)),
    "rows that are unique": (lambda: torch.randn(1 << 30, 4, device="cuda").unique(dim=0), (1 << 30, 4)),
    "inverse of rows": (lambda: torch.randn(1 << 30, 4, device="cuda").unique(True, True, dim=0)[1], (1 << 30,)),
    "unique_consecutive": (lambda: torch.randn(HUGE**2, device="cuda").unique_consecutive(), (HUGE**2,)),
    "runs of columns": (lambda: torch.randn(4, 1 << 30, device="cuda").unique_consecutive(dim=1), (4, 1 << 30)),
    "bincount": (lambda: torch.bincount(torch.tensor([HUGE**2], device="cuda")), (HUGE**2 + 1,)),
    "minlength": (lambda: torch.bincount(torch.tensor([1], device="cuda"), minlength=HUGE**2), (HUGE**2,)),
    "repeat_interleave": (
        lambda: torch.arange(9, device="cuda").repeat_interleave(torch.full((9,), 1 << 30, device="cuda")),
        (9 << 30,),
    ),
    "cartesian_prod": (lambda: torch.cartesian_prod(*[torch.arange(3000, device="cuda")] * 3), (3000**3, 3)),
}


@pytest.mark.parametrize("name", BEYOND_THE_HOST)
def test_what_no_host_can_hold_is_counted(gpu: VirtualGpu, name: str) -> None:
    make, shape = BEYOND_THE_HOST[name]
    assert make().shape == shape


def test_indices_are_computed_up_to_a_bound(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 1 << 16)
    at, beyond = (torch.ones(number, dtype=torch.bool, device="cuda").nonzero() for number in (1 << 13, (1 << 13) + 1))
    assert int(at[-1]) == (1 << 13) - 1
    assert len(beyond) == (1 << 13) + 1
    assert int(beyond[-1]) == 1  # an unknown integer
    assert any("Indices of a selection beyond 1 GiB" in said for said in gpu.trace.assumptions)


def test_what_values_decide_is_computed_up_to_a_bound(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 1 << 16)
    at, beyond = (torch.bincount(torch.tensor([size - 1], device="cuda")) for size in (1 << 13, (1 << 13) + 1))
    assert int(at[0]) == 0
    assert len(beyond) == (1 << 13) + 1 and int(beyond[0]) == 1
    assert any("bincount or repeat_interleave beyond 1 GiB" in said for said in gpu.trace.assumptions)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_number_put_at_a_mask_needs_no_indices(gpu: VirtualGpu, in_place: bool) -> None:
    """canDispatchToMaskedFill, of index_put as of index_put_; autograd's formula of the second calls the first."""
    data, mask = torch.zeros(1024, device="cuda"), torch.arange(1024, device="cuda") < 9
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    put = data.index_put_ if in_place else data.index_put
    made = put((mask,), torch.ones(()))
    assert torch.cuda.max_memory_allocated() - before == (0 if in_place else 4096)
    assert len(made.nonzero()) == 9


@pytest.mark.parametrize("count", [1 << 10, 1 << 28])
def test_numbers_that_are_all_alike_are_computed_at_any_size(count: int) -> None:
    with VirtualGpu(find_gpu("a100-80gb")):
        ones = torch.ones(count, dtype=torch.long, device="cuda")
        assert int((ones + 41)[0]) == 42 and int(ones.mul(7).sum()) == 7 * count
