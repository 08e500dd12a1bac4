"""The store of known values: what it keeps of a storage, within which limits, and when it forgets."""

from __future__ import annotations

import pytest
import torch

from memprof.virtual.values import budget
from memprof.virtual.values.shadows import DeferredTensor, Shadow, TensorLayout, make_zeros
from memprof.virtual.values.store import ChosenTokens, ValueStore

aten = torch.ops.aten


def meta(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype, device="meta")


def address(tensor):
    return tensor.untyped_storage()._cdata


def test_values_are_all_elements_one_value_or_a_density():
    store, elements, one, density, unknown = ValueStore(), meta(4), meta(4), meta(4, dtype=torch.bool), meta(4)
    store.set(elements, torch.arange(4))
    store.set_uniform(one, 7)
    store.set_density(density, 0.25)
    tensors = [elements, one, density, unknown]
    assert [store.is_known(address(tensor)) for tensor in tensors] == [True, True, True, False]
    assert [store.can_read(tensor) for tensor in tensors] == [True, True, False, False]
    assert [store.is_uniform(tensor) for tensor in tensors] == [False, True, False, False]
    assert [store.get_density(tensor) for tensor in tensors] == [None, None, 0.25, None]
    assert store.get(elements).tolist() == [0, 1, 2, 3] and store.get(one).tolist() == [7] * 4
    assert store.get(density) is None and store.get(unknown) is None
    assert [store.get_uniform_value(tensor) for tensor in (elements, unknown)] == [None, None]
    assert store.get_uniform_value(one).item() == 7
    for tensor in tensors:
        store.drop(address(tensor))
    assert not any(store.is_known(address(tensor)) for tensor in tensors)
    assert store._shadow_bytes == 0


def test_what_is_no_meta_tensor_or_empty_is_known():
    store, real = ValueStore(), torch.arange(3)
    assert store.can_read(5) and store.can_read(real) and store.can_read(meta(0))
    assert store.get(real) is real
    assert store.get(meta(0, 3)).shape == (0, 3) and store.get(meta(0)).dtype is torch.int64
    assert store.get_uniform_value(real) is None and store.get_uniform_value(torch.tensor([5])).item() == 5
    store.set(meta(0), torch.empty(0, dtype=torch.int64))
    store.set_uniform(meta(0), 1)
    assert not store._shadows and not store._uniform


def test_equal_elements_take_no_memory():
    store, first, second, third = ValueStore(), meta(4), meta(2, 3), meta(1)
    store.set(first, torch.tensor(5).expand(4))
    store.set(second, torch.tensor([[5]]).expand(2, 3))
    store.set(third, torch.tensor([5]))
    assert all(store.is_uniform(tensor) for tensor in (first, second, third)) and store._shadow_bytes == 0
    rows = meta(2, 3)
    store.set(rows, torch.arange(3).expand(2, 3))
    assert not store.is_uniform(rows) and store.get(rows).tolist() == [[0, 1, 2]] * 2
    assert store._shadow_bytes == 48


def test_one_element_of_a_shadow_is_a_value():
    store, tensor = ValueStore(), meta(4)
    store.set(tensor, torch.arange(4))
    assert store.get_uniform_value(tensor[2:3]).item() == 2
    assert store.get_uniform_value(tensor[2:4]) is None


def test_a_view_of_another_dtype_is_read_from_the_elements():
    store, tensor = ValueStore(), meta(2)
    store.set_uniform(tensor, 1 << 32)
    view = tensor.view(torch.int32)
    assert store.get_uniform_value(view) is None
    assert store.get(view).tolist() == [0, 1, 0, 1]


def test_shadows_have_limits(monkeypatch):
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 16 << 20)
    monkeypatch.setattr(budget, "MAX_SHADOW_BYTES", 24 << 20)
    store = ValueStore()
    assert store.is_trackable(meta(2 << 20)) and not store.is_trackable(meta((2 << 20) + 1))
    kept = meta(1 << 20)  # 8 MiB
    store.set(kept, torch.arange(1 << 20))
    assert store.is_trackable(meta(2 << 20))
    more = meta(1)
    store.set_elements(more.untyped_storage(), torch.zeros(1, dtype=torch.int64))
    assert not store.is_trackable(meta(2 << 20)) and store.is_trackable(meta(1 << 20))
    store.drop(address(more))
    assert store.is_trackable(meta(2 << 20))


def test_large_zeros_are_read_and_other_large_values_are_not(monkeypatch):
    monkeypatch.setattr(budget, "MAX_TENSOR_BYTES", 32)
    store = ValueStore()
    for count, value, known in ((4, 1, True), (5, 1, False), (5, 0, True)):
        tensor = meta(count)
        store.set_uniform(tensor, value)
        found = store.read_elements(tensor.untyped_storage())
        assert (found is None) is not known
        assert found is None or found.tolist() == [value] * count


def test_deferred_elements_take_memory_from_their_first_read_on():
    store, tensor, calls = ValueStore(), meta(4), []

    def compute():
        calls.append(1)
        return torch.arange(4)

    shadow = store.set_elements(tensor.untyped_storage(), None, compute)
    shadow.num_deferred_steps = 3
    assert (shadow.num_bytes, store._shadow_bytes, calls) == (0, 0, [])
    assert [store.get(tensor).tolist() for _ in range(2)] == [[0, 1, 2, 3]] * 2
    assert (shadow.num_bytes, store._shadow_bytes, calls, shadow.num_deferred_steps) == (32, 32, [1], 0)
    unknown = store.set_elements(meta(2).untyped_storage(), None, lambda: None)
    assert unknown.read() is None and DeferredTensor(unknown, TensorLayout.from_tensor(meta(2))).read() is None


