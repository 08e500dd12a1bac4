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

_CUDA_GRAPHS_ASSUMPTION = (
    "Compiled code runs in CUDA graphs, as it was asked to: what they take stays in a pool of their own, which serves "
    "nothing else. A replay is counted as taking again from the pool what was captured."
)
_SKIPPED_ASSUMPTION = "Compiled code of {} runs without CUDA graphs, as on a GPU: {}."
_CAPTURE_CALL = 2  # number of the call that is captured, for each combination of sizes


class CudaGraphs:
    """CUDA graphs of the compiled functions of a run, which share one memory pool."""

    def __init__(self, recorder: Recorder, assume: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._assume = assume
        self._pool = 0
        self._num_sizes_by_line: Counter[str] = Counter()

    def wrap_compiled(self, compiled: Any, settings: dict[str, Any], name: str) -> None:
        """Make `compiled`, the code of the function `name`, run as a CUDA graph, if torch would capture it."""
        static_indices = set(settings.get("static_input_idxs") or ())
        written_indices = set(getattr(compiled, "mutated_input_idxs", ())) - static_indices
        reason = getattr(compiled, "disabled_cudagraphs_reason", None) or (
            "it writes into an input" if written_indices else ""
        )
        if reason:
            self._assume(_SKIPPED_ASSUMPTION.format(name, str(reason).partition("\n")[0].rstrip(". ")))
            return
        self._assume(_CUDA_GRAPHS_ASSUMPTION)
        compiled.current_callable = _CudaGraph(
            self, compiled.current_callable, static_indices, not settings.get("is_backward")
        )

    def count_input_sizes(self) -> None:
        """Count a new combination of input sizes, which gets its own graph, for the program's current line."""
        source = self._recorder.attribution.find_call_site(sys._getframe(1)).source
        trace = self._recorder.trace
        if source != NONE:
            self._num_sizes_by_line[trace.sources[source]] += 1
            trace.graphed[:] = [CudaGraphed(*item) for item in self._num_sizes_by_line.items()]

    def run_in_pool(
        self, compiled: Callable[[list[Any]], Any], inputs: list[Any], copied_indices: Iterable[int]
    ) -> tuple[Any, list[Any]]:
        """Return the result of `compiled` and copies of the inputs at `copied_indices`, all allocated from the pool."""
        if not self._pool:
            self._pool = torch.cuda.graph_pool_handle()[0]
        previous = self._recorder.active_pool.select_pool(self._pool, is_thread_local=False)
        try:
            copies = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in map(inputs.__getitem__, copied_indices)
            ]
            return compiled(inputs), copies
        finally:
            self._recorder.active_pool.select_pool(previous[0], is_thread_local=previous[1])


class _CudaGraph:
    """CUDA graph of one compiled forward or backward; callable with the list of inputs, which is emptied."""

    def __init__(
        self, graphs: CudaGraphs, compiled: Callable[[list[Any]], Any], static_indices: set[int], is_forward: bool
    ) -> None:
        self._graphs = graphs
        self._compiled = compiled
        self._static_indices = static_indices
        self._is_forward = is_forward
        self._num_calls_by_sizes: dict[tuple[int, ...], int] = {}
        self._copies: list[Any] = []  # inputs that the graph keeps

    def __call__(self, inputs: list[Any]) -> Any:
        sizes = tuple(value for value in inputs if isinstance(value, int))
        call_number = self._num_calls_by_sizes[sizes] = self._num_calls_by_sizes.get(sizes, 0) + 1
        copied_indices: list[int] = []
        if call_number == 1 and self._is_forward:
            self._graphs.count_input_sizes()
        if call_number == _CAPTURE_CALL:
            torch.cuda.empty_cache()  # the first step of torch.cuda.graph
            tensors = (i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor))
            copied_indices = [i for i in tensors if i not in self._static_indices]
        result, copies = self._graphs.run_in_pool(self._compiled, inputs, copied_indices)
        self._copies += copies
        return result
