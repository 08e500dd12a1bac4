"""Nothing of a virtual GPU stays behind, however it is left; and a run repeated gives the same trace."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import multiprocessing.process
import multiprocessing.queues
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed
import torch.multiprocessing
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils.checkpoint
import torch.utils.data
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.flows.capture import capture_virtual
from memprof.spec import TargetSpec
from memprof.trace.events import Trace
from memprof.virtual import VirtualGpu
from memprof.virtual.integrations.mode_bypasses import ModeBypasses
from memprof.workload.models import find_source
from memprof.workload.step import Workload
from tests.lanes import by_day
from tests.processes import ROOT, python

optimizer_module = sys.modules[torch.optim.Optimizer.__module__]
GPU = find_gpu("a100-80gb")
PATCHED = [
    concurrent.futures.ThreadPoolExecutor,
    multiprocessing.process.BaseProcess,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    safetensors,
    safetensors.torch,
    torch.cuda.nccl,
    torch.cuda.profiler,
    torch.cuda.random,
    torch.distributed,
    torch.distributed.distributed_c10d,
    torch.cuda.nvtx,
    torch.multiprocessing,
    torch.utils.data.dataloader,
    torch.utils.data._utils.collate,
    torch.utils.data._utils.worker,
    torch,
    torch._C,
    torch._C._autograd,
    torch._C._nn,
    torch._tensor,
    torch._tensor_str,
    torch._utils,
    torch.Tensor,
    torch.UntypedStorage,
    torch.TypedStorage,
    torch.Generator,
    torch.accelerator,
    torch.amp,
    torch.autograd,
    torch.autograd.graph,
    torch.autograd.Function,
    torch.backends.cuda,
    torch.backends.cudnn,
    torch.cuda,
    torch.cuda.amp,
    torch.cuda.memory,
    torch.cuda.random,
    torch.functional,
    torch.nn.functional,
    torch.nn.Module,
    torch.nn.Parameter,
    torch.nn.modules.module,
    torch.optim.Optimizer,
    optimizer_module,
    torch.overrides,
    torch.random,
    torch.serialization,
    torch.utils._device,
    torch.utils.checkpoint,
    torch.version,
]
REGISTRIES = [
    (module, name)
    for module in (torch.nn.modules.module, optimizer_module)
    for name, value in vars(module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
# reduce_op warns when it is looked at.
STATE_OF_TORCH = {"reduce_op", "_warned_capturable_if_run_uncaptured", "__warningregistry__", "_cached_device_count"}


def attributes() -> dict[tuple[str, str], object]:
    """Every attribute that a run may replace, and the hook registries as they are."""
    found: dict[tuple[str, str], object] = {}
    for owner in PATCHED:
        for name, value in list(vars(owner).items()):
            # A submodule appears when something is imported for the first time: no patch.
            if name not in STATE_OF_TORCH and not isinstance(value, types.ModuleType):
                found[getattr(owner, "__qualname__", owner.__name__), name] = value
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.split(".")[0] == "torch":
            for name in OVERRIDES:
                if name in vars(module):
                    found[module_name, name] = vars(module)[name]
    for module, name in REGISTRIES:
        found[module.__name__, name + " entries"] = list(vars(module)[name])
    found["collate", "functions"] = dict(torch.utils.data._utils.collate.default_collate_fn_map)
    return found


def state() -> dict[str, object]:
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cuda"),
        "gc": gc.isenabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "swap parameters": torch.__future__.get_swap_module_params_on_conversion(),
    }


class Failing(nn.Module):
    """A layer under checkpointing that fails where it is told to."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        if where == "construction":
            raise ZeroDivisionError(where)
        self.where = where
        self.layer = nn.Linear(8, 8)

    def inner(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states).relu()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = torch.utils.checkpoint.checkpoint(self.inner, states, use_reentrant=False)
        if self.where == "forward":
            raise ZeroDivisionError(self.where)
        if self.where == "backward":
            states.register_hook(self.fail)
        return nn.functional.layer_norm(states, (8,))

    def fail(self, gradient: torch.Tensor) -> None:
        raise ZeroDivisionError(self.where)


