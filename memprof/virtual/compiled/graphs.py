"""CUDA graphs of compiled code (mode="reduce-overhead"), whose memory stays in one private pool.

The rules are from torch/_inductor/cudagraph_trees.py: the first call of a function warms up and the second is captured,
both with memory of the pool that all graphs of the process share. Inputs that are neither parameters nor results of
another graph are copied into tensors that the graph keeps. A replay allocates nothing; memprof simulates a replay by
allocating the captured memory again from the pool.
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
_CAPTURED_CALL = 2  # number of the call that is captured, for each combination of sizes


class Graphs:
    """CUDA graphs of a run, which share one memory pool."""

    def __init__(self, recorder: Recorder, assume: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._assume = assume
        self._pool = 0
        self._sizes: Counter[str] = Counter()

    def keep(self, compiled: Any, settings: dict[str, Any], name: str) -> None:
        """Have the function `name`, compiled by Inductor, run as a CUDA graph, unless torch would not capture it."""
        static = set(settings.get("static_input_idxs") or ())
        written = set(getattr(compiled, "mutated_input_idxs", ())) - static
        reason = getattr(compiled, "disabled_cudagraphs_reason", None) or ("it writes into an input" if written else "")
        if reason:
            self._assume(_SKIPPED.format(name, str(reason).partition("\n")[0].rstrip(". ")))
            return
        self._assume(TOLD)
        compiled.current_callable = _Graph(self, compiled.current_callable, static, not settings.get("is_backward"))

    def note_sizes(self) -> None:
        """Count a graph for the program's current line: a function is called with new sizes."""
        line = self._recorder.attribution.find_call_site(sys._getframe(1)).source
        trace = self._recorder.trace
        if line != NONE:
            self._sizes[trace.sources[line]] += 1
            trace.graphed[:] = [CudaGraphed(*item) for item in self._sizes.items()]

    def run(
        self, compiled: Callable[[list[Any]], Any], inputs: list[Any], copied: Iterable[int]
    ) -> tuple[Any, list[Any]]:
        """Return the result of `compiled` in memory of the pool, and copies of the inputs at the indices `copied`."""
        if not self._pool:
            self._pool = torch.cuda.graph_pool_handle()[0]
        before = self._recorder.active_pool.select_pool(self._pool, is_thread_local=False)
        try:
            copies = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in map(inputs.__getitem__, copied)
            ]
            return compiled(inputs), copies
        finally:
            self._recorder.active_pool.select_pool(before[0], is_thread_local=before[1])


class _Graph:
    """CUDA graph of one compiled function or backward; a call empties the list of inputs."""

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
        call_number = self._calls[sizes] = self._calls.get(sizes, 0) + 1
        copied: list[int] = []
        if call_number == 1 and self._is_forward:
            self._graphs.note_sizes()
        if call_number == _CAPTURED_CALL:
            torch.cuda.empty_cache()  # the first step of torch.cuda.graph
            tensors = (at for at, value in enumerate(inputs) if isinstance(value, torch.Tensor))
            copied = [at for at in tensors if at not in self._static]
        result, copies = self._graphs.run(self._compiled, inputs, copied)
        self._copies += copies
        return result
