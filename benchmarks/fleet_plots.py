"""Line plots as SVG files, written by hand: they need no library and look the same anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log2

Line = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 56, 44
_COLOURS = ("#b45309", "#2563eb", "#0f766e", "#7c3aed")


def line_plot(title: str, x_name: str, y_name: str, lines: Mapping[str, Line]) -> str:
    """An SVG of lines over an x axis whose steps double. Lines: name -> (x, y), x above 0."""
    xs = sorted({x for line in lines.values() for x, _ in line})
    ys = [y for line in lines.values() for _, y in line]
    low, high, every = _range(min(ys), max(ys))
    span = log2(xs[-1] / xs[0]) or 1.0

    def at(x: float, y: float) -> str:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * log2(x / xs[0]) / span
        down = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (y - low) / (high - low)
        return f"{across:.1f},{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#5d6b79">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600" fill="#17212b">{escape(title)}</text>',
    ]
    mark = low
    while mark <= high + every / 1000:
        x1, y = at(xs[0], mark).split(",")
        x2 = at(xs[-1], mark).split(",")[0]
        parts.append(f'<path d="M{x1} {y}H{x2}" stroke="#e1e6eb"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{mark:g}</text>'
        )
        mark += every
    for x in xs:
        across = at(x, low).split(",")[0]
        parts.append(
            f'<text x="{across}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>'
    )
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 8}" text-anchor="end">{escape(y_name)}</text>')
    across = _LEFT + 30
    for colour, (name, line) in zip(_COLOURS, lines.items(), strict=False):
        points = " ".join(at(x, y) for x, y in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for point in points.split():
            x1, y = point.split(",")
            parts.append(f'<circle cx="{x1}" cy="{y}" r="2.6" fill="{colour}"/>')
        parts.append(f'<path d="M{across} {_TOP - 22}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{across + 20}" y="{_TOP - 18}">{escape(name)}</text>')
        across += 34 + 7 * len(name)
    return "\n".join([*parts, "</svg>\n"])


def _range(low: float, high: float) -> tuple[float, float, float]:
    """Round numbers around the values, and the step between marks."""
    rough = max((high - low) / 4, 1e-3)
    power = 10.0 ** floor(_log10(rough))
    every = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    bottom, top = floor(low / every) * every, ceil(high / every) * every
    return bottom, (top if top > bottom else bottom + every), every


def _log10(x: float) -> float:
    return log2(x) / log2(10)
