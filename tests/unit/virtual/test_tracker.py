"""What the trace says: births, deaths, and where in the program they happen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.device.catalog import find_gpu
from memprof.trace.events import NONE, EventKind, ModuleRole, PhaseKind, Role, Storage
from memprof.virtual import VirtualGpu

KIB = 1024


class Watch:
    """The births and deaths since it was made."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.trace = gpu.trace
        self.begin = len(self.trace.events)

    def events(self, kind: EventKind) -> list[int]:
        return [event.ref for event in self.trace.events[self.begin :] if event.kind is kind]

    @property
    def born(self) -> list[Storage]:
        return [self.trace.storages[index] for index in self.events(EventKind.ALLOC)]

    @property
    def ops(self) -> list[str]:
        return [self.trace.op(storage) for storage in self.born]

    @property
    def sizes(self) -> list[int]:
        return [storage.num_bytes for storage in self.born]

    @property
    def dead(self) -> list[int]:
        return self.events(EventKind.FREE)


def ones(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **kwargs)


# -- births -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.int64, 8), (torch.int8, 1), (torch.bool, 1)],
)
def test_bytes_shape_and_dtype(gpu: VirtualGpu, dtype: torch.dtype, size: int) -> None:
    watch = Watch(gpu)
    tensor = torch.empty(3, 5, dtype=dtype, device="cuda")
    (storage,) = watch.born
    assert storage.num_bytes == 15 * size == tensor.untyped_storage().nbytes()
    assert storage.shape == (3, 5)
    assert storage.dtype == str(dtype).removeprefix("torch.")
    assert watch.ops == ["aten.empty"] and storage.device == "cuda:0" and not storage.hidden


def test_a_default_dtype_that_changes_is_seen(gpu: VirtualGpu) -> None:
    """Layouts are remembered, and not those of another default: a bfloat16 model after one in float32."""

    def dtypes() -> list[torch.dtype]:
        with torch.device("cuda"):
            made = nn.Embedding(3, 4).weight, torch.arange(3) / 2, torch.full((3,), 1.0)
        return [tensor.dtype for tensor in made]

    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            assert dtypes() == [dtype] * 3
    finally:
        torch.set_default_dtype(torch.float32)


def test_padded_strides_count(gpu: VirtualGpu) -> None:
    watch = Watch(gpu)
    tensor = torch.empty_strided((2, 3), (16, 1), device="cuda")
    assert watch.sizes == [(16 + 3) * 4] == [tensor.untyped_storage().nbytes()]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.view(-1),
        lambda t: t.reshape(2, -1),
        lambda t: t[1:, ::2],
        lambda t: t.t(),
        lambda t: t.transpose(0, 1).permute(1, 0),
        lambda t: t.unsqueeze(0).expand(5, -1, -1),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.chunk(2),
        lambda t: t.split([3, 5]),
        lambda t: t.unbind(),
        lambda t: t.contiguous(),
        lambda t: t.to("cuda"),
        lambda t: t.float(),
        lambda t: t.as_strided((2,), (1,)),
        lambda t: t.view(torch.int32),
        lambda t: t.flatten(),
        lambda t: t.diagonal(),
        lambda t: t.unfold(0, 2, 1),
        lambda t: nn.functional.dropout(t, 0.0),
    ],
)
def test_views_allocate_nothing(gpu: VirtualGpu, view: Callable[[torch.Tensor], Any]) -> None:
    tensor = ones(8, 8)
    watch = Watch(gpu)
    kept = view(tensor)
    assert watch.born == []
    del tensor
    assert watch.dead == [], "a view keeps the storage live"
    del kept
    assert len(watch.dead) == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.mul_(t),
        lambda t: t.zero_(),
        lambda t: t[1:].fill_(3),
        lambda t: t.copy_(t),
        lambda t: t.__setitem__(0, t[1]),
        lambda t: nn.functional.relu(t, inplace=True),
        lambda t: nn.init.normal_(t),
        lambda t: t.clamp_(0, 1).sqrt_(),
        lambda t: torch._foreach_add_([t], 1.0),
        lambda t: torch.add(t, 1, out=t),
    ],
)
def test_writing_in_place_allocates_nothing(gpu: VirtualGpu, write: Callable[[torch.Tensor], Any]) -> None:
    tensor = ones(8, 8)
    watch = Watch(gpu)
    write(tensor)
    assert watch.born == [] and watch.dead == []


