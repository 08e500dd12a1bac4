"""Small programs that allocate and free as programs do: inside operators, outside, in threads, on streams.

Each is a function of the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 512


def perceptron(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(device)


def training(device: str) -> None:
    """Train: all but the batch is allocated in operators, and freed by the backward pass and by `del`."""
    model = perceptron(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        states = model(torch.randn(256, WIDTH, device=device))
        loss = (states.float() ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del states, loss


def inference(device: str) -> None:
    """Overwrite a variable again and again: its old tensors are freed outside operators."""
    model = perceptron(device)
    with torch.no_grad():
        for _ in range(5):
            states = torch.randn(256, WIDTH, device=device)
            states = model(states)
            states = states * 2
            states = states.softmax(-1)


class KeepsAttribute(torch.autograd.Function):
    """Keeps a tensor as an attribute of ctx: it ends with the node, and not when saved tensors are released."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        ctx.kept = states.detach() * 3
        return states * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return ctx.kept * gradients[0]


def ctx_attribute(device: str) -> None:
    """Free what autograd's own nodes held."""
    for _ in range(3):
        states = torch.randn(256, WIDTH, device=device, requires_grad=True)
        KeepsAttribute.apply(states).sum().backward()  # type: ignore[no-untyped-call]
        del states


def other_thread(device: str) -> None:
    """Free in another thread what was allocated in this one, and the other way round."""
    box = [torch.randn(256, WIDTH, device=device)]
    _in_thread(box.clear)
    _in_thread(lambda: box.append(torch.randn(128, WIDTH, device=device)))
    box.clear()


def _in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def checkpointed(device: str) -> None:
    """Compute activations again in the backward pass, by both ways that torch has."""
    model = perceptron(device)
    for reentrant in (False, True):
        states = torch.randn(256, WIDTH, device=device, requires_grad=True)
        checkpoint(model, states, use_reentrant=reentrant).sum().backward()


def side_stream(device: str) -> None:
    """Use a tensor on a second stream and free it meanwhile. Needs CUDA."""
    stream = torch.cuda.Stream()
    states = torch.randn(1 << 20, device=device)
    with torch.cuda.stream(stream):
        doubled = states * 2
        states.record_stream(stream)
        del states
        more = doubled + 1
    torch.cuda.current_stream().wait_stream(stream)
    del doubled, more


def captured_forward(device: str) -> None:
    """Capture a forward pass in a CUDA graph, and replay it. Needs CUDA."""
    model = perceptron(device)
    states = torch.randn(256, WIDTH, device=device)
    for _ in range(2):
        model(states)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(states)
    graph.replay()
    torch.cuda.synchronize()


def captured_step(device: str) -> None:
    """Capture a whole training step, whose phases memprof sees begin while the capture goes on. Needs CUDA."""
    model = perceptron(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    states = torch.randn(64, WIDTH, device=device)

    def step() -> None:
        model(states).sum().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()


PATTERNS: dict[str, Callable[[str], None]] = {
    pattern.__name__: pattern
    for pattern in (
        training,
        inference,
        ctx_attribute,
        other_thread,
        checkpointed,
        side_stream,
        captured_forward,
        captured_step,
    )
}
