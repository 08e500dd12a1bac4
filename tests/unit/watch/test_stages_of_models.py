"""The stages of models of any kind: a language model's own words are said of no other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof
from memprof.trace.events import Role


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.norm(x))


def through(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


class Speaker(nn.Module):
    """Layers are lists of modules, and the head is a product with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for attention, feedforward in self.layers:
            x = feedforward(attention(x))
        return torch.einsum("btd,vd->btv", self.norm(x), self.embed.weight)


class Painter(nn.Module):
    """Layers, then a Linear that is no head, and layers again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
        self.up = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through(self.up, self.middle(through(self.down, self.first(x)))) * 2


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Mixed(nn.Module):
    """Layers, and between them a list of modules of several kinds, with code of the model's own between its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.mid = nn.ModuleList([Block(), nn.ModuleList([Scale(), nn.Linear(64, 64)]), Block()])
        self.up = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = through(self.down, self.first(x))
        before, (scale, linear), after = self.mid
        x = after(x + linear(scale(before(x))))
        return through(self.up, x) * 2


class Gated(nn.Module):
    """A language model that has a Linear beside its head, called before its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head, self.gate = nn.LayerNorm(64), nn.Linear(64, 1000), nn.Linear(64, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.norm(through(self.layers, x * self.gate(x))))


class Conditional(nn.Module):
    """Of images of a class: it has an embedding, and reads no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.first = nn.Embedding(10, 64), nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.labels(torch.zeros(len(x), dtype=torch.int64, device=x.device))
        return through(self.blocks, x) * 2


class Detector(nn.Module):
    """Its parts are called one by one while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64))
        for part in self.model:
            part(torch.zeros(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model[1](self.model[0](x))


def trained(model: nn.Module, *, tokens: bool, length: int = 32) -> memprof.Report:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            if tokens:
                ids = torch.randint(0, 1000, (4, length), device="cuda")
                loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            else:
                x = torch.randn(128, 64, device="cuda")
                loss = functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpu.report()


def forward_stages(model: nn.Module, *, tokens: bool) -> list[str]:
    stages = trained(model, tokens=tokens).stages
    return list(dict.fromkeys(s.name for s in stages if s.step == 2 and s.micro_batch and s.name != "backward"))


def test_lists_of_lists_are_layers_and_a_product_is_a_head() -> None:
    stages = ["embedding", "layer 0", "layer 1", "final norm", "logits", "loss"]
    assert forward_stages(Speaker(), tokens=True) == stages
    categories = trained(Speaker(), tokens=True).peak.categories
    # At least the logits and their log-softmax.
    assert categories["logits and loss"] >= 2 * 4 * 32 * 1000 * 4


def test_a_model_of_images_has_its_own_modules_for_stages() -> None:
    assert forward_stages(Painter(), tokens=False) == [
        "first Linear", "down layer 0", "down layer 1", "middle Sequential", "up layer 0", "up layer 1", "own code",
        "loss",
    ]  # fmt: skip


def test_a_list_of_several_kinds_of_modules_is_one_stage() -> None:
    layers = [[f"{stack} layer {number}" for number in range(2)] for stack in ("down", "up")]
    stages = forward_stages(Mixed(), tokens=False)
    assert stages == ["first Linear", *layers[0], "mid ModuleList", *layers[1], "own code", "loss"]


def test_the_head_has_an_output_for_each_word() -> None:
    expected = ["embedding", "layer 0", "layer 1", "final norm", "logits", "loss"]
    assert forward_stages(Gated(), tokens=True) == expected


def test_an_embedding_of_labels_makes_no_language_model() -> None:
    expected = ["first Linear", "labels Embedding", "own code", "layer 0", "layer 1", "loss"]
    stages = forward_stages(Conditional(), tokens=False)
    assert sorted(set(stages)) == sorted(expected)


def test_parts_that_were_called_alone_are_parts_of_the_whole() -> None:
    assert forward_stages(Detector(), tokens=False) == ["model.0 Sequential", "model.1 Linear", "loss"]


def test_a_model_that_was_called_while_it_was_built_has_all_its_parts() -> None:
    """As SpeechBrain's, which ask what their last part returns for the shape of the next."""
    with memprof.virtual_gpu("a100-80gb") as gpu:
        model = nn.Sequential()
        for name, part in (("conv", nn.Conv2d(3, 8, 3)), ("norm", nn.BatchNorm2d(8)), ("head", nn.Conv2d(8, 2, 3))):
            with torch.no_grad():
                model(torch.zeros(1, 3, 8, 8))
            model.add_module(name, nn.Sequential(part, nn.ReLU()))
        model.cuda()(torch.rand(1, 3, 8, 8, device="cuda")).sum().backward()
    names = [row.name for row in gpu.report().stages]
    assert {"norm Sequential", "head Sequential"} <= set(names)
    assert "conv.0.weight" in {owner.name for owner in gpu.trace.owners.values()}


