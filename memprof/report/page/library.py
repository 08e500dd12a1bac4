"""plotly: the one file that imports it. It draws the figures of the page and of notebooks."""

from __future__ import annotations

from typing import Any

from memprof.fixes.catalog import check_package


def check_plotly(what: str) -> None:
    """Check that plotly is there, which `what` needs. Raises UsageError: it is not."""
    check_package(what, "plotly")


def plotly_script() -> bytes:
    """Return plotly.js with its licence, as plotly brings it: 4.8 MB. Raises UsageError: plotly is not installed."""
    check_plotly("a page with figures")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.encode()


def figure_of(traces: list[dict[str, Any]], layout: dict[str, Any]) -> Any:
    """Return a figure of plotly's, which shows itself in a notebook and can be changed and written to a file.

    `traces` are what is drawn, as plotly's JSON has it; `layout` has axes, lines and words around it.
    """
    from plotly.graph_objects import Figure

    return Figure({"data": traces, "layout": layout})
