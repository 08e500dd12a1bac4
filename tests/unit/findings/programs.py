"""Programs that need much memory, each for another reason, and the same programs with what helps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memprof

STEPS = 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Callable[[], Any]) -> None:
    """Steps, each with the backward of every loss that `losses` yields."""
    for _ in range(STEPS):
        for loss in losses():
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()


# -- a model with layers of convolutions, and of attention ----------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(hidden)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(64) for _ in range(6)])
        self.classifier = nn.Linear(64, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean((2, 3)))


def convnet(fix: str = "", parts: int = 1) -> None:
    model = ConvNet().cuda()
    if fix:
        memprof.apply(model, fix)

    def losses() -> Any:
        images, labels = torch.randn(256, 3, 64, 64, device="cuda"), torch.randint(100, (256,), device="cuda")
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            yield F.cross_entropy(model(x), y) / parts

    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), losses)


WIDTH, HEADS, TOKENS, WORDS = 512, 8, 512, 50304


class Block(nn.Module):
    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.eager = eager

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        if self.eager:
            attended = (query @ key.transpose(-1, -2) / 8).softmax(-1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class LanguageModel(nn.Module):
    def __init__(self, *, eager: bool = False, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(eager=eager) for _ in range(layers)])
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def language_model(
    fix: str = "", rows: int = 32, parts: int = 1, *, outside: bool = False, eager: bool = False, layers: int = 4
) -> None:
    """`outside`: the loss is not the model's, but the program's own."""
    model = LanguageModel(eager=eager, layers=layers).cuda()
    if fix:
        memprof.apply(model, fix)

    def losses() -> Any:
        for ids in torch.randint(WORDS, (rows, TOKENS), device="cuda").chunk(parts):
            loss = F.cross_entropy(model(ids).view(-1, WORDS), ids.view(-1)) if outside else model(ids, ids)
            yield loss / parts

    train(model, torch.optim.AdamW(model.parameters()), losses)


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(256, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](hidden)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 256), nn.SiLU(), nn.Linear(256, 256))
        self.stem, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)
        self.down = nn.ModuleList([Stage(64, 64), Stage(64, 128), Stage(128, 256)])
        self.up = nn.ModuleList([Stage(512, 128), Stage(256, 64), Stage(128, 64)])

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        time, x, skips = self.time(time[:, None]), self.stem(x), []
        for stage in self.down:
            x = stage(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for stage in self.up:
            skip = skips.pop()
            x = stage(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1), time)
        return self.last(x)


def unet(fix: str = "", parts: int = 1) -> None:
    model = UNet().cuda()
    if fix:
        memprof.apply(model, fix)

    def losses() -> Any:
        images, noise = (torch.randn(64, 3, 128, 128, device="cuda") for _ in range(2))
        times = torch.rand(64, device="cuda")
        for x, n, t in zip(images.chunk(parts), noise.chunk(parts), times.chunk(parts), strict=True):
            yield F.mse_loss(model(x + n * t[:, None, None, None], t), n) / parts

    train(model, torch.optim.AdamW(model.parameters()), losses)


def perceptron(fix: str = "", parts: int = 1) -> None:
    """A million rows at a time."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 1)).cuda()
    if fix:
        memprof.apply(model, fix)

    def losses() -> Any:
        for x in torch.randn(1_000_000, 1024, device="cuda").chunk(parts):
            yield model(x).square().mean() / parts

    train(model, torch.optim.Adam(model.parameters()), losses)


# -- weights and the state of their optimizer ------------------------------------------------------------------------


def wide_layers(
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, dtype: str = "float32"
) -> None:
    model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(12)]).cuda().to(getattr(torch, dtype))
    inputs = torch.randn(32, 8192, device="cuda").to(getattr(torch, dtype))
    train(model, make_optimizer(model.parameters()), lambda: [model(inputs).square().mean()])


