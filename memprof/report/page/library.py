"""Access to plotly for the figures of pages and notebooks; no other file imports plotly."""

from __future__ import annotations

from typing import Any

from memprof.fixes.catalog import check_package


def read_plotly_script() -> bytes:
    """Return the source of plotly.js with its licence (4.8 MB). Raises UsageError: plotly is not installed."""
    check_package("a page with figures", "plotly")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.encode()


def make_figure(traces: list[dict[str, Any]], layout: dict[str, Any]) -> Any:
    """Return a plotly figure; `traces` and `layout` are dictionaries in the form of plotly's JSON."""
    from plotly.graph_objects import Figure

    return Figure({"data": traces, "layout": layout})