def test_what_is_inside_a_wrapper_has_stages() -> None:
    wrapped = forward_stages(nn.DataParallel(Painter()), tokens=False)
    assert wrapped[:2] == ["module.first Linear", "down layer 0"]
    assert forward_stages(nn.DataParallel(Detector()), tokens=False)[:2] == [
        "module.model.0 Sequential",
        "module.model.1 Linear",
    ]


@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_are_never_called_are_parameters(moved: bool) -> None:
    """Whether they are known by the move or by the optimizer."""

    def program() -> None:
        nonlocal model
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, device=None if moved else "cuda"))
        model = model.cuda() if moved else model[1]
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            x = torch.randn(8, 256, device="cuda")
            model.forward(x).mean().backward()
            optimizer.step()

    model: nn.Module
    with memprof.virtual_gpu("h100-80gb") as gpu:
        program()
    size = sum(p.numel() * 4 for p in model.parameters())
    assert gpu.report().peak.categories["parameters"] == size


def test_weights_that_autocast_has_cast_are_no_logits() -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu, torch.no_grad(), torch.amp.autocast("cuda", dtype=torch.bfloat16):
        model = Gated().cuda()
        ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        for _ in range(2):
            model(ids)
    assert gpu.report().peak.categories["logits and loss"] < 1000 * 64 * 2


def run(program: Callable[[], object]) -> memprof.Report:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        program()
    return gpu.report()


def test_a_deep_copy_of_a_model_is_parameters() -> None:
    """Also if it has buffers, whose storages are copied flat, and is never moved, called or stepped on."""

    def program() -> None:
        nonlocal average
        model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)).cuda()
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 256, device="cuda")).mean().backward()
            optimizer.step()

    average: nn.Module
    report = run(program)
    size = sum(p.numel() * 4 for p in average.parameters())
    assert 2 * size <= report.peak.categories["parameters"] < 2.1 * size
    # The line that copies is the program's and not Python's own.
    assert not any("copy.py" in (t.source or "") for t in report.peak.tensors)


def test_a_model_that_the_program_lets_go_of_is_gone() -> None:
    """Nobody here keeps the one that was called last."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Linear(512, 512, bias=False).cuda()
        model(torch.rand(16, 512, device="cuda"))
        before = torch.cuda.memory_allocated()
        del model
        assert torch.cuda.memory_allocated() == before - (1 << 20)
    assert gpu.report().peak.categories["parameters"] == 1 << 20


def test_weights_of_a_model_can_be_swapped() -> None:
    """As torch moves those that are spread over ranks: it swaps none that somebody refers to weakly."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = nn.Linear(512, 512, bias=False).cuda()
            model(torch.rand(16, 512, device="cuda")).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert gpu.report().peak.categories["parameters"] == 1 << 20


