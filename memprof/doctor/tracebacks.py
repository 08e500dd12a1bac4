"""The frames of the traceback before an error, in the formats of Python, IPython and rich."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memprof.doctor.log import Passage, clean_line, strip_box

_PYTHON = re.compile(r'\bFile "([^"]+)", line (\d+)(?:, in (\S+))?')
_IPYTHON = re.compile(
    r"^(?:File |Input In |Cell )?((?:[\w.~/\\:<>-]+\.py|<ipython[^>]*>|[\w.~/\\:-]+\.py)):(\d+),? in ([\w.<>]+)"
)
_RICH = re.compile(r"^\s*((?:[A-Za-z]:)?[\w.~/\\ -]+\.py):(\d+) in (\S+)")
_ARROW = re.compile(r"^\s*(?:-+>|❱|>)\s*\d+ ?[│|]?\s*(.*)$")
_RANK = re.compile(r"\[rank ?\d+\]|\[default\d*\]|\bpid=\d+")
_TORCH = re.compile(r"[/\\]torch[/\\]|<frozen|<__array_function__|[/\\]torch\.py$")
_INSTALLED = re.compile(
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
        of_python = self.is_installed and not re.search(r"(?:site|dist)-packages", self.file)
        return bool(_TORCH.search(self.file)) or of_python

    @property
    def is_installed(self) -> bool:
        """Return whether the frame is in an installed library, not in the user's code."""
        return bool(_INSTALLED.search(self.file))


def read_frames(passage: Passage) -> list[TracebackFrame]:
    """Return the frames of the last traceback before the error, outermost first; [] without a traceback."""
    lines = passage.before.split("\n")
    rank = _RANK.search(passage.after.split("\n", 1)[0])
    if rank is not None:  # processes write at once
        lines = [line for line in lines if rank[0] in line]
    cleaned = [clean_line(line) for line in lines]
    starts = [number for number, line in enumerate(cleaned) if "Traceback (most recent call last)" in line]
    if starts:
        cleaned = cleaned[starts[-1] + 1 :]
    frames: list[TracebackFrame] = []
    for number, line in enumerate(cleaned):
        framed = strip_box(line)
        match = _PYTHON.search(line) or _PYTHON.search(framed)
        if match:
            code = next((later.strip() for later in cleaned[number + 1 : number + 2] if not _PYTHON.search(later)), "")
            frames.append(TracebackFrame(match[1], int(match[2]), match[3] or "", "" if _MARKERS.match(code) else code))
            continue
        match = _IPYTHON.match(framed) or _RICH.match(framed)
        if match:
            frames.append(TracebackFrame(match[1].strip(), int(match[2]), match[3].split("(")[0]))
            continue
        arrow = _ARROW.match(framed) or _ARROW.match(line.replace("│", "", 1))
        if arrow and frames and not frames[-1].code:
            last = frames.pop()
            frames.append(TracebackFrame(last.file, last.line, last.function, strip_box(arrow[1]).strip(" │")))
    return frames


def choose_frames(frames: list[TracebackFrame]) -> list[TracebackFrame]:
    """Return the innermost frame outside torch, and the innermost frame of the user's code if it is another."""
    guilty = next((frame for frame in reversed(frames) if not frame.is_in_torch), None)
    own = next((frame for frame in reversed(frames) if not frame.is_installed), None)
    if guilty is None:
        return frames[-1:]
    return [guilty] if own is None or own == guilty else [guilty, own]
