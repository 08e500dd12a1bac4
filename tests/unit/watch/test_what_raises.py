"""What raises, in whatever phase, has ended: nothing of it is held, and what is done instead is counted."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from memprof.device.catalog import find_gpu
from memprof.flows.script import run_script
from memprof.measured import MeasuredDevice
from memprof.patching import PatchSet
from memprof.run_spec import RunSpec
from memprof.script import EndReason, Program, StopRule
from memprof.trace.events import PhaseKind, Role
from memprof.virtual import VirtualGpu
from memprof.watch.watch import Watch
from tests.lanes import by_day

GPU = find_gpu("rtx-4090")
SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TOO_MUCH = 30 << 30

def fill(where):
    if fails == where:
        torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")

class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        fill("backward")
        return gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8192, 8192, bias=False)

    def forward(self, x):
        fill("forward" if torch.is_grad_enabled() else "evaluation")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=fails == "autocast"):
            y = self.linear(Identity.apply(x))
            fill("autocast")
        return y.float()

class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if fails == "recomputation" else block(x)
        return x

class Optimizer(torch.optim.AdamW):
    def zero_grad(self, *args, **kwargs):
        fill("zero_grad")
        super().zero_grad(*args, **kwargs)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        fill("data")
        return torch.zeros(8192)

def attempt(layers):
    model = Model(layers).cuda()
    optimizer = Optimizer(model.parameters())
    if fails == "module hook":
        model.blocks[1].register_forward_hook(lambda *given: fill("module hook"))
    if fails == "recomputation":
        calls = [fails, None]  # the second is in the backward pass
        model.blocks[1].register_forward_pre_hook(lambda *given: fill(calls.pop()))
    if fails == "gradient hook":
        model.blocks[1].linear.weight.register_post_accumulate_grad_hook(lambda weight: fill("gradient hook"))
    if fails == "step hook":
        optimizer.register_step_pre_hook(lambda *given: fill("step hook"))
    for batch in torch.utils.data.DataLoader(Data(), batch_size=2):
        loss = model(batch.cuda().requires_grad_()).sum()
        fill("loss")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(2, 8192, device="cuda"))
    fill("end")

WHERE = "{where}"
steps = []
fails = WHERE
try:
    attempt(24 if WHERE == "step" else 8)
except torch.OutOfMemoryError as error:
    print(error)
else:
    raise SystemExit(9)
if WHERE != "gradient hook":  # after which torch's own engine holds one layer's weights until its next pass
    assert torch.cuda.memory_allocated() < 64 << 20
fails = ""
attempt(14)
"""
BEFORE = {"evaluation": 3, "end": 3}  # Steps that the first attempt makes.
WHERE = (
    "forward", "module hook", "autocast", "loss", "backward", "gradient hook", "recomputation", "step hook", "step",
    "zero_grad", "data", "evaluation", "end",
)  # fmt: skip


