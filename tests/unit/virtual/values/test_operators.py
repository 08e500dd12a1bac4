"""Operators on values that are known, as on the CPU; whether they are kept as one value, as elements, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memprof.virtual.values import budget
from memprof.virtual.values.values import Values

aten = torch.ops.aten
INT, FLOAT, BOOL = torch.int64, torch.float32, torch.bool


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def values(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Values:
    """Values for which five elements are many."""
    monkeypatch.setattr(budget, "SMALL_INTEGER_ELEMENTS", 4)
    monkeypatch.setattr(budget, "SMALL_FLOAT_ELEMENTS", 4)
    KEPT.clear()
    return Values(said.append)


KEPT: list[torch.Tensor] = []  # A storage that is freed leaves its address, with what is known of it, to the next one.


def keep(tensor: torch.Tensor) -> torch.Tensor:
    KEPT.append(tensor)
    return tensor


def meta(*shape: int, dtype: torch.dtype = INT) -> torch.Tensor:
    return keep(torch.empty(shape, dtype=dtype, device="meta"))


def virtual(values: Values, real: Any) -> Any:
    """`real` with its tensors on the virtual GPU, of the same layout, and their values known."""
    if isinstance(real, (list, tuple)):
        return [virtual(values, item) for item in real]
    if isinstance(real, dict):
        return {name: virtual(values, item) for name, item in real.items()}
    if not isinstance(real, torch.Tensor):
        return real
    if real._base is not None and real.untyped_storage().nbytes() != real.numel() * real.element_size():
        base = virtual(values, real._base)
        return base.as_strided(real.shape, real.stride(), real.storage_offset())
    made = keep(torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta"))
    if (real == real.reshape(-1)[0]).all():
        values.store.set_uniform(made, real.reshape(-1)[0])
    else:
        values.store.set(made, real)
    return made


def kind(values: Values, tensor: torch.Tensor) -> str:
    """How the store keeps `tensor`."""
    if values.store.get_density(tensor) is not None:
        return "density"
    return "one" if values.store.is_uniform(tensor) else "elements" if values.store.get_shadow(tensor) else "unknown"


def run(values: Values, func: Any, args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of `func` on the CPU, and on the virtual GPU."""
    real = func(*args, **kwargs)
    args, kwargs = virtual(values, args), virtual(values, kwargs)
    found = func(*args, **(kwargs if isinstance(args[0], (torch.Tensor, list)) else {**kwargs, "device": "meta"}))
    reals, founds = ([each] if isinstance(each, torch.Tensor) else list(each) for each in (real, found))
    KEPT.extend(founds)
    values.propagate(func, args, kwargs, founds)
    return reals, founds


def elements(dtype: torch.dtype = INT) -> torch.Tensor:
    return (torch.arange(12).view(3, 4) * 5 % 7 - 2).to(dtype)


def one(value: float, *shape: int, dtype: torch.dtype = INT) -> torch.Tensor:
    return torch.full((), value, dtype=dtype).expand(shape or (3, 4)).contiguous()


UNARY = "abs neg sign bitwise_not logical_not square sgn floor isnan isfinite isinf clone"
FLOATS = "sqrt exp sin cos tanh sigmoid reciprocal relu gelu silu log1p erf rsqrt floor round frac"
BINARY = "add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor ge.Tensor maximum.default " \
    "minimum.default remainder.Tensor floor_divide.default fmod.Tensor pow.Tensor_Tensor"  # fmt: skip
