"""The dashboard of a live run in a real browser: the API's numbers, and no script runs in it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from any_agent.client.rl_client import RLClient
from any_agent.launcher import Node, NodeOptions
from tests.clients.environment import component
from tests.support.e2e.live_run import drive, live_config
from tests.support.ports import own_port

if os.environ.get("CI") == "true":
    from axe_playwright_python import sync_playwright as axe
    from playwright import sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")

ADMIN = "the-operators-key-4711"
EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
LIMIT_MS = 60_000


@dataclass
class Run:
    """A run that has trained, and a session in which scripts were planted."""

    node: Node
    http: httpx.Client
    planted: str = ""
    aborted: str = ""

    def api(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def sessions_by_state(self) -> dict[str, int]:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [s for f in families for s in f.samples if s.name == "any_agent_sessions"]
        out: dict[str, int] = {}
        for s in samples:
            key = f"{s.labels['mode']} {s.labels['state']}"
            out[key] = out.get(key, 0) + int(s.value)
        return out


@dataclass
class Browser:
    """A page, and what went wrong in it."""

    page: Any
    url: str
    errors: list[str] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)

    def watch(self) -> None:
        self.page.on(
            "console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else 0
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda r: self.origins.add("/".join(r.url.split("/")[:3])))

    def open(self, path: str) -> None:
        response = self.page.goto(f"{self.url}/ui{path}")
        assert response.status == 200, (path, response.status)

    def check(self) -> None:
        assert self.page.evaluate("window.hacked") is None
        assert self.errors == []
        assert self.origins <= {self.url}
        wide = self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, "the page scrolls sideways"
        for look in ("light", "dark"):
            self.page.emulate_media(color_scheme=look)
            found = axe.Axe().run(self.page).response["violations"]
            serious = [v for v in found if v["impact"] in ("serious", "critical")]
            assert [(v["id"], [n["target"] for n in v["nodes"]]) for v in serious] == [], look
        self.page.emulate_media(color_scheme="light")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Run]:
    settings: dict[str, object] = {
        "server.admin_key": ADMIN,
        "server.ranks": 1,
        "train.steps": 3,
        "rollout.batch_size": 8,
        "sampling.max_new_tokens": 40,
    }
    config = live_config(tmp_path_factory.mktemp("dashboard"), tiny_model_dir, **settings)
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(drive(node, agents=8, admin_key=ADMIN))
        headers = {"Authorization": f"Bearer {ADMIN}"}
        with httpx.Client(base_url=node.url, headers=headers, timeout=60) as http:
            made = Run(node, http)
            asyncio.run(_plant(made))
            yield made


async def _plant(run: Run) -> None:
    """Record a session with a branch, with scripts wherever an agent may write a text."""
    async with RLClient(run.node.url, admin_key=ADMIN) as service, httpx.AsyncClient() as http:
        for _ in range(50):  # more than a page of them
            spare = await service.start_session(mode="eval")
            await service.abort_session(spare.session_id, reason="spare")
        session = await service.start_session(mode="eval", task_id="planted")
        run.planted = session.session_id

        async def call(*messages: dict[str, Any]) -> dict[str, Any]:
            answer = await http.post(
                f"{session.base_url}/chat/completions",
                json={"model": "x", "messages": messages, "max_tokens": 40},
                headers={"Authorization": f"Bearer {session.api_key}"},
                timeout=120,
            )
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        first = {"role": "user", "content": f"Count from 1. {EVIL} \u05e9\u05dc\u05d5\u05dd"}
        done = await call(first)
        await call(first, done["choices"][0]["message"], {"role": "user", "content": EVIL})
        tool = {"name": "look", "arguments": json.dumps({"x": EVIL})}
        asked = {
            "role": "assistant",
            "content": EVIL,
            "tool_calls": [{"id": "call_1", "type": "function", "function": tool}],
        }
        result = {"role": "tool", "tool_call_id": "call_1", "content": EVIL}
        await call({"role": "system", "content": EVIL}, first, asked, result)
        await service.set_reward(session.api_key, {"style": 0.5, "answer": 0.25})
        await service.finalize(session.api_key, final_reward=1.0)
        gone = await service.start_session(mode="eval", task_id="gone")
        run.aborted = gone.session_id
        await service.abort_session(gone.session_id, reason=EVIL)


@pytest.fixture(scope="module")
def browser(run: Run) -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=component("chromium"),
            args=[
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--disable-dev-shm-usage",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
            ],
        )
        context = chromium.new_context(viewport={"width": 1280, "height": 860})
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        made = Browser(page, run.node.url)
        page.goto(f"{run.node.url}/ui/training")
        page.fill("[name=key]", "wrong")
        page.click("button")
        assert page.locator("[role=alert]").inner_text() == "This key is not valid here."
        page.fill("[name=key]", ADMIN)
        page.keyboard.press("Enter")
        page.wait_for_url("**/ui/training")
        assert ADMIN not in page.url and page.evaluate("document.cookie") == ""
        made.watch()
        yield made
        chromium.close()


def test_the_overview_shows_the_figures_of_the_api_and_renews_itself(
    run: Run, browser: Browser
) -> None:
    browser.open("")
    page = browser.page
    version = run.api("/rl/v1/run")["version"]
    assert page.locator("#version").inner_text() == str(version) == "3"
    counts = run.sessions_by_state()
    for cell in page.locator("[data-state]").all():
        name = cell.get_attribute("data-state")
        assert int(cell.inner_text()) == counts.get(name, 0), name
    assert sum(counts.values()) >= 24
    browser.check()
    # It goes on by itself.
    before = counts["eval open"]
    opened = run.http.post("/rl/v1/start_session", json={"mode": "eval"}).json()
    cell = page.locator("[data-state='eval open']")
    sync_api.expect(cell).to_have_text(str(before + 1), timeout=LIMIT_MS)
    run.http.post(f"/rl/v1/sessions/{opened['session_id']}/abort", json={})
    sync_api.expect(cell).to_have_text(str(before), timeout=LIMIT_MS)
    browser.check()


def test_the_list_of_sessions_is_paged_and_filtered(run: Run, browser: Browser) -> None:
    browser.open("/sessions")
    page = browser.page
    expected = [each["session_id"] for each in run.api("/rl/v1/sessions?limit=50")]
    assert page.locator("#sessions tbody tr td:first-child").all_inner_texts() == expected
    page.click("text=Older")
    page.wait_for_url("**after=**")
    older = page.locator("#sessions tbody tr td:first-child").all_inner_texts()
    assert older and not set(older) & set(expected)
    page.select_option("[name=state]", "aborted")
    page.click("text=Show")
    page.wait_for_url("**state=aborted**")
    assert run.aborted in page.locator("#sessions").inner_text()
    assert EVIL in page.locator("#sessions").inner_text()
    browser.check()


def test_the_trajectory_shows_every_call_and_keeps_markup_as_text(
    run: Run, browser: Browser
) -> None:
    browser.open(f"/sessions/{run.planted}")
    page = browser.page
    calls = run.api(f"/rl/v1/sessions/{run.planted}/interactions")["interactions"]
    assert page.locator(".turn").count() == 3 == len(calls)
    assert page.locator("main").inner_text().count(EVIL) >= 6
    assert "A new beginning" in page.locator("#call-3").inner_text()
    third = dict(
        zip(
            page.locator("#call-3 .tiny dt").all_inner_texts(),
            page.locator("#call-3 .tiny dd").all_inner_texts(),
            strict=True,
        )
    )
    assert third["output tokens"] == str(calls[2]["output_tokens"])
    assert float(third["return"]) == pytest.approx(calls[2]["propagated"], rel=1e-3)
    assert (third["style"], third["answer"]) == ("0.5", "0.25")
    for view in ("logprob", "version", "mask"):
        page.check(f"[value={view}]")
        spans = page.locator("#call-1 .tokens > span")
        sync_api.expect(spans.first).to_be_visible()
        if view == "logprob":
            path = f"/rl/v1/sessions/{run.planted}/interactions/{calls[0]['id']}/tokens"
            tokens = run.api(path)
            assert spans.count() == len(tokens["ids"]) == tokens["total"]
            spans.last.hover()
            told = page.locator(".readout").inner_text()
            assert f"id {tokens['ids'][-1]} " in told
            assert f"log-probability {tokens['logprobs'][-1]:.4f}" in told
            assert f"version {tokens['versions'][-1]}" in told
        browser.check()
    page.check("[value=text]")
    assert page.locator("#call-1 .tokens").is_hidden()


def test_a_trained_session_shows_its_advantage_and_the_formula(run: Run, browser: Browser) -> None:
    found = run.api("/rl/v1/sessions?state=trained")
    group = next(s["group_id"] for s in found)
    members = [s["session_id"] for s in found if s["group_id"] == group]
    shown = []
    for id in members:
        browser.open(f"/sessions/{id}")
        page = browser.page
        assert "standard deviation of the scores" in page.locator("#advantage").inner_text()
        page.check("[value=advantage]")
        sync_api.expect(page.locator("#call-1 .tokens > span").first).to_be_visible()
        browser.check()
        score = run.api(f"/rl/v1/sessions/{id}/interactions")["score"]
        names = page.locator(".figures.small dt").all_inner_texts()
        values = page.locator(".figures.small dd").all_inner_texts()
        figures = dict(zip(names, values, strict=True))
        assert float(figures["score"]) == pytest.approx(score, rel=1e-3)
        shown.append(float(figures["advantage, mean"]))
    assert len(members) == 4 and sum(shown) == pytest.approx(0.0, abs=0.01)
    page.check("[value=text]")


def test_tokens_that_could_not_be_read_are_asked_for_again(run: Run, browser: Browser) -> None:
    browser.open(f"/sessions/{run.planted}")
    page = browser.page
    said = {"error": "rank 0, which has this session, does not answer; try again"}
    page.route("**/tokens/*", lambda route: route.fulfill(status=503, json=said))
    page.check("[value=logprob]")
    problem = page.locator("#call-1 .problem")
    sync_api.expect(problem).to_contain_text(said["error"])
    page.unroute("**/tokens/*")
    problem.get_by_role("button").click()
    sync_api.expect(page.locator("#call-1 .tokens > span").first).to_be_visible()
    sync_api.expect(problem).to_be_hidden()
    # The browser itself tells of each answer that is an error.
    browser.errors.clear()
    page.check("[value=text]")
    browser.check()


def test_every_page_loads_in_a_browser_without_an_error(run: Run, browser: Browser) -> None:
    other = run.node.dir.path.parent / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 2, "reward": 0.125}\n')
    found = run.api("/rl/v1/sessions?limit=1000")
    group = next(s["group_id"] for s in found if s["state"] == "trained" and s["group_id"])
    shows = {
        "/training?with=other": "other 0.125",
        f"/groups?group_id={group}": next(s["session_id"] for s in found if s["group_id"] == group),
        "/tasks?order=improved": "task-0",
        "/service?log=rank-0": "server:",
    }
    for path, text in shows.items():
        browser.open(path)
        assert text in browser.page.locator("main").inner_text(), path
        assert ADMIN not in browser.page.content()
        browser.check()


def test_every_part_is_reached_by_the_keyboard(browser: Browser) -> None:
    browser.open("/sessions")
    page = browser.page
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
    assert seen[0] == "Skip to the page"
    assert {"Overview", "Training", "Sessions", "Log out"} <= set(seen)


def test_logging_out_closes_the_dashboard(run: Run, browser: Browser) -> None:
    browser.open("/sessions")
    browser.page.click("text=Log out")
    browser.page.wait_for_url(re.compile("/ui/login$"))
    assert browser.page.goto(f"{run.node.url}/ui").status == 401


def test_prometheus_has_figures_for_the_panels_and_no_alarm(run: Run, tmp_path: Path) -> None:
    """A real Prometheus scrapes the run, and answers what deploy/grafana asks it."""
    prometheus, port = component("prometheus"), own_port()
    (tmp_path / "key").write_text(ADMIN)
    scrape = {
        "job_name": "any-agent",
        "authorization": {"credentials_file": str(tmp_path / "key")},
        "static_configs": [{"targets": [run.node.url.removeprefix("http://")]}],
    }
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(GRAFANA / "alerts.yaml")],
        "scrape_configs": [scrape],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    command = [
        prometheus,
        f"--config.file={tmp_path / 'prometheus.yaml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                check_prometheus(http, tmp_path / "log")
        finally:
            process.terminate()


GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"


def check_prometheus(http: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + 60

    def ask(path: str, **params: str) -> Any:
        response = http.get(f"/api/v1/{path}", params=params)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    while True:
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)
        with suppress(httpx.TransportError, AssertionError):
            counted = ask("query", query="min(count_over_time(any_agent_up[5m]))")["result"]
            if counted and float(counted[0]["value"][1]) >= 4:
                break
    empty = {}
    panels = json.loads((GRAFANA / "dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m")
            found = ask("query", query=query)["result"]
            # The trainer is done, and shows nothing any more.
            if not found and not re.search("any_agent_(train|eval)_", query):
                empty[query] = panel["title"]
    assert set(empty.values()) <= MAY_BE_EMPTY, empty
    groups = ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 10
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


MAY_BE_EMPTY = {"Frozen models, USD per hour", "Why branches began", "Refused"}
"""Panels with something that not every run has: frozen models, branches, refusals."""
