"""Which code requests what differs from the simulation: allocations and frees, each with its C++ and Python frames."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


def traced(call: Callable[[], object]) -> list[tuple[str, int, list[str]]]:
    """Call twice, and return what the second call does."""
    call()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="all")
    call()
    torch.cuda.synchronize()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [
        (entry["action"], entry["size"], [frame["name"][:80] for frame in entry.get("frames", [])][:30])
        for entry in entries
        if entry["action"] in ("alloc", "free_requested")
    ]


def calls() -> dict[str, Callable[[], object]]:
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True, device="cuda")
    states = torch.randn(4, 512, 512, device="cuda", requires_grad=True)
    matrix = torch.randn(1024, 1024, device="cuda")
    symmetric = matrix @ matrix.T + torch.eye(1024, device="cuda") * 1024
    sparse = torch.where(matrix > 1.6, matrix, 0).to_sparse()
    found: dict[str, Callable[[], object]] = {
        "TransformerEncoderLayer": lambda: layer(states).sum().backward(),
        "sparse coo": lambda: torch.sparse.mm(sparse, matrix),
        "sparse csr": lambda: sparse.to_sparse_csr() @ matrix,
        "fft": lambda: torch.fft.fft(matrix[:64, :1009]),
    }
    for name in ("svd", "eigh", "qr", "cholesky", "inv", "eig"):
        found[name] = lambda name=name: getattr(torch.linalg, name)(symmetric)  # type: ignore[misc]
    # The buffer by which Triton's tuning empties the cache between kernels, in a first compiled call.
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "pointwise": lambda x: (x * 2 + 1).relu(),
        "reduction": lambda x: (x * 2).sum(-1),
        "softmax": lambda x: x.softmax(-1),
        "transposition": lambda x: x.t().contiguous() + 1,
        "layer_norm": lambda x: functional.layer_norm(functional.gelu(x), (1024,)),
    }
    for name, function in functions.items():
        found[f"compiled {name}"] = lambda function=function: torch.compile(function, fullgraph=True)(matrix)  # type: ignore[misc]
    return found


def main() -> None:
    found = {}
    for name, call in calls().items():
        if name.startswith("compiled"):
            torch.compiler.reset()
            torch.cuda.memory._record_memory_history(enabled=None)
            torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python")
            call()  # the first call is the one that tunes
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            found[f"{name}, first call"] = [(entry["action"], entry["size"]) for entry in entries]
        found[name] = traced(call)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
