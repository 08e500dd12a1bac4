"""What the documents on runs, recordings and comparisons offer beside JSON: tables, and a text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from memprof.trace.plain import Plain

if TYPE_CHECKING:
    from pandas import DataFrame


class Shown(Plain):
    """Base of a document with tables, and with a view in the file of terminal/ that has its own file's name."""

    __slots__ = ()

    def frames(self) -> dict[str, DataFrame]:
        """Its tables by name, as data frames of pandas (docs/data-frames.md); sizes are bytes."""
        from memprof.report.frames import frames_of

        return frames_of(self)

    def __str__(self) -> str:
        from memprof.report.terminal.console import text_of

        view = importlib.import_module(type(self).__module__.replace(".documents.", ".terminal.")).view
        return text_of(view(self))
