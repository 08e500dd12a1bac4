"""Functions that quantize weights: what is written for a call is what a run of it does, and returns."""

import contextlib
import dataclasses

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memprof.catalog import find_gpu
from memprof.flows.capture import capture_virtual
from memprof.spec import TargetSpec
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu
from memprof.virtual.repeat import Repeats, RunAgain
from memprof.workload.models import find_source
from memprof.workload.step import Workload

KEPT = []
CALLS = 8
TABLES = {}


class State:
    def __init__(self, **parts):
        vars(self).update(parts)


def plain(weight, size=64, *, name="a"):
    """As bitsandbytes does it: scales, a table of known numbers, temporaries."""
    blocks = weight.reshape(-1, size)
    scales = blocks.abs().amax(-1)
    offset = scales.mean()
    code = torch.tensor([-1.0, 0.0, 0.5, 2.0], device=weight.device)
    code.div_(code.abs().max())
    small = (scales - offset).to(torch.uint8)
    del scales
    packed = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8, device=weight.device)
    inner = State(offset=offset, name=name)
    return packed, State(scales=small, code=code, inner=inner, shape=weight.shape, both=[1, 2])


def with_a_table(weight):
    if "table" not in TABLES:
        TABLES["table"] = torch.arange(8, device=weight.device)
    return weight * 2, State(table=TABLES["table"])


def keeps(weight):
    made = weight * 2
    KEPT.append(made)
    return made + 1


def views(weight):
    return (weight * 2)[:1]


def writes(weight):
    weight.mul_(2)
    return weight * 2


def returns_what_it_is_given(weight):
    return weight, weight * 2


def draws(weight):
    return weight * torch.rand(1, device=weight.device)


def weights(number):
    """Of two sizes, of which one comes seldom."""
    return torch.randn(64 if number % 4 else 128, 64, device="cuda")


def known(number):
    return torch.ones(64, 64, device="cuda")


def on_the_host(number):
    return torch.randn(64, 64)


def trained(number):
    return torch.randn(64, 64, device="cuda", requires_grad=True)


def recorded(function, make, *, repeats, around=contextlib.nullcontext):
    """The trace of calls, how many were repeated, and what they returned."""
    KEPT.clear()
    TABLES.clear()
    torch.manual_seed(0)
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=repeats)
    with device, device.phase(PhaseKind.MODEL), around():
        call = device.repeats.functions._wrapped(function) if repeats else function
        made = [call(make(number)) for number in range(CALLS)]
        found = [described(one, device) for one in made]
        del made[2:5]
        made.append([one * 2 for one in all_tensors(made)])
        KEPT.clear()
        TABLES.clear()
        del made
    return device.trace, device.repeats.functions.times if repeats else 0, found


def all_tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = vars(value).values() if isinstance(value, State) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in all_tensors(part)]


def described(value, device):
    if isinstance(value, torch.Tensor):
        index, values = device.recorder.index_of(value), device.recording.values
        numbers = values.get(value)
        return (
            index, value.device, value.size(), value.stride(), value.dtype,
            None if value.is_inference() else value._version,
            values.held_for(value.untyped_storage()._cdata), None if numbers is None else numbers.tolist(),
        )  # fmt: skip
    if isinstance(value, State):
        return State, [(name, described(part, device)) for name, part in vars(value).items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(part, device) for part in value]
    return value


def check_same(function, make=weights, **asked):
    run, _, results = recorded(function, make, repeats=False, **asked)
    trace, times, others = recorded(function, make, repeats=True, **asked)
    for field in dataclasses.fields(run):
        assert getattr(trace, field.name) == getattr(run, field.name), field.name
    assert others == results
    return times


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (plain, CALLS - 4),
        (with_a_table, CALLS - 4),
        *((one, 0) for one in (keeps, views, writes, returns_what_it_is_given, draws)),
    ],
)
def test_what_is_repeated_is_what_is_run(function, times):
    """Of weights of each size two are run."""
    assert check_same(function) == times


@pytest.mark.parametrize(("make", "times"), [(known, 0), (on_the_host, 0), (trained, 0)])
def test_weights_of_which_more_is_known_are_quantized_each(make, times):
    assert check_same(plain, make) == times


@pytest.mark.parametrize(
    ("around", "times"),
    [
        (torch.no_grad, CALLS - 4),
        (lambda: torch.device("cuda"), CALLS - 4),
        (lambda: torch.autocast("cuda", torch.bfloat16), CALLS - 4),
        (torch.inference_mode, 0),
    ],
    ids=["without gradients", "a device", "autocast", "inference"],
)
def test_what_is_going_on_around(around, times):
    assert check_same(plain, around=around) == times


def test_other_arguments_are_another_function():
    calls = []

    def recording(weight, size=64, *, name="a"):
        calls.append((size, name))
        return plain(weight, size, name=name)

    device = VirtualGpu(find_gpu("h100-80gb"), repeats=True)
    with device, device.phase(PhaseKind.MODEL):
        call, weight = device.repeats.functions._wrapped(recording), weights(1)
        for size in (64, 64, 32, 64, 32, 32):
            call(weight, size)
        call(weight, name="b")
        call(weight, 64)
    assert calls == [(64, "a"), (64, "a"), (32, "a"), (32, "a"), (64, "b")]


def test_a_call_by_names_is_the_same_call():
    def by_name(weight):
        return call(size=64, weight=weight)

    device = VirtualGpu(find_gpu("h100-80gb"), repeats=True)
    with device, device.phase(PhaseKind.MODEL):
        call = device.repeats.functions._wrapped(plain)
        for _ in range(4):
            by_name(weights(1))
        assert device.repeats.functions.times == 2


class Counting(TorchFunctionMode):
    """Sees each function that is called inside."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_repeated_where_somebody_looks_on():
    assert check_same(plain, around=Counting) == 0


def test_the_weights_of_a_model_are_quantized_twice_each(monkeypatch):
    """Four layouts in 16 layers: 7 matrices each."""
    counted, settle = [], Repeats.settle
    monkeypatch.setattr(Repeats, "settle", lambda self: (counted.append(self.functions.times), settle(self))[1])
    spec = TargetSpec(model="llama-3.2-1b", quantize="nf4", dtype="bfloat16", mode="inference", context_length=8)
    capture_virtual(Workload(spec, find_source(spec)), find_gpu("h100-80gb"), repeats=True)
    assert counted == [16 * 7 - 9]


def test_a_table_that_is_gone_is_run_again():
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=True)
    TABLES.clear()
    with device, device.phase(PhaseKind.MODEL):
        call = device.repeats.functions._wrapped(with_a_table)
        for _ in range(3):
            call(weights(1))
        assert device.repeats.functions.times == 0
        call(weights(1))
        assert device.repeats.functions.times == 1
        TABLES.clear()
        with pytest.raises(RunAgain):
            call(weights(1))


def test_what_was_repeated_can_be_written_to():
    """What the program writes to one is not in the others."""
    device = VirtualGpu(find_gpu("h100-80gb"), repeats=True)
    with device, device.phase(PhaseKind.MODEL):
        call = device.repeats.functions._wrapped(plain)
        made = [call(weights(1))[1].code for _ in range(4)]
        made[1].mul_(3)
        made[2].zero_()
        made.append(call(weights(1))[1].code)
        assert [one.tolist()[-1] for one in made] == [1.0, 3.0, 0.0, 1.0, 1.0]
        assert device.repeats.functions.times == 3
