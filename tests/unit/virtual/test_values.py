"""Values on the virtual GPU: integers and booleans are right, floats follow a policy."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from tests.lanes import by_day, examples

GPU = find_gpu("a100-80gb")


def mod3(device: str) -> torch.Tensor:
    return torch.arange(6, device=device) % 3


def written(tensor: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    write(tensor)
    return tensor


def setitem(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    tensor[key] = value
    return tensor


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "arange": lambda d: torch.arange(2, 11, 3, device=d),
    "cumsum": lambda d: torch.arange(5, device=d).cumsum(0),
    "arithmetic": lambda d: (torch.arange(5, device=d) * 3 - 4) // 2,
    "comparison": lambda d: torch.arange(5, device=d) >= 2,
    "logic": lambda d: (mod3(d) == 1) | ~(mod3(d) > 1),
    "where": lambda d: torch.where(mod3(d) == 1, torch.arange(6, device=d), -1),
    "masked_fill": lambda d: torch.arange(6, device=d).masked_fill(mod3(d) == 0, 9),
    "one_hot": lambda d: torch.nn.functional.one_hot(mod3(d), 4),
    "one_hot of unknown classes": lambda d: torch.nn.functional.one_hot(mod3(d)),
    "nonzero": lambda d: (mod3(d) == 0).nonzero(),
    "nonzero as tuple": lambda d: mod3(d).nonzero(as_tuple=True)[0],
    "where with one argument": lambda d: torch.where(mod3(d) == 2)[0],
    "argwhere": lambda d: torch.argwhere(mod3(d).view(2, 3) == 2),
    "unique": lambda d: mod3(d).unique(),
    "unique with counts": lambda d: torch.unique(mod3(d), return_inverse=True, return_counts=True),
    "unique_consecutive": lambda d: mod3(d).sort()[0].unique_consecutive(return_counts=True)[1],
    "bincount": lambda d: mod3(d).bincount(minlength=5),
    "sort": lambda d: mod3(d).sort(descending=True)[0],
    "argsort": lambda d: torch.arange(6, device=d).flip(0).argsort(),
    "topk": lambda d: torch.arange(6, device=d).topk(2)[1],
    "max": lambda d: torch.arange(6, device=d).view(2, 3).max(1),
    "argmax": lambda d: torch.arange(6, device=d).view(2, 3).argmax(),
    "sum, any, all": lambda d: [mod3(d).sum(), (mod3(d) > 1).any(), (mod3(d) > 1).all()],
    "gather": lambda d: torch.arange(10, 16, device=d).gather(0, mod3(d)),
    "index": lambda d: torch.arange(10, 16, device=d)[mod3(d)],
    "index_select": lambda d: torch.arange(6, device=d).view(3, 2).index_select(0, mod3(d)),
    "slices and steps": lambda d: torch.arange(24, device=d).view(2, 3, 4)[:, 1:, ::2],
    "transpose": lambda d: torch.arange(6, device=d).view(2, 3).t().contiguous(),
    "expand": lambda d: torch.arange(3, device=d).expand(2, 3) + 1,
    "cat, stack": lambda d: torch.cat([torch.stack([mod3(d), mod3(d)]), mod3(d)[None]]),
    "split": lambda d: torch.arange(6, device=d).split([1, 5])[1],
    "repeat_interleave": lambda d: torch.arange(3, device=d).repeat_interleave(torch.arange(3, device=d)),
    "tril": lambda d: torch.ones(3, 3, dtype=torch.bool, device=d).tril(),
    "searchsorted": lambda d: torch.searchsorted(torch.arange(0, 8, 2, device=d), torch.arange(4, device=d)),
    "diff": lambda d: torch.diff(mod3(d), prepend=mod3(d)[:1] - 1),
    "pad": lambda d: torch.nn.functional.pad(mod3(d), (1, 2), value=7),
    "casts": lambda d: mod3(d).to(torch.int32).bool().to(torch.uint8),
    "small schedules in float": lambda d: (torch.arange(4, device=d).float() / 8).cumsum(0),
    "fill_": lambda d: written(mod3(d), lambda t: t.fill_(4)),
    "zero_": lambda d: written(mod3(d), lambda t: t[2:].zero_()),
    "add_ through a view": lambda d: written(torch.arange(6, device=d), lambda t: t.view(2, 3)[:, 1].add_(10)),
    "augmented assignment": lambda d: written(mod3(d), lambda t: t.add_(t)),
    "masked_fill_": lambda d: written(torch.arange(6, device=d), lambda t: t.masked_fill_(mod3(d) == 1, 0)),
    "copy_": lambda d: written(mod3(d), lambda t: t.copy_(torch.arange(6, device=d))),
    "copy_ from the host": lambda d: written(mod3(d), lambda t: t.copy_(torch.arange(6))),
    "copy_ to the host": lambda d: written(torch.zeros(6, dtype=torch.int64), lambda t: t.copy_(mod3(d))),
    "assignment to an element": lambda d: setitem(mod3(d), 2, 9),
    "assignment to a slice": lambda d: setitem(mod3(d), slice(1, 4), torch.arange(3, device=d)),
    "assignment to a row": lambda d: setitem(mod3(d).view(2, 3), 0, 7),
    "assignment at indices": lambda d: setitem(mod3(d), torch.arange(2, device=d), 9),
    "scatter_": lambda d: written(mod3(d), lambda t: t.scatter_(0, torch.arange(2, device=d), 8)),
    "scatter_add_": lambda d: written(mod3(d), lambda t: t.scatter_add_(0, mod3(d), mod3(d))),
    "index_add_": lambda d: written(mod3(d), lambda t: t.index_add_(0, torch.arange(2, device=d), mod3(d)[:2])),
    "a view sees a later write": lambda d: (lambda t, v: (t.add_(1), v)[1])(*(lambda t: (t, t[1:3]))(mod3(d))),
    "a clone does not": lambda d: (lambda t, c: (t.add_(1), c)[1])(*(lambda t: (t, t.clone()))(mod3(d))),
    "item": lambda d: mod3(d)[4].item(),
    "conversions": lambda d: [
        int(mod3(d)[1]),
        bool(mod3(d)[0]),
        float(mod3(d)[2]),
        len(mod3(d)),
        [int(x) for x in mod3(d)],
    ],
    "equal": lambda d: torch.equal(mod3(d), mod3(d)),
    "a tensor from the host": lambda d: torch.tensor([5, 6, 7]).to(d).cpu() + 1,
    "an element as an index": lambda d: [10, 11, 12][mod3(d)[1]],
    "range over an element": lambda d: list(range(mod3(d).max())),
    "numpy": lambda d: mod3(d).cpu().numpy().tolist(),
}


def plain(value: Any) -> Any:
    """`value` with tensors as (dtype, lists)."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