def test_an_average_beside_two_models_that_came_from_the_host_is_parameters() -> None:
    """A list of tensors, as diffusers' EMAModel has them; weights in host memory are not counted with those here."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        trained, frozen = ([nn.Linear(512, 512, bias=False) for _ in range(10)] for _ in range(2))
        kept = [each.weight.detach().clone() for each in trained + frozen]  # the host's go on living
        model, other = nn.Sequential(*trained).cuda(), nn.Sequential(*frozen).cuda()
        torch.optim.SGD(model.parameters())  # which ends the phase in which models are built
        shadow = [weight.detach().clone() for weight in model.parameters()]
        x = torch.rand(16, 512, device="cuda")
        with torch.no_grad():
            x = other(x)
        model(x).sum().backward()
    assert len(kept) == 2 * len(shadow)
    assert gpu.report().peak.categories["parameters"] == 30 << 20


def test_a_program_of_functions_has_activations() -> None:
    """What its backward needs is no data, and the data is none of its activations."""

    def program() -> None:
        weights = [torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(2)]
        optimizer = torch.optim.SGD(weights)
        data = torch.randn(4096, 256, device="cuda")
        for _ in range(3):
            x = data[torch.randint(0, 4096, (1024,), device="cuda")]
            for weight in weights:
                x = torch.relu(x @ weight)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    tensors = run(program).peak.tensors
    found = {t.category for t in tensors if t.op == "aten.relu"}
    assert found == {"activations"}
    assert {t.category for t in tensors if t.shape == (4096, 256) or t.op == "aten.index"} == {"inputs"}


def test_tensors_that_a_program_differentiates_by_are_its_parameters() -> None:
    """It has neither modules nor an optimizer."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        weights = [torch.randn(512, 512, device="cuda", requires_grad=True) for _ in range(2)]
        data = torch.randn(512, 512, device="cuda")
        for _ in range(2):
            torch.relu(data @ weights[0] @ weights[1]).sum().backward()
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight.sub_(weight.grad)
                    weight.grad = None
    by_role: dict[Role, int] = {}
    for index, owner in gpu.trace.owners.items():
        by_role[owner.role] = by_role.get(owner.role, 0) + gpu.trace.storages[index].num_bytes
    assert by_role == {Role.PARAMETER: 2 << 20, Role.GRADIENT: 4 << 20}


def test_a_teacher_is_not_evaluated() -> None:
    """A model that no optimizer steps on is called without gradients, and the step goes on."""

    def program() -> None:
        student, teacher = Block().cuda(), Block().cuda().eval()
        optimizer = torch.optim.SGD(student.parameters())
        for _ in range(2):
            x = torch.randn(64, 64, device="cuda")
            y = student(x)
            with torch.no_grad():
                target = teacher(x)
            functional.mse_loss(y, target).backward()
            optimizer.step()
        with torch.no_grad():
            student.eval()(x)

    stages = run(program).stages
    evaluations = {number for number, stage in enumerate(stages) if stage.name.startswith("evaluation")}
    assert evaluations and min(evaluations) > max(n for n, stage in enumerate(stages) if stage.name == "backward")


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_teacher_beside_its_student_is_evaluated_where_that_is(is_evaluated: bool) -> None:
    def program() -> None:
        student, teacher = Block().cuda(), Block().cuda().eval()
        optimizer = torch.optim.SGD(student.parameters())
        x = torch.randn(64, 64, device="cuda")
        for _ in range(2):
            student(x).mean().backward()
            optimizer.step()
        student.train(not is_evaluated)
        with torch.no_grad():
            teacher(x)

    assert any(stage.name.startswith("evaluation") for stage in run(program).stages) == is_evaluated


def test_what_a_forward_between_steps_is_followed_by_is_no_loss() -> None:
    def program() -> None:
        model = Block().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(64, 64, device="cuda")).mean().backward()
            optimizer.step()
            with torch.no_grad():
                sample = model(torch.randn(64, 64, device="cuda"))
                sample = sample * 2 + 1

    stages = run(program).stages
    assert {stage.name for stage in stages if not stage.step and stage.name in ("loss", "output")} == {"output"}
    assert {stage.name for stage in stages if stage.step and stage.name in ("loss", "output")} == {"loss"}


class Bare(nn.Module):
    """Words are rows of a parameter, and the head is a product with another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Parameter(torch.randn(1000, 64)), nn.Parameter(torch.randn(64, 1000))
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words[ids]
        for layer in self.layers:
            x = layer(x)
        return torch.einsum("btd,dv->btv", x, self.out)


class Recurrent(nn.Module):
    """A language model without layers that are alike; of so many tokens that logits outweigh cuDNN's workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.decoder = nn.Embedding(4000, 64), nn.LSTM(64, 64, 2), nn.Linear(64, 4000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.rnn(self.embed(ids))[0])


@pytest.mark.parametrize("kind", [Bare, Recurrent])
def test_logits_are_known_by_their_use(kind: type[nn.Module]) -> None:
    # So long that the loss decides the peak, and not cuDNN's workspace in an LSTM's backward.
    tensors = trained(kind(), tokens=True, length=4096).peak.tensors
    words = {t.category for t in tensors if t.shape[-1:] in ((1000,), (4000,)) and t.shape[0] != 64 and not t.name}
    assert words == {"logits and loss"}


