"""Values that are assumed or computed, at the limits of what is computed."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual.values import budget, shadows
from memprof.virtual.values.shadows import limit_threads
from memprof.virtual.values.values import Values

aten = torch.ops.aten


def meta(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def said():
    return []


@pytest.fixture
def values(said):
    return Values(said.append)


@pytest.mark.parametrize(("tensor", "expected"), [
    (meta(2, dtype=torch.float16), [1.0, 1.0]), (meta(2), [1, 1]), (meta(2, dtype=torch.bool), [True, True]),
    (meta(dtype=torch.bool), False), (meta(1, dtype=torch.bool), [True]), (meta(3, dtype=torch.bool)[0], True),
    (meta(dtype=torch.uint8), 1), (meta(dtype=torch.float32), 1.0),
])  # fmt: skip
def test_unknown_values_are_one_and_conditions_false(values, said, tensor, expected):
    seen = []
    values.policy.on_unknown_read = lambda tensor, text: seen.append(text)
    found = values.policy.read(tensor)
    assert found.tolist() == expected and found.dtype is tensor.dtype
    kind = str(tensor.dtype).removeprefix("torch.")
    assert seen == [f"{expected[0] if isinstance(expected, list) else expected} for an unknown {kind}"]
    assert len(said) == 1


def test_known_values_are_read_in_silence(values, said):
    tensor = meta(3)
    values.store.set(tensor, torch.arange(3))
    assert values.policy.read(tensor).tolist() == [0, 1, 2] and said == []


def test_masks_select_what_they_say_a_share_or_everything(values, said, monkeypatch):
    known, share, unknown = (meta(2, 4, dtype=torch.bool) for _ in range(3))
    values.store.set(known, torch.arange(8).view(2, 4) % 3 == 0)
    values.store.set_density(share, 0.25)
    select = values.policy.find_selected_indices
    assert select(known).tolist() == [[0, 0], [0, 3], [1, 2]] and said == []
    assert select(share).tolist() == [[0, 0], [1, 0]] and len(said) == 1
    assert select(unknown).shape == (8, 2) and len(said) == 2
    nothing, everything = meta(2, 4, dtype=torch.bool), meta(2, 4, dtype=torch.bool)
    values.store.set_uniform(nothing, False)
    values.store.set_uniform(everything, True)
    assert select(nothing).shape == (0, 2) and select(everything).shape == (8, 2)
    # Indices of 8 elements in two dimensions take 128 bytes.
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 128)
    assert not select(unknown).is_meta
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 127)
    assert select(unknown).is_meta and select(unknown).shape == (8, 2)
    assert not select(share).is_meta
    assert any("beyond 1 GiB" in sentence for sentence in said)


def test_work_on_large_tensors_has_a_budget(values, said, monkeypatch):
    large = meta((1 << 20) + 1)
    within = values.evaluator.is_within_budget
    monkeypatch.setattr(budget, "MAX_VISITED_ELEMENTS", 2 * ((1 << 20) + 1))
    small = [meta(1 << 20), meta(1 << 12, dtype=torch.float32)]
    for _ in range(9):  # not charged
        assert within(aten.linalg_det.default, small)
    assert within(aten.add.Tensor, [large, large]) and within(aten.add.Tensor, [large]) and said == []
    assert not within(aten.add.Tensor, [large]) and len(said) == 1
    assert within(aten.linalg_det.default, small)


@pytest.mark.parametrize(("operator", "count", "dtype", "expected"), [
    (aten.linalg_det.default, 1 << 24, torch.int64, True), (aten.linalg_det.default, (1 << 24) + 1, torch.int64, False),
    (aten.linalg_det.default, (1 << 12) + 1, torch.float32, False), (aten.add.Tensor, (1 << 24) + 1, torch.int64, True),
    (aten.add.Tensor, (1 << 12) + 1, torch.float32, True),
])  # fmt: skip
def test_moderate_integers_are_computed_by_any_operator(values, operator, count, dtype, expected):
    assert values.evaluator.is_within_budget(operator, [meta(count, dtype=dtype)]) is expected


def test_large_floats_and_bytes_are_deferred_and_integers_are_not(values):
    large, floats = (1 << 20) + 1, (1 << 12) + 1
    copy = aten._to_copy.default
    source = meta(floats, dtype=torch.float32)
    assert not values.evaluator.defer(aten.add.Tensor, (source, 1), {}, meta(floats, dtype=torch.float32))  # unknown
    values.store.set(source, torch.arange(float(floats)))
    assert values.evaluator.defer(aten.add.Tensor, (source, 1), {}, meta(floats, dtype=torch.float32))
    assert values.store.get_shadow(source).has_pending_readers
    assert not values.evaluator.defer(aten.add.Tensor, (source, 1), {}, meta(floats - 1, dtype=torch.float32))
    assert not values.evaluator.defer(aten.bernoulli.default, (source,), {}, meta(floats, dtype=torch.float32))
    assert not values.evaluator.defer(aten.linalg_det.default, (source,), {}, meta(floats, dtype=torch.float32))
    for dtype, deferred in ((torch.int8, True), (torch.uint8, True), (torch.int16, False), (torch.bool, False)):
        integers = meta(large, dtype=dtype)
        values.store.set(integers, torch.zeros(large, dtype=dtype).index_fill(0, torch.tensor(0), 1))
        assert values.evaluator.defer(copy, (integers,), {}, meta(large, dtype=dtype)) is deferred


def test_chains_of_deferred_operators_have_an_end(values):
    count = (1 << 12) + 1
    tensor, kept = meta(count, dtype=torch.float32), []
    values.store.set(tensor, torch.arange(float(count)))
    for step in range(1, 65):
        result = meta(count, dtype=torch.float32)
        assert values.evaluator.defer(aten.add.Tensor, (tensor, 1), {}, result)
        assert values.store.get_shadow(result).num_deferred_steps == step
        kept.append(tensor)
        tensor = result
    assert shadows.MAX_DEFERRED_STEPS == 64
    assert not values.evaluator.defer(aten.add.Tensor, (tensor, 1), {}, meta(count, dtype=torch.float32))
    assert values.store.get(tensor)[-1].item() == count - 1 + 64


@pytest.mark.parametrize(("elements", "threads"), [(1 << 20, [1, 7]), ((1 << 20) + 1, [7])])
def test_few_elements_are_visited_by_one_thread(monkeypatch, elements, threads):
    used = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    with pytest.raises(ValueError, match="x"), limit_threads(elements):
        raise ValueError("x")
    assert used == threads


def test_random_integers_are_the_same_in_every_run_and_floats_are_unknown(said):
    def draw(values):
        return [values.evaluator.compute(aten.randint.default, (1 << 30, [4]), {}).tolist() for _ in range(2)]

    state = torch.random.get_rng_state()
    first, second = (draw(Values(said.append)) for _ in range(2))
    assert first == second and first[0] != first[1]
    assert torch.equal(torch.random.get_rng_state(), state)
    given = {"generator": torch.Generator().manual_seed(7), "dtype": torch.int32}
    drawn = Values(said.append).evaluator.compute(aten.randint.generator, (1 << 30, [4]), given)
    assert drawn.dtype is torch.int32 and drawn.tolist() == first[0]
    values = Values(said.append)
    assert values.evaluator.compute(aten.rand.default, ([4],), {}) is None


def test_results_are_computed_on_the_cpu_wherever_they_are_wanted(values):
    found = values.evaluator.compute(aten.arange.default, (3,), {"device": torch.device("meta"), "pin_memory": True})
    assert found.device.type == "cpu" and found.tolist() == [0, 1, 2]
    assert values.evaluator.compute(aten.add.Tensor, (meta(3), 1), {}) is None  # not known
    tensor = meta(3)
    values.store.set(tensor, torch.arange(3))
    assert values.evaluator.compute(aten.cat.default, ([tensor, tensor],), {}).tolist() == [0, 1, 2, 0, 1, 2]
    assert (
        values.evaluator.compute(aten.add.Tensor, (tensor, torch.arange(5)), {}) is None
    )  # torch's own error comes later
    assert values.evaluator.are_known({"x": [(tensor, 5)]}) and not values.evaluator.are_known({"x": [(meta(3),)]})
    with pytest.raises(LookupError):
        values.evaluator.find_known_values([meta(3)])


@pytest.mark.parametrize(("operator", "is_kept"), [
    *((operator, True) for operator in (aten._to_copy.default, aten.clone.default, aten.ne.Scalar, aten.eq.Scalar,
                                        aten.gt.Scalar, aten.ge.Scalar)),
    (aten.lt.Scalar, False), (aten.mul.Tensor, False),
])  # fmt: skip
def test_a_mask_of_a_mask_has_its_share_of_ones(values, operator, is_kept):
    mask, other = meta(1 << 20, 32), meta(1 << 20, 32)
    values.store.set_density(mask, 0.25)
    values.policy.assume_results(operator, (mask,), {}, [other])
    assert values.store.get_density(other) == (0.25 if is_kept else None)


def test_moderate_work_of_any_operator_is_on_integers_and_on_few_floats(values):
    within, large = values.evaluator.is_within_budget, (1 << 20) + 1
    assert within(aten.histc.default, [meta(large), meta(1 << 12, dtype=torch.float32)])
    assert not within(aten.histc.default, [meta(large), meta((1 << 12) + 1, dtype=torch.float32)])
    assert within(aten.histc.default, [meta(1 << 24), meta(large)])
    assert not within(aten.histc.default, [meta((1 << 24) + 1), meta(1)])


def test_a_fill_takes_the_value_of_a_tensor(values):
    known, unknown = meta(), meta()
    values.store.set(known, torch.tensor(5))
    for given, expected in ((known, 5), (unknown, None), (7, 7)):
        output = meta(3)
        values.propagate(aten.fill.Tensor, (meta(3), given), {}, [output])
        found = values.store.get_uniform_value(output)
        assert (None if found is None else found.item()) == expected


def test_triangles_of_another_value_are_other_ones(values):
    for value in (1, 2):
        square, output = meta(4, 4), meta(4, 4)
        values.store.set_uniform(square, value)
        values.propagate(aten.tril.default, (square,), {}, [output])
        assert values.store.get(output).sum().item() == 10 * value


def test_a_sum_of_equal_floats_is_computed(values):
    halves, output = meta(5000, dtype=torch.float32), meta(dtype=torch.float32)
    values.store.set_uniform(halves, 0.5)
    values.propagate(aten.sum.default, (halves,), {}, [output])
    assert values.store.get(output).item() == 2500


def test_an_inner_product_of_unknown_vectors_is_unknown(values):
    output = meta(dtype=torch.float32)
    vectors = [meta(8, dtype=torch.float32) for _ in range(2)]
    values.propagate(aten.dot.default, vectors, {}, [output])
    assert values.store.get(output) is None
    values.inner_products_are_one = True
    values.propagate(aten.dot.default, vectors, {}, [output])
    assert values.store.get(output).item() == 1