def test_out_grows_an_empty_tensor(gpu: VirtualGpu) -> None:
    tensor, out = ones(8, 8), torch.empty(0, device="cuda")
    watch = Watch(gpu)
    torch.add(tensor, 1, out=out)
    assert watch.sizes == [256] and watch.dead == []
    del out
    assert len(watch.dead) == 1


def test_out_is_written_each_time(gpu: VirtualGpu) -> None:
    for first in (1, 5):
        numbers, out = torch.tensor([first, first + 1], device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        watch = Watch(gpu)
        assert torch.add(numbers, 1, out=out) is out
        assert watch.born == [] and out.tolist() == [first + 1, first + 2]
        grown = torch.empty(0, dtype=torch.int64, device="cuda")
        assert torch.add(numbers, 1, out=grown) is grown
        assert watch.sizes == [16] and grown.tolist() == out.tolist()


def test_resize_gives_back_and_takes(gpu: VirtualGpu) -> None:
    tensor = ones(8)
    first = len(gpu.trace.storages) - 1
    watch = Watch(gpu)
    tensor.resize_(64)
    assert watch.sizes == [256] and watch.dead == [first]
    assert torch.cuda.memory_allocated() == 256
    tensor.untyped_storage().resize_(0)
    del tensor
    assert torch.cuda.memory_allocated() == 0


def test_set_shares_a_storage(gpu: VirtualGpu) -> None:
    source, target = ones(8), ones(8)
    watch = Watch(gpu)
    target.set_(source)
    assert watch.born == [] and len(watch.dead) == 1
    del source
    assert len(watch.dead) == 1


def test_empty_tensors_take_nothing(gpu: VirtualGpu) -> None:
    watch = Watch(gpu)
    tensor = torch.empty(0, 4, device="cuda")
    joined = torch.cat([tensor, ones(2, 4)])
    assert watch.sizes == [32, 32]
    assert tensor.is_cuda and joined.shape == (2, 4) and (tensor + 1).is_cuda


def test_operators_with_several_outputs(gpu: VirtualGpu) -> None:
    states = ones(4, 8)
    watch = Watch(gpu)
    values, indices = states.topk(2)
    assert watch.sizes == [4 * 2 * 4, 4 * 2 * 8]
    assert values.is_cuda and indices.is_cuda


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_del_and_overwriting(gpu: VirtualGpu) -> None:
    watch = Watch(gpu)
    tensor = ones(8)
    tensor = tensor * 2
    kinds = [event.kind for event in gpu.trace.events[watch.begin :]]
    assert kinds == [EventKind.ALLOC, EventKind.ALLOC, EventKind.FREE], "the old value dies after the new one is made"
    del tensor
    assert len(watch.dead) == 2


def test_temporaries_of_an_expression(gpu: VirtualGpu) -> None:
    tensor = ones(8)
    watch = Watch(gpu)
    result = (tensor + 1) * 2 - 3
    kinds = "".join(event.kind.name[0] for event in gpu.trace.events[watch.begin :])
    assert kinds == "AAFAF"
    assert result.is_cuda


def test_containers_keep_tensors_alive(gpu: VirtualGpu) -> None:
    watch = Watch(gpu)
    kept: dict[str, list[torch.Tensor]] = {"a": [ones(8)]}
    assert watch.dead == []
    kept["a"].clear()
    assert len(watch.dead) == 1


def test_a_function_frees_its_locals_on_return(gpu: VirtualGpu) -> None:
    def function() -> torch.Tensor:
        first = ones(8)
        second = first + 1
        return second * 2

    watch = Watch(gpu)
    result = function()
    assert len(watch.born) == 3 and len(watch.dead) == 2
    assert result.is_cuda


def test_saved_tensors_live_until_the_backward(gpu: VirtualGpu) -> None:
    leaf = ones(8, requires_grad=True)
    watch = Watch(gpu)
    loss = leaf.exp().sin().sum()
    exp, sin, total = watch.events(EventKind.ALLOC)
    assert watch.dead == [sin], "exp saves its result, sin its input; nothing saves the result of sin"
    loss.backward()
    assert exp in watch.dead and total not in watch.dead
    assert leaf.grad is not None
    assert torch.cuda.memory_allocated() == 4 + 2 * 32


def test_without_grad_nothing_is_saved(gpu: VirtualGpu) -> None:
    leaf = ones(8, requires_grad=True)
    watch = Watch(gpu)
    with torch.no_grad():
        loss = leaf.exp().sin().sum()
    assert len(watch.born) == 3 and len(watch.dead) == 2
    assert not loss.requires_grad


def test_the_graph_dies_with_its_loss(gpu: VirtualGpu) -> None:
    leaf = ones(8, requires_grad=True)
    watch = Watch(gpu)
    loss = leaf.exp().sin().sum()
    del loss
    assert sorted(watch.dead) == watch.events(EventKind.ALLOC)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes(gpu: VirtualGpu, reentrant: bool) -> None:
    layer = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False)).to("cuda")
    inputs = ones(4, 16, requires_grad=True)
    watch = Watch(gpu)
    output = checkpoint(layer, inputs, use_reentrant=reentrant)
    inner = 4 * 64 * 4
    forward = watch.events(EventKind.ALLOC)
    assert [gpu.trace.storages[i].num_bytes for i in forward].count(inner) == 2
    assert sum(gpu.trace.storages[i].num_bytes == inner for i in set(forward) - set(watch.dead)) == 0
    backward = Watch(gpu)
    output.sum().backward()
    recomputed = [s for s in backward.born if s.num_bytes == inner and s.forward_event == NONE]
    assert [gpu.trace.op(storage) for storage in recomputed] == ["aten.mm", "aten.gelu"]
    assert [gpu.trace.module_path(storage) for storage in recomputed] == ["0", "1"]
    assert all(gpu.trace.phases[storage.phase].kind is PhaseKind.BACKWARD for storage in recomputed)
    del output
    kept = sum(p.numel() for p in layer.parameters()) * 4 * 2 + 2 * 4 * 16 * 4
    assert torch.cuda.memory_allocated() == kept, "parameters, input and their gradients"