SCALAR = "add.Scalar mul.Scalar eq.Scalar gt.Scalar le.Scalar remainder.Scalar"
DIMS = "sum.dim_IntList amax.default amin.default any.dim all.dim cumsum.default argmax.default flip.default"


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    *((name, ()) for name in UNARY.split()), *((name, (3,)) for name in SCALAR.split()),
    *((name, (dim,) if name[:6] in ("cumsum", "argmax", "any.di", "all.di") else ([dim],))
      for name in DIMS.split() for dim in (0, 1, -1)),
    ("sum", ()), ("any", ()), ("all", ()), ("count_nonzero", ()), ("count_nonzero.dim_IntList", ([1],)),
    ("amax", ([0, 1],)), ("max", ()), ("max.dim", (1,)), ("min.dim", (0, True)), ("sort", (1, True)), ("topk", (2, 0)),
    ("tril", ()), ("triu", (1,)), ("repeat", ([2, 1],)), ("roll", ([1], [0])), ("constant_pad_nd", ([1, 2], 9)),
    ("clamp", (None, 1)), ("clamp", (0,)), ("_to_copy", ()), ("index_select", (0, torch.tensor([2, 0, 2, 1, 0]))),
    ("gather", (0, torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]]))), ("where.self", ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rest"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_results_are_those_of_the_cpu(values: Values, name: str, rest: tuple[Any, ...]) -> None:
    """Of contiguous and of transposed elements, of a part of a storage, and of elements that are all equal."""
    for dtype in (INT, torch.int32, torch.uint8, FLOAT, torch.float64):
        func = aten.neg.default if dtype.is_floating_point and name == "bitwise_not" else overload(name)
        whole, fives = elements(dtype), one(5, dtype=dtype)
        part = torch.cat([whole, whole])[1:4]
        for source in (whole, whole.t().contiguous().t(), part, one(2, dtype=dtype), one(0, dtype=dtype)):
            args = (source > 1, source, fives) if name == "where.self" else (source, *rest)
            for real, found in zip(*run(values, func, args), strict=True):
                result = values.store.get(found)
                assert result is not None, kind(values, found)
                torch.testing.assert_close(result, real)


@pytest.mark.parametrize("dtype", [INT, FLOAT])
def test_results_of_two_tensors(values: Values, dtype: torch.dtype) -> None:
    """Of elements and of equal elements, on both sides, and of a tensor of one element."""
    many, same, single = elements(dtype), one(3, dtype=dtype), torch.tensor(2, dtype=dtype)
    row = one(5, 1, dtype=dtype)
    for left, right in ((many, same), (same, many + 3), (same, same), (same, single), (single, same), (same, row)):
        for name in BINARY.split():
            ((real,), (found,)) = run(values, overload(name), (left, right))
            torch.testing.assert_close(values.store.get(found), real, msg=name)


def test_functions_of_floats(values: Values) -> None:
    for source in (elements(FLOAT).abs() + 1, one(0.5, dtype=FLOAT), one(0.5, 2, dtype=FLOAT)):
        for name in FLOATS.split():
            ((real,), (found,)) = run(values, overload(name), (source,))
            torch.testing.assert_close(values.store.get(found), real, msg=name)


# -- equal elements stay one value, and cost nothing ---------------------------------------------------------------

EQUAL: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = [
    ("sum", (one(3),), {}, 36), ("sum.dim_IntList", (one(3), [0]), {}, 9), ("sum", (one(True, dtype=BOOL),), {}, 12),
    ("count_nonzero", (one(3),), {}, 12), ("count_nonzero", (one(0),), {}, 0),
    ("count_nonzero", (one(2.5, dtype=FLOAT),), {}, None),
    ("count_nonzero.dim_IntList", (one(3), [1]), {}, 4), ("sum", (one(0.5, dtype=FLOAT),), {}, None),
    ("any", (one(1),), {}, True), ("all", (one(0),), {}, False), ("amax", (one(4), [0]), {}, 4),
    ("amin", (one(4), [1]), {}, 4), ("repeat", (one(4), [2, 2]), {}, 4),
    ("index_select", (one(4), 0, torch.tensor([1, 0])), {}, 4), ("_to_copy", (one(7),), {"dtype": FLOAT}, 7.0),
    ("_to_copy", (one(2.5, dtype=FLOAT),), {"dtype": INT}, 2), ("add.Tensor", (one(3), one(4)), {}, 7),
    ("add.Tensor", (one(3), one(4)), {"alpha": 10}, 43), ("add.Scalar", (one(3), 4), {}, 7),
    ("add.Tensor", (one(3), torch.tensor(5)), {}, 8), ("add.Tensor", (one(3), elements()), {}, None),
    ("clamp", (one(3), None, 2), {}, 2), ("clamp", (one(3), 5), {}, 5),
    ("clamp.Tensor", (one(3),), {"max": one(2)}, None), ("where.self", (one(1, dtype=BOOL), one(3), one(4)), {}, 3),
    ("clone", (one(3),), {"memory_format": torch.contiguous_format}, 3), ("neg", (one(3),), {}, -3),
    ("cumsum", (one(3), 0), {}, None), ("tril", (one(3),), {}, None), ("neg", (elements(),), {}, None),
    ("pow.Tensor_Scalar", (one(3), -1), {}, None), ("pow.Tensor_Scalar", (one(3), 2), {}, 9),
    ("sigmoid", (one(0, dtype=FLOAT),), {}, 0.5), ("eq.Scalar", (one(3), 3), {}, True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "kwargs", "expected"), EQUAL, ids=[each[0] for each in EQUAL])
def test_equal_elements_cost_nothing(values, monkeypatch, name, args, kwargs, expected):
    """Where nothing may be computed, only what has equal elements is known."""
    monkeypatch.setattr(budget, "MAX_VISITED_ELEMENTS", 0)
    monkeypatch.setattr(budget, "MODERATE_ELEMENTS", 0)
    args, kwargs = virtual(values, args), virtual(values, kwargs)
    func = overload(name)
    found = func(*args, **kwargs)
    values.propagate(func, args, kwargs, [found])
    value = values.store.get_uniform_value(found)
    assert (value if value is None else value.item()) == expected
    assert value is None or value.dtype is found.dtype


def test_operators_with_several_results_or_without_a_tensor(values: Values) -> None:
    for name, args in (
        ("frexp.Tensor", (one(6, dtype=FLOAT),)), ("pow.Scalar", (2, elements().abs())), ("cat", ([one(3), one(4)],)),
        ("stack", ([elements(), one(4)], 1)), ("split.Tensor", (elements(), 2)),
        ("isin.Tensor_Tensor", (elements(), one(3))),
        ("index.Tensor", (elements(), [None, torch.tensor([3, 1, 1])])),
    ):  # fmt: skip
        real = overload(name)(*args)
        given = virtual(values, args)
        found = overload(name)(*given)
        reals, founds = ([each] if isinstance(each, torch.Tensor) else list(each) for each in (real, found))
        if name != "split.Tensor":  # views, which share what is known
            values.propagate(overload(name), given, {}, founds)
        for expected, each in zip(reals, founds, strict=True):
            torch.testing.assert_close(values.store.get(each), expected, msg=name)


# -- new tensors ---------------------------------------------------------------------------------------------------

like = meta(3, 4, dtype=FLOAT)
FILLS: list[tuple[str, tuple[Any, ...], torch.dtype, Any]] = [
    ("zeros", ([3, 4],), FLOAT, 0), ("ones", ([3, 4],), FLOAT, 1), ("full", ([3, 4], 2.5), FLOAT, 2.5),
    ("zeros_like", (like,), FLOAT, 0), ("ones_like", (like,), FLOAT, 1), ("full_like", (like, 7), FLOAT, 7),
    ("new_zeros", (like, [5]), FLOAT, 0), ("new_ones", (like, [5]), FLOAT, 1), ("new_full", (like, [5], 3), FLOAT, 3),
    ("empty_like", (like,), FLOAT, None), ("new_empty", (like, [5]), FLOAT, None), ("new_empty", (like, [4]), FLOAT, 0),
    ("empty.memory_format", ([5],), INT, 0), ("empty.memory_format", ([5],), FLOAT, None),
    ("empty.memory_format", ([4],), FLOAT, 0), ("empty_strided", ([5], [1]), FLOAT, None),
    ("empty_strided", ([5], [1]), BOOL, False), ("new_empty_strided", (like, [2, 3], [3, 1]), FLOAT, None),
    ("fill.Scalar", (like, 6), FLOAT, 6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "dtype", "expected"), FILLS)
def test_new_tensors(values, name, args, dtype, expected):
    """What is not initialised is zero, except for floats that are many."""
    func = overload(name)
    found = func(*args, **({} if args[0] is like else {"dtype": dtype, "device": "meta"}))
    values.propagate(func, args, {}, [found])
    value = values.store.get_uniform_value(found)
    assert (value if value is None else value.item()) == expected
    if expected is None:
        assert kind(values, found) == "unknown"


# -- writes --------------------------------------------------------------------------------------------------------

rows, columns = torch.tensor([[1, 2, 0, 0]]), torch.tensor([[1, 0, 0, 0]] * 3)
WRITES: list[tuple[str, Callable[[torch.dtype], tuple[Any, ...]]]] = [
    ("add_.Tensor", lambda d: (elements(d),)), ("add_.Tensor", lambda d: (one(2, dtype=d),)),
    ("add_.Scalar", lambda d: (3,)), ("mul_.Tensor", lambda d: (one(2, dtype=d),)), ("zero_", lambda d: ()),
    ("fill_.Scalar", lambda d: (6,)), ("fill_.Tensor", lambda d: (torch.tensor(6),)),
    ("copy_", lambda d: (elements() + 1,)), ("copy_", lambda d: (one(5),)), ("copy_", lambda d: (torch.arange(4),)),
    ("neg_", lambda d: ()), ("clamp_", lambda d: (0, 2)), ("masked_fill_.Scalar", lambda d: (elements() > 1, 9)),
    ("tril_", lambda d: ()), ("triu_", lambda d: (1,)), ("cumsum_", lambda d: (0,)), ("eq_.Scalar", lambda d: (3,)),
    ("index_fill_.int_Scalar", lambda d: (0, torch.tensor([1]), 9)), ("sub_.Tensor", lambda d: (torch.tensor(5),)),
    ("index_copy_", lambda d: (0, torch.tensor([2]), elements(d)[:1])), ("square_", lambda d: ()),
    ("index_add_", lambda d: (0, torch.tensor([0, 0, 1]), elements(d))), ("scatter_.value", lambda d: (0, rows, 1)),
    ("scatter_.src", lambda d: (0, rows, elements(d))), ("scatter_add_", lambda d: (1, columns, elements(d))),
    *((f"{name}_.Tensor", lambda d: (one(2, dtype=d),)) for name in ("ne", "lt", "le", "gt", "ge", "floor_divide")),
    ("abs_", lambda d: ()), ("cumprod_", lambda d: (1,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "give"), WRITES, ids=lambda value: value if isinstance(value, str) else "")
def test_writes_are_those_of_the_cpu(values: Values, name: str, give: Any) -> None:
    """To elements, to a part of a storage, to equal elements, and to equal elements of which a part is written."""
    for dtype in (INT, torch.int16, FLOAT):
        whole, func, rest = elements(dtype).abs(), overload(name), give(dtype)
        for base in (whole, one(3, dtype=dtype), one(3, 5, 4, dtype=dtype), torch.cat([whole, whole])):
            real, target = base.clone(), virtual(values, base)
            ours, theirs = (target, real) if len(real) == 3 else (target[1:4], real[1:4])
            func(theirs, *rest)
            values.write(func, (ours, *virtual(values, rest)), {}, ours)
            torch.testing.assert_close(values.store.get(target), real)


def test_writes_that_cover_a_storage_make_it_known(values: Values) -> None:
    for name, rest, expected in (
        ("zero_", (), "one"), ("fill_.Scalar", (6,), "one"), ("copy_", (elements(),), "elements"),
        ("add_.Tensor", (elements(),), "unknown"), ("neg_", (), "unknown"),
    ):  # fmt: skip
        target, part = meta(3, 4), meta(5, 4)[1:4]
        for tensor, found in ((target, expected), (part, "unknown")):
            values.write(overload(name), (tensor, *virtual(values, rest)), {}, tensor)
            assert kind(values, tensor) == found, (name, found)
    values.write(aten.copy_.default, (target := meta(3, 4), virtual(values, elements())), {}, target)
    assert values.store.get(target).tolist() == elements().tolist()


def test_writes_of_what_is_not_known_make_it_unknown(values: Values) -> None:
    for known in (elements(FLOAT), one(3, dtype=FLOAT)):
        for func, rest, kwargs in (
            (aten.add_.Tensor, (meta(3, 4, dtype=FLOAT),), {}), (aten.copy_.default, (meta(3, 4),), {}),
            (aten.normal_.default, (), {}), (aten.add_.Tensor, (1,), {"alpha": meta()}),
            (aten.uniform_.default, (), {}),
        ):  # fmt: skip
            target = virtual(values, known)
            values.write(func, (target, *rest), kwargs, target)
            assert kind(values, target) == "unknown", func
    empty = meta(0)
    values.write(aten.add_.Tensor, (empty, meta(0)), {}, empty)


def test_a_share_of_a_mask_lasts_until_it_is_written(values: Values) -> None:
    for func, rest, expected in (
        (aten.logical_not_.default, (), "unknown"), (aten.zero_.default, (), "one"), (aten.fill_.Scalar, (1,), "one"),
        (aten.copy_.default, (one(1, dtype=BOOL),), "elements"),
    ):  # fmt: skip
        mask = meta(3, 4, dtype=BOOL)
        values.store.set_density(mask, 0.25)
        values.write(func, (mask, *virtual(values, rest)), {}, mask)
        assert kind(values, mask) == expected, func


def test_random_integers_are_written_and_the_same_in_every_run(said: list[str]) -> None:
    drawn = []
    for _ in range(2):
        values = Values(said.append)
        target = meta(6)
        values.store.set_uniform(target, 0)
        values.write(aten.random_.to, (target, 1000), {}, target)
        drawn.append(values.store.get(target).tolist())
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 1


def test_writes_beyond_the_limit_leave_a_share_of_ones(values, monkeypatch):
    """As one_hot writes them."""
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 12 * 8 - 1)
    index = virtual(values, torch.tensor([[1, 2, 0, 0]]))
    for start, func, last, expected in (
        (0, aten.scatter_.value, 1, 4 / 12), (1, aten.scatter_.value, 1, None), (0, aten.scatter_.value, 2, None),
        (0, aten.index_fill_.int_Scalar, 1, None),
    ):  # fmt: skip
        target = meta(3, 4)
        values.store.set_uniform(target, start)
        values.write(func, (target, 0, index if func is aten.scatter_.value else index[0], last), {}, target)
        assert values.store.get_density(target) == expected
        assert values.store.get(target) is None


def test_what_can_not_be_computed_in_place_is_unknown(values: Values) -> None:
    target = virtual(values, elements())
    values.write(aten.pow_.Scalar, (target, -1), {}, target)  # torch's own error comes later
    assert kind(values, target) == "unknown"


# -- what is put off -----------------------------------------------------------------------------------------------


def test_a_tensor_that_is_moved_is_computed_when_it_is_read(values: Values) -> None:
    source, target, part = virtual(values, elements(FLOAT)), meta(3, 4, dtype=FLOAT), meta(5, 4, dtype=FLOAT)
    values.store.set_uniform(part, 0)
    values.write(aten.copy_.default, (target, source), {}, target)
    assert (
        values.store.get_shadow(target).num_deferred_steps == 1 and values.store.get_shadow(source).has_pending_readers
    )
    values.write(aten.add_.Tensor, (source, 1), {}, source)
    assert torch.equal(values.store.get(target), elements(FLOAT)) and torch.equal(
        values.store.get(source), elements(FLOAT) + 1
    )
    values.write(aten.copy_.default, (part[1:4], source), {}, part[1:4])
    assert values.store.get_shadow(part).num_deferred_steps == 0
    assert torch.equal(values.store.get(part)[1:4], elements(FLOAT) + 1)
    # A real tensor may change until then, and is copied; another shape or dtype is converted.
    real, row, halves = elements(FLOAT), meta(3, 4, dtype=FLOAT), meta(3, 4, dtype=torch.float16)
    values.write(aten.copy_.default, (target, real), {}, target)
    real.zero_()
    assert torch.equal(values.store.get(target), elements(FLOAT))
    values.write(aten.copy_.default, (row, virtual(values, torch.arange(4.0))), {}, row)
    assert torch.equal(values.store.get(row), torch.arange(4.0).expand(3, 4))
    values.write(aten.copy_.default, (halves, source), {}, halves)
    assert torch.equal(values.store.get(halves), elements(torch.float16) + 1)


def test_what_is_put_off_is_charged_when_it_is_read(values, said, monkeypatch):
    source = virtual(values, elements(FLOAT))
    results = [meta(3, 4, dtype=FLOAT) for _ in range(3)]
    for result in results:
        values.propagate(aten.add.Tensor, (source, 1), {}, [result])
        assert values.store.get_shadow(result).num_bytes == 0
    monkeypatch.setattr(budget, "MAX_VISITED_ELEMENTS", 24)
    assert [values.store.get(result) is not None for result in results] == [True, True, False]
    assert len(said) == 1


def test_triangles_are_computed_once_and_each_has_its_own(values, monkeypatch):
    calls = []
    call = values.evaluator._call
    monkeypatch.setattr(values.evaluator, "_call", lambda func, *rest: (calls.append(func), call(func, *rest))[1])

    def triangle(func=aten.tril.default, *rest, dtype=INT, value=1, shape=(3, 3), **kwargs):
        square, result = meta(*shape, dtype=dtype), meta(*shape, dtype=dtype)
        values.store.set_uniform(square, value)
        values.propagate(func, (square, *rest), kwargs, [result])
        assert torch.equal(values.store.get(result), func(torch.full(shape, value, dtype=dtype), *rest, **kwargs))
        return result

    first, second = triangle(), triangle()
    assert len(calls) == 1
    values.write(aten.add_.Scalar, (second, 1), {}, second)
    calls.clear()
    assert values.store.get(triangle()).sum() == values.store.get(first).sum() == 6 and not calls
    for settings in (
        {"value": 2},
        {"dtype": torch.int32},
        {"shape": (4, 3)},
        {"func": aten.triu.default},
        {"diagonal": 1},
    ):
        triangle(**settings)
        assert len(calls) == 1, settings
        calls.clear()
    triangle(aten.tril.default, 1)
    triangle(aten.tril.default, 2)
    assert len(calls) == 2
    calls.clear()
    limit = 9 * 8
    for bytes_, made in ((limit, 1), (limit - 1, 2)):
        monkeypatch.setattr(budget, "MAX_TRIANGLE_BYTES", bytes_)
        for _ in range(2):
            triangle(value=5 + made)
        assert len(calls) == made
        calls.clear()
    # From the cache, too, it is charged.
    monkeypatch.setattr(budget, "MAX_TRIANGLE_BYTES", limit)
    triangle()
    monkeypatch.setattr(budget, "MAX_VISITED_ELEMENTS", 0)
    monkeypatch.setattr(budget, "MODERATE_ELEMENTS", 0)
    result, square = meta(3, 3), virtual(values, one(1, 3, 3))
    values.propagate(aten.tril.default, (square,), {}, [result])
    assert values.store.get(result) is None


# -- what is assumed -----------------------------------------------------------------------------------------------


def test_what_is_assumed_of_results(values: Values) -> None:
    unknown, mask, share = meta(3, 4, dtype=FLOAT), meta(3, 4, dtype=BOOL), meta(3, 4, dtype=BOOL)
    values.store.set_density(share, 0.25)
    for func, args, result, expected in (
        (aten.all.default, (unknown,), meta(dtype=BOOL), True), (aten.any.default, (unknown,), meta(dtype=BOOL), None),
        (aten.isnan.default, (unknown,), meta(3, 4, dtype=BOOL), None),
        (aten.sum.default, (mask,), meta(), 12), (aten.sum.default, (share,), meta(), 3),
        (aten.sum.dim_IntList, (share, [0]), meta(4), [1, 1, 1, 0]),
        (aten.sum.default, (unknown,), meta(dtype=FLOAT), None),
        (aten._to_copy.default, (mask,), meta(3, 4), [[1] * 4] * 3), (aten.argmax.default, (unknown,), meta(), 7),
        (aten.argmax.default, (unknown, 1), meta(3), [1, 2, 3]),
        (aten.cumsum.default, (mask, 1), meta(3, 4), [[1, 2, 3, 4]] * 3),
        (aten.neg.default, (meta(3, 4),), meta(3, 4), None),
        (aten.argmax.default, (virtual(values, elements()),), meta(), 4),
        (aten.argmax.default, (share,), meta(), None),
    ):  # fmt: skip
        values.propagate(func, args, {}, [result])
        found = values.store.get(result)
        assert (found if found is None else found.tolist()) == expected, (func, args)
    values.propagate(aten.arange.default, (meta(),), {}, [])


def test_sums_of_a_mask_beyond_the_limit_are_not_kept_but_its_copy_is(values, monkeypatch):
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 95)
    mask, sums, copy = meta(3, 4, dtype=BOOL), meta(3, 4), meta(3, 4)
    values.propagate(aten.cumsum.default, (mask, 1), {}, [sums])
    values.propagate(aten._to_copy.default, (mask,), {}, [copy])
    assert (kind(values, sums), kind(values, copy)) == ("unknown", "one")


def test_chosen_tokens_stay_so_through_operators_and_writes(values: Values) -> None:
    chosen, text = meta(2), meta(2, 3)
    values.policy.end_tokens = {618}
    values.propagate(aten.argmax.default, (meta(2, 1000, dtype=FLOAT), 1), {}, [chosen])
    assert values.store.get(chosen).tolist() == [619, 620]
    values.store.set_uniform(text, 0)
    values.write(aten.copy_.default, (text[:, 1], chosen), {}, text[:, 1])
    assert values.store.tokens.find_placeholders([text]) == range(619, 621)
    result = meta(2, 3, dtype=BOOL)
    values.propagate(aten.eq.Scalar, (text, 619), {}, [result])
    assert not values.store.get(result).any()
    values.propagate(aten.eq.Scalar, (text, 0), {}, [result])
    assert values.store.get(result).sum() == 4