@pytest.mark.parametrize("name", PROGRAMS)
def test_integers_and_booleans_are_right(name: str) -> None:
    expected = plain(PROGRAMS[name]("cpu"))
    with VirtualGpu(GPU, workspaces=False):
        assert plain(PROGRAMS[name]("cuda")) == expected


STEPS: list[Callable[[torch.Tensor, int], torch.Tensor]] = [
    lambda t, n: t + n,
    lambda t, n: t * (n - 2),
    lambda t, n: t - t.flip(0),
    lambda t, n: t % (n + 2),
    lambda t, n: t // (n + 1),
    lambda t, n: -t.abs(),
    lambda t, n: (t > n).to(torch.int64),
    lambda t, n: torch.where(t > n, t, n - t),
    lambda t, n: t.cumsum(-1),
    lambda t, n: t.sort(dim=-1)[0],
    lambda t, n: t.roll(n),
    lambda t, n: t[::2] if t.shape[0] > 1 else t,
    lambda t, n: t[..., :1] + t,
    lambda t, n: t.t() if t.dim() == 2 else t.unsqueeze(0),
    lambda t, n: t.reshape(-1),
    lambda t, n: torch.cat([t, t]) if t.numel() < 64 else t,
    lambda t, n: t.masked_fill(t == n, 0),
    lambda t, n: t.clamp(-n, n),
    lambda t, n: t.clone().add_(n),
    lambda t, n: written(t.clone(), lambda c: c[:1].mul_(n)),
    lambda t, n: written(t.clone(), lambda c: c.reshape(-1)[-1:].fill_(n)),
    lambda t, n: written(t.clone(), lambda c: c.masked_fill_(c > n, -n)),
    lambda t, n: written(torch.zeros_like(t), lambda c: c.copy_(t)),
    lambda t, n: t.reshape(-1).unique(),
    lambda t, n: t.reshape(-1).abs().clamp(max=9).bincount(minlength=n + 1),
    lambda t, n: (t == n).nonzero().sum(0),
    lambda t, n: t.gather(-1, t.abs() % t.shape[-1]),
    lambda t, n: t.max(dim=-1, keepdim=True)[0],
    lambda t, n: torch.stack([t.sum(), t.min(), t.max()]),
    lambda t, n: t.to(torch.int32).to(torch.int64),
    lambda t, n: t + int(t.sum().item() % 5),
]