@pytest.mark.parametrize("where", by_day(WHERE, "forward", "step", "evaluation"))
def test_a_smaller_attempt_after_one_that_was_refused_fits(where: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{where}", where))
    document = run_script(Program(str(script)), StopRule(None), RunSpec(gpu=GPU.key)).document
    assert document.program is not None and document.program.ended == EndReason.EXIT, document.program
    assert document.verdict.fits
    made = BEFORE.get(where, 1 if where == "zero_grad" else 0)
    assert document.program.steps == made + 3


class Doubled(torch.optim.SGD):
    """Steps by itself where another that it has inside cannot."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"])

    def step(self, closure=None):
        try:
            self.inner.step(closure)
        except RuntimeError:
            super().step()


def fail() -> None:
    raise RuntimeError("as an out-of-memory in the step would")


@pytest.fixture(params=["simulated", "measured"])
def watch(request: pytest.FixtureRequest) -> Watch:
    return VirtualGpu(GPU) if request.param == "simulated" else MeasuredDevice("cpu")


class TestOptimizers:
    """Of a simulated and of a measured run."""

    def test_one_that_raised_is_let_go_of(self, watch: Watch) -> None:
        def attempt() -> weakref.ref:
            model = nn.Linear(64, 64, device=watch.name)
            optimizer = torch.optim.AdamW(model.parameters())

            def closure():
                model(torch.zeros(2, 64, device=watch.name)).sum().backward()
                fail()

            with pytest.raises(RuntimeError, match="as an out-of-memory"):
                optimizer.step(closure)
            return weakref.ref(optimizer)

        with watch:
            gone = attempt()
            gc.collect()  # what pytest.raises keeps
            assert gone() is None
            assert watch.current_phase.kind is PhaseKind.OTHER

    def test_steps_of_another_are_counted_while_it_lives(self, watch: Watch) -> None:
        with watch:
            model = nn.Linear(64, 64, device=watch.name)
            first, second = (torch.optim.AdamW(model.parameters()) for _ in range(2))
            model(torch.zeros(2, 64, device=watch.name)).sum().backward()
            with pytest.raises(RuntimeError, match="as an out-of-memory"):
                first.step(fail)
            ended: list[object] = []
            watch.phases.on_step = ended.append
            second.step()
            assert ended == [second]

    def test_one_that_began_before_the_run_and_is_scheduled(self, watch: Watch) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        LambdaLR(optimizer, lambda step: 1.0)
        step = torch.optim.AdamW.step
        gone = weakref.ref(optimizer)
        with watch:
            with pytest.raises(RuntimeError, match="as an out-of-memory"):
                optimizer.step(fail)
            del optimizer
            gc.collect()
            assert gone() is None
        assert torch.optim.AdamW.step is step

    def test_an_inner_one_that_raises_ends_no_step_of_the_outer(self, watch: Watch) -> None:
        with watch:
            model = nn.Linear(64, 64, device=watch.name)
            optimizer = Doubled(model.parameters())
            model(torch.zeros(2, 64, device=watch.name)).sum().backward()
            ended = []
            watch.phases.on_step = ended.append
            optimizer.step(fail)
            assert ended == [optimizer]


def test_the_state_of_a_step_that_was_refused_is_optimizer_state() -> None:
    class Half(torch.optim.AdamW):
        def _init_group(self, *args, **kwargs):
            super()._init_group(*args, **kwargs)
            fail()

    with VirtualGpu(GPU) as gpu:
        model = nn.Linear(64, 64, device="cuda")
        optimizer = Half(model.parameters())
        model(torch.zeros(2, 64, device="cuda")).sum().backward()
        with pytest.raises(RuntimeError, match="as an out-of-memory"):
            optimizer.step()
        names = [owner.name for owner in gpu.trace.owners.values() if owner.role is Role.OPTIMIZER_STATE]
    assert names.count("exp_avg") == names.count("exp_avg_sq") == 2


def test_the_phase_of_an_error_is_where_it_was_raised() -> None:
    with VirtualGpu(GPU) as gpu:
        model = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(torch.zeros(2, 64, device="cuda")).sum()
        loss.register_hook(lambda gradient: fail())
        for kind, run in {
            PhaseKind.OPTIMIZER_STEP: lambda: optimizer.step(fail),
            PhaseKind.BACKWARD: loss.backward,
            PhaseKind.FORWARD: lambda: model(torch.zeros(2, 7, device="cuda")),
            PhaseKind.MODEL: lambda: model._apply(lambda tensor: fail()),
        }.items():
            with pytest.raises(RuntimeError) as caught:
                run()
            assert gpu.find_error_phase(caught.value).kind is kind
            assert gpu.current_phase.kind is PhaseKind.OTHER


def test_a_backward_that_raised_makes_no_micro_batch() -> None:
    with VirtualGpu(GPU) as gpu:
        model = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(torch.zeros(2, 64, device="cuda")).sum()
            loss.register_hook(lambda gradient: fail())
            with pytest.raises(RuntimeError):
                loss.backward()
        model(torch.zeros(2, 64, device="cuda")).sum().backward()
        optimizer.step()
    assert {(one.step, one.micro_batch) for one in gpu.trace.phases if one.kind is PhaseKind.BACKWARD} == {(1, 1)}
    assert gpu.phases.num_completed_steps == 1


class TestMemory:
    @pytest.mark.parametrize("run", [
        lambda x: torch.roll(x, shifts=1, dims=7),
        lambda x: nn.functional.layer_norm(x, (64,), torch.ones(64, device="cuda"), torch.ones(7, device="cuda")),
    ], ids=["roll", "layer_norm"])  # fmt: skip
    def test_scratch_is_given_back(self, run) -> None:
        with VirtualGpu(GPU):
            x = torch.zeros(4, 64, 64, device="cuda").transpose(1, 2)  # not contiguous: a copy is made
            before = torch.cuda.memory_allocated()
            with pytest.raises((RuntimeError, IndexError)):
                run(x)
            gc.collect()
            assert torch.cuda.memory_allocated() == before

    @pytest.mark.parametrize("run", [
        lambda x: torch.cat([x * 2, torch.zeros(7, 7, 7, device="cuda")]),
        lambda x: (x * 2).view(-1, 64) @ torch.zeros(63, 3, device="cuda"),
        lambda x: (x * 2)["a"],
        lambda x: (x * 2).expand(1 << 20, -1, -1, -1).clone(),
    ], ids=["cat", "matmul", "getitem", "refused"])  # fmt: skip
    def test_what_a_function_of_torch_was_given_is_not_held_while_the_error_is(self, run) -> None:
        gpu = VirtualGpu(GPU)
        gpu.recorder.storages.find_oom_message = lambda device: (
            "full" if gpu.recorder.storages.live_bytes > 4 << 30 else None
        )
        with gpu:
            x = torch.zeros(4, 64, 64, device="cuda")
            before = torch.cuda.memory_allocated()
            try:
                run(x)
            except (RuntimeError, TypeError):
                inside = torch.cuda.memory_allocated()
            assert inside == before

    def test_what_the_program_holds_while_the_error_is_stays(self) -> None:
        def run() -> None:
            held = torch.zeros(1024, device="cuda")
            held.view(7)

        with VirtualGpu(GPU):
            try:
                run()
            except RuntimeError:
                assert torch.cuda.memory_allocated() == 4096

    def test_what_was_joined_in_a_call_that_raised_is_no_cache(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.part = nn.Linear(4, 4)
                self.part.register_forward_hook(lambda *given: self.then())
                self.kept = None

            def forward(self, x):
                return self.part(x)

            def then(self) -> None:
                if self.kept is None:
                    self.kept = torch.zeros(4, 4, device="cuda")
                elif self.kept.shape[0] == 4:
                    self.kept = torch.cat([self.kept, self.kept])
                    fail()

        with VirtualGpu(GPU) as gpu, torch.no_grad():
            model = Model().cuda()
            x = torch.zeros(2, 4, device="cuda")
            model(x)
            with pytest.raises(RuntimeError):
                model(x)
            old = gpu.recorder.storages.get_index(model.kept)
            model(x)
            assert gpu.trace.owners.get(old) is None


def test_patches_that_cannot_be_put_back_keep_no_others() -> None:
    class Once:
        def __setattr__(self, name: str, value: object) -> None:
            if name in vars(self) and value == "before":
                raise AttributeError(name)
            super().__setattr__(name, value)

    one, other, patches = Once(), Once(), PatchSet()
    one.name, other.kind = "before", "first"
    patches.set(other, "kind", "second")
    patches.set(one, "name", "after")
    with pytest.raises(AttributeError):
        patches.undo()
    assert other.kind == "first"
    vars(one)["name"] = "before"
    patches.set(other, "kind", "second")
    patches.set(one, "name", "after")
    patches.set(other, "kind", "third")
    with pytest.raises(AttributeError), patches.suspended():
        raise AssertionError
    assert other.kind == "third"
