"""Which operator or kernel used a storage last, as the number of events before it."""

from __future__ import annotations

import contextlib
import gc
import linecache
from pathlib import Path

import pytest
import torch
from torch import nn

import memprof
from memprof.trace.events import AUTOCAST_KIND, NONE, PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.function_mode import FunctionMode
from memprof.watch import holders, idle
from memprof.watch.collection import disable_garbage_collection
from memprof.watch.cycles import find_cycle
from tests.lanes import by_day
from tests.unit.virtual.test_refusals import MIB, small_gpu, take

pytestmark = pytest.mark.usefixtures("small_heap")

ELEMENTS = 1 << 20


def last_use(gpu: VirtualGpu, tensor: torch.Tensor) -> int:
    return gpu.trace.last_uses[gpu.recorder.storages.get_index(tensor)]


def test_operators_that_read_or_write_use_and_views_do_not(gpu: VirtualGpu) -> None:
    read, written, unused = (torch.empty(ELEMENTS, device="cuda") for _ in range(3))
    assert [last_use(gpu, one) for one in (read, written, unused)] == [NONE] * 3
    total = read + 1  # its own result is allocated within the use
    assert last_use(gpu, read) == gpu.num_events and last_use(gpu, total) == NONE
    before = gpu.num_events
    written.zero_()
    assert last_use(gpu, written) == before
    torch.empty(ELEMENTS, device="cuda")
    view = read.view(2, -1)[0]
    assert last_use(gpu, read) < gpu.num_events
    kept = view.sum()
    assert kept is not None and last_use(gpu, read) == gpu.num_events
    assert last_use(gpu, unused) == NONE


def test_a_backward_uses_what_its_forward_saved(gpu: VirtualGpu) -> None:
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    data = torch.ones(64, 64, device="cuda")
    loss = (data @ weight).sum()
    between = gpu.num_events
    loss.backward()
    assert last_use(gpu, data) >= between


def test_reading_a_value_is_a_use(gpu: VirtualGpu) -> None:
    value = torch.ones((), device="cuda")
    before = gpu.num_events
    assert value.item() == 1
    assert last_use(gpu, value) == before


def test_a_stubs_kernel_uses_its_inputs_and_what_it_saved() -> None:
    def forward(x, weight):
        return torch.empty_like(x), (weight,)

    def backward(saved, gradient):
        return torch.empty_like(gradient), torch.empty_like(saved[0])

    with memprof.virtual_gpu("a100-80gb") as gpu:
        x = torch.ones(64, 32, device="cuda", requires_grad=True)
        weight = torch.ones(32, device="cuda", requires_grad=True)
        out = memprof.kernel(forward, backward, x, weight)
        events = len(gpu.trace.events)
        assert gpu.trace.last_uses[:2] == [events, events]
        events = len(gpu.trace.events)
        out.backward(torch.ones_like(out))
        assert gpu.trace.last_uses[1] >= events


def test_storages_may_be_freed_while_they_are_looked_at(gpu: VirtualGpu) -> None:
    """As by the garbage collector, which may run in any loop."""
    kept = [torch.ones(ELEMENTS, device="cuda").add_(1) for _ in range(3)]
    for index in gpu.recorder.storages.iterate_unused_since(gpu.num_events):
        kept.clear()
        assert not gpu.recorder.storages.is_live(index)


@pytest.mark.parametrize("num_steps", [3])
def test_what_a_step_keeps_is_named_by_the_variable(num_steps: int) -> None:
    """As in a loop whose last output is still bound when the next is computed."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(64, 65536).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(num_steps):
            out = model(torch.randn(1024, 64, device="cuda"))
            loss = torch.nn.functional.cross_entropy(out, torch.zeros(1024, dtype=torch.long, device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (holder,) = gpu.trace.idle_holders
    assert (holder.name, holder.kind, len(holder.storages)) == ("out", "", 1)
    file, _, line = (holder.source or "").partition(" ")[0].rpartition(":")
    assert linecache.getline(file, int(line)).strip().startswith("out = model(")


def test_what_was_given_to_a_model_is_named_by_the_attribute() -> None:
    class Decoder(torch.nn.Linear):
        def generate(self) -> None:
            self.cache = torch.zeros(1 << 16, 64, device="cuda")
            self(self.cache)

    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = Decoder(64, 64).cuda()
        model.generate()
        for _ in range(2):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
    (holder,) = gpu.trace.idle_holders
    assert (holder.name, len(holder.storages)) == ("Decoder.cache", 1)


def test_each_variable_is_asked_whether_it_is_read_later() -> None:
    """Both are made on one line; the program reads the first after its loop."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        first, second = (torch.ones(1 << 16, 64, device="cuda") for _ in range(2))
        (first + second).sum()
        for _ in range(3):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
        first.sum()
    found = {holder.name: holder.is_read_later for holder in gpu.trace.idle_holders}
    assert found == {"first": True, "second": False}