def test_writes_do_not_change_what_deferred_operators_read():
    store, tensor = ValueStore(), meta(4)
    store.set(tensor, torch.arange(4))
    shadow = store.get_shadow(tensor)
    assert store.make_writable(tensor.untyped_storage()) is shadow.read()
    shadow.has_pending_readers = True
    written = store.get_writable(tensor[1:3])
    written.fill_(9)
    assert store.get(tensor).tolist() == [0, 9, 9, 3] and shadow.read().tolist() == [0, 1, 2, 3]
    assert store._shadow_bytes == 32 and not store.get_shadow(tensor).has_pending_readers
    assert store.get_writable(meta(3)) is None


def test_one_value_is_copied_and_becomes_elements():
    store, tensor, value = ValueStore(), meta(4), torch.tensor(3)
    store.set_uniform(tensor, value)
    value.fill_(8)
    store.materialize(tensor.untyped_storage())
    assert not store.is_uniform(tensor) and store.get(tensor).tolist() == [3] * 4
    assert store._shadow_bytes == 32
    zeros = meta(4)
    store.set_uniform(zeros, 0)
    store.materialize(zeros.untyped_storage())
    assert store.get(zeros).tolist() == [0] * 4


@pytest.mark.parametrize("count", [8191, 8192, 100_000])
def test_zeros_are_zeros_in_pages_too(count):
    zeros = make_zeros(count, torch.int64)
    assert zeros.shape == (count,) and zeros.dtype is torch.int64 and not zeros.any()
    zeros[-1] = 5
    assert int(zeros.sum()) == 5


def test_layouts_say_where_a_tensor_lies_in_its_storage():
    tensor = meta(4, 6)[1:, ::2]
    layout = TensorLayout.from_tensor(tensor)
    assert layout == (24, torch.int64, (3, 3), (6, 2), 6)
    assert layout.view_elements(torch.arange(24)).tolist() == [[6, 8, 10], [12, 14, 16], [18, 20, 22]]
    expanded = TensorLayout.from_tensor(meta(3, 1).expand(3, 4))
    assert expanded.fill_storage(torch.arange(3)[:, None].expand(3, 4)).tolist() == [0, 1, 2]
    transposed = TensorLayout.from_tensor(meta(2, 3).t())
    assert transposed.fill_storage(torch.tensor([[0, 1], [2, 3], [4, 5]])).tolist() == [0, 2, 4, 1, 3, 5]
    assert Shadow(5, torch.arange(2)).read().tolist() == [0, 1]


def test_chosen_tokens_follow_integers_and_equal_no_other_token():
    tokens, chosen, other, flag = ChosenTokens(), meta(3), meta(3), meta(3, dtype=torch.bool)
    assert tokens.find_placeholders([chosen]) == range(0)
    tokens.mark_placeholders(other, range(0))
    assert not tokens._placeholders
    tokens.mark_placeholders(chosen, range(10, 13))
    result, real = meta(3), meta(3, dtype=torch.float32)
    tokens.propagate(aten.add.Tensor, (chosen, 1), {}, [result, flag, real])
    assert [bool(tokens.find_placeholders([each])) for each in (result, flag, real)] == [True, False, False]
    tokens.mark_placeholders(other, range(20, 25))
    assert tokens.find_placeholders([chosen, other]) == range(10, 25)
    named = meta(3)
    tokens.propagate(aten.where.self, (), {"x": chosen}, [named])
    assert tokens.find_placeholders([named]) == range(10, 13)
    # What is filled is filled with its argument.
    filled = meta(3)
    tokens.propagate(aten.full_like.default, (chosen, 5), {}, [filled])
    assert not tokens.find_placeholders([filled])
    tokens.drop(address(chosen))
    assert not tokens.find_placeholders([chosen])


def test_comparisons_of_chosen_tokens_with_named_ones_are_false():
    tokens, chosen = ChosenTokens(), meta(4)
    values, named = torch.tensor([9, 10, 12, 13]), torch.tensor([9, 10, 12, 13])
    equal, unequal = values == named, values != named
    assert tokens.mask_comparison(aten.eq.Tensor, (chosen, named), (values, named), equal) is equal
    tokens.mark_placeholders(chosen, range(10, 13))

    def masked(call, args, result):
        return tokens.mask_comparison(call, args, (values, named), result).tolist()

    assert masked(aten.eq.Tensor, (chosen, named), equal) == [True, False, False, True]
    assert masked(aten.eq.Tensor, (named, chosen), equal) == [True, False, False, True]
    shuffled = values, torch.tensor([10, 12, 9, 13])
    found = tokens.mask_comparison(aten.isin.Tensor_Tensor, (chosen, named), shuffled, torch.isin(*shuffled))
    assert found.tolist() == [True, False, False, True]
    assert masked(aten.ne.Tensor, (chosen, named), unequal) == [False, True, True, False]
    assert masked(aten.eq.Tensor, (chosen, chosen), equal) == [True] * 4
    assert masked(aten.ge.Tensor, (chosen, named), equal) == [True] * 4
    assert masked(aten.eq.Tensor, (named, named), equal) == [True] * 4
