"""Who keeps what piles up, in small programs on the virtual GPU."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof
from memprof.findings import find_all
from memprof.trace.events import Holder, Trace
from memprof.units import MIB
from memprof.watch import holders
from memprof.watch.named_holders import find_named_holders
from memprof.watch.variables import HolderName
from tests.lanes import by_day
from tests.unit.full_gpu import run_out_of_memory


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, retain: bool = False) -> torch.Tensor:
    loss = functional.cross_entropy(
        model(torch.randn(512, 64, device="cuda")), torch.zeros(512, dtype=torch.long, device="cuda")
    )
    loss.backward(retain_graph=retain)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 1000).cuda()
    return model, torch.optim.AdamW(model.parameters())


def run(program: Callable[[], Any]) -> Trace:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        program()
    return gpu.trace


def only(trace: Trace) -> Holder:
    (holder,) = trace.holders
    return holder


def in_a_list() -> None:
    model, optimizer = parts()
    losses = []
    for _ in range(4):
        losses.append(step(model, optimizer))  # kept  # noqa: PERF401


def in_a_sum() -> None:
    model, optimizer = parts()
    total = 0
    for _ in range(4):
        total += step(model, optimizer)  # kept


class Meter:
    state: Any  # none of its methods sets it

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def add(self, value: torch.Tensor) -> None:
        self.values[len(self.values)] = (value, "loss")  # kept


def in_an_object() -> None:
    model, optimizer = parts()
    meter = Meter()
    for _ in range(4):
        meter.add(step(model, optimizer))


class History:
    def __init__(self) -> None:
        self.logs: dict[str, Any] = {"train": {"step": [], "loss": []}}

    def add(self, value: torch.Tensor) -> None:
        self.logs["train"]["step"].append(len(self.logs))
        self.logs["train"]["loss"].append(value)  # kept


def in_a_dict_of_dicts_of_an_object() -> None:
    model, optimizer = parts()
    history = History()
    for _ in range(4):
        history.add(step(model, optimizer))


def in_a_dict_of_dicts() -> None:
    model, optimizer = parts()
    logs: dict[str, dict[int, torch.Tensor]] = {"train": {}}
    for number in range(4):
        logs["train"][number] = step(model, optimizer)  # kept


def log(logs: dict[str, Any], loss: torch.Tensor) -> None:
    logs["count"] += 1
    logs["losses"].append(loss)  # kept


def in_a_list_that_another_function_fills() -> None:
    model, optimizer = parts()
    logs: dict[str, Any] = {"count": 0, "losses": []}
    for _ in range(4):
        log(logs, step(model, optimizer))


def replace(losses: list[torch.Tensor], loss: torch.Tensor) -> list[torch.Tensor]:
    losses = [*losses, loss]
    assert not loss.dim()
    return losses


def in_a_list_that_another_function_makes() -> None:
    model, optimizer = parts()
    losses: list[torch.Tensor] = []
    for _ in range(4):
        kept = replace(losses, step(model, optimizer))
        losses = kept


def test_a_line_that_only_assigns_to_a_parameter_fills_nothing() -> None:
    assert not only(run(in_a_list_that_another_function_makes)).fills


def in_a_list_by_a_variable() -> None:
    model, optimizer = parts()
    logs: dict[str, list[torch.Tensor]] = {"train": [], "test": []}
    for _ in range(4):
        for phase in ("train",):
            logs[phase].append(step(model, optimizer))  # kept


def in_a_sum_by_a_key() -> None:
    model, optimizer = parts()
    totals = {"steps": 0, "loss": torch.zeros((), device="cuda")}
    for _ in range(4):
        totals["steps"] = totals["steps"] + 1
        totals["loss"] = totals["loss"] + step(model, optimizer)  # kept


def in_a_sum_of_an_object() -> None:
    model, optimizer = parts()
    meter = Meter()
    meter.total = 0
    for _ in range(4):
        meter.total = meter.total + step(model, optimizer)


class Mean:
    def __init__(self) -> None:
        self.total: Any = 0

    def add(self, value: torch.Tensor) -> None:
        self.total = self.total + value  # kept


class Statistics:
    def __init__(self) -> None:
        self.means = {"loss": Mean()}


def in_a_sum_of_an_object_of_a_dict() -> None:
    model, optimizer = parts()
    statistics = Statistics()
    for _ in range(4):
        statistics.means["loss"].add(step(model, optimizer))


def in_a_hook() -> None:
    model, optimizer = parts()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))  # kept
    for _ in range(4):
        step(model, optimizer)


def in_one_tensor() -> None:
    model, optimizer = parts()
    everything = torch.empty(0, device="cuda")
    for _ in range(4):
        loss = step(model, optimizer).detach()
        everything = torch.cat([everything, loss.expand(512)])  # kept


def line_of(code: Any) -> str:
    lines, first = inspect.getsourcelines(code)
    offset = next(number for number, line in enumerate(lines) if "# kept" in line)
    return f"{__file__}:{first + offset} "


@pytest.mark.parametrize(
    ("program", "kind", "name", "filled_in"),
    [
        (in_a_list, "list", "losses", in_a_list),
        (in_a_sum, "", "total", in_a_sum),
        pytest.param(in_an_object, "dict", "Meter.values", Meter.add, marks=pytest.mark.nightly),
        (in_a_dict_of_dicts_of_an_object, "list", "History.logs['train']['loss']", History.add),
        (in_a_list_that_another_function_fills, "list", "logs['losses']", log),
        (in_a_dict_of_dicts, "dict", "logs['train']", in_a_dict_of_dicts),
        (in_a_list_by_a_variable, "list", "logs['train']", in_a_list_by_a_variable),
        (in_a_sum_by_a_key, "", "totals['loss']", in_a_sum_by_a_key),
        (in_a_sum_of_an_object_of_a_dict, "", "Mean.total", Mean.add),
        (in_a_hook, "list", "seen", in_a_hook),
        (in_one_tensor, "", "everything", in_one_tensor),
    ],
)
def test_names_and_lines(program: Callable[[], None], kind: str, name: str, filled_in: Any) -> None:
    holder = only(run(program))
    assert (holder.kind, holder.name, holder.fills) == (kind, name, True)
    assert holder.source is not None and holder.source.startswith(line_of(filled_in))


class Metric(Meter):
    def reset(self) -> None:
        self.values.clear()


@pytest.mark.parametrize(("kind", "has_reset"), [(Metric, True), (Meter, False)])
def test_whether_it_can_be_reset(kind: type[Meter], has_reset: bool) -> None:
    def program() -> None:
        model, optimizer = parts()
        meter = kind()
        for _ in range(4):
            meter.add(step(model, optimizer))

    assert only(run(program)).has_reset is has_reset


def test_what_the_program_resets_itself_has_no_reset_to_be_told() -> None:
    def program() -> None:
        model, optimizer = parts()
        meter = Metric()
        for _ in range(4):
            meter.add(step(model, optimizer))
        if model is None:
            meter.reset()

    assert not only(run(program)).has_reset


def remember_output(module: Any, args: Any, output: torch.Tensor) -> None:
    module.output = output.detach()  # kept


def on_modules_by_a_hook() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3))).cuda()
    handles = [layer.register_forward_hook(remember_output) for layer in model]
    x = torch.randn(4096, 2048, device="cuda")
    model(x)
    for handle in handles:
        handle.remove()
    for _ in range(2):
        model(x)


def test_what_a_hook_puts_on_modules_is_an_attribute_of_theirs() -> None:
    """Not of their container in torch, `Sequential._modules`."""
    (holder,) = run(on_modules_by_a_hook).idle_holders
    assert (holder.kind, holder.name) == ("", "Linear.output") and len(holder.storages) > 1
    assert holder.source is not None and holder.source.startswith(line_of(remember_output))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()


class Finder:
    state: Any

    def __init__(self, model: nn.Module) -> None:
        self.state = None
        self.begin(model)

    def begin(self, model: nn.Module) -> None:
        self.state = copy.deepcopy(model.state_dict())  # kept

    def reset(self) -> None:
        self.state = None


def in_an_attribute_of_several_lines() -> None:
    model = nn.Linear(2048, 2048).cuda()
    finder = Finder(model)
    for _ in range(3):
        model(torch.randn(8, 2048, device="cuda"))
    finder.reset()


def in_an_attribute_that_the_main_part_sets() -> None:
    model = nn.Linear(2048, 2048).cuda()
    meter = Meter()
    meter.state = copy.deepcopy(model.state_dict())  # kept
    for _ in range(3):
        model(torch.randn(8, 2048, device="cuda"))


def evaluate(model: nn.Module, given: Any, *, named: Any = None) -> None:
    for _ in range(3):
        model(torch.randn(8, 2048, device="cuda"))
    assert given or named


def passed_by_position() -> None:
    model = nn.Linear(2048, 2048).cuda()
    state = copy.deepcopy(model.state_dict())  # kept
    evaluate(model, state)


def passed_by_keyword() -> None:
    model = nn.Linear(2048, 2048).cuda()
    state = copy.deepcopy(model.state_dict())  # kept
    evaluate(model, None, named=state)


def pass_on(model: nn.Module, passed: Any) -> None:
    evaluate(model, passed)


def passed_through_two_functions() -> None:
    model = nn.Linear(2048, 2048).cuda()
    state = copy.deepcopy(model.state_dict())  # kept
    pass_on(model, state)


given: Any = None


def passed_from_a_global() -> None:
    global given
    model = nn.Linear(2048, 2048).cuda()
    given = copy.deepcopy(model.state_dict())  # kept
    try:
        evaluate(model, given)
    finally:
        given = None


def in_a_variable_of_several_lines() -> None:
    model = nn.Linear(2048, 2048).cuda()
    state: Any = None
    for number in range(3):
        if number == 0:
            state = copy.deepcopy(model.state_dict())  # kept
        elif number == 7:
            state = {}
        model(torch.randn(8, 2048, device="cuda"))
    assert state


def in_a_variable_that_another_line_made() -> None:
    model = nn.Linear(2048, 2048).cuda()
    state = None
    made = copy.deepcopy(model.state_dict())
    state = dict(made)  # kept
    del made
    for _ in range(3):
        model(torch.randn(8, 2048, device="cuda"))
    assert state


@pytest.mark.parametrize(
    ("program", "name", "assigned_in"),
    [
        (in_an_attribute_of_several_lines, "Finder.state", Finder.begin),
        (in_an_attribute_that_the_main_part_sets, "Meter.state", in_an_attribute_that_the_main_part_sets),
        (in_a_variable_of_several_lines, "state", in_a_variable_of_several_lines),
        (in_a_variable_that_another_line_made, "state", in_a_variable_that_another_line_made),
        (passed_by_position, "state", passed_by_position),
        (passed_by_keyword, "state", passed_by_keyword),
        (passed_through_two_functions, "state", passed_through_two_functions),
        (passed_from_a_global, "given", passed_from_a_global),
    ],
)
def test_of_several_assignments_the_one_that_made_the_tensors_or_the_last(
    program: Callable[[], None], name: str, assigned_in: Any
) -> None:
    (holder,) = run(program).idle_holders
    assert (holder.name, holder.fills) == (name, False)
    assert holder.source is not None and holder.source.startswith(line_of(assigned_in))


@pytest.mark.parametrize(
    ("text", "change", "is_parameter"),
    [
        ("given", {}, True),
        ("named", {}, True),
        ("given['a']", {}, True),
        ("_", {}, False),  # a variable of its own
        ("given", {"is_global": True}, False),
        ("given", {"owner": Meter}, False),
        ("given", {"code": None}, False),
    ],
)
def test_what_a_function_has_from_its_caller(text: str, change: dict[str, Any], is_parameter: bool) -> None:
    name = dataclasses.replace(HolderName(text, evaluate.__code__), **change)
    assert name.is_parameter is is_parameter


@pytest.mark.nightly
def test_modules_are_named_as_the_program_does() -> None:
    def program() -> None:
        stacks = [Stack().cuda()]
        x = torch.randn(8, 2048, device="cuda")
        for _ in range(3):
            stacks[0].layers.append(nn.Linear(2048, 2048).cuda())
            stacks[0].layers[-1](x)

    trace = run(program)
    assert trace.idle_holders
    assert all("_modules" not in holder.name for holder in trace.idle_holders)
    assert all(holder.source and holder.source.startswith(__file__) for holder in trace.idle_holders)


@pytest.mark.parametrize(("depth", "is_found"), by_day([(7, True), (8, True), (9, False)], (9, False)))
def test_a_module_is_one_reference(depth: int, *, is_found: bool) -> None:
    """From its parameter, a list is one reference more than there are modules around it."""

    def program() -> None:
        model: nn.Module = nn.Linear(2048, 2048).cuda()
        for _ in range(depth - 1):
            model = nn.Sequential(model)
        x = torch.randn(8, 2048, device="cuda")
        models = [model]
        del model
        models[0](x)
        for _ in range(3):
            nn.Linear(2048, 2048).cuda()(x)

    assert any(holder.name == "models" for holder in run(program).idle_holders) is is_found


def test_a_sum_in_an_object() -> None:
    holder = only(run(in_a_sum_of_an_object))
    assert (holder.kind, holder.name, holder.node_steps) == ("", "Meter.total", 2)


@pytest.mark.parametrize(
    ("part", "num_bytes"),
    [
        (lambda out: out, 512 * 1000 * 4),
        (lambda out: out[:, 0], 512 * 4),
        (lambda out: out[:2].expand(1000, 2, 1000), 512 * 1000 * 4),  # no more than there is
        (lambda out: (out[:, 0], out[0]), (512 + 1000) * 4),
    ],
)
def test_bytes_of_views(part: Callable[[torch.Tensor], object], num_bytes: int) -> None:
    def program() -> None:
        model, kept = parts()[0], []
        with torch.no_grad():
            for _ in range(4):
                kept.append(part(model(torch.randn(512, 64, device="cuda"))))  # noqa: PERF401

    found = run(program).holders[-1]
    assert found.held_bytes == num_bytes * len(found.storages)


def fill_a_queue() -> None:
    model, optimizer = parts()
    queue = torch.zeros(512, 1000, device="cuda")
    for _ in range(4):
        keys = model(torch.randn(512, 64, device="cuda"))
        scores = keys.sum() + queue.square().mean()
        scores.backward(retain_graph=True)
        optimizer.step()
        queue = torch.cat([queue, keys])[-512:]  # kept


def test_a_queue_that_is_filled_after_the_step_is_the_holder() -> None:
    """And not the scores of the second step, which were computed from it."""
    holder = only(run(fill_a_queue))
    assert (holder.name, holder.fills) == ("queue", True)
    assert holder.source is not None and holder.source.startswith(line_of(fill_a_queue))


class RunningMean(nn.Linear):
    def __init__(self, num_features: int = 64) -> None:
        super().__init__(num_features, num_features)
        self.register_buffer("mean", torch.zeros(num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0)  # kept
        return y


class MeanInPlace(RunningMean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(self, x)
        self.mean.mul_(0.9).add_(0.1 * y.mean(0))  # kept
        return y


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        step(model, optimizer)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (RunningMean, "RunningMean.mean"),
        # Four levels down, and one for each of two layers.
        (lambda: nn.Sequential(nn.Sequential(nn.Sequential(RunningMean(), RunningMean()))), "model.0.0.0.mean"),
    ],
)
def test_a_buffer_is_named_by_its_path(make: Callable[[], nn.Module], name: str) -> None:
    holder = only(run(lambda: train(make().cuda())))
    assert (holder.kind, holder.name, holder.node_steps) == ("", name, 3)
    assert holder.source is not None and holder.source.startswith(line_of(RunningMean))


def test_a_buffer_is_changed_where_a_method_adds_to_it() -> None:
    holder = only(run(lambda: train(MeanInPlace().cuda())))
    assert holder.fills and (holder.source or "").startswith(line_of(MeanInPlace))


def test_graphs_are_counted() -> None:
    summed, listed = only(run(in_a_sum)), only(run(in_a_list))
    # Of each step the loss, log-softmax, the linear layer and its transposed weight; the nodes of the two parameters
    # are those of all steps. Two losses have been summed, or are kept, when the third step ends.
    assert (summed.nodes, summed.node_steps) == (2 * (1 + 4) + 2, 2)
    assert (listed.nodes, listed.node_steps) == (2 * 4 + 2, 2)
    assert only(run(in_one_tensor)).nodes == 0


def differentiates_what_it_prepares(*, sums: bool) -> None:
    """A node of each step is made before its model is called, as with coordinates that need a gradient."""
    model, optimizer = parts()
    places = torch.rand(512, 32, device="cuda", requires_grad=True)
    total = 0
    for _ in range(4):
        loss = model(torch.cat([places, places], 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = total + loss if sums else 0


def test_what_is_prepared_for_a_step_is_not_of_the_one_before() -> None:
    assert not run(lambda: differentiates_what_it_prepares(sums=False)).holders
    holder = only(run(lambda: differentiates_what_it_prepares(sums=True)))
    assert (holder.name, holder.node_steps) == ("total", 2)


def test_what_each_step_lets_go_of_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(holders.HolderSearch, "find_holders", fail)

    def clean() -> None:
        model, optimizer = parts()
        numbers, before = [], None
        for _ in range(5):
            loss = step(model, optimizer)
            numbers.append(loss.item())
            before = loss  # noqa: F841

    assert not run(clean).holders


def test_a_limit_is_noted() -> None:
    def window() -> None:
        model, optimizer = parts()
        last = collections.deque(maxlen=3)
        for _ in range(4):
            last.append(step(model, optimizer))

    holder = only(run(window))
    assert (holder.kind, holder.name, holder.limit) == ("deque", "last", 3)


def test_looking_keeps_nothing_alive() -> None:
    """A frame that was requested its variables would keep them, and frees would be seen late."""

    def program(keep: bool) -> None:
        model, optimizer = parts()
        losses = []
        for _ in range(5):
            loss = step(model, optimizer)
            if keep:
                losses.append(loss.detach()[None])
            del loss

    def frees(trace: Trace) -> list[tuple[int, int]]:
        return [(time, event.ref) for time, event in enumerate(trace.events) if event.kind == 1]

    watched = run(lambda: program(True))
    assert watched.holders
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(holders.HolderSearch, "find_holders", lambda self, targets: [])
        patch.setattr(holders.HolderSearch, "find_running_sums", lambda self: [])
        unwatched = run(lambda: program(True))
    assert not unwatched.holders
    assert frees(watched) == frees(unwatched)


def test_the_workloads_of_memprof_are_not_watched() -> None:
    from memprof.flows.profile import profile
    from memprof.spec import TargetSpec

    trace, _ = profile(TargetSpec(model="gpt2", context_length=16, steps=3))
    assert not trace.forwards and not trace.holders


def test_what_a_module_that_is_not_running_has_is_named_by_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("library")
    monkeypatch.setitem(sys.modules, "library", library)
    library.kept = []  # type: ignore[attr-defined]

    def program() -> None:
        model, optimizer = parts()
        for _ in range(6):
            library.kept.append(step(model, optimizer).detach())

    assert only(run(program)).name == "library.kept"


def sum_of_losses() -> None:
    """Each call keeps 256 MiB for a backward of the sum."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1)).cuda()
    criterion = nn.MSELoss()
    total: Any = 0
    for _ in range(8):
        output = model(torch.randn(16384, 64).cuda())
        total = total + criterion(output, torch.zeros(16384, 1, device="cuda"))  # kept
    total.backward()


