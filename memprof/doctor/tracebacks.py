"""The frames of the traceback before an error, in the formats of Python, IPython and rich."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.doctor.log_lines import Passage, clean_line, strip_box_borders

_PYTHON_FRAME = re.compile(r'\bFile "([^"]+)", line (\d+)(?:, in (\S+))?')
_IPYTHON_FRAME = re.compile(
    r"^(?:File |Input In |Cell )?((?:[\w.~/\\:<>-]+\.py|<ipython[^>]*>|[\w.~/\\:-]+\.py)):(\d+),? in ([\w.<>]+)"
)
_CELL_FRAME = re.compile(r"^(?:Cell )?(In\s?\[\d+\]), line (\d+)")
_RICH_FRAME = re.compile(r"^\s*((?:[A-Za-z]:)?[\w.~/\\ -]+\.py):(\d+) in (\S+)")
_ARROW_LINE = re.compile(r"^\s*(?:-+>|❱|>)\s*\d+ ?[│|]?\s*(.*)$")
_RANK_PREFIX = re.compile(r"\[rank ?\d+\]|\[default\d*\]|\bpid=\d+")
_TORCH_PATH = re.compile(r"[/\\]torch[/\\]|<frozen|<__array_function__|[/\\]torch\.py$")
_LIBRARY_PATH = re.compile(
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python\d|[/\\]Lib[/\\]|[/\\]lib[/\\]\w+\.py$|<frozen", re.I
)
_MARKERS = re.compile(r"^[\s~^*]*$")


@dataclass(frozen=True, slots=True)
class TracebackFrame:
    """A frame of a traceback; `code` is its source line, empty if not printed."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        name = re.split(r"(?:site|dist)-packages[/\\]", self.file)[-1].replace("\\", "/")
        code = f": {self.code}" if self.code else ""
        return f"{name}:{self.line}{f' {self.function}' if self.function else ''}{code}"

    @property
    def is_in_torch(self) -> bool:
        """Return whether the frame is in torch or in Python's standard library."""
        is_standard_library = self.is_in_library and not re.search(r"(?:site|dist)-packages", self.file)
        return bool(_TORCH_PATH.search(self.file)) or is_standard_library

    @property
    def is_in_library(self) -> bool:
        """Return whether the frame is in an installed library, not in the user's code."""
        return bool(_LIBRARY_PATH.search(self.file))


def read_frames(passage: Passage) -> list[TracebackFrame]:
    """Return the frames of the last traceback before the error, outermost first; [] without a traceback."""
    lines = passage.text_before.split("\n")
    rank = _RANK_PREFIX.search(passage.text_after.split("\n", 1)[0])
    if rank is not None:  # processes write at once
        same_rank = re.compile(re.escape(rank[0]) + r"(?!\d)")
        lines = [line for line in lines if same_rank.search(line)]
    clean_lines = [clean_line(line) for line in lines]
    starts = [i for i, line in enumerate(clean_lines) if "Traceback (most recent call last)" in line]
    if starts:
        clean_lines = clean_lines[starts[-1] + 1 :]
    frames: list[TracebackFrame] = []
    for i, line in enumerate(clean_lines):
        unboxed = strip_box_borders(line)
        match = _PYTHON_FRAME.search(line) or _PYTHON_FRAME.search(unboxed)
        if match:
            code = next((text.strip() for text in clean_lines[i + 1 : i + 2] if not _PYTHON_FRAME.search(text)), "")
            frames.append(TracebackFrame(match[1], int(match[2]), match[3] or "", "" if _MARKERS.match(code) else code))
            continue
        match = _IPYTHON_FRAME.match(unboxed) or _RICH_FRAME.match(unboxed)
        if match:
            frames.append(TracebackFrame(match[1].strip(), int(match[2]), match[3].split("(")[0]))
            continue
        if (cell := _CELL_FRAME.match(unboxed)) is not None:
            frames.append(TracebackFrame(cell[1], int(cell[2]), ""))
            continue
        arrow = _ARROW_LINE.match(unboxed) or _ARROW_LINE.match(line.replace("│", "", 1))
        if arrow and frames and not frames[-1].code:
            last = frames.pop()
            frames.append(TracebackFrame(last.file, last.line, last.function, strip_box_borders(arrow[1]).strip(" │")))
    return frames


def choose_frames(frames: list[TracebackFrame]) -> list[TracebackFrame]:
    """Return the innermost frame outside torch, and the innermost frame of the user's code if that is a different one.
    If all frames are in torch, return the innermost."""
    innermost = next((frame for frame in reversed(frames) if not frame.is_in_torch), None)
    user_frame = next((frame for frame in reversed(frames) if not frame.is_in_library), None)
    if innermost is None:
        return frames[-1:]
    return [innermost] if user_frame is None or user_frame == innermost else [innermost, user_frame]


def find_script(frames: list[TracebackFrame]) -> str | None:
    """Return the path of the script that the user ran, as the outermost frame has it; None if it is not a file."""
    for frame in frames:
        if frame.function == "<module>" and not frame.is_in_library:
            is_file = frame.file.endswith(".py") and "ipykernel_" not in frame.file
            return frame.file if is_file else None
    return None
