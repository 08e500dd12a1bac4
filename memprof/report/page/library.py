"""plotly: the one file that imports it. It draws the page's figures; all else in the page is memprof's own."""

from __future__ import annotations

from memprof.remedy_catalog import check_package


def check_plotly(what: str) -> None:
    """Whether plotly is there, which `what` needs.

    Raises:
        UsageError: it is not.
    """
    check_package(what, "plotly")


def plotly_script() -> bytes:
    """plotly.js with its licence, as plotly brings it: 4.8 MB.

    Raises:
        UsageError: plotly is not installed.
    """
    check_plotly("a page with figures")
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.encode()
