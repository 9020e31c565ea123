"""Dashboard and alert rules name what the code exports; Prometheus's own tool reads the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients.environment import component

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "grafana" / "alerts.yaml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
LEGENDS = {each["expr"]: each["legendFormat"] for panel in PANELS for each in panel["targets"]}
QUERIES = list(LEGENDS)
EVERYWHERE = {"rank", "part", "le", "instance", "job"}


@cache
def exported() -> dict[str, set[str]]:
    """Return the labels of each sample's name; docs/reference/metrics.md is made from the code."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    names: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(any_agent_\w+)` \| (\w+) \| (.*?) \|", text, re.M):
        ends = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        for end in ends:
            names.setdefault(name + end, set()).update(re.findall(r"`(\w+)`", labels))
    return names


def test_queries_and_legends_have_names_and_labels_that_are_exported() -> None:
    wrong = []
    for query in (*QUERIES, *(rule["expr"] for rule in RULES)):
        names = set(re.findall(r"any_agent_\w+", query))
        known = EVERYWHERE.union(*(exported().get(name, set()) for name in names))
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", query))))
        used = kept | set(re.findall(r"(\w+)=?[=~!]~?\"", query))
        wrong += [(query, each) for each in (names - exported().keys()) | (used - known)]
        legend = LEGENDS.get(query, "")
        if "sum" in query or "max" in query:
            wrong += [(query, each) for each in set(re.findall(r"\{\{(\w+)\}\}", legend)) - kept]
    assert wrong == []


def test_panels_lie_apart_and_alerts_say_what_to_do() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        mine = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert panel["title"] and not mine & taken and x + w <= 24, panel["title"]
        taken |= mine
    for rule in RULES:
        notes = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert len(notes["summary"]) < 80 and len(notes["description"]) > 40, rule["alert"]


CASES = {
    "PartDown": ("any_agent_up{part='rank-1'}", "0x10"),
    "EngineDown": ("any_agent_engine_up{rank='1'}", "0x10"),
    "JournalFull": ("any_agent_journal_full{rank='1'}", "1x10"),
    "JournalRedisAway": ("any_agent_journal_log_away{rank='1'}", "1x10"),
    "QuotasInexact": ("any_agent_quotas_exact{rank='1'}", "1 1 0x8"),
    "EngineAndTrainerDisagree": ("any_agent_train_logprob_mismatch_fresh", "0.5x30"),
    "TrainerDiskFull": ("any_agent_train_disk_full", "1x10"),
}
"""The sample by which each of these alerts is raised."""
HEALTHY = {
    "any_agent_up{part='rank-1'}": "1x30",
    "any_agent_engine_up{rank='1'}": "1x30",
    "any_agent_journal_full{rank='1'}": "0x30",
    "any_agent_journal_log_away{rank='1'}": "0x30",
    "any_agent_quotas_exact{rank='1'}": "0x30",
    "any_agent_train_logprob_mismatch": "0.5x30",
    "any_agent_train_logprob_mismatch_fresh": "0.001x30",
    "any_agent_train_disk_full": "0x30",
    "any_agent_sessions_created_total{rank='1'}": "5x30",
    "any_agent_sessions{rank='1',state='open'}": "2x30",
    "any_agent_sessions{rank='1',state='trained'}": "3x30",
    "any_agent_train_step": "0+1x30",
}


@pytest.mark.service
def test_the_rules_are_raised_by_what_they_are_for(tmp_path: Path) -> None:
    """Prometheus's own unit tests of rules: each fault raises its alert, a healthy run none."""
    promtool = component("promtool")
    shutil.copy(ALERTS, tmp_path)
    tests = []
    for alert in (None, *CASES):
        series = dict(HEALTHY)
        if alert is not None:
            name, values = CASES[alert]
            series[name] = values
        checks = []
        for name in CASES:
            checks.append({"eval_time": "20m" if name == "EngineAndTrainerDisagree" else "9m"})
            checks[-1] |= {"alertname": name, "exp_alerts": expected(name) if name == alert else []}
        given = [{"series": name, "values": values} for name, values in series.items()]
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": checks})
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [ALERTS.name], "tests": tests}))
    for words in (["check", "rules", ALERTS.name], ["test", "rules", path.name]):
        done = subprocess.run(
            [promtool, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def expected(alert: str) -> list[dict[str, Any]]:
    (rule,) = [rule for rule in RULES if rule["alert"] == alert]
    sample = CASES[alert][0]
    labels = dict(re.findall(r"(\w+)='(\w[\w-]*)'", sample))
    values = {"{{ $value }}": "0.5"} | {f"{{{{ $labels.{k} }}}}": v for k, v in labels.items()}
    notes = {}
    for name, text in rule["annotations"].items():
        for place, value in values.items():
            text = text.replace(place, value)
        notes[name] = text
    return [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": notes}]
