"""Curves of cost as one SVG picture: a panel each, both axes logarithmic, so that linear growth is a slope of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Protocol

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 340, 230, 46, 40, 16, 36
COLUMNS = 2
_STYLE = (
    "text{font:11px sans-serif;fill:#57606a}.title{font-weight:bold}.axis{stroke:#8c959f}.line{stroke:#0969da;"
    "fill:none;stroke-width:2}.guide{stroke:#8c959f;stroke-dasharray:3 4}circle{fill:#0969da}"
)


class _Curve(Protocol):
    @property
    def what(self) -> str: ...
    @property
    def unit(self) -> str: ...


class _Point(Protocol):
    @property
    def at(self) -> int: ...
    @property
    def processor_seconds(self) -> float: ...


def drawn(curves: Sequence[tuple[_Curve, Sequence[_Point]]]) -> str:
    """The picture: seconds of a processor over what is requested; dashed, growth in proportion up to the last point."""
    rows = math.ceil(len(curves) / COLUMNS)
    size = (WIDTH * COLUMNS, HEIGHT * rows)
    panels = "".join(
        f'<g transform="translate({WIDTH * (i % COLUMNS)} {HEIGHT * (i // COLUMNS)})">{_panel(curve, points)}</g>'
        for i, (curve, points) in enumerate(curves)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" '
        f'height="{size[1]}"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{panels}</svg>\n'
    )


def _panel(curve: _Curve, points: Sequence[_Point]) -> str:
    across = [math.log10(point.at) for point in points]
    up = [math.log10(point.processor_seconds) for point in points]
    low, high = math.floor(min(up)), max(math.ceil(max(up)), math.floor(min(up)) + 1)
    first, last = across[0], across[-1]

    def x(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    places = [(x(a), y(b)) for a, b in zip(across, up, strict=True)]
    begin = max(low, up[-1] - (last - first))
    guide = (x(last - (up[-1] - begin)), y(begin), *places[-1])
    parts = [
        f'<text class="title" x="{LEFT}" y="18">{escape(curve.what)}</text>',
        f'<text x="{LEFT}" y="32">seconds over {escape(curve.unit)}; dashed: in proportion</text>',
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>',
        *(_label(LEFT - 6, y(power) + 4, f"{10.0**power:g}", "end") for power in range(low, high + 1)),
        *(_label(px, HEIGHT - BOTTOM + 16, _short(p.at), "middle") for (px, _), p in zip(places, points, strict=True)),
        '<path class="guide" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>'.format(*guide),
        '<path class="line" d="M' + "L".join(f"{px:.1f} {py:.1f}" for px, py in places) + '"/>',
        *(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in places),
    ]
    return "".join(parts)


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _short(count: int) -> str:
    """640000 -> 640k, 4096 -> 4k, 1048576 -> 1M, 2048 -> 2,048."""
    if count % 1000 == 0:
        return f"{count // 1000:,}k"
    if count % (1 << 20) == 0:
        return f"{count >> 20}M"
    return f"{count >> 10}k" if count >= 4096 and count % 1024 == 0 else f"{count:,}"
