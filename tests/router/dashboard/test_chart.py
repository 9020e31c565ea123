"""The geometry of charts: whatever a run writes gives a drawing, and its numbers are the run's."""

from __future__ import annotations

import math

import pytest

from router.dashboard.chart import HEIGHT, WIDTH, draw, number_text


def points(path: str) -> list[tuple[float, float]]:
    pairs = path.replace("h0.01", "").replace("M", "|").replace("L", "|").split("|")[1:]
    return [(float(x), float(y)) for x, y in (pair.split() for pair in pairs)]


def test_points_are_in_proportion() -> None:
    chart = draw("t", "", [1, 2, 3], {"a": [0.0, 0.5, 1.0]})
    (line,) = chart.lines
    (x1, y1), (x2, y2), (x3, y3) = points(line.path)
    assert (x1, x3, y1, y3) == (chart.left, chart.right, chart.bottom, chart.top)
    assert (x2, y2) == pytest.approx(((x1 + x3) / 2, (y1 + y3) / 2), abs=0.1)
    assert (line.last, chart.bands[1].title) == ("1", "step 2: a 0.5")
    assert [tick.label for tick in chart.columns] == ["1", "3"]
    numbers = {1234567: "1\u202f234\u202f567", 12.3456: "12.35", 0.00001: "1.00e-05", None: "–"}
    assert {value: number_text(value) for value in numbers} == numbers


def test_gaps_break_a_line_and_a_lone_value_is_a_dot() -> None:
    values = [1.0, None, 2.0, math.nan, 3.0, 4.0, math.inf]
    chart = draw("t", "", list(range(7)), {"a": values})
    assert (chart.lines[0].path.count("M"), chart.lines[0].path.count("L")) == (1, 1)
    assert chart.lines[0].dots.count("h0.01") == 2
    assert chart.lines[0].last == "4"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [None],
        [math.nan],
        [0.0],
        [5.0, 5.0],
        [-1e300, 1e300],
        [1e-300, 2e-300],
        ["text", True, {}],
    ],
)
def test_any_values_give_a_finite_drawing(values: list) -> None:
    chart = draw("t", "", list(range(len(values))), {"a": values})
    for line in chart.lines:
        for x, y in points(line.path + line.dots):
            assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    assert all(0 <= tick.at <= HEIGHT for tick in chart.rows)
    assert len(chart.rows) <= 6


def test_a_long_run_is_thinned_to_means() -> None:
    chart = draw("t", "", list(range(1, 10_001)), {"a": [1.0, 3.0] * 5000})
    assert len(chart.bands) <= 180
    assert {y for _, y in points(chart.lines[0].path)} == {(chart.top + chart.bottom) / 2}
    assert chart.columns[-1].label == "10000"
