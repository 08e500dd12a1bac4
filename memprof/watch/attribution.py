"""Attribution of each allocation to a module, a source line and a forward operator."""

from __future__ import annotations

import bisect
import sys
from types import CodeType, FrameType
from typing import Any

from memprof.torch_private import autograd
from memprof.trace.events import NONE, Trace
from memprof.watch.forward import CallSite, ForwardOperators
from memprof.watch.modules import ModuleTracker
from memprof.watch.program_code import is_program

_new_tuple: Any = tuple.__new__  # Makes a named tuple without its class's Python-level `__new__`.


class Attribution:
    """Finder of the call site of each operator: module, source line and forward operator.

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
        """Return the module, source line and forward operator of the operator that runs; `frame` is the innermost frame
        to consider.

        Modules that run inside a backward pass (recomputation) count as themselves.
        """
        module = self._running_modules.module
        if module == NONE and autograd.current_graph_task_id() != -1:
            node = autograd.current_autograd_node()
            if node is not None:
                return self._find_node_call_site(node, frame)
        return _new_tuple(CallSite, (module, self._find_source_index(frame), NONE))  # type: ignore[no-any-return]

    def _find_node_call_site(self, node: Any, frame: FrameType | None) -> CallSite:
        number, forward = node._sequence_nr(), self._forward
        if number != forward.backward_node:
            forward.backward_node = number
            forward.num_storages_before_node = len(self._trace.storages)
        position = bisect.bisect_right(forward.sequence_numbers, number)
        if position < len(forward.call_sites):
            return forward.call_sites[position]
        variable = getattr(node, "variable", None)
        if variable is not None:
            return CallSite(self._modules.find_parameter_module(variable), NONE, NONE)
        return CallSite(NONE, self._find_source_index(frame), NONE)

    def record_forward_operator(self, call_site: CallSite) -> None:
        """Attribute to `call_site` the backward operators with autograd's current sequence number."""
        number, forward = autograd.get_sequence_nr(), self._forward
        sequence = forward.sequence_numbers
        if not sequence or sequence[-1] < number:
            sequence.append(number)
            forward.call_sites.append(
                _new_tuple(CallSite, (call_site.module, call_site.source, len(self._trace.events)))
            )

    def is_made_by_node(self, index: int) -> bool:
        """Return whether the autograd node that runs now made the storage with this index."""
        return index >= self._forward.num_storages_before_node

    def find_caller_line(self) -> int:
        """Return the index of the source line outside torch and memprof that runs now."""
        return self._find_source_index(sys._getframe(1))

    def index_source_line(self, text: str) -> int:
        """Return the index in the trace of the line `text` (`file:number function`); add a new line to the trace."""
        index = self._line_index.get(text)
        if index is None:
            index = self._line_index[text] = len(self._trace.sources)
            self._trace.sources.append(text)
        return index

    def _find_source_index(self, frame: FrameType | None) -> int:
        codes = self._code_by_id
        while frame is not None:
            code = frame.f_code
            known = codes.get(id(code))
            if known is None:
                known = codes[id(code)] = (code, is_program(code))
            if known[1]:
                key = (id(code), frame.f_lasti)
                index = self._source_by_instruction.get(key)
                if index is None:
                    index = self._source_by_instruction[key] = self._find_line_index(code, frame.f_lineno)
                return index
            frame = frame.f_back
        return NONE

    def _find_line_index(self, code: CodeType, number: int) -> int:
        index = self._source_index.get((code, number))
        if index is None:
            index = self._source_index[code, number] = self.index_source_line(
                f"{code.co_filename}:{number} {code.co_name}"
            )
        return index

    def clear(self) -> None:
        """Remove the record of operators that ran forward."""
        self._forward = ForwardOperators()