def test_what_is_idle_is_recorded_until_it_is_used() -> None:
    """Both copies are idle when the first backward begins; one is used before the third."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        used, unused = (torch.ones(1 << 16, 64, device="cuda") for _ in range(2))
        (used + unused).sum()
        for step in range(4):
            if step == 2:
                used.sum()
            model(torch.ones(4, 64, device="cuda")).sum().backward()
        begins = [time for time, phase in gpu.trace.list_phase_begins() if phase.kind is PhaseKind.BACKWARD]
        until = {holder.name: holder.unused_until for holder in gpu.trace.idle_holders}
    assert until == {"used": begins[1] + 1, "unused": begins[3] + 1}


def test_a_list_is_not_read_later_by_what_fills_it() -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        batches = []
        for _ in range(4):
            batches.append(torch.ones(1 << 16, 64, device="cuda").add_(1))
            model(torch.ones(4, 64, device="cuda")).sum().backward()
    assert {(holder.name, holder.is_read_later) for holder in gpu.trace.idle_holders} == {("batches", False)}


class Ring:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.ring = tensor, self


@pytest.mark.nightly
@pytest.mark.parametrize("is_kept", by_day([False, True], True))
def test_what_a_dropped_cycle_has_is_garbage_unless_another_tensor_of_it_is_kept(*, is_kept: bool) -> None:
    """As a view in a dropped cycle, of a tensor that a variable has too."""
    with memprof.virtual_gpu("h100-80gb") as gpu, disable_garbage_collection():
        model = torch.nn.Linear(64, 64).cuda()
        tensor = torch.ones(1 << 16, 64, device="cuda").add_(1)
        Ring(tensor.view(-1))
        if not is_kept:
            del tensor
        for _ in range(3):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
    (holder,) = gpu.trace.idle_holders
    assert holder.name == ("tensor" if is_kept else "Ring.ring -> Ring.ring")


def test_a_cycle_of_memprofs_own_objects_is_none_of_the_program(gpu: VirtualGpu) -> None:
    """The operator that runs out of memory is on the way, and refers to all of the virtual GPU."""
    assert find_cycle([torch.ones(4, device="cuda")], []) is None
    mode = next(one for one in gc.get_objects() if type(one) is FunctionMode)
    tensor = torch.ones(4, device="cuda")
    kept = [tensor]
    mode.kept = kept
    try:
        assert find_cycle([tensor], []) is None
    finally:
        del mode.kept


class Session:
    """A cycle: its schedule is a function that refers to it."""

    def __init__(self) -> None:
        self.state = torch.ones(1 << 16, 64, device="cuda")
        self.schedule = lambda: self


@pytest.mark.nightly
def test_what_the_program_has_dropped_is_named_by_its_cycle() -> None:
    """The search allocates many objects: it must not run the collector, which would free what it is about."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(64, 64).cuda()
        for _ in range(3):
            session = Session()
            (model(torch.ones(4, 64, device="cuda")).sum() + session.state.sum()).backward()
    (holder,) = (one for one in gpu.trace.idle_holders if one.is_cycle)
    assert holder.name == "Session.__init__.<locals>.<lambda>" and len(holder.storages) == 1
    assert not set(holder.storages) & {gpu.trace.events[-1].ref, *range(3)}


def test_a_healthy_loop_is_not_searched() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        out = model(torch.randn(1024, 64, device="cuda"))
        torch.nn.functional.cross_entropy(out, torch.zeros(1024, dtype=torch.long, device="cuda")).backward()
        del out
        optimizer.step()
        optimizer.zero_grad()

    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(64, 65536).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer)
    assert not gpu.trace.idle_holders


