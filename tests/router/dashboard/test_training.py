"""Reads of `metrics.jsonl`: its end, each step once, and nothing that breaks a page."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from any_agent.rundir.layout import RunDir
from router.dashboard import training
from router.dashboard.chart import HEIGHT, WIDTH, draw, number_text
from router.dashboard.training import StepReader, charts_of, dull_sessions, parse_steps, table_of
from router.dashboard.trials import serve_commands, trials_beside


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "reward": step / 10, "sessions": 4, "seconds": {"wait": 2.0}, **more}


def write(path: Path, *lines: dict[str, Any] | str) -> None:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("".join(f"{text}\n" for text in texts))


def test_a_repeated_step_counts_once_and_broken_lines_do_not() -> None:
    lines = [line(1), line(2, reward=9), line(2, reward=0.5), {"step": 2, "eval": {"reward": 0.7}}]
    texts = [json.dumps(each) for each in lines]
    content = "\n".join([*texts, "[]", "null", '{"step": "x"}', '{"step": 3, "rew']).encode()
    run = parse_steps(content, whole=True)
    assert [(each["step"], each["reward"]) for each in run.steps] == [(1, 0.1), (2, 0.5)]
    assert [each["eval"]["reward"] for each in run.evaluations] == [0.7]


def test_only_the_end_of_a_long_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = StepReader(path)
    assert reader.read().steps == ()
    write(path, *map(line, range(1, 101)))
    assert len(reader.read().steps) == 100 and reader.read().whole
    assert reader.read() is reader.read()
    monkeypatch.setattr(training, "MAX_BYTES", 1000)
    write(path, *map(line, range(1, 102)))
    run = reader.read()
    assert not run.whole and 5 < len(run.steps) < 20
    assert run.last is not None and run.last["step"] == 101
    assert run.phases() == {"wait": 2.0}


def test_dull_sessions_are_counted_between_steps() -> None:
    lines = [
        line(1, rejected={"zero_variance": 100}),
        line(2, rejected={"zero_variance": 108}, left_out={"zero_variance": 4}),
        # The trainer has started again and counts from 0.
        line(3, rejected={"zero_variance": 8}, left_out={}),
    ]
    assert dull_sessions(lines) == (8 + 4 + 8, 8)
    assert dull_sessions(lines[:1]) == (0, 0)
    content = "\n".join(map(json.dumps, lines)).encode()
    table = table_of(parse_steps(content, whole=True))
    assert [row["left_out"] for row in table] == [8, 12, 100]


def test_charts_leave_out_values_that_are_no_numbers() -> None:
    odd = [line(1, loss="x", lengths=3, seconds=None, left_out=None), {"step": 2}]
    run = parse_steps("\n".join(map(json.dumps, odd)).encode(), whole=True)
    charts = charts_of(run)
    assert charts[0].title == "Reward" and charts[0].lines[0].last == "0.1"
    assert [chart.lines for chart in charts if chart.title == "Loss"] == [()]
    assert [row["step"] for row in table_of(run)] == [2, 1]
    assert charts_of(parse_steps(b"", whole=True)) == []


def test_rewards_by_name_have_a_chart_where_there_are_any() -> None:
    lines = [line(1), line(2, rewards={"correct": 0.5}), line(3, rewards={"<b>": 1, "correct": 1})]
    lines[2]["rewards"] |= {f"a{k}": 0 for k in range(9)}
    run = parse_steps("\n".join(map(json.dumps, lines)).encode(), whole=True)
    (chart,) = [chart for chart in charts_of(run) if chart.title == "Rewards by name"]
    shown = [(each.name, each.last) for each in chart.lines]
    assert shown[:2] == [("correct", "1"), ("<b>", "1")] and len(shown) == 4
    assert chart.bands[1].title == "step 2: correct 0.5"
    odd = parse_steps(json.dumps(line(1, rewards="x")).encode(), whole=True)
    assert "Rewards by name" not in [chart.title for chart in charts_of(odd)]


def test_trials_beside_each_other_are_one_line_each() -> None:
    def run(*lines: dict[str, Any]) -> training.Steps:
        return parse_steps("\n".join(map(json.dumps, lines)).encode(), whole=True)

    mine = run(line(1), line(2), {"step": 2, "eval": {"reward": 0.7}})
    other = run(line(2, reward=0.9), line(4, reward=1.0))
    charts = charts_of(mine, "this", {"that": other})
    reward = charts[0]
    assert (reward.title, reward.about) == ("Reward", "mean score of a step's sessions")
    assert [(each.name, each.last) for each in reward.lines] == [("this", "0.2"), ("that", "1")]
    assert [band.title for band in reward.bands] == [
        *("step 1: this 0.1", "step 2: this 0.2, that 0.9", "step 4: that 1")
    ]
    assert all(len(chart.lines) in (0, 2) for chart in charts)
    assert next(chart.about for chart in charts if chart.title == "Turns") == (
        "calls of a session: mean"
    )


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
    assert [tick.label for tick in chart.columns] == ["step 1", "3"]
    numbers = {1234567: "1\u202f234\u202f567", 12.3456: "12.35", 0.00001: "1e-05", None: "–"}
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


def trial(root: Path, name: str, *, at: float) -> RunDir:
    run = RunDir.of(root, "me", "exp", name)
    run.path.mkdir(parents=True)
    run.metrics.write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    os.utime(run.metrics, (at, at))
    return run


def test_other_trials_are_offered_the_latest_first(tmp_path: Path) -> None:
    mine = trial(tmp_path, "mine", at=9)
    trial(tmp_path, "old", at=1)
    trial(tmp_path, "new", at=5)
    RunDir.of(tmp_path, "me", "exp", "no-step").path.mkdir()
    (mine.path.parent / "a-file").write_text("")
    choices, none = trials_beside(mine, "")
    assert [(each.name, each.chosen, each.link) for each in choices] == [
        ("new", False, "new"),
        ("old", False, "old"),
    ]
    assert none == {}
    choices, beside = trials_beside(mine, "old,../../x,mine,no-step")
    assert [(each.name, each.chosen, each.link) for each in choices] == [
        ("new", False, "old,new"),
        ("old", True, ""),
    ]
    assert {name: run.last for name, run in beside.items()} == {"old": {"step": 1, "reward": 0.5}}


def test_an_experiment_that_is_gone_gives_no_trials_and_no_error(tmp_path: Path) -> None:
    run = RunDir.of(tmp_path / "none", "me", "exp", "mine")
    assert trials_beside(run, "x") == ([], {}) and serve_commands(run) == []


def test_whole_checkpoints_are_named(tmp_path: Path) -> None:
    run = trial(tmp_path / "a folder", "mine", at=1)
    for step in range(1, 8):
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "x").write_text("1")
        (folder / "manifest.json").write_text(json.dumps({"files": {"x": 2 if step == 6 else 1}}))
    found = serve_commands(run)
    assert [step for step, _ in found] == [7, 5, 4, 3]
    assert found[0][1] == (
        "any-agent serve --no-train --experiment served --trial mine-step-7 "
        f"--model '{run.checkpoints}/step-00000007'"
    )
