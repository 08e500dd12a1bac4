"""Record of the lines of the program's own files that lead to an allocation, for large allocations.

A storage has the innermost line outside torch, which can be a library's, or in a function that torch calls for the
program: a module's `forward`, a function that `torch.func.vmap` transforms, a part that is checkpointed.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch.func import functional_call, jacrev, vmap

from memprof.trace.events import NONE, Caller, CheckpointedLine, Trace
from memprof.watch.attribution import Attribution
from memprof.watch.program_code import COMMANDS_DIR, is_own_file, is_program

# Files of torch that call functions of the program, and the public module of the functions that the program calls;
# "" if the name says nothing, as that of a module's call.
_CALLING_FILES = {
    torch.nn.modules.module.__file__: "",
    torch.utils.checkpoint.__file__: "",
    torch.autograd.function.__file__: "",
    torch.autograd.__file__: "torch.autograd",
    inspect.getfile(torch.Tensor.backward): "torch",
    **{inspect.getfile(function): "torch.func" for function in (vmap, jacrev, functional_call)},
}


class _CodeKind(NamedTuple):
    """What is known of code that matters to the search: of the program or a library, or of torch and calls these."""

    is_program: bool
    is_own: bool
    called: str | None  # for a function of torch that calls the program: its name, or ""
    is_outermost: bool  # whether no caller of it belongs to the program: the program's main part, memprof's commands
    is_checkpoint: bool  # whether it is torch.utils.checkpoint.checkpoint


class CallerRecorder:
    """Recorder of `Trace.callers` and `Trace.checkpointed_lines`."""

    def __init__(self, trace: Trace, attribution: Attribution) -> None:
        self._trace = trace
        self._attribution = attribution
        self._codes: list[CodeType] = []  # kept alive, so that the `id` of each stays its own
        self._kind_by_id: dict[int, _CodeKind | None] = {}  # None: the code does not matter
        self._is_own_source: dict[int, bool] = {NONE: False}
        self._checkpointed_sources: set[int] = set()

    def record(self, index: int) -> None:
        """Append the callers of the storage `index`, which is being allocated, to the trace."""
        source = self._trace.storages[index].source
        nearest, outermost = self._find_callers(sys._getframe(1), source)
        lines = {} if nearest is None or self._is_own(source) else {nearest.source: nearest}
        if outermost is not None and outermost.source != source:
            lines[outermost.source] = outermost
        self._trace.callers += (caller._replace(storage=index) for caller in lines.values())

    def _find_callers(self, frame: FrameType | None, source: int) -> tuple[Caller | None, Caller | None]:
        """Return the innermost line of the program's own files at or above `frame`, and the outermost of those whose
        function torch called back."""
        nearest = outermost = None
        is_first, calls_back, by = True, False, ""
        is_checkpointed = False
        kinds = self._kind_by_id
        while frame is not None:
            code = frame.f_code
            kind = kinds[id(code)] if id(code) in kinds else self._add_kind(code)
            if kind is not None:  # most frames are torch's
                if kind.called is not None:
                    calls_back, by = True, kind.called
                    is_checkpointed |= kind.is_checkpoint
                elif kind.is_program:
                    if is_checkpointed:
                        self._record_checkpoint(source, self._attribution.find_source_index(frame))
                        is_checkpointed = False
                    line = self._attribution.find_source_index(frame) if is_first or kind.is_own else NONE
                    if is_first and line == source:  # what torch calls inside this line does not lead to it
                        calls_back, by = False, ""
                    if kind.is_own:
                        caller = Caller(NONE, line, by)
                        nearest = nearest or caller
                        if calls_back:
                            outermost = caller
                        calls_back = False
                    is_first, by = False, ""
                if kind.is_outermost:
                    break
            frame = frame.f_back
        return nearest, outermost

    def _record_checkpoint(self, source: int, caller: int) -> None:
        """Record that the line `source` runs in a checkpoint that the line `caller` calls; the innermost counts."""
        if source not in self._checkpointed_sources:
            self._checkpointed_sources.add(source)
            self._trace.checkpointed_lines.append(CheckpointedLine(source, caller))

    def _add_kind(self, code: CodeType) -> _CodeKind | None:
        file = code.co_filename
        called = _CALLING_FILES.get(file)
        if called:
            called = f"{called}.{code.co_qualname.partition('.<locals>')[0]}"
        is_own = is_own_file(file)
        is_outermost = (is_own and code.co_name == "<module>") or file.startswith(COMMANDS_DIR)
        is_checkpoint = file == torch.utils.checkpoint.__file__ and code.co_name == "checkpoint"
        kind = _CodeKind(is_program(code), is_own, called, is_outermost, is_checkpoint)
        self._codes.append(code)
        self._kind_by_id[id(code)] = None if kind == (False, False, None, False, False) else kind
        return self._kind_by_id[id(code)]

    def _is_own(self, source: int) -> bool:
        is_own = self._is_own_source.get(source)
        if is_own is None:
            file = self._trace.sources[source].rpartition(":")[0]
            is_own = self._is_own_source[source] = is_own_file(file)
        return is_own
