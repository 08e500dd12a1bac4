"""Origins of the buffers of generated code: operator, module and source line whose result each buffer holds.

Inductor keeps the graph nodes of every buffer; Dynamo keeps, in every node, the stack of modules and the program's
stack. A generated file has one line for each allocation, with the name of the buffer.
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
_ROOT_NAME = re.compile(r"^L\[[^\]]*\](\._orig_mod)?\.?")  # Dynamo's name of the compiled object
# Operators that change the layout of another operator's result.
_VIEW_OPERATORS = frozenset(
    {"view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "alias"}
)
UNKNOWN_OPERATOR = "compiled kernel"  # operator of a buffer without a node


class BufferOrigin(NamedTuple):
    """Origin of one buffer: operator, path of the module in the compiled module, source line (`file:line function`)."""

    op: str
    module: str
    source: str


class BufferOrigins:
    """Table of the origins of all buffers, by generated file; `folder()` is the folder of these files."""

    def __init__(self, recorder: Recorder, folder: Callable[[], str]) -> None:
        self._recorder = recorder
        self._folder = folder
        self._origins_by_file: dict[str, dict[str, BufferOrigin]] = {}
        self._origins_by_line: dict[tuple[str, int], BufferOrigin | None] = {}
        self._call_sites: dict[tuple[int, BufferOrigin], CallSite] = {}

    def record_buffers(self, graph: Any, file: str) -> None:
        """Record the origins of the buffers of `graph`, lowered by Inductor to the generated `file`."""
        self._origins_by_file[file] = {name: find_node_origin(node) for name, node in _find_buffer_nodes(graph)}

    def find_call_site(self, frame: FrameType | None, call_site: CallSite) -> tuple[str, CallSite]:
        """Return operator and call site of an allocation by generated code at or above `frame`; else `call_site`."""
        while frame is not None and not frame.f_code.co_filename.startswith(self._folder()):
            frame = frame.f_back
        origin = None if frame is None else self._find_origin(frame.f_code.co_filename, frame.f_lineno)
        if origin is None:
            return UNKNOWN_OPERATOR, call_site
        key = (call_site.module, origin)
        site = self._call_sites.get(key)
        if site is None:
            recorder = self._recorder
            source = recorder.attribution.index_source_line(origin.source) if origin.source else call_site.source
            site = CallSite(recorder.modules.find_innermost_module(call_site.module, origin.module), source, NONE)
            self._call_sites[key] = site
        return origin.op, CallSite(site.module, site.source, call_site.forward_event)

    def _find_origin(self, file: str, line: int) -> BufferOrigin | None:
        key = (file, line)
        if key not in self._origins_by_line:
            with open(file, encoding="utf-8") as stream:
                match = _ALLOCATION.match(stream.read().splitlines()[line - 1])
            self._origins_by_line[key] = self._origins_by_file.get(file, {}).get(match[1]) if match else None
        return self._origins_by_line[key]


def _find_buffer_nodes(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each buffer of `graph`, lowered by Inductor, and the node whose result the buffer holds."""
    for name, buffer in graph.name_to_buffer.items():
        nodes = list(getattr(buffer, "origins", ()))
        node = getattr(buffer, "origin_node", None) or next(iter(nodes), None)
        if node is not None:
            yield name, next((n for n in (node, *nodes) if _find_operator_name(n) not in _VIEW_OPERATORS), node)


def _find_operator_name(node: Any) -> str:
    target = node.meta.get("original_aten") or node.target
    return str(getattr(target, "__name__", target)).partition(".")[0]


def find_node_origin(node: Any) -> BufferOrigin:
    """Return the origin of the result of `node`, from the metadata that Dynamo recorded."""
    meta = node.meta
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = next((_ROOT_NAME.sub("", str(entry[0])) for entry in reversed(list(modules.values()))), "")
    frames = list(_FRAME.finditer(meta.get("stack_trace") or ""))
    program_frames = [frame for frame in frames if is_program_file(frame["file"])]
    source = (
        f"{program_frames[-1]['file']}:{program_frames[-1]['line']} {program_frames[-1]['function']}"
        if program_frames
        else ""
    )
    return BufferOrigin(f"aten.{_find_operator_name(node)}", path, source)