# -- gradients --------------------------------------------------------------------------------------------------------


def test_second_backward_adds_in_place(gpu: VirtualGpu) -> None:
    layer = nn.Linear(16, 16, bias=False, device="cuda")
    inputs = ones(4, 16)
    layer(inputs).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    before = torch.cuda.memory_allocated()
    watch = Watch(gpu)
    layer(inputs).sum().backward()
    assert layer.weight.grad is gradient
    assert torch.cuda.memory_allocated() == before
    assert "aten.add" not in watch.ops and watch.sizes.count(1024) == 1


def test_zero_grad_frees_the_gradient(gpu: VirtualGpu) -> None:
    layer = nn.Linear(16, 16, bias=False, device="cuda")
    layer(ones(4, 16)).sum().backward()
    watch = Watch(gpu)
    layer.zero_grad()
    assert len(watch.dead) == 1


FAN_INS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "two of its own": (lambda x: (x.sin() * x.cos()).sum(), 0),
    "three of its own": (lambda x: (x.sin() * x.cos() + x.exp()).sum(), 0),
    "residual": (lambda x: (lambda h: (h + h.sin()).sin().sum())(x * 1), 0),
    "the first one is shared": (lambda x: (lambda h: (h + h).sum())(x * 1), 1),
}


def allocations_on_cpu(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Out-of-place additions that the engine makes on a run without modes, counted by torch's profiler."""
    leaf = torch.ones(KIB, requires_grad=True)
    loss = function(leaf)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        loss.backward()
    return sum(event.count for event in recorded.key_averages() if event.key == "aten::add")


@pytest.mark.parametrize("name", FAN_INS)
def test_the_engine_adds_up_as_without_a_mode(name: str) -> None:
    function, expected = FAN_INS[name]
    assert allocations_on_cpu(function) == expected, "the expectation itself"
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
        leaf = ones(KIB, requires_grad=True)
        loss = function(leaf)
        watch = Watch(gpu)
        loss.backward()
        assert watch.ops.count("aten.add") == expected


def test_an_addition_of_the_program_in_a_hook_allocates(gpu: VirtualGpu) -> None:
    leaf = ones(KIB, requires_grad=True)
    hidden = leaf.sin()
    hidden.register_hook(lambda gradient: gradient + gradient)
    loss = hidden.sum()
    watch = Watch(gpu)
    loss.backward()
    assert watch.ops.count("aten.add") == 1


# -- places -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(self.norm(states)))
        return states + self.down(inner)


TANH_LINE = inspect.getsourcelines(Block.forward)[1] + 1


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        for block in self.blocks:
            states = block(states)
        return self.head(self.norm(states))


def test_module_source_and_phase(gpu: VirtualGpu) -> None:
    network = Network().to("cuda")
    with gpu.phase(PhaseKind.FORWARD, 3, 2):
        output = network(torch.arange(4, device="cuda"))
    trace = gpu.trace
    (tanh,) = [s for s in trace.storages if trace.op(s) == "aten.tanh" and trace.module_path(s) == "blocks.1"]
    assert trace.source_line(tanh) == f"{__file__}:{TANH_LINE} forward"
    assert trace.phases[tanh.phase] == (PhaseKind.FORWARD, 3, 2)
    assert trace.modules[tanh.module].class_name == "Block"
    (up,) = [s for s in trace.storages if trace.op(s) == "aten.addmm" and trace.module_path(s) == "blocks.2.up"]
    assert trace.source_line(up) == f"{__file__}:{TANH_LINE} forward", "the innermost line outside torch"
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    outside = output * 2
    assert trace.module_path(trace.storages[-1]) is None and outside.is_cuda
    assert trace.source_line(trace.storages[-1]) == f"{__file__}:{line} test_module_source_and_phase"


def test_roles_of_modules(gpu: VirtualGpu) -> None:
    network = Network().to("cuda")
    network(torch.arange(4, device="cuda"))
    roles = {module.path: module.role for module in gpu.trace.modules}
    assert roles[""] is ModuleRole.ROOT
    assert roles["embedding"] is ModuleRole.EMBEDDING
    assert [roles[f"blocks.{index}"] for index in range(3)] == [ModuleRole.LAYER] * 3
    assert roles["blocks.0.norm"] is ModuleRole.NORM and roles["norm"] is ModuleRole.NORM
    assert roles["head"] is ModuleRole.HEAD
    assert {module.stack for module in gpu.trace.modules if module.role is ModuleRole.LAYER} == {"blocks"}


def test_enters_and_exits_nest_even_when_forward_raises(gpu: VirtualGpu) -> None:
    class Raising(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        nn.Sequential(nn.Linear(4, 4, device="cuda"), Raising())(ones(1, 4))
    stack: list[int] = []
    for event in gpu.trace.events:
        if event.kind is EventKind.ENTER:
            stack.append(event.ref)
        elif event.kind is EventKind.EXIT:
            assert stack.pop() == event.ref
    assert stack == [] and gpu.modules.current_index == NONE


def test_backward_belongs_to_the_forward_module(gpu: VirtualGpu) -> None:
    network = Network().to("cuda")
    loss = network(torch.arange(4, device="cuda")).sum()
    begin = len(gpu.trace.events)
    watch = Watch(gpu)
    loss.backward()
    trace = gpu.trace
    (first, second, third) = [s for s in watch.born if trace.op(s) == "aten.tanh_backward"]
    assert [trace.module_path(s) for s in (first, second, third)] == ["blocks.2", "blocks.1", "blocks.0"]
    assert trace.source_line(first) == f"{__file__}:{TANH_LINE} forward"
    assert third.forward_event < second.forward_event < first.forward_event < begin
    weights = [s for s in watch.born if trace.op(s) == "aten.mm" and s.shape == (32, 16)]
    assert {trace.module_path(s) for s in weights} == {f"blocks.{i}.up" for i in range(3)}
    heads = [s for s in watch.born if trace.op(s) == "aten.mm" and 50 in s.shape]
    assert {trace.module_path(s) for s in heads} == {"head"}
    (embedding,) = [s for s in watch.born if trace.op(s) == "aten.embedding_dense_backward"]
    assert trace.module_path(embedding) == "embedding"
    # The root gradient is made by torch.autograd.backward, before the engine begins.
    assert all(trace.phases[s.phase].kind is PhaseKind.BACKWARD for s in watch.born if trace.op(s) != "aten.ones_like")


def test_roles_of_storages(gpu: VirtualGpu) -> None:
    network = Network().to("cuda")
    network.register_buffer("scale", ones(16))
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    network(torch.arange(4, device="cuda")).sum().backward()
    optimizer.step()
    names: dict[Role, set[str]] = {}
    for owner in gpu.trace.owners.values():
        names.setdefault(owner.role, set()).add(owner.name)
    expected = {name for name, _ in network.named_parameters()}
    assert names[Role.PARAMETER] == expected and names[Role.GRADIENT] == expected
    assert names[Role.OPTIMIZER_STATE] == {"exp_avg", "exp_avg_sq"}
    assert names[Role.BUFFER] == {"scale"}


def test_guessed_phases(gpu: VirtualGpu) -> None:
    network = Network().to("cuda")
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    loss = network(torch.arange(4, device="cuda")).sum()
    watch = Watch(gpu)
    loss.backward(torch.ones_like(loss))
    assert {gpu.trace.phases[s.phase].kind for s in watch.born[1:]} == {PhaseKind.BACKWARD}
    watch = Watch(gpu)
    optimizer.step()
    assert {gpu.trace.phases[s.phase].kind for s in watch.born} == {PhaseKind.OPTIMIZER_STEP}
    watch = Watch(gpu)
    kept = ones(4)
    assert {gpu.trace.phases[s.phase].kind for s in watch.born} == {PhaseKind.OTHER} and kept.is_cuda


def test_every_storage_is_born_once_and_dies_at_most_once(gpu: VirtualGpu) -> None:
    network = Network().to("cuda")
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    for _ in range(2):
        network(torch.arange(4, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    born: set[int] = set()
    dead: set[int] = set()
    for event in gpu.trace.events:
        if event.kind is EventKind.ALLOC:
            assert event.ref not in born
            born.add(event.ref)
        elif event.kind is EventKind.FREE:
            assert event.ref in born and event.ref not in dead
            dead.add(event.ref)
    assert born == set(range(len(gpu.trace.storages)))
    alive = sum(gpu.trace.storages[index].num_bytes for index in born - dead)
    assert alive == torch.cuda.memory_allocated() == 3 * sum(p.numel() * 4 for p in network.parameters())


def test_what_dies_after_the_run_is_not_recorded() -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        kept = ones(8)
    count = len(gpu.trace.events)
    del kept
    assert len(gpu.trace.events) == count