@pytest.mark.nightly
def test_what_joins_the_graphs_of_calls_where_memory_runs_out() -> None:
    context = run_out_of_memory(sum_of_losses, 1500 * MIB)
    holder = only(context.ledger.trace)
    (finding,) = [one for one in find_all(context) if one.id == "memory-growth"]
    assert holder.name == "total" and holder.fills and finding.is_decisive
    assert "wait for one backward, kept by variable `total`" in finding.title
    assert next(one.source for one in finding.evidence if one.text.startswith("fix")) == holder.source
    context.ledger.trace.holders.clear()
    (finding,) = [one for one in find_all(dataclasses.replace(context)) if one.id == "memory-growth"]
    fixes = [one.text for one in finding.evidence if one.text.startswith("fix")]
    assert fixes[0].endswith("before each backward()")  # the model's: the loss keeps little


def sum_beside_a_mean() -> None:
    """The sum of 30 calls is an item; so is what is computed of it, of 80 nodes a call."""
    model = nn.Sequential(*(nn.LayerNorm(64) for _ in range(80))).cuda().eval()
    results: Any = {"count": 0, "sum": 0, "mean": 0}
    for _ in range(30):
        results["count"] += 1
        results["sum"] += model(torch.randn(1024, 64).cuda()).mean()  # kept
        results["mean"] = results["sum"] / results["count"]