def test_sums_of_equal_numbers_are_known_however_many_there_are(gpu: VirtualGpu) -> None:
    twos = torch.full((3000, 3000), 2.0, device="cuda")
    assert (twos.sum().item(), twos.sum(0)[3].item(), twos.mean().item()) == (18e6, 6000.0, 2.0)
    assert torch.count_nonzero(twos).item() == 9_000_000
    threes = torch.full((3000, 3000), 3, device="cuda")
    assert (threes.sum().item(), threes.sum(0)[3].item()) == (27_000_000, 9000)
    assert threes.fill_(torch.tensor(4, device="cuda")).sum().item() == 36_000_000


@settings(max_examples=examples(120), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    values=st.lists(st.integers(-9, 9), min_size=1, max_size=8),
    program=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 4)), max_size=8),
)
def test_integer_programs_as_on_the_cpu(values: list[int], program: list[tuple[int, int]]) -> None:
    def run(device: str) -> list[object]:
        tensor = torch.tensor(values).to(device)
        results = [plain(tensor)]
        for step, number in program:
            if tensor.numel() == 0:
                break
            tensor = STEPS[step](tensor, number)
            results.append((tuple(tensor.shape), plain(tensor)))
        return results

    expected = run("cpu")
    with VirtualGpu(GPU, workspaces=False):
        assert run("cuda") == expected


# -- what is not computed ---------------------------------------------------------------------------------------------

LARGE = 1 << 13  # More elements than floating-point values are kept for.


def unknown(device: str = "cuda") -> torch.Tensor:
    return torch.randn(LARGE, device=device)


def test_floats_are_read_as_one(gpu: VirtualGpu) -> None:
    assert unknown().sum().item() == 1.0
    assert float(unknown()[3]) == 1.0
    assert unknown()[:2].tolist() == [1.0, 1.0]
    assert any("a float read by the program is 1.0" in sentence for sentence in gpu.trace.assumptions)


def test_a_loss_is_finite_and_conditions_are_false(gpu: VirtualGpu) -> None:
    loss = torch.nn.functional.mse_loss(unknown(), unknown())
    assert loss.item() == 1.0
    assert not (loss > 3)
    assert torch.isnan(unknown()).any().item() is False
    assert torch.isinf(unknown()).any().item() is False


def test_integers_from_floats_follow_the_policy(gpu: VirtualGpu) -> None:
    assert unknown().long()[0].item() == 1


