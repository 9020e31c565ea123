"""The geometry of a line chart, which a template draws as SVG without any script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360.0, 132.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 6.0, 8.0, 20.0
_MAX_POINTS = 180
_TICKS = 3


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    number: int
    """Its place among the chart's lines, from 0, which selects its colour."""
    path: str
    """The commands of an SVG path; "" without two values in a row."""
    dots: str
    """The commands for values that have no neighbour."""
    last: str
    """Its last value."""


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Band:
    """A strip of the chart that names its values when the pointer is on it."""

    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    about: str
    lines: Sequence[Line]
    rows: Sequence[Tick]
    """Horizontal grid lines."""
    columns: Sequence[Tick]
    """Labels of the axis of steps."""
    bands: Sequence[Band]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def draw(
    title: str,
    about: str,
    steps: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
) -> Chart:
    """Return a chart of values by step; None, and what is not finite, is a gap."""
    steps, clean = _thinned(steps, {name: _finite(values) for name, values in series.items()})
    values = [v for line in clean.values() for v in line if v is not None]
    if not values:
        return Chart(title, about, (), (), (), ())
    ticks = _ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    if low == high:
        # A line without a slope lies in the middle.
        low, high = low - 1, high + 1
    span = (high - low) or 1.0
    inner = WIDTH - _LEFT - _RIGHT
    distance = (steps[-1] - steps[0]) or 1

    def x(step: int) -> float:
        place = 0.5 if len(steps) == 1 else (step - steps[0]) / distance
        return round(_LEFT + place * inner, 1)

    def y(value: float) -> float:
        return round(_TOP + (high - value) / span * (HEIGHT - _TOP - _BOTTOM), 1)

    lines = []
    for number, (name, line) in enumerate(clean.items()):
        known = [v for v in line if v is not None]
        points = [
            None if v is None else (x(step), y(v)) for step, v in zip(steps, line, strict=True)
        ]
        last = number_text(known[-1]) if known else "–"
        lines.append(Line(name, number, *_paths(points), last))
    ends = dict.fromkeys((steps[0], steps[-1]))
    width = inner / max(1, len(steps) - 1)
    bands = []
    for k, step in enumerate(steps):
        shown = [
            f"{name} {number_text(line[k])}" for name, line in clean.items() if line[k] is not None
        ]
        bands.append(Band(x(step) - width / 2, width, f"step {step}: {', '.join(shown) or '–'}"))
    return Chart(
        title,
        about,
        lines,
        [Tick(y(tick), number_text(tick)) for tick in ticks],
        [Tick(x(step), str(step) if place else f"step {step}") for place, step in enumerate(ends)],
        bands,
    )


def number_text(value: float | int | None) -> str:
    """Return a number as people read it: four figures, an exponent only where it is needed."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 0.001 or abs(value) >= 1e7:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.4g}"


def _finite(values: Sequence[float | None]) -> list[float | None]:
    return [
        v if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) else None
        for v in values
    ]


def _thinned(
    steps: Sequence[int], series: dict[str, list[float | None]]
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return at most so many points as a chart can show, each the mean of some steps."""
    size = -(-len(steps) // _MAX_POINTS)
    if size <= 1:
        return list(steps), series
    parts = range(0, len(steps), size)

    def mean(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return sum(known) / len(known) if known else None

    thin = {name: [mean(line[k : k + size]) for k in parts] for name, line in series.items()}
    return [steps[min(k + size, len(steps)) - 1] for k in parts], thin


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers that span the values."""
    if low == high:
        return [low]
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(k * step, 12) for k in range(first, last + 1)]


def _paths(points: Sequence[tuple[float, float] | None]) -> tuple[str, str]:
    """Return the commands that join points; a gap breaks the line, and a lone point is a dot."""
    line, dots = [], []
    for k, point in enumerate(points):
        if point is None:
            continue
        begins = k == 0 or points[k - 1] is None
        place = f"{point[0]:g} {point[1]:g}"
        if begins and (k + 1 == len(points) or points[k + 1] is None):
            dots.append(f"M{place}h0.01")
        else:
            line.append(f"{'M' if begins else 'L'}{place}")
    return "".join(line), "".join(dots)