class FailingSGD(torch.optim.SGD):
    """An optimizer that fails in its second half."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise ZeroDivisionError("optimizer")


def train(where: str = "") -> None:
    model = Failing(where).to("cuda")
    optimizer = (FailingSGD if where == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module", autouse=True)
def imports_done() -> None:
    """What torch imports or sets up by itself, once, is not a change of ours."""
    with VirtualGpu(GPU):
        train()
    model = Failing()
    model(torch.ones(4, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()


@pytest.mark.parametrize("where", ["", "construction", "forward", "backward", "optimizer"])
def test_torch_is_as_before(where: str) -> None:
    before, before_state = attributes(), state()
    with contextlib.suppress(ZeroDivisionError), VirtualGpu(GPU):
        train(where)
        assert not where, "the failure did not happen"
    after = attributes()
    assert [key for key in before if after.get(key, None) is not before[key] and after.get(key) != before[key]] == []
    assert [key for key in after if key not in before] == []
    assert state() == before_state


@pytest.mark.skipif(torch.__version__ < "2.9", reason="untouched.py runs an operator of torch 2.9")
def test_nothing_at_all_is_changed_by_import_and_run() -> None:
    """Of torch's names, its tables of kernels and the process itself; see untouched.py."""
    done = python("-m", "tests.unit.virtual.untouched", folder=ROOT)
    assert done.stdout.splitlines() == [
        "import: []",
        "run: []",
        "same program, same torch: True ('cuda:0', 'FusedRmsNormBackward0') True",
    ], done.stderr


def test_what_is_imported_inside_has_the_original_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_inside.py").write_text(
        "from torch.cuda import is_available, is_available as ready\nfrom torch.overrides import has_torch_function\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with VirtualGpu(GPU):
        import imported_inside  # type: ignore[import-not-found]

        assert imported_inside.is_available() and imported_inside.ready()
    assert imported_inside.is_available is imported_inside.ready is torch.cuda.is_available
    assert imported_inside.has_torch_function is torch.overrides.has_torch_function
    del sys.modules["imported_inside"]


def test_something_is_patched_inside() -> None:
    """The comparison above would notice a patch: inside a run there are some."""
    before = attributes()
    with VirtualGpu(GPU):
        inside = attributes()
    changed = {key for key in before if inside.get(key) is not before[key]}
    assert {("Module", "__call__"), ("torch.cuda", "is_available"), ("torch.nn.functional", OVERRIDES[0])} <= changed


def test_failed_entry_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, before_state = attributes(), state()

    def broken(self: ModeBypasses, context: object) -> None:
        raise ZeroDivisionError("entry")

    with monkeypatch.context() as patch:
        patch.setattr(ModeBypasses, "around", broken)
        with pytest.raises(ZeroDivisionError), VirtualGpu(GPU):
            pass
    assert [key for key, value in attributes().items() if value is not before[key] and value != before[key]] == []
    assert state() == before_state
    with VirtualGpu(GPU):
        train()


def test_real_tensors_work_afterwards() -> None:
    with VirtualGpu(GPU):
        train()
        kept = torch.ones(3, device="cuda")
    model = Failing()
    model(torch.ones(4, 8)).sum().backward()
    assert model.layer.weight.grad is not None and model.layer.weight.grad.device.type == "cpu"
    assert not torch.ones(1).is_meta and str(torch.ones(2)) == "tensor([1., 1.])"
    assert kept.is_meta and not torch.cuda.is_available()


def test_random_numbers_are_untouched() -> None:
    """A run neither uses nor sets the process's random state."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    expected = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[union-attr,index]
    with VirtualGpu(GPU):
        layer = nn.Linear(64, 64, device="cuda")
        layer(torch.randn(8, 64, device="cuda")).sum().backward()
        torch.randint(5, (4,), device="cuda").tolist()
        torch.randperm(4, device="cuda").tolist()
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert numpy.random.get_state()[1].tolist() == expected[2]  # type: ignore[union-attr,index]


def test_nesting_is_refused_and_does_no_harm() -> None:
    with VirtualGpu(GPU) as outer:
        with pytest.raises(MemprofError, match="already active"), VirtualGpu(GPU):
            pass
        kept = torch.ones(512, device="cuda")
        assert kept.is_cuda
        assert len(outer.trace.storages) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_as_before(enabled: bool) -> None:
    spec = TargetSpec(model="unknown")

    class Broken(Workload):
        def __init__(self) -> None:
            self.spec = spec

        def run(self, device: Any, progress: Callable[[str], None] = lambda doing: None) -> None:
            assert not gc.isenabled()
            raise ZeroDivisionError

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(MemprofError):
            capture_virtual(Broken(), GPU)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def captured(seed: int, **changes: Any) -> Trace:
    torch.manual_seed(seed)
    spec = TargetSpec(model="gpt2", context_length=64, steps=2, **changes)
    return capture_virtual(Workload(spec, find_source(spec)), GPU)


@pytest.mark.parametrize("checkpointing", by_day([False, True], True))
def test_same_run_same_trace(checkpointing: bool) -> None:
    first, second = (captured(seed, activation_checkpointing=checkpointing) for seed in (0, 1))
    for table in ("events", "storages", "ops", "modules", "sources", "phases", "owners", "mismatches", "assumptions"):
        assert getattr(first, table) == getattr(second, table), table


def test_results_of_fake_tensors_are_forgotten():
    """They say which GPU was current, which is another for the next run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with VirtualGpu(GPU), FakeTensorMode():
        torch.ones(3) + 1
    assert FakeTensorMode.cache_info().size == 0
