"""Both sides of the comparison of compiled code with the CPU: Inductor's code for the CPU, run there, and on the GPU.

The virtual GPU traces and partitions a program as for its GPU; then Inductor is given the graphs as if the GPU were
the CPU, for which it fuses otherwise. Its C++ is neither made nor run there, as its Triton is not elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import PatchSet
from memprof.virtual.compiled import wrapper

CPU = torch.device("cpu")


@contextlib.contextmanager
def for_the_cpu() -> Iterator[list[int]]:
    """Inside, what a virtual GPU compiles is compiled for the CPU; gives how many nodes each graph has."""
    from torch._inductor import async_compile, compile_fx
    from torch._inductor.codegen import cpp

    graphs: list[int] = []
    compile_inner, wrapped = compile_fx.compile_fx_inner, wrapper.patches

    def compile_for_cpu(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return compile_inner(graph, _retarget(graph, inputs), *args, **kwargs)

    def patches(*of_the_run: Any) -> Iterator[tuple[Any, str, Any]]:
        for owner, name, replacement in wrapped(*of_the_run):
            if owner is not cpp.CppScheduling:
                yield owner, name, replacement
            if name == "_empty_strided_cuda":
                yield owner, "_empty_strided_cpu", replacement
        yield async_compile.AsyncCompile, "cpp_pybinding", lambda compiler, types, source: lambda *args: None

    own = PatchSet()
    own.set(compile_fx, "compile_fx_inner", compile_for_cpu)
    own.set(wrapper, "patches", patches)
    try:
        with torch.backends.mkldnn.flags(enabled=False):  # as on the other side: what oneDNN takes depends on the CPU
            yield graphs
    finally:
        own.undo()


def _retarget(graph: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """The inputs, and what each node gives, as on the CPU."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
        return made.requires_grad_(value.requires_grad)

    mode = next(value.fake_mode for value in inputs if isinstance(value, torch.Tensor))  # type: ignore[attr-defined]
    with mode:
        given = [moved(value) for value in inputs]
    for node in graph.graph.nodes:
        node.kwargs = {name: CPU if _is_cuda(value) else value for name, value in node.kwargs.items()}
        node.args = tuple(CPU if _is_cuda(value) else value for value in node.args)
    graph.recompile()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    return given


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"
