"""Hooks that a program registers again and again: what they keep is theirs, and not the module's that calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memprof
from memprof.trace.events import HOOK_KIND, Holder
from memprof.watch.piled_hooks import find_piled_hook
from memprof.watch.source_lines import read_line


class Recorder:
    def __init__(self, layer: nn.Module) -> None:
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.handles = [layer.register_forward_hook(self.keep)]  # registered
        self.handles.append(layer.register_full_backward_hook(self.keep_gradient))

    def keep_gradient(self, module: nn.Module, given: object, gradients: tuple[torch.Tensor, ...]) -> None:
        self.gradients.append(gradients[0])

    def keep(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.outputs.append(output.detach())


class Keeper:
    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.outputs.append(output.detach())


def register(layer: nn.Module) -> Keeper:
    keeper = Keeper()
    layer.register_forward_hook(keeper)  # of an object
    return keeper


def record(*, is_removed: bool) -> list[Holder]:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1)).cuda()
        for _ in range(4):
            recorder = Recorder(model[1])
            model(torch.randn(64, 64, device="cuda")).sum().backward()
            if is_removed:
                for handle in recorder.handles:
                    handle.remove()
            del recorder
    return gpu.trace.holders


def test_what_each_hook_keeps_is_of_the_line_that_registers_it() -> None:
    (holder,) = record(is_removed=False)
    assert (holder.kind, holder.name, holder.fills) == (HOOK_KIND, "Recorder.keep", True)
    assert read_line(holder.source or "").endswith("# registered\n")


@pytest.mark.parametrize("num_kept", [0, 1])
def test_an_object_that_is_called_as_a_hook_is_named_by_its_class(num_kept: int) -> None:
    # With the first keeper in a variable its list is what grows: for each hook there are more calls that add to it.
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 1)).cuda()
        keepers = [register(model[0]) for _ in range(3)][:num_kept]
        for _ in range(4):
            model(torch.randn(64, 64, device="cuda")).sum().backward()
        del keepers
    (holder,) = {(one.kind, one.name, one.source) for one in gpu.trace.holders}
    assert holder[:2] == (HOOK_KIND, "Keeper")
    assert read_line(holder[2] or "").endswith("# of an object\n")


def test_a_list_of_an_object_that_is_a_hook_once_is_what_grows() -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 1)).cuda()
        keeper = register(model[0])
        for _ in range(4):
            model(torch.randn(64, 64, device="cuda")).sum().backward()
    (holder,) = gpu.trace.holders
    assert (holder.kind, holder.name) == ("list", "Keeper.outputs")
    del keeper


def test_a_hook_that_is_removed_keeps_nothing() -> None:
    assert not record(is_removed=True)


@pytest.mark.parametrize(("count", "is_piled"), [(2, False), (3, True)])
def test_as_many_hooks_of_one_kind_on_one_module(count: int, is_piled: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for _ in range(count):
        Recorder(model[0])
    for _ in range(2):
        Recorder(model[1])
    hook = find_piled_hook(model.modules())
    assert (None if hook is None else hook.name) == ("Recorder.keep" if is_piled else None)
