"""The console's line on a run's health: what it says, and when."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from any_agent.launcher.health import Console, Health, HealthReport, HealthWatch, describe_health
from any_agent.launcher.training_progress import TrainingProgress
from any_agent.runtime.atomic_files import write_atomic

RUN: dict[str, Any] = {
    "alarms": [],
    "parts": [{"name": "trainer", "state": "ready"}],
    "sessions": {
        "train": {"open": 3, "awaiting_reward": 1, "finalized": 2, "trained": 5},
        "eval": {"open": 1, "evaluated": 4},
    },
    "slots": {"waiting": 6},
    "step": {"step": 10, "reward": 0.875, "all": {"reward": 0.9, "sessions": 64, "dull": 48}},
    "since_step": {"reward": 0.996, "sessions": 8720, "dull": 8008},
    "why": "for members of group g (3 of 8)",
    "version": 10,
    "calls_rate": 4.21,
}
ALARM = {"level": "bad", "what": "Rank 1 does not answer.", "do": "Read its log."}


def test_the_line_has_what_an_operator_asks_first() -> None:
    now = describe_health(RUN, 40)
    assert now.line == (
        "now       well  4 open, 6 waiting, 11 finished  step 10/40 reward 0.875, since then "
        "0.996 over 8720 sessions, 8008 taught nothing  waits for members of group g (3 of 8)  "
        "version 10  4.2 calls/s"
    )
    assert now.alarms == ()


def test_the_line_leaves_out_what_is_not_known() -> None:
    since = {"reward": None, "sessions": 0, "dull": 0}
    line = describe_health(RUN | {"since_step": since}, 40).line
    assert "reward 0.875 (since the step before: 0.900 over 64 sessions, 48 taught nothing)" in line
    fresh = RUN | {"since_step": since, "step": None, "version": None, "calls_rate": None}
    assert "reward" not in describe_health(fresh, 40).line
    assert "\x1b" not in describe_health(RUN | {"why": "for group \x1b[2J"}, 40).line


def test_a_run_is_not_well_before_its_trainer_has_loaded_the_model() -> None:
    parts = [{"name": "rank-0", "state": "ready"}]
    assert " well " in describe_health(RUN | {"parts": parts}, 0).line, "it has none"
    for more in ([], [{"name": "trainer", "state": "starting"}]):
        assert " starting " in describe_health(RUN | {"parts": parts + more}, 40).line


def looks(*runs: dict[str, Any]) -> list[Health]:
    return [describe_health(RUN | run, 40) for run in runs]


def test_without_a_terminal_a_change_of_health_is_said_at_once_and_figures_seldom() -> None:
    said: list[str] = []
    now = 1000.0
    report = HealthReport(said.append, None, lambda: now)
    well, moved, ill, worse, again, later, after = looks(
        {},
        {"version": 11},
        {"alarms": [ALARM]},
        {"alarms": [ALARM, ALARM | {"what": "Rank 0 does not answer."}], "version": 12},
        {},
        {"version": 13},
        {"version": 14},
    )
    for look in (None, well, well, moved):
        report.update(look)
    assert said == [well.line]
    report.update(ill)
    assert said[1:] == [ill.line, "bad       Rank 1 does not answer. Read its log."]
    report.update(worse)
    assert said[3] == worse.line and len(said) == 6
    report.update(again)
    assert said[6:] == [again.line, "well      All parts are well again."]
    now += 60
    report.update(later)
    assert said[8:] == [later.line]
    # The last figures follow the last step, once the overview had time to see it.
    now += 4
    report.renew()
    report.update(after)
    assert said[9:] == []
    now += 5
    report.update(*looks({"version": 14}))
    assert said[9:] == [after.line]


def test_on_a_terminal_the_line_is_rewritten_and_alarms_stay() -> None:
    said: list[str] = []
    shown: list[str] = []
    report = HealthReport(said.append, shown.append)
    all_looks = looks({}, {"version": 11}, {"alarms": [ALARM]}, {})
    for look in all_looks:
        report.update(look)
    assert shown == [look.line for look in all_looks]
    assert said == [all_looks[2].alarms[0], "well      All parts are well again."]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_lines_replace_the_rewritten_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((10, 24)))
    out = Terminal()
    console = Console(out)
    console.show("now 0123456789")
    console.say("ready")
    console.show("now 2")
    assert console.clear() is True
    assert out.getvalue() == "now 01234\r\x1b[2Kready\nnow 2\r\x1b[2K"
    file = io.StringIO()
    console = Console(file)
    console.show("now")
    console.say("ready")
    assert not console.live and file.getvalue() == "ready\n"


@contextmanager
def service(answer: dict[str, Any], keys: list[str | None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            body = json.dumps(answer).encode()
            self.send_response(200 if self.path == "/rl/v1/overview" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def until_seen(watch: HealthWatch) -> Health:
    while (found := watch.latest) is None:
        threading.Event().wait(0.01)
    return found


def test_the_health_line_reads_the_services_overview_with_the_runs_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str | None] = []
    with service(RUN, keys) as url, HealthWatch(url, lambda: "run-key", 40) as watch:
        assert until_seen(watch) == describe_health(RUN, 40)
    assert keys[0] == "Bearer run-key"
    monkeypatch.setattr("any_agent.launcher.health.INTERVAL", 0.01)
    with HealthWatch(url, lambda: "run-key", 40) as watch:
        found = until_seen(watch)
    assert found.alarms and "does not answer" in found.line


def line(step: int) -> str:
    figures = {"reward": 0.5, "version": step, "staleness_mean": 0.25}
    seconds = {"wait": 1.0, "pack": 0.5, "forward": 0.25, "backward": 0.75, "optimizer": 0.5}
    return json.dumps({"step": step, "seconds": seconds | {"sync": 9}, **figures})


def test_steps_of_this_run_are_shown_once_and_whole(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    progress = TrainingProgress(metrics, 9)
    assert progress.new_lines() == []
    metrics.write_text(line(1) + "\n" + line(2) + "\n" + line(3)[:20])
    assert [text.split()[1] for text in progress.new_lines()] == ["1/9", "2/9"]
    assert progress.new_lines() == []
    metrics.write_text(f"{line(1)}\n{line(2)}\n{line(3)}\n")
    (shown,) = progress.new_lines()
    assert shown == (
        "step        3/9  reward 0.500  version 3  staleness 0.25  wait 1.00 s  train 2.00 s"
    )
    assert progress.step == 3
    # The next start shows neither these nor half a line.
    progress = TrainingProgress(metrics, 9)
    assert progress.new_lines() == []
    with metrics.open("a") as file:
        file.write(f"{line(4)[:20]}{line(4)}\n{line(5)}\n")
    assert [text.split()[1] for text in progress.new_lines()] == ["5/9"]


def test_what_the_trainer_waits_for_is_shown_whenever_it_says_so(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting.txt"
    waiting.write_text("waiting   of an earlier run\n")
    progress = TrainingProgress(tmp_path / "metrics.jsonl", 9, waiting)
    assert progress.new_lines() == []
    for seconds in (60, 120):
        write_atomic(waiting, f"waiting   {seconds} s\nwaiting   dull\n")
        os.utime(waiting, (seconds, seconds))
        assert progress.new_lines() == [f"waiting   {seconds} s", "waiting   dull"]
        assert progress.new_lines() == []
    waiting.unlink()
    assert progress.new_lines() == [], "a trainer forgets the waits of earlier ones"


def test_sessions_that_were_left_out_are_shown(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    first = {"rejected": {"zero_variance": 16}, "all": {"reward": 0.9, "sessions": 24, "dull": 16}}
    metrics.write_text(json.dumps(json.loads(line(1)) | first) + "\n")
    progress = TrainingProgress(metrics, 9)
    assert progress.new_lines() == []
    counts = [
        first | {"rejected": {"zero_variance": 32}},
        {"rejected": {"zero_variance": 32, "failed": 1}, "left_out": {"stale": 2}},
        # The trainer has started again, and counts from 0.
        {"rejected": {"zero_variance": 8}, "left_out": None},
    ]
    lines = [json.dumps(json.loads(line(k)) | each) for k, each in enumerate(counts, 2)]
    with metrics.open("a") as file:
        file.write("\n".join(lines) + "\n")
    shown = progress.new_lines()
    assert "0.900 over 24 sessions, 16 taught nothing" in shown[0]
    assert [text.partition("train 2.00 s")[2] for text in shown] == [
        "  left out 16 (zero_variance)",
        "  left out 1 (failed)  left out 2 (stale)",
        "  left out 8 (zero_variance)",
    ]
