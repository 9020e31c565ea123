"""`GET /`: people who meet the service's URL learn what runs there."""

from __future__ import annotations

import pytest

from tests.router.conftest import StartLab

ADMIN = "admin-key-1"


@pytest.mark.parametrize("ui", [True, False])
async def test_it_says_what_runs_here_without_a_key(start_lab: StartLab, ui: bool) -> None:
    lab = await start_lab(f"server.admin_key={ADMIN}", f"server.ui={str(ui).lower()}")
    answer = await lab.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    url = str(lab.http.base_url).rstrip("/")
    assert f"{url}/v1 " in answer.text
    assert "docs/README.md" in answer.text and (f"{url}/ui" in answer.text) == ui
    # It tells nobody about the run, and asks no rank.
    for key in ("wrong", lab.signer.mint(0)[1]):
        assert (await lab.get("/", key)).status_code == 200
    assert lab.ranks[0].received == []
    assert lab.config.experiment not in answer.text.replace("any-agent", "")
    head = await lab.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


async def test_a_browser_is_led_to_the_dashboard_where_there_is_one(start_lab: StartLab) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    lab = await start_lab()
    answer = await lab.get("/", **browser)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
