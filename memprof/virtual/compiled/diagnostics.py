"""Diagnostics of how Dynamo cut the program up: functions compiled again, and breaks between graphs.

Each is told once, with what it comes to: what one graph leaves to the next lies in memory, where one graph might have
computed it as it went.
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
from memprof.virtual.compiled.mode_suspension import Lifting
from memprof.virtual.compiled.saved import SavedResult, traced_bytes
from memprof.watch.program_code import is_program, is_program_file
from memprof.watch.recorder import Recorder

_NUMBERS = re.compile(r"\d+")
_LONGEST = 160
_RESUMED = "torch_dynamo_resume_in"  # how Dynamo calls what follows a break; it is compiled again where its function is


class CompileDiagnostics:
    """Notes recompilations and breaks of a run."""

    def __init__(self, lifted: Lifting, recorder: Recorder, assume: Callable[[str], None]) -> None:
        self._lifted = lifted
        self._recorder = recorder
        self._assume = assume
        self._told: set[tuple[Any, str]] = set()
        # Code of functions that were compiled in this run: Dynamo keeps what it compiled in runs before, too.
        self._compiled: set[Any] = set()
        self._break: Any = None
        self._seconds = 0.0
        self._kernels: set[str] = set()
        self._graphs = 0

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the patches (owner, name, replacement) of Dynamo."""

        reasons_of = dynamo.get_and_maybe_log_recompilation_reasons.get()
        cut, compile_graph = dynamo.compile_subgraph.get(), dynamo.call_user_compiler.get()

        def reasons(entries: Any, frame: Any, *args: Any, **kwargs: Any) -> list[str]:
            # Guards fail where the program runs, in what it sees of torch.
            with self._lifted.put_back():
                found: list[str] = reasons_of(entries, frame, *args, **kwargs)
            self._again(frame.f_code, found)
            return found

        def compile_subgraph(graph: Any, tracer: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
            self._break = reason if reason.graph_break else None
            self._compiled.add(tracer.f_code)
            return cut(graph, tracer, reason, *args, **kwargs)

        def call_user_compiler(graph: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._break is not None:
                self._broken(self._break, module)
            return compile_graph(graph, module, *args, **kwargs)

        yield dynamo.get_and_maybe_log_recompilation_reasons.patch(reasons)
        yield dynamo.compile_subgraph.patch(compile_subgraph)
        yield dynamo.call_user_compiler.patch(call_user_compiler)

    def add_compile_time(self, seconds: float) -> None:
        """Torch compiled for so long."""
        self._seconds += seconds
        self._recorder.trace.compiling = CompileStats(round(self._seconds, 3), len(self._kernels))

    def note_kernel(self, source: str) -> None:
        """Note a kernel that Inductor wrote."""
        self._kernels.add(source)

    def keeps_more(self, kept: list[SavedResult], more_bytes: int) -> None:
        """A graph keeps these for its backward, and so many bytes more in all than eager code would."""
        self._graphs += 1
        for one, count in Counter(kept).items():
            found = CompiledSavedTensors(self._graphs, more_bytes, one.op, one.source, one.num_bytes, count, one.again)
            self._recorder.trace.compiled_keeps.append(found)

    def note_recompile_limit(self, name: str) -> None:
        """The function of this name (and place) was compiled as often as Dynamo allows."""
        limit = dynamo.config.get().recompile_limit
        self._assume(
            f"{name} was compiled {limit} times (torch._dynamo.config.recompile_limit), and for whatever fits none of "
            "them runs eagerly, as on a GPU."
        )

    def _again(self, code: Any, reasons: list[str]) -> None:
        if not reasons or code not in self._compiled:
            return
        if not is_program(code) or code.co_name.startswith(_RESUMED):
            return
        reason = reasons[-1].partition(": ")[2].partition("\n")[0] or reasons[-1]
        reason = reason.partition("  # ")[0].strip().rstrip(".")
        key = (code, _NUMBERS.sub("", reason))
        if key in self._told:
            return
        self._told.add(key)
        self._assume(
            f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) is compiled again ({reason[:_LONGEST]}), "
            "which costs time, and memory of the GPU where it runs in CUDA graphs; more of the kind is not told."
        )

    def _broken(self, reason: Any, module: Any) -> None:
        frames = [frame for frame in reason.user_stack if is_program_file(frame.filename)]
        if not frames:
            return
        at = f"{frames[-1].filename}:{frames[-1].lineno}"
        if (at, "") in self._told:
            return
        self._told.add((at, ""))
        why = str(reason.reason).strip().partition("\n")[0].rstrip(".")
        end = GraphBreak(f"{at} {frames[-1].name}", why[:_LONGEST], _left(module))
        self._recorder.trace.graph_ends.append(end)
        self._assume(
            f"A graph ends at {at} ({end.why}): {format_bytes(end.num_bytes)} are left there in memory for what "
            "follows, with which nothing before it is fused."
        )


def _left(module: torch.fx.GraphModule) -> int:
    inputs = {id(node.meta.get("example_value")) for node in module.graph.nodes if node.op == "placeholder"}
    output = next(node for node in module.graph.nodes if node.op == "output")
    results = {
        id(value): value for node in output.all_input_nodes if (value := node.meta.get("example_value")) is not None
    }
    return sum(traced_bytes(value) for key, value in results.items() if key not in inputs)