def test_what_a_child_is_done_with_is_freed_in_its_stage() -> None:
    """No rows of "own code" between the parts of a Sequential that is called without gradients."""

    def program() -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
        with torch.no_grad():
            model(torch.randn(512, 64, device="cuda"))

    names = [stage.name for stage in run(program).stages]
    assert [name for name in names if name[0].isdigit()] == [f"{n} Linear" for n in range(4)]
    assert "own code" not in names


def test_a_stack_is_not_called_by_a_number() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(head(x) for head in self.m)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleList([Heads(), nn.Linear(64, 64), Heads()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.model:
                x = part(x)
            return x

    stages = forward_stages(Many(), tokens=False)
    assert "model.0.m layer 0" in stages and "model.2.m layer 1" in stages


def test_what_follows_a_checkpoint_is_no_embedding(tmp_path: Path) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = Gated().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        model(ids).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(ids)
        torch.save(model.state_dict(), tmp_path / "saved.pt")
        kept = torch.zeros(1 << 20, device="cuda")
    names = [stage.name for stage in gpu.report().stages]
    assert kept.numel() and names.count("evaluation embedding") == 1 and names[-1] == "evaluation loss"


@pytest.mark.parametrize("kind", [Speaker, Recurrent])
def test_what_a_program_makes_of_logits_is_logits(kind: type[nn.Module]) -> None:
    @torch.no_grad()
    def program() -> None:
        model = kind().cuda().eval()
        for _ in range(3):
            logits = model(torch.zeros(4, 512, dtype=torch.long, device="cuda"))
            copied = logits.double()
            copied.softmax(-1)

    rows = {tensor.category for tensor in run(program).peak.tensors if tensor.shape[:2] == (4, 512)}
    assert rows == {"logits and loss"}


class Chunks(torch.autograd.Function):
    """A loss over a head's weight, a quarter of the tokens at a time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        parts = zip(x.flatten(0, 1).chunk(4), ids.flatten().chunk(4), strict=True)
        return torch.stack([functional.cross_entropy(part @ weight.t(), words) for part, words in parts]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


class Fused(nn.Module):
    """The head is never called; nor is a norm, if it is a function."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(64) if norm else lambda x: functional.layer_norm(x, (64,))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(through(self.layers, self.embed(ids)))
        loss: torch.Tensor = Chunks.apply(x, self.head.weight, ids)
        return loss


@pytest.mark.parametrize("norm", [True, False])
def test_a_loss_over_the_weight_of_a_head_that_is_not_called_is_not_before_it(norm: bool) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = Fused(norm=norm).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randint(0, 1000, (4, 32), device="cuda")).backward()
            optimizer.step()
    stages = [s.name for s in gpu.report().stages if s.step == 2 and s.micro_batch]
    assert stages == [
        "embedding",
        "layer 0",
        "layer 1",
        *(["final norm"] if norm else []),
        "logits",
        "loss",
        "backward",
    ]


def test_a_loss_that_is_a_module_is_no_head() -> None:
    """It makes one value a word too, of logits that it is given: the head is what has the product."""
    trunk = nn.Sequential(nn.Embedding(1000, 64), Block())

    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    with memprof.virtual_gpu("h100-80gb") as gpu:
        model, head, loss = trunk.cuda().bfloat16(), nn.Linear(64, 1000).cuda().bfloat16(), Loss()
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()])
        ids = torch.zeros(4, 32, dtype=torch.int64, device="cuda")
        for _ in range(2):
            loss(head(model(ids)), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    stages = [stage.name for stage in gpu.report().stages if stage.step == 2]
    assert stages.count("logits") == 1, stages
    assert stages.index("loss") == stages.index("logits") + 1, stages


def test_a_head_that_fills_a_buffer_in_the_models_own_code_is_logits() -> None:
    """As Liger-Kernel's loss does, of one chunk of tokens after another."""

    class Chunked(Speaker):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for attention, feedforward in self.layers:
                x = feedforward(attention(x))
            x = self.norm(x)
            buffer = torch.empty(x.shape[1], 1000, device=x.device)
            with torch.no_grad():
                for row in x:
                    torch.mm(row, self.embed.weight.t(), out=buffer)
            return x

    stages = forward_stages(Chunked(), tokens=True)
    assert stages == ["embedding", "layer 0", "layer 1", "final norm", "logits", "loss"]
