"""What holds for every screen."""

from __future__ import annotations

import re

from rich.console import RenderableType

from memprof.report.terminal.console import to_text

MAX_LINES = 40
GRAPHICS = " ─▁▂▃▄▅▆▇█^!‼\\"
BESIDE = 16  # Columns beside a long word, in a table: one that leaves no room for these is broken.


def assert_on_one_screen(view: RenderableType) -> None:
    """Of 40 lines of 100 columns, the verdict first."""
    lines = to_text(view, 100).splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[0].partition(":")[0] in ("Fits", "Fits so far", "Does not fit", "Fits, with allocator retries")
    assert max(map(len, lines)) <= 100


def assert_no_word_is_broken(view: RenderableType, width: int, *, but_paths: bool = False) -> None:
    """At `width`, which no line is wider than; words too long for it are none but for paths of PEFT's modules."""
    text = to_text(view, width)
    assert max(map(len, text.splitlines())) <= width
    whole = set(to_text(view, 1000).split())
    said = re.sub(r"No room for: ([^.]|\.\w)*\.", "", text)
    too_long = "".join(word for word in whole if len(word) > width - BESIDE and word.strip(GRAPHICS))
    broken = {word for word in said.split() if word not in whole and word.strip(GRAPHICS) and word not in too_long}
    assert not broken
    assert not too_long or but_paths