@pytest.mark.parametrize(("rows", "is_found"), [(1024, True), (1023, False)])
def test_holders_are_searched_from_16_mib_on(rows: int, is_found: bool) -> None:
    """Output of 4,096 features in float32: 16 KiB a row."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = torch.nn.Linear(16, 4096).cuda()
        for _ in range(2):
            out = model(torch.randn(rows, 16, device="cuda"))
            out.sum().backward()
            model.zero_grad()
    assert bool(gpu.trace.idle_holders) == is_found


def test_holders_are_searched_six_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    monkeypatch.setattr(idle, "NUM_FIRST_PHASES", 100)
    monkeypatch.setattr(
        holders.HolderSearch, "find_holders", lambda self, targets, outermost=False: searches.append(len(targets)) or []
    )
    kept = []
    with memprof.virtual_gpu("h100-80gb"):
        model = torch.nn.Linear(16, 16).cuda()
        data = torch.ones(2048, 4096, device="cuda")
        for operator in (torch.sin, torch.cos, torch.tan, torch.exp, torch.log, torch.sqrt, torch.abs, torch.neg):
            kept.append(operator(data))
            kept[-1].sum()
            model(torch.randn(4, 16, device="cuda")).sum().backward()
    assert len(searches) == 6


def test_live_tensors_are_looked_at_in_the_first_twelve_phases_and_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(
        idle.IdleWatch, "_find_holders", lambda self, before, with_owners: looked.append(self._num_phases)
    )
    with memprof.virtual_gpu("h100-80gb"):
        model = torch.nn.Linear(16, 16).cuda()
        for _ in range(40):
            model(torch.randn(4, 16, device="cuda")).sum().backward()
            with torch.no_grad():
                model(torch.randn(4, 16, device="cuda"))
    *phases, _ = looked  # the last is the end of the run
    assert [number for number in phases if number > 12] == [number for number in (16, 32, 64) if number in phases]
    assert 12 in phases or 11 in phases


class Greedy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + take(1024 * MIB)


def resume(path: Path) -> None:
    """Load a checkpoint beside another model, until memory runs out in the first forward pass."""
    first = nn.Linear(2048, 2048).cuda()
    first(torch.ones(1, 2048, device="cuda"))
    loaded = torch.load(path, map_location="cuda")
    model = nn.Sequential(nn.Linear(2048, 2048), Greedy()).cuda()
    model[0].load_state_dict(loaded["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    model(torch.ones(1, 2048, device="cuda"))


@pytest.mark.nightly
def test_when_memory_runs_out_a_loaded_checkpoint_and_a_model_are_named(tmp_path: Path) -> None:
    """The optimizer has its part of the checkpoint, and has not used it yet."""
    saved = nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(saved.parameters())
    saved(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    with pytest.raises(torch.OutOfMemoryError), small_gpu() as gpu:
        resume(tmp_path / "saved.pt")
    names = {holder.name: {gpu.trace.owners.get(i) for i in holder.storages} for holder in gpu.trace.idle_holders}
    assert names["loaded['model']"] == {None} and "first" in names


def collect(is_pending: bool) -> None:
    """Keep the outputs of three forward passes, with or without a backward pass each, until memory runs out."""
    outs = []
    model = nn.Linear(64, 8192).cuda()
    for _ in range(3):
        outs.append(model(torch.ones(1024, 64, device="cuda")))
        loss = outs[-1].sum()
        if not is_pending:
            loss.backward()
            model.zero_grad()
    take(1024 * MIB)


@pytest.mark.parametrize("is_pending", [True, False])
def test_when_memory_runs_out_what_the_steps_forward_made_is_not_idle(
    is_pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backward pass of several forward passes may follow, unless an earlier one has used what they made."""
    monkeypatch.setattr(idle, "NUM_FIRST_PHASES", 0)  # only memory that runs out is a reason to search
    with pytest.raises(torch.OutOfMemoryError), small_gpu() as gpu:
        collect(is_pending)
    assert ("outs" in {holder.name for holder in gpu.trace.idle_holders}) is not is_pending


@pytest.mark.parametrize("is_outside", [True, False])
def test_the_autocast_block_that_keeps_copies_of_weights_over_several_calls_is_recorded(is_outside: bool) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Linear(64, 64).cuda()
        data = torch.ones(4, 64, device="cuda")
        with torch.no_grad(), torch.autocast("cuda") if is_outside else contextlib.nullcontext():
            for _ in range(3):
                with torch.autocast("cuda", torch.float16):
                    model(data)
    holders = [holder for holder in gpu.trace.idle_holders if holder.kind == AUTOCAST_KIND]
    assert len(holders) == is_outside
    for holder in holders:
        file, _, line = (holder.source or "").partition(" ")[0].rpartition(":")
        assert (
            linecache.getline(file, int(line)).strip().startswith("with torch.no_grad()") and len(holder.storages) == 2
        )
