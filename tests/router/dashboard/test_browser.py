"""The dashboard in a real browser, over a router that has no service behind it."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from any_agent.launcher.trial import trial_dir
from any_agent.runtime.metrics import CONTENT_TYPE
from tests.clients.environment import component
from tests.router.conftest import StartLab
from tests.router.dashboard.test_app import ADMIN, KEYS, rank
from tests.router.test_affinity import IDS
from tests.support.router import Received

METRICS = b"""\
any_agent_sessions{mode="train",state="open"} 3
any_agent_sessions{mode="train",state="trained"} 40
any_agent_sessions{mode="eval",state="aborted"} 2
any_agent_slots_limit 52
any_agent_slots_waiting 1
any_agent_calls_limit 64
"""
TOKENS = {
    "interaction_id": "chatcmpl-1", "start": 0, "total": 3, "prompt": 1, "trained": True,
    "loss_mask": [0, 1, 1], "ids": [7, 8, 9], "texts": ["ask", "an", "swer"],
    "logprobs": [None, -0.5, -3.0], "versions": [None, 3, 4],
}  # fmt: skip
STEP = {"step": 4, "version": 4, "reward": 0.625, "sessions": 8, "staleness_mean": 0.5}


async def served(received: Received) -> None:
    path = received.target.partition("?")[0]
    if path == "/metrics":
        lines = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {len(METRICS)}"
        await received.send(f"{lines}\r\n\r\n".encode() + METRICS)
    elif path.endswith("/tokens"):
        await received.answer(TOKENS)
    else:
        await rank(received)


def looked_at(url: str, program: str, admits_root: bool) -> dict[str, Any]:
    """Log in, read the overview and a session's tokens; return what a visitor sees."""
    from playwright.sync_api import sync_playwright

    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if admits_root else [])]
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        page = browser.new_page()
        page.goto(f"{url}/ui/login")
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.fill("[name=key]", ADMIN)
        page.keyboard.press("Enter")
        page.wait_for_url("**/ui")
        cells = page.locator("[data-state]").evaluate_all(
            "all => all.map(one => [one.dataset.state, Number(one.innerText)])"
        )
        seen = {
            "counts": dict(cells),
            "texts": {name: page.locator(f"#{name}").inner_text() for name in ("version", "step")},
            "figures": page.locator(".figures dd").all_inner_texts(),
        }
        page.goto(f"{url}/ui/sessions/{IDS[0]}")
        page.check("[value=logprob]")
        spans = page.locator(".tokens > span")
        spans.last.hover()
        seen |= {
            "tokens": spans.all_inner_texts(),
            "shades": spans.evaluate_all("all => all.map(one => one.classList[0])"),
            "readout": page.locator(".readout").inner_text(),
            "address": page.url.removeprefix(url),
        }
        # Somebody opens the link, without a login, and then another view.
        other = browser.new_context().new_page()
        other.goto(page.url)
        other.fill("[name=key]", ADMIN)
        other.keyboard.press("Enter")
        other.locator(".tokens > span").last.wait_for()
        seen["linked"] = other.locator(".tokens > span").evaluate_all(
            "all => all.map(one => one.classList[0])"
        )
        shown = []
        for view in ("version", "mask", "text", "odd"):
            other.goto(f"{url}/ui/sessions/{IDS[0]}?view={view}")
            shown.append([other.locator(".views :checked").get_attribute("value"), other.url])
        seen["views"] = [(view, address.removeprefix(url)) for view, address in shown]
        browser.close()
    return seen | {"errors": errors}


@pytest.mark.service
async def test_the_overview_opens_with_the_figures_of_the_api_and_without_an_error(
    start_lab: StartLab,
) -> None:
    if os.environ.get("CI") != "true":
        pytest.importorskip("playwright.sync_api")
    program = component("chromium")
    lab = await start_lab(KEYS)
    lab.ranks[0].handler = served
    trial_dir(lab.config).metrics.write_text(json.dumps(STEP) + "\n")
    url = f"http://127.0.0.1:{lab.port}"
    seen = await asyncio.to_thread(looked_at, url, program, os.geteuid() == 0)
    assert seen["errors"] == []
    run = (await lab.get("/rl/v1/overview", ADMIN)).json()
    counts = {
        f"{mode} {state}": count
        for mode, states in run["sessions"].items()
        for state, count in states.items()
    }
    assert seen["counts"] == counts and counts["train trained"] == 40
    assert seen["texts"] == {"version": str(run["version"]), "step": str(run["step"]["step"])}
    assert {"0.625", "0.5"} <= set(seen["figures"])
    assert seen["tokens"] == TOKENS["texts"] and seen["shades"] == ["prompt", "p3", "p1"]
    here = f"/ui/sessions/{IDS[0]}"
    assert seen["address"] == f"{here}?view=logprob" and seen["linked"] == seen["shades"]
    assert seen["views"] == [
        *(("version", f"{here}?view=version"), ("mask", f"{here}?view=mask")),
        *(("text", here), ("text", here)),
    ]
    assert "id 9 · log-probability -3.0000 (4.98 %) · version 4 · trained" in seen["readout"]