@pytest.mark.parametrize("choose", [lambda s: s.topk(2, dim=-1)[1], lambda s: s.argmax(-1, keepdim=True)])
def test_routing_is_balanced(gpu: VirtualGpu, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
    scores = torch.randn(LARGE, 16, device="cuda").softmax(-1)
    chosen = choose(scores)
    counts = chosen.flatten().bincount(minlength=16).tolist()
    assert counts == [chosen.numel() // 16] * 16


def test_topk_chooses_different_experts_for_one_token(gpu: VirtualGpu) -> None:
    chosen = torch.randn(LARGE, 8, device="cuda").topk(2)[1].tolist()
    assert all(first != second for first, second in chosen)
    assert set(Counter(expert for pair in chosen for expert in pair).values()) == {LARGE // 4}


def test_a_selection_by_an_unknown_mask_keeps_everything(gpu: VirtualGpu) -> None:
    data = unknown()
    assert data[data > 0].shape == (LARGE,)
    assert (data > 0).nonzero().shape == (LARGE, 1)
    assert data.masked_select(data > 0).shape == (LARGE,)
    assert any("keeps every element" in sentence for sentence in gpu.trace.assumptions)


def test_a_selection_by_a_known_mask_has_its_size(gpu: VirtualGpu) -> None:
    data, mask = unknown(), torch.arange(LARGE, device="cuda") % 4 == 0
    assert data[mask].shape == (LARGE // 4,)
    assert data.masked_select(mask).shape == (LARGE // 4,)


def test_a_float_write_makes_integers_unknown_again(gpu: VirtualGpu) -> None:
    counts = torch.zeros(LARGE, dtype=torch.int64, device="cuda")
    assert counts[0].item() == 0
    counts.copy_(unknown())
    assert counts[0].item() == 1
    counts.zero_()
    assert counts[0].item() == 0


def test_what_has_the_shape_of_an_unknown_tensor_is_known(gpu: VirtualGpu) -> None:
    """The gradient that a backward begins with is 1, whatever the loss is: code that asks takes its short cut."""
    loss = torch.randn(8, device="cuda").sum()
    assert torch.equal(torch.ones_like(loss), torch.tensor(1.0, device="cuda"))
    unknown = torch.randn(2, 3, device="cuda")
    assert torch.zeros_like(unknown).tolist() == [[0.0] * 3] * 2
    assert torch.full_like(unknown, 7.0).t().tolist() == [[7.0] * 2] * 3
    seen: list[bool] = []

    class Short(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            seen.append(torch.equal(gradients[0], torch.tensor(1.0, device="cuda")))
            return gradients[0].expand(2, 3)

    Short.apply(unknown.requires_grad_()).backward()
    assert seen == [True]


def test_small_values_are_computed_on_one_thread(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking the others takes longer."""
    small, large = (torch.arange(size, device="cuda") for size in (1 << 17, 1 << 21))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    assert int(small.cumsum(0)[-1]) == sum(range(1 << 17))
    assert {1, 7} == set(used)
    used.clear()
    large.cumsum(0)
    assert 1 not in used


def test_zeros_take_no_memory_until_they_are_written(gpu):
    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    makers = (
        lambda: torch.zeros(1 << 22, dtype=torch.int32, device="cuda"),
        lambda: torch.empty(1 << 22, dtype=torch.int32, device="cuda"),
        lambda: torch.zeros_like(torch.empty(1 << 22, dtype=torch.int32, device="cuda")),
    )
    states = [make() for make in makers for _ in range(20)]
    assert resident_bytes() - before < 100 << 20  # of 960 MiB
    states[0][[5, 7]] = torch.tensor([3, 4], dtype=torch.int32, device="cuda")
    states[1].fill_(9)
    assert states[0][4:9].tolist() == [0, 3, 0, 4, 0]
    assert states[1][-2:].tolist() == [9, 9]
    assert states[2].count_nonzero().item() == 0


# -- masks that are not known: everything is kept, wherever they are used ---------------------------------------------

MASKED: dict[str, Callable[[torch.Tensor], int]] = {
    "gpu": lambda keep: len(torch.randn(8, device="cuda")[keep]),
    "known numbers of the GPU": lambda keep: int((torch.arange(8, device="cuda")[keep] > -1).sum()),
    "host": lambda keep: len(torch.arange(8)[keep.cpu()]),
    "as_tensor": lambda keep: len(torch.arange(8)[torch.as_tensor(keep, device="cpu")]),
    "numpy": lambda keep: len(numpy.arange(8)[keep.cpu().numpy()]),
    "tolist": lambda keep: sum(keep.tolist()),
    "elements": lambda keep: sum(bool(element) for element in keep),
    "nonzero": lambda keep: len(keep.nonzero()),
    "where": lambda keep: len(torch.where(keep)[0]),
    "masked_select": lambda keep: len(torch.randn(8, device="cuda").masked_select(keep)),
    "complement": lambda keep: len(torch.randn(8, device="cuda")[~keep]),
    "sum": lambda keep: int(keep.sum()),
    "sum of integers": lambda keep: int(keep.long().sum()),
    "count_nonzero": lambda keep: int(keep.count_nonzero()),
    "cumsum": lambda keep: int(keep.cumsum(0)[-1]),
    "assignment": lambda keep: len(setitem(torch.randn(8, device="cuda"), keep, torch.ones(8, device="cuda"))),
    "assignment of fewer": lambda keep: len(setitem(torch.randn(8, device="cuda"), keep, torch.ones(3).cuda())),
    "masked_scatter": lambda keep: len(torch.randn(8, device="cuda").masked_scatter(keep, torch.ones(8).cuda())),
}


@pytest.mark.parametrize("name", MASKED)
def test_an_unknown_mask_keeps_everything(gpu: VirtualGpu, name: str) -> None:
    assert MASKED[name](torch.randn(8, device="cuda") > 0) == 8
    assert not gpu.trace.mismatches


def test_what_is_not_known_stays_so_on_the_host(gpu: VirtualGpu) -> None:
    scores = torch.randn(8, device="cuda").cpu()
    assert len(scores[scores < 0.5]) == len(scores[scores > 0.5]) == len((~(scores < 0.5)).nonzero()) == 8
    assert scores.tolist() == scores.numpy().tolist() == [1.0] * 8


def test_a_gradient_of_a_small_host_tensor_is_real(gpu: VirtualGpu) -> None:
    weight = torch.ones(4, requires_grad=True)
    (weight.to("cuda") * torch.randn(4, device="cuda")).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1.0] * 4


def test_a_condition_is_false(gpu: VirtualGpu) -> None:
    keep = torch.randn(8, device="cuda") > 0
    assert not keep.any()
    assert not (torch.randn(8, device="cuda").sum() > 0)


def test_repeats_that_are_not_known(gpu: VirtualGpu) -> None:
    repeats = torch.randn(4, device="cuda").long()
    data = torch.arange(4, device="cuda")
    assert len(data.repeat_interleave(repeats)) == 4
    assert len(data.repeat_interleave(repeats, output_size=10)) == 10
    assert repeats.bincount(minlength=6).tolist() == [1, 1, 1, 1, 0, 0]


# -- chosen tokens end no text ---------------------------------------------------------------------------------------

CHOSEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda scores: scores.argmax(-1),
    "argmax of the whole": lambda scores: scores[:1].argmax()[None],
    "max": lambda scores: scores.max(-1)[1],
    "max, named": lambda scores: scores.max(dim=1).indices,
    "topk": lambda scores: scores.topk(1)[1][:, 0],
    "topk of several": lambda scores: scores.topk(5)[1][:, 0],
    "multinomial": lambda scores: scores.softmax(-1).multinomial(1)[:, 0],
    "multinomial, named": lambda scores: torch.multinomial(scores.softmax(-1), num_samples=4)[:, 0],
    "categorical": lambda scores: torch.distributions.Categorical(logits=scores).sample(),
    "exponential race": lambda scores: (scores.softmax(-1) / torch.empty_like(scores).exponential_()).argmax(-1),
    "every position": lambda scores: scores[:, None].expand(-1, 99, -1).argmax(-1)[:, -1],
}
VOCABULARY = 50_257
CHOICE = int(0.6180339887 * VOCABULARY)  # What is chosen first.


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("end", by_day([0, VOCABULARY // 2, CHOICE, CHOICE + 3], CHOICE))
@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_token_ends_no_text(gpu: VirtualGpu, name: str, end: int, device: str) -> None:
    chosen = CHOSEN[name](torch.randn(4, VOCABULARY, device="cuda")).to(device)
    done = chosen == end
    assert not done.any() and not done.all() and not torch.isin(chosen, torch.tensor([end, 3], device=device)).any()
    assert (chosen != end).all() and (~done).any() and (1 - done.long()).max() == 1
    assert not torch.isin(end, chosen) and not torch.equal(chosen, torch.full_like(chosen, end))
    assert any("ends a text" in sentence for sentence in gpu.trace.assumptions)
    if end < CHOICE:  # as numbers of Python they are tokens like any other
        assert chosen[0].item() != end and end not in chosen.tolist() and end not in chosen.cpu().numpy()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_loop_of_its_own_ends_by_length(gpu: VirtualGpu, rows: int, device: str) -> None:
    text, made = torch.zeros(rows, 3, dtype=torch.long, device=device), 0
    while made < 9:
        token = torch.randn(rows, 1000, device="cuda").argmax(-1).to(device)
        text = torch.cat([text, token[:, None]], dim=1)
        if (token == 618).all() or token[0] == 618 or torch.isin(text[:, -1], torch.tensor([618, 2]).to(device)).any():
            break
        made += 1
    assert text.shape == (rows, 12)


def test_what_is_no_choice_is_compared_as_it_is(gpu: VirtualGpu) -> None:
    text = torch.full((2, 8), CHOICE, device="cuda")
    chosen = torch.randn(2, VOCABULARY, device="cuda").argmax(-1)
    assert (text == CHOICE).all() and (chosen == chosen.clone()).all()
    buffer = torch.zeros(2, 8, dtype=torch.long, device="cuda")
    buffer[:, 3] = chosen
    assert (buffer == 0).sum() == 14 and not (buffer == CHOICE).any()
    assert len(set(torch.randn(600, 512, device="cuda").argmax(-1).tolist())) == 512


def test_choices_along_any_dimension(gpu: VirtualGpu) -> None:
    scores = torch.randn(64, 8, 3, device="cuda").softmax(1)
    chosen = scores.topk(2, dim=1)[1]
    assert chosen.max() == 7
    assert (chosen[:, 0] != chosen[:, 1]).all()
    assert scores.argmax(1).flatten().bincount(minlength=8).tolist() == [24] * 8
    assert sorted(torch.randn(5, device="cuda").argsort().tolist()) == [0, 1, 2, 3, 4]


def test_the_greater_of_two_is_no_choice(gpu: VirtualGpu) -> None:
    first = torch.randn(8, device="cuda").long()
    assert torch.max(first, torch.zeros_like(first)).tolist() == [1] * 8  # an unknown integer is 1
