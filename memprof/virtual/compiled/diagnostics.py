"""Diagnostics of Dynamo's graphs: recompilations and graph breaks.

Each cause is reported once. The cost of a graph break, in bytes, is the results that one graph leaves in memory for
the next graph, which a single graph might have fused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.torch_private import dynamo
from memprof.trace.events import CompiledSavedTensors, CompileStats, GraphBreak
from memprof.units import format_bytes
from memprof.virtual.compiled.mode_suspension import Suspension
from memprof.virtual.compiled.saved_tensors import SavedResult, count_traced_bytes
from memprof.watch.program_code import is_program, is_program_file
from memprof.watch.recorder import Recorder

_NUMBERS = re.compile(r"\d+")
_MAX_CHARS = 160
_RESUME_PREFIX = "torch_dynamo_resume_in"  # Dynamo's functions after a graph break, recompiled with the whole function


class CompileDiagnostics:
    """Collector of the recompilations, graph breaks, compile times and saved tensors of a run."""

    def __init__(self, suspension: Suspension, recorder: Recorder, assume: Callable[[str], None]) -> None:
        self._suspension = suspension
        self._recorder = recorder
        self._assume = assume
        self._reported_keys: set[tuple[Any, str]] = set()
        # Code objects of functions that were compiled in this run; Dynamo's caches also have those of earlier runs.
        self._compiled_code: set[Any] = set()
        self._graph_break: Any = None
        self._seconds = 0.0
        self._kernels: set[str] = set()
        self._num_saving_graphs = 0

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the patches (owner, name, replacement) of Dynamo's functions."""

        original_find_reasons = dynamo.get_and_maybe_log_recompilation_reasons.get()
        original_compile_subgraph, original_compiler = dynamo.compile_subgraph.get(), dynamo.call_user_compiler.get()

        def find_reasons(entries: Any, frame: Any, *args: Any, **kwargs: Any) -> list[str]:
            # Guards are evaluated under memprof's patches, as while the program runs.
            with self._suspension.resume():
                reasons: list[str] = original_find_reasons(entries, frame, *args, **kwargs)
            self._report_recompilation(frame.f_code, reasons)
            return reasons

        def compile_subgraph(graph: Any, tracer: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
            self._graph_break = reason if reason.graph_break else None
            self._compiled_code.add(tracer.f_code)
            return original_compile_subgraph(graph, tracer, reason, *args, **kwargs)

        def call_user_compiler(graph: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._graph_break is not None:
                self._report_graph_break(self._graph_break, module)
            return original_compiler(graph, module, *args, **kwargs)

        yield dynamo.get_and_maybe_log_recompilation_reasons.patch(find_reasons)
        yield dynamo.compile_subgraph.patch(compile_subgraph)
        yield dynamo.call_user_compiler.patch(call_user_compiler)

    def add_compile_time(self, seconds: float) -> None:
        """Add `seconds` to the compile time of the run."""
        self._seconds += seconds
        self._recorder.trace.compiling = CompileStats(round(self._seconds, 3), len(self._kernels))

    def record_kernel(self, source: str) -> None:
        """Record the source code of a kernel that Inductor generated."""
        self._kernels.add(source)

    def record_saved_tensors(self, saved_results: list[SavedResult], excess_bytes: int) -> None:
        """Record the results that a graph saves for the backward, and the bytes by which they exceed eager code's."""
        self._num_saving_graphs += 1
        for result, count in Counter(saved_results).items():
            key = (
                self._num_saving_graphs,
                excess_bytes,
                result.op,
                result.source,
                result.num_bytes,
                count,
                result.is_recomputed,
            )
            self._recorder.trace.compiled_keeps.append(CompiledSavedTensors(*key))

    def report_recompile_limit(self, name: str) -> None:
        """Report that the function `name`, given with its source line, reached Dynamo's recompile limit."""
        limit = dynamo.config.get().recompile_limit
        self._assume(
            f"{name} was compiled {limit} times (torch._dynamo.config.recompile_limit), and for whatever fits none of "
            "them runs eagerly, as on a GPU."
        )

    def _report_recompilation(self, code: Any, reasons: list[str]) -> None:
        if not reasons or code not in self._compiled_code:
            return
        if not is_program(code) or code.co_name.startswith(_RESUME_PREFIX):
            return
        reason = reasons[-1].partition(": ")[2].partition("\n")[0] or reasons[-1]
        reason = reason.partition("  # ")[0].strip().rstrip(".")
        key = (code, _NUMBERS.sub("", reason))
        if key in self._reported_keys:
            return
        self._reported_keys.add(key)
        self._assume(
            f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) is compiled again ({reason[:_MAX_CHARS]}), "
            "which costs time, and memory of the GPU where it runs in CUDA graphs; more of the kind is not told."
        )

    def _report_graph_break(self, reason: Any, module: Any) -> None:
        frames = [frame for frame in reason.user_stack if is_program_file(frame.filename)]
        if not frames:
            return
        location = f"{frames[-1].filename}:{frames[-1].lineno}"
        if (location, "") in self._reported_keys:
            return
        self._reported_keys.add((location, ""))
        cause = str(reason.reason).strip().partition("\n")[0].rstrip(".")
        entry = GraphBreak(f"{location} {frames[-1].name}", cause[:_MAX_CHARS], _count_output_bytes(module))
        self._recorder.trace.graph_ends.append(entry)
        self._assume(
            f"A graph ends at {location} ({entry.why}): {format_bytes(entry.num_bytes)} are left there in memory for "
            "what follows, with which nothing before it is fused."
        )


def _count_output_bytes(module: torch.fx.GraphModule) -> int:
    inputs = {id(node.meta.get("example_value")) for node in module.graph.nodes if node.op == "placeholder"}
    output = next(node for node in module.graph.nodes if node.op == "output")
    results = {
        id(value): value for node in output.all_input_nodes if (value := node.meta.get("example_value")) is not None
    }
    return sum(count_traced_bytes(value) for key, value in results.items() if key not in inputs)
