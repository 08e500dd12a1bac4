"""Forwards of hand-written traces, as a line of words."""

from __future__ import annotations

from memprof.trace.events import EventKind, Module, ModuleRole
from tests.unit.traces import TraceBuilder

VOCABULARY, WIDTH = 1000, 64

MODULES = {
    "root": Module("", "Net", ModuleRole.ROOT, ""),
    "other": Module("", "Other", ModuleRole.ROOT, ""),
    "embedding": Module("embedding", "Embedding", ModuleRole.EMBEDDING, ""),
    "norm": Module("norm", "Norm", ModuleRole.NORM, ""),
    "head": Module("head", "Linear", ModuleRole.HEAD, ""),
    "part": Module("layers.0.part", "Part", ModuleRole.OTHER, ""),
    "conv": Module("conv", "Conv", ModuleRole.CHILD, ""),
    "pool": Module("pool", "Pool", ModuleRole.CHILD, ""),
    "blocks": Module("blocks", "ModuleList", ModuleRole.OTHER, ""),
    **{f"blocks{i}": Module(f"blocks.{i}", f"Block{i}", ModuleRole.CHILD, "blocks") for i in range(2)},
    **{f"layer{i}": Module(f"layers.{i}", "Layer", ModuleRole.LAYER, "layers") for i in range(2)},
    "layer0.mlp": Module("layers.0.mlp", "Mlp", ModuleRole.LAYER, "layers"),
    **{f"encoder{i}": Module(f"net.encoder.{i}", "Layer", ModuleRole.LAYER, "net.encoder") for i in range(2)},
    **{f"decoder{i}": Module(f"net.decoder.{i}", "Layer", ModuleRole.LAYER, "net.decoder") for i in range(2)},
}


def run_forward(b: TraceBuilder, code: str) -> list[int]:
    """Run `code`, of words: `layer0(` calls a module and `)` returns, `+layer0` has one that is not called, `4x64`
    allocates, `4x64@layer0` in that module, `4x64!mul` by an operator, and `-` frees the last allocation.
    Return the indices of the storages."""
    made: list[int] = []
    indices: list[int] = []
    modules = b.trace.modules
    for word in code.split():
        word, _, op = word.partition("!")
        shape, _, name = word.partition("@")
        name = name or word.strip("+(")
        if name in MODULES and MODULES[name] not in modules:
            modules.append(MODULES[name])
        if word.endswith("("):
            b._calls.append(modules.index(MODULES[name]))
            b.add(EventKind.ENTER, b._calls[-1])
        elif word == ")":
            b.leave()
        elif word == "-":
            b.free(indices.pop())
        elif not word.startswith("+"):
            module = modules.index(MODULES[name]) if "@" in word else None
            indices.append(b.new(*map(int, shape.split("x")), module=module, op=f"aten.{op or 'mm'}"))
            made.append(indices[-1])
    return made