def lbfgs(history_size: int = 100) -> None:
    model = nn.Linear(8192, 8192).cuda()
    inputs = torch.randn(32, 8192, device="cuda")
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=history_size)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def sparse_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of the first parameter, a table of 1,280 million numbers; the others are few."""
    return torch.optim.SparseAdam([next(iter(parameters))])


def table_of_items(make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
    is_sparse = make_optimizer is sparse_adam
    model = nn.Sequential(nn.Embedding(20_000_000, 64, sparse=is_sparse), nn.Linear(64, 1)).cuda()

    def losses() -> Any:
        yield model(torch.randint(20_000_000, (4096, 50), device="cuda")).square().mean()

    train(model, make_optimizer(model.parameters()), losses)


# -- all pairs --------------------------------------------------------------------------------------------------------


def in_rows(function: Callable[..., torch.Tensor], rows: int | None, first: torch.Tensor, *rest: torch.Tensor) -> Any:
    """`function` of all rows, or with checkpoints of some at a time."""
    if rows is None:
        return function(first, *rest)
    return torch.cat([checkpoint(function, part, *rest, use_reentrant=False) for part in first.split(rows)])


def point_cloud(rows: int | None = None) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()

    def nearest(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left[:, None] - right[None]).pow(2).sum(2).min(1).values

    def losses() -> Any:
        left, right = (model(torch.randn(points, 6, device="cuda")) for points in (32768, 8192))
        yield in_rows(nearest, rows, left, right).mean()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), losses)


def contrastive(rows: int | None = None) -> None:
    """NT-Xent: each of a batch with all others."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
    targets = torch.arange(32768, device="cuda").roll(16384)

    def compare(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(left @ right.t() / 0.5, targets[: len(left)], reduction="none")

    def losses() -> Any:
        features = F.normalize(model(torch.randn(32768, 512, device="cuda")), dim=1)
        yield in_rows(compare, rows, features, features).mean()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), losses)


def kernel_matrix(rows: int | None = None) -> None:
    points, targets = torch.randn(40000, device="cuda"), torch.randn(40000, 1, device="cuda")
    scale = torch.ones((), device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([scale])

    def predict(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.exp(-((left[:, None] - right[None]) ** 2) / scale) @ targets

    for _ in range(2):
        (in_rows(predict, rows, points, points, scale) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- torch.func, and sparse matrices ---------------------------------------------------------------------------------


def gradients_of_samples(chunk_size: int | None = None) -> None:
    layers = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    images, labels = torch.randn(4096, 3, 64, 64, device="cuda"), torch.randint(10, (4096,), device="cuda")
    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), chunk_size=chunk_size)
    assert all(len(gradient) == 4096 for gradient in of_each(parameters, images, labels).values())


def jacobian(chunk_size: int | None = None) -> None:
    left, right = (torch.randn(2000, 3, device="cuda") for _ in range(2))

    def residual(points: torch.Tensor) -> torch.Tensor:
        return torch.exp(-((points[:, None] - right[None]) ** 2).sum(-1)).sum(1)

    assert torch.func.jacrev(residual, chunk_size=chunk_size)(left).shape == (2000, 2000, 3)


def forward_jacobian(chunk_size: int | None = None) -> None:
    points = torch.randn(500, 3, device="cuda")

    def residual(points: torch.Tensor) -> torch.Tensor:
        return torch.exp(-((points[:, None] - points[None]) ** 2).sum(-1)).sum(1)

    if chunk_size is None:
        torch.func.jacfwd(residual)(points)
    else:
        basis = torch.eye(1500, device="cuda").view(1500, 500, 3)
        push = lambda direction: torch.func.jvp(residual, (points,), (direction,))[1]  # noqa: E731
        torch.func.vmap(push, chunk_size=chunk_size)(basis)


def slope_of_waves(*, autograd: bool = False) -> None:
    x = torch.rand(8192, 8192, device="cuda", requires_grad=True)

    def wave(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x.sin().cos()
        return x.sum()

    if autograd:
        torch.autograd.grad(wave(x), x)
    else:
        torch.func.grad(wave)(x)


def sparse_graph(*, entries: bool = False) -> None:
    """A trained adjacency matrix; `entries`: its product is written as a sum over its entries."""
    nodes, edges = 110_000, 500_000
    indices = torch.randint(nodes, (2, edges), device="cuda")
    weights = torch.rand(edges, device="cuda", requires_grad=True)
    features = torch.randn(nodes, 16, device="cuda", requires_grad=True)
    for _ in range(2):
        if entries:
            messages = weights[:, None] * features[indices[1]]
            result = torch.zeros(nodes, 16, device="cuda").index_add(0, indices[0], messages)
        else:
            result = torch.sparse.mm(
                torch.sparse_coo_tensor(indices, weights, (nodes, nodes), check_invariants=False), features
            )
        result.square().mean().backward()
        weights.grad = features.grad = None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(64, 256), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        results = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            results.append(self.head(state))
        return torch.cat(results, 1), state


def recurrence(windows: int = 1) -> None:
    model = Recurrent().cuda()

    def losses() -> Any:
        x, state = torch.randn(4096, 80, 64, device="cuda"), torch.zeros(4096, 256, device="cuda")
        for part in x.chunk(windows, 1):
            y, state = model(part, state.detach())
            yield y.square().mean()

    train(model, torch.optim.SGD(model.parameters(), lr=0.1), losses)
