"""plotly, for the figures of the page and of notebooks: only this file imports it."""

from __future__ import annotations

from typing import Any

from memprof.fixes.catalog import check_package


def check_plotly(what: str) -> None:
    """Check that plotly, which `what` needs, is installed. Raises UsageError: it is not."""
    check_package(what, "plotly")


def plotly_script() -> bytes:
    """Return plotly.js with its licence, 4.8 MB. Raises UsageError: plotly is not installed."""
    check_plotly("a page with figures")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.encode()


def figure_of(traces: list[dict[str, Any]], layout: dict[str, Any]) -> Any:
    """Return a plotly figure, which a notebook displays and which can be changed and written to a file.

    `traces` are in the form of plotly's JSON; `layout` has axes, lines and labels.
    """
    from plotly.graph_objects import Figure

    return Figure({"data": traces, "layout": layout})
