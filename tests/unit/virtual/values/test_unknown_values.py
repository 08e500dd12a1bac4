"""What is assumed of unknown values, and which operators on known ones are computed however large they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memprof.virtual import VirtualGpu
from memprof.virtual.values import budget, unknown_values

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def choose(name: str, args: tuple[object, ...], *shapes: tuple[int, ...], avoided: object = (), **kwargs: object):
    """Indices and tokens that an operator with outputs of these shapes is assumed to choose."""
    packet, _, overload = name.partition(".")
    outputs = [meta(*shape, dtype=torch.int64) for shape in shapes]
    call = getattr(getattr(aten, packet), overload or "default")
    found = unknown_values.spread_choices(call, args, kwargs, outputs, avoided)
    return None if found is None else (found[0].tolist(), found[1])


NONE = range(0)


@pytest.mark.parametrize(("name", "args", "shapes", "expected"), [
    # One of all 32: at 0.618 of them. One of each row: no two the same.
    ("argmax", (meta(4, 8),), [()], (19, NONE)), ("argmin", (meta(4, 8), None), [()], (19, NONE)),
    ("argmax", (meta(4, 8), 1), [(4,)], ([4, 5, 6, 7], NONE)),
    ("argmax", (meta(8, 4), 0), [(4,)], ([4, 5, 6, 7], NONE)),
    ("argmax", (meta(4, 8), 1, True), [(4, 1)], ([[4], [5], [6], [7]], NONE)),
    ("argmax", (meta(6, 2), 1), [(6,)], ([0, 1, 0, 1, 0, 1], NONE)), ("argmax", (meta(),), [()], (0, NONE)),
    ("topk", (meta(4, 8), 2), [(4, 2), (4, 2)], ([[0, 1], [2, 3], [4, 5], [6, 7]], NONE)),
    ("topk", (meta(8, 4), 2, 0), [(2, 4), (2, 4)], ([[0, 2, 4, 6], [1, 3, 5, 7]], NONE)),
    ("sort", (meta(2, 3),), [(2, 3), (2, 3)], ([[0, 1, 2], [0, 1, 2]], NONE)),
    ("sort", (meta(2, 3), 0), [(2, 3), (2, 3)], ([[0, 0, 0], [1, 1, 1]], NONE)),
    ("kthvalue", (meta(4, 8), 3), [(4,), (4,)], ([4, 5, 6, 7], NONE)),
    ("kthvalue", (meta(8, 4), 3, 0), [(4,), (4,)], ([4, 5, 6, 7], NONE)),
    ("max.dim", (meta(4, 8), 1), [(4,), (4,)], ([4, 5, 6, 7], NONE)), ("max", (meta(4, 8),), [()], None),
    ("median.dim", (meta(8, 4), 0), [(4,), (4,)], ([4, 5, 6, 7], NONE)), ("nanmedian", (meta(4, 8),), [()], None),
    ("nanmedian.dim", (meta(4, 8), 1), [(4,), (4,)], ([4, 5, 6, 7], NONE)),
    ("min.dim", (meta(4, 8), 1), [(4,), (4,)], ([4, 5, 6, 7], NONE)),
    ("min", (meta(4, 8),), [()], None), ("median", (meta(4, 8),), [()], None),
    ("cummax", (meta(2, 3), 1), [(2, 3), (2, 3)], ([[0, 1, 2], [0, 1, 2]], NONE)),
    ("cummin", (meta(2, 3), 0), [(2, 3), (2, 3)], ([[0, 0, 0], [1, 1, 1]], NONE)),
    ("mode", (meta(4, 8),), [(4,), (4,)], ([4, 5, 6, 7], NONE)), ("argsort", (meta(3),), [(3,)], ([0, 1, 2], NONE)),
    ("multinomial", (meta(4, 8), 1), [(4, 1)], ([[4], [5], [6], [7]], NONE)), ("sum", (meta(4),), [()], None),
    # Choices of more than 512 are tokens.
    ("argmax", (meta(1, 512), 1), [(1,)], ([316], NONE)),
    ("argmax", (meta(1, 513), 1), [(1,)], ([317], range(317, 318))),
    ("multinomial", (meta(2, 1000), 2), [(2, 2)], ([[618, 619], [620, 621]], range(618, 622))),
    ("topk", (meta(600), 600), [(600,), (600,)], (list(range(600)), NONE)),
    ("topk", (meta(600), 599), [(599,), (599,)], (list(range(1, 600)), range(1, 600))),
])  # fmt: skip
def test_choices_are_spread(name, args, shapes, expected):
    assert choose(name, args, *shapes) == expected


def test_choices_may_be_named():
    assert choose("sort.stable", (meta(2, 3),), (2, 3), (2, 3), stable=True, dim=0) == ([[0, 0, 0], [1, 1, 1]], NONE)


def test_tokens_that_the_program_names_are_not_chosen():
    logits = (meta(1, 1000), 1)
    assert choose("argmax", logits, (1,), avoided={618, 620}) == ([619], range(619, 620))
    assert choose("argmax", logits, (1,), avoided=set(range(618, 1000))) == ([0], range(1))
    assert choose("argmax", logits, (1,), avoided=set(range(1000))) == ([618], range(618, 619))
    assert choose("topk", (meta(1000), 3), (3,), (3,), avoided={620}) == ([621, 622, 623], range(621, 624))
    assert choose("topk", (meta(1000), 3), (3,), (3,), avoided={617, 621}) == ([618, 619, 620], range(618, 621))


@pytest.mark.parametrize(("name", "args", "output", "density", "expected"), [
    ("sum", (meta(8),), meta(3, dtype=torch.int64), 1.0, [3, 3, 2]), ("sum", (meta(8),), meta(3), 1.0, None),
    ("sum", (meta(8),), meta(dtype=torch.int64), 0.5, 4),
    ("count_nonzero", (meta(8),), meta(2, dtype=torch.int64), 0.6, [3, 2]),
    ("_to_copy", (meta(2),), meta(2, dtype=torch.int32), 1.0, [1, 1]), ("_to_copy", (meta(2),), meta(2), 1.0, None),
    ("_to_copy", (meta(2),), meta(2, dtype=torch.int32), 0.5, None),
    ("cumsum", (meta(2, 3), 1), meta(2, 3, dtype=torch.int64), 1.0, [[1, 2, 3], [1, 2, 3]]),
    ("cumsum", (meta(2, 3), 0), meta(2, 3, dtype=torch.int64), 1.0, [[1, 1, 1], [2, 2, 2]]),
    ("cumsum", (meta(), 0), meta(dtype=torch.int64), 1.0, 1),
    ("cumsum", (meta(2, 3), 1), meta(2, 3, dtype=torch.int64), 0.5, None), ("any", (meta(2),), meta(), 1.0, None),
])  # fmt: skip
def test_masks_are_counted_by_their_density(name, args, output, density, expected):
    call = getattr(aten, name).default
    found = unknown_values.count_mask(call, args, output, density)
    assert (found if found is None else found.tolist()) == expected
    assert found is None or found.dtype is output.dtype


@pytest.mark.parametrize(("shape", "density", "expected"), [
    ((4,), 0.5, [[0], [2]]), ((2, 3), 0.5, [[0, 0], [0, 2], [1, 1]]), ((3,), 1.0, [[0], [1], [2]]), ((3,), 0.0, []),
    ((5,), 0.4, [[0], [2]]), ((), 1.0, [[]]),
])  # fmt: skip
def test_indices_are_spread_evenly(shape, density, expected):
    assert unknown_values.spread_indices(torch.Size(shape), density).tolist() == expected


def test_fills_have_one_value():
    def value(call, *args):
        return unknown_values.UNIFORM_FILLS[call](args, {})

    zeros = "zeros zeros_like new_zeros empty empty_like empty_strided new_empty new_empty_strided zero_"
    assert [value(getattr(aten, name), 1, 2) for name in zeros.split()] == [0] * 9
    assert [value(getattr(aten, name), 5, 2) for name in ("ones", "ones_like", "new_ones")] == [1, 1, 1]
    assert [value(getattr(aten, name), 5, 7, 9) for name in ("full", "full_like", "fill_", "fill", "new_full")] == [
        7,
        7,
        7,
        7,
        9,
    ]
    assert value(aten.full, 5) is None
    assert {getattr(aten, name) for name in zeros.split()[3:8]} == unknown_values.UNINITIALIZED


def test_operators_that_keep_what_is_known_of_all_elements():
    same = {getattr(aten, name) for name in ["any", "all", "amax", "amin", "index_select", "_to_copy", "repeat"]}
    assert same <= unknown_values.UNIFORM_PRESERVING
    masks = {getattr(aten, name) for name in ["_to_copy", "clone", "ne", "eq", "gt", "ge"]}
    assert masks <= unknown_values.DENSITY_PRESERVING
    linear = "_index_put_impl_ repeat_interleave equal randperm randint tril_indices triu_indices allclose _unique2 " \
        "unique_consecutive bincount diagonal_copy"  # fmt: skip
    assert {getattr(aten, name) for name in linear.split()} <= unknown_values.LINEAR_COST
    products = {getattr(aten, name) for name in ["mm", "bmm", "addmm", "baddbmm"]}
    assert products <= unknown_values.MATRIX_PRODUCTS


@pytest.mark.parametrize(("count", "dtype", "is_cheap"), [
    (1 << 12, torch.float32, True), ((1 << 12) + 1, torch.float32, False), ((1 << 12) + 1, torch.complex64, False),
    (1 << 20, torch.int8, True), ((1 << 20) + 1, torch.bool, False), (1 << 20, torch.bool, True),
])  # fmt: skip
def test_small_tensors_cost_nothing(count, dtype, is_cheap):
    assert budget.is_cheap_to_compute(meta(count, dtype=dtype)) is is_cheap


def test_matrix_products_visit_each_element_for_each_row():
    tensors = [meta(2, 3), meta(3, 5), meta(2, 5)]
    assert budget.count_visited_elements(aten.mm.default, tensors) == 3 * 15
    assert budget.count_visited_elements(aten.add.Tensor, [meta(2), meta(7), meta(3)]) == 7
    assert budget.has_linear_cost(aten.bmm.default) and budget.has_linear_cost(aten.add.Tensor)
    assert budget.has_linear_cost(aten.cumsum.default) and not budget.has_linear_cost(aten.linalg_inv_ex.default)


def mask(data: torch.Tensor) -> torch.Tensor:
    return data % 2 == 0


def places(data: torch.Tensor) -> torch.Tensor:
    return torch.arange(2500, device=data.device) * 2


def written(data: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    copy = data.clone()
    write(copy)
    return copy


# Operators besides pointwise ones, on floats that are more than are computed by any operator.
LINEAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "_to_copy": lambda x: x.double(),
    "tril": lambda x: x.view(50, 100).tril(),
    "triu": lambda x: x.view(50, 100).triu(),
    "tril_": lambda x: written(x.view(50, 100), lambda t: t.tril_()),
    "triu_": lambda x: written(x.view(50, 100), lambda t: t.triu_()),
    "copy_": lambda x: written(x, lambda t: t.copy_(x * 2)),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x + 1]),
    "index": lambda x: x[places(x)],
    "index_put_": lambda x: written(x, lambda t: t.__setitem__(places(x), 7.0)),
    "index_put": lambda x: x.index_put((places(x),), torch.full((2500,), 7.0, device=x.device)),
    "index_select": lambda x: x.index_select(0, places(x)),
    "gather": lambda x: x.gather(0, places(x)),
    "scatter": lambda x: x.scatter(0, places(x), 7.0),
    "scatter_": lambda x: written(x, lambda t: t.scatter_(0, places(x), 7.0)),
    "scatter_add": lambda x: x.scatter_add(0, places(x), x),
    "scatter_add_": lambda x: written(x, lambda t: t.scatter_add_(0, places(x), x)),
    "index_fill_": lambda x: written(x, lambda t: t.index_fill_(0, places(x), 7.0)),
    "index_add_": lambda x: written(x, lambda t: t.index_add_(0, places(x), x[:2500])),
    "index_copy_": lambda x: written(x, lambda t: t.index_copy_(0, places(x), x[:2500])),
    "masked_select": lambda x: x.masked_select(mask(x)),
    "masked_scatter": lambda x: x.masked_scatter(mask(x), x * 2),
    "masked_scatter_": lambda x: written(x, lambda t: t.masked_scatter_(mask(x), x * 2)),
    "nonzero": lambda x: x.nonzero(),
    "sum": lambda x: x.sum(),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: (x - 9).abs().argmin(),
    "count_nonzero": lambda x: x.count_nonzero(),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(descending=True)[0],
    "topk": lambda x: x.topk(3)[0],
    "isin": lambda x: torch.isin(x, torch.tensor([3.0, 4.0], device=x.device)),
    "searchsorted": lambda x: torch.searchsorted(x, torch.tensor([3.5, 77.0], device=x.device)),
    "bucketize": lambda x: torch.bucketize(torch.tensor([3.5, 77.0], device=x.device), x),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(3),
    "repeat": lambda x: x.repeat(2),
    "constant_pad_nd": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "arange": lambda x: torch.arange(6000.0, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, 6001, device=x.device),
    "eye": lambda x: torch.eye(80, device=x.device),
    "softmax": lambda x: (x / 5000).softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "mean": lambda x: x.mean(),
    "prod": lambda x: (x * 0 + 1.001).prod(),
    "cumprod": lambda x: (x % 2 + 1e-3).cumprod(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "var": lambda x: x.var(),
    "linalg_vector_norm": lambda x: x.norm(),
    "avg_pool2d": lambda x: torch.nn.functional.avg_pool2d(x.view(1, 1, 50, 100), 2),
    "max_pool2d_with_indices": lambda x: torch.nn.functional.max_pool2d(x.view(1, 1, 50, 100), 2),
    "upsample_nearest2d": lambda x: torch.nn.functional.interpolate(x.view(1, 1, 50, 100), scale_factor=2),
    "upsample_bilinear2d": lambda x: torch.nn.functional.interpolate(
        x.view(1, 1, 50, 100), scale_factor=2, mode="bilinear"
    ),
    "_adaptive_avg_pool2d": lambda x: torch.nn.functional.adaptive_avg_pool2d(x.view(1, 1, 50, 100), 2),
    "mm": lambda x: x.view(50, 100) @ x.view(100, 50),
    "bmm": lambda x: torch.bmm(x.view(2, 25, 100), x.view(2, 100, 25)),
    "addmm": lambda x: torch.addmm(x[:50], x.view(50, 100), x.view(100, 50)),
    "baddbmm": lambda x: torch.baddbmm(x[:25], x.view(2, 25, 100), x.view(2, 100, 25)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_work_on_known_floats_is_done(gpu: VirtualGpu, name: str) -> None:
    expected = LINEAR[name](torch.arange(5000.0))
    found = LINEAR[name](torch.arange(5000.0, device="cuda")).cpu()
    assert torch.allclose(found, expected, rtol=1e-4) if found.is_floating_point() else torch.equal(found, expected)


def test_other_work_on_known_floats_is_not(gpu: VirtualGpu) -> None:
    matrix = torch.arange(6400.0, device="cuda").view(80, 80) + torch.eye(80, device="cuda")
    assert torch.linalg.det(matrix).item() == 1.0  # as any unknown float
