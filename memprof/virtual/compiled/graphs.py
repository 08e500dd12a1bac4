"""CUDA graphs of compiled code (mode="reduce-overhead"): what they take is in one private pool, which is kept.

As torch/_inductor/cudagraph_trees.py has it: a function's first call warms up and its second is captured, both with
memory of the pool that all graphs of the process share; inputs that are no parameters, and no results of another graph,
are copied into tensors that the graph keeps. A replay takes nothing: here it takes from the pool what was captured.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memprof.trace.events import NONE, CudaGraphed
from memprof.watch.recorder import Recorder

TOLD = (
    "Compiled code runs in CUDA graphs, as it was asked to: what they take stays in a pool of their own, which serves "
    "nothing else. A replay is counted as taking again from the pool what was captured."
)
_SKIPPED = "Compiled code of {} runs without CUDA graphs, as on a GPU: {}."
_CAPTURED_AT = 2  # which call of a function, with sizes that it was not yet called with, is captured


class Graphs:
    """The graphs of a run, which share one pool."""

    def __init__(self, recorder: Recorder, assume: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._assume = assume
        self._pool = 0
        self._sizes: Counter[str] = Counter()

    def keep(self, compiled: Any, settings: dict[str, Any], name: str) -> None:
        """Run what Inductor compiled for the function `name` as a graph, unless a GPU would not."""
        static = set(settings.get("static_input_idxs") or ())
        written = set(getattr(compiled, "mutated_input_idxs", ())) - static
        why_not = getattr(compiled, "disabled_cudagraphs_reason", None) or (
            "it writes into an input" if written else ""
        )
        if why_not:
            self._assume(_SKIPPED.format(name, str(why_not).partition("\n")[0].rstrip(". ")))
            return
        self._assume(TOLD)
        compiled.current_callable = _Graph(self, compiled.current_callable, static, not settings.get("is_backward"))

    def note_sizes(self) -> None:
        """The program calls a function with sizes that it was not yet called with."""
        line = self._recorder.attribution.place(sys._getframe(1)).source
        trace = self._recorder.trace
        if line != NONE:
            self._sizes[trace.sources[line]] += 1
            trace.graphed[:] = [CudaGraphed(*item) for item in self._sizes.items()]

    def run(
        self, compiled: Callable[[list[Any]], Any], inputs: list[Any], copied: Iterable[int]
    ) -> tuple[Any, list[Any]]:
        """Return what `compiled` gives, with memory of the pool; and copies of the inputs with these numbers."""
        if not self._pool:
            self._pool = torch.cuda.graph_pool_handle()[0]
        before = self._recorder.active_pool.select(self._pool, of_thread=False)
        try:
            copies = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in map(inputs.__getitem__, copied)
            ]
            return compiled(inputs), copies
        finally:
            self._recorder.active_pool.select(before[0], of_thread=before[1])


class _Graph:
    """One compiled function, or its backward: called with a list of inputs, which it empties."""

    def __init__(
        self, graphs: Graphs, compiled: Callable[[list[Any]], Any], static: set[int], is_forward: bool
    ) -> None:
        self._graphs = graphs
        self._compiled = compiled
        self._static = static
        self._is_forward = is_forward
        self._calls: dict[tuple[int, ...], int] = {}
        self._copies: list[Any] = []

    def __call__(self, inputs: list[Any]) -> Any:
        sizes = tuple(value for value in inputs if isinstance(value, int))
        number = self._calls[sizes] = self._calls.get(sizes, 0) + 1
        copied: list[int] = []
        if number == 1 and self._is_forward:
            self._graphs.note_sizes()
        if number == _CAPTURED_AT:
            torch.cuda.empty_cache()  # torch.cuda.graph begins with it
            tensors = (at for at, value in enumerate(inputs) if isinstance(value, torch.Tensor))
            copied = [at for at in tensors if at not in self._static]
        result, copies = self._graphs.run(self._compiled, inputs, copied)
        self._copies += copies
        return result
