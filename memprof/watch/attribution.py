"""Attribution of each allocation to a module, a source line and a forward operator."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from memprof.torch_private import autograd
from memprof.trace.events import NONE, EventKind, Trace
from memprof.watch.forward import CallSite, ForwardOperators
from memprof.watch.modules import ModuleTracker
from memprof.watch.program_code import is_program

_new_tuple: Any = tuple.__new__  # Makes a named tuple without its class's Python-level `__new__`.


class Attribution:
    """Finder of the call site of each operator call: module, source line and forward operator.

    A backward operator is attributed to the forward operator that it differentiates, found by the sequence number that
    autograd gives to both.
    """

    def __init__(self, trace: Trace, modules: ModuleTracker) -> None:
        self._trace = trace
        self._modules = modules
        self._running_modules = modules.thread
        self._forward = ForwardOperators()
        self._line_index: dict[str, int] = {}
        self._source_index: dict[tuple[CodeType, int], int] = {}
        # Source index by the code's `id` and the instruction offset: a code object's hash reads all its contents.
        self._source_by_instruction: dict[tuple[int, int], int] = {}
        self._code_by_id: dict[
            int, tuple[CodeType, bool]
        ] = {}  # Code objects by `id`, and whether they are the program's.

    def find_call_site(self, frame: FrameType | None) -> CallSite:
        """Return the call site of the running operator; `frame` is the innermost stack frame to consider.

        Operators of a module call inside a backward pass (recomputation) are attributed to that module.
        """
        module = self._running_modules.module
        if module == NONE and autograd.current_graph_task_id() != -1:
            node = autograd.current_autograd_node()
            if node is not None:
                return self._find_node_call_site(node, frame)
        return _new_tuple(CallSite, (module, self.find_source_index(frame), NONE))  # type: ignore[no-any-return]

    def _find_node_call_site(self, node: Any, frame: FrameType | None) -> CallSite:
        sequence_number, forward = node._sequence_nr(), self._forward
        if sequence_number != forward.backward_node:
            forward.backward_node = sequence_number
            forward.num_storages_before_node = len(self._trace.storages)
        position = bisect.bisect_right(forward.sequence_numbers, sequence_number)
        if position < len(forward.call_sites):
            return forward.call_sites[position]
        variable = getattr(node, "variable", None)
        if variable is not None:
            return CallSite(self._modules.find_parameter_module(variable), NONE, NONE)
        return CallSite(NONE, self.find_source_index(frame), NONE)

    def record_forward_operator(self, call_site: CallSite) -> None:
        """Store `call_site` as that of the backward node with autograd's current sequence number."""
        sequence_number, forward = autograd.get_sequence_nr(), self._forward
        sequence_numbers = forward.sequence_numbers
        if not sequence_numbers or sequence_numbers[-1] < sequence_number:
            sequence_numbers.append(sequence_number)
            forward.call_sites.append(
                _new_tuple(CallSite, (call_site.module, call_site.source, len(self._trace.events)))
            )

    def find_spans(self, nodes: Iterable[Any], others: Iterable[Any]) -> list[tuple[int, int]]:
        """Return the spans (begin, end) of events in which operators of the autograd `nodes` ran forward in this
        thread, and no operator with another node: of `others`, or of a graph that has none of `nodes`.

        A span begins with the first call of a module after the operator before, if there is one.
        """
        numbers, sites, events = self._forward.sequence_numbers, self._forward.call_sites, self._trace.events

        def find_positions(nodes: Iterable[Any]) -> set[int]:
            return {bisect.bisect_right(numbers, node._sequence_nr()) for node in nodes}

        positions = find_positions(nodes) - find_positions(others)
        spans: list[tuple[int, int]] = []
        for position in sorted(positions & set(range(len(sites)))):
            first = sites[position].forward_event
            end = sites[position + 1].forward_event if position + 1 < len(sites) else len(events)
            if spans and position - 1 in positions:
                spans[-1] = spans[-1][0], end
                continue
            previous = sites[position - 1].forward_event if position else 0
            calls = (time for time in range(previous, first) if events[time].kind is EventKind.ENTER)
            spans.append((next(calls, first), end))
        return spans

    def is_made_by_node(self, index: int) -> bool:
        """Return whether the storage `index` was allocated by the autograd node that is running."""
        return index >= self._forward.num_storages_before_node

    def find_caller_line(self) -> int:
        """Return the trace's index of the innermost running source line outside torch and memprof."""
        return self.find_source_index(sys._getframe(1))

    def find_caller_lines(self) -> tuple[int, int]:
        """Return `find_caller_line`, and the index of the line that calls its function; NONE: none does."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_program(frame.f_code):
            frame = frame.f_back
        return self.find_source_index(frame), self.find_source_index(None if frame is None else frame.f_back)

    def index_source_line(self, line: str) -> int:
        """Return the trace's index of the source line `line` (`file:number function`), which is added if new."""
        index = self._line_index.get(line)
        if index is None:
            index = self._line_index[line] = len(self._trace.sources)
            self._trace.sources.append(line)
        return index

    def find_source_index(self, frame: FrameType | None) -> int:
        """Return the trace's index of the innermost line outside torch and memprof at or above `frame`; else NONE."""
        code_by_id = self._code_by_id
        while frame is not None:
            code = frame.f_code
            entry = code_by_id.get(id(code))
            if entry is None:
                entry = code_by_id[id(code)] = (code, is_program(code))
            if entry[1]:
                key = (id(code), frame.f_lasti)
                index = self._source_by_instruction.get(key)
                if index is None:
                    index = self._source_by_instruction[key] = self._find_line_index(code, frame.f_lineno)
                return index
            frame = frame.f_back
        return NONE

    def _find_line_index(self, code: CodeType, line_number: int) -> int:
        index = self._source_index.get((code, line_number))
        if index is None:
            index = self._source_index[code, line_number] = self.index_source_line(
                f"{code.co_filename}:{line_number} {code.co_name}"
            )
        return index

    def clear(self) -> None:
        """Forget the call sites of forward operators."""
        self._forward = ForwardOperators()
