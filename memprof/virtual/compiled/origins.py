"""Origins of the buffers of generated code: the module, the line and the operator whose result each holds.

Inductor keeps with every buffer the nodes of the graph that it was made of, and with every node what Dynamo knew of it:
the modules that were running, and the program's stack. A generated file has one line for each allocation, which says
the buffer's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from memprof.trace.events import NONE
from memprof.watch.forward import CallSite
from memprof.watch.program_code import is_program_file
from memprof.watch.recorder import Recorder

_ALLOCATION = re.compile(r"^\s*(\w+) = ")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>\S+)$', re.MULTILINE)
_ROOT = re.compile(r"^L\[[^\]]*\](\._orig_mod)?\.?")  # how Dynamo names what it compiles
# Operators that lay out another's result.
_MOVES = frozenset({"view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "alias"})
UNKNOWN = "compiled kernel"  # what is said of a buffer without a node


class BufferOrigin(NamedTuple):
    """The origin of one buffer: operator, module below the compiled one, and line (`file:line function`)."""

    op: str
    module: str
    source: str


class Origins:
    """The origins of the buffers of every generated file."""

    def __init__(self, recorder: Recorder, folder: Callable[[], str]) -> None:
        self._recorder = recorder
        self._folder = folder
        self._buffers: dict[str, dict[str, BufferOrigin]] = {}
        self._lines: dict[tuple[str, int], BufferOrigin | None] = {}
        self._places: dict[tuple[int, BufferOrigin], CallSite] = {}

    def note(self, graph: Any, file: str) -> None:
        """`graph`, lowered by Inductor, became that file."""
        self._buffers[file] = {name: origin for name, node in _nodes(graph) if (origin := origin_of(node)) is not None}

    def place(self, frame: FrameType | None, known: CallSite) -> tuple[str, CallSite]:
        """Return operator and place of the allocation in generated code that `frame` is called from."""
        while frame is not None and not frame.f_code.co_filename.startswith(self._folder()):
            frame = frame.f_back
        origin = None if frame is None else self._origin(frame.f_code.co_filename, frame.f_lineno)
        if origin is None:
            return UNKNOWN, known
        key = (known.module, origin)
        place = self._places.get(key)
        if place is None:
            recorder = self._recorder
            source = recorder.attribution.line(origin.source) if origin.source else known.source
            place = CallSite(recorder.modules.below(known.module, origin.module), source, NONE)
            self._places[key] = place
        return origin.op, CallSite(place.module, place.source, known.forward_event)

    def _origin(self, file: str, line: int) -> BufferOrigin | None:
        key = (file, line)
        if key not in self._lines:
            with open(file, encoding="utf-8") as text:
                found = _ALLOCATION.match(text.read().splitlines()[line - 1])
            self._lines[key] = self._buffers.get(file, {}).get(found[1]) if found else None
        return self._lines[key]


def _nodes(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield each buffer of a lowered graph, and the node whose result it holds."""
    for name, buffer in graph.name_to_buffer.items():
        nodes = list(getattr(buffer, "origins", ()))
        node = getattr(buffer, "origin_node", None) or next(iter(nodes), None)
        if node is not None:
            yield name, next((one for one in (node, *nodes) if _operator(one) not in _MOVES), node)


def _operator(node: Any) -> str:
    target = node.meta.get("original_aten") or node.target
    return str(getattr(target, "__name__", target)).partition(".")[0]


def origin_of(node: Any) -> BufferOrigin | None:
    """Return the origin of a node that Dynamo traced."""
    meta = node.meta
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = next((_ROOT.sub("", str(found[0])) for found in reversed(list(modules.values()))), "")
    frames = list(_FRAME.finditer(meta.get("stack_trace") or ""))
    own = [frame for frame in frames if is_program_file(frame["file"])]
    source = f"{own[-1]['file']}:{own[-1]['line']} {own[-1]['function']}" if own else ""
    return BufferOrigin(f"aten.{_operator(node)}", path, source)