def test_a_sum_of_many_calls_and_not_what_is_computed_of_it() -> None:
    context = run_out_of_memory(sum_beside_a_mean, 500 * MIB)
    holder = only(context.ledger.trace)
    assert holder.name == "results['sum']" and (holder.source or "").startswith(line_of(sum_beside_a_mean))


def test_what_an_operator_makes_beside_an_output_is_not_of_its_list() -> None:
    def program() -> None:
        model = nn.LayerNorm(64).cuda().eval()  # makes a mean and a deviation for each output
        outputs = [model(torch.randn(16384, 64, device="cuda")) for _ in range(2)]
        for _ in range(3):
            outputs.append(model(torch.randn(16384, 64, device="cuda")))  # noqa: PERF401

    assert only(run(program)).name == "outputs"


def test_one_call_after_the_last_backward_is_no_sum() -> None:
    def program() -> None:
        model, optimizer = parts()
        total = torch.zeros((), device="cuda")
        for _ in range(4):
            total = step(model, optimizer)
        torch.zeros(1 << 30, device="cuda")
        print(total)

    assert not run_out_of_memory(program, 1000 * MIB).ledger.trace.holders


def test_a_class_of_a_program_does_not_keep_what_its_namespace_has() -> None:
    """Its methods have the namespace as their globals, in which the tensor is a variable."""
    namespace: dict[str, Any] = {"__name__": "no module"}
    exec("class Decoder:\n    def forward(self): ...\n", namespace)
    namespace["outputs"] = kept = torch.zeros(2)
    found = find_named_holders({id(kept): (kept, 0)}, types.SimpleNamespace(names={}, tensors=[]))
    assert [name.name for holder in found for name in holder.names if "Decoder" in name.name] == []
