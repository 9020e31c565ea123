"""What is decided before a route is reached, and which routes a key is needed for."""

from __future__ import annotations

import httpx
import pytest

from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
)
async def test_open_mode_serves_no_web_page(proxy: Proxy, site: str, status: int) -> None:
    # An image or a form on a page carries no Origin.
    response = await proxy.http.get("/rl/v1/start_session", headers={"Sec-Fetch-Site": site})
    assert response.status_code == status, response.text
    if status == 403:
        assert "server.admin_key" in response.json()["error"]["message"]
    assert (await proxy.capacity())["admitted"] == (status == 200)


async def test_with_a_key_pages_are_served(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret")
    response = await proxy.http.get("/rl/v1/run", headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/rl/v1/run", "/rl/v1/version"])
async def test_the_run_is_told_to_holders_of_a_key(start: Start, path: str) -> None:
    proxy = await start("server.admin_key=operator-secret")
    key = (await proxy.open(mode="eval"))["api_key"]
    async with httpx.AsyncClient(base_url=proxy.url) as stranger:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Bearer {key}"}, 200),
            ({"x-api-key": "operator-secret"}, 200),
        ):
            response = await stranger.get(path, headers=headers)
            assert response.status_code == status, (headers, response.text)


async def test_in_open_mode_the_run_needs_no_key(proxy: Proxy) -> None:
    for path in ("/rl/v1/run", "/rl/v1/version"):
        assert (await proxy.http.get(path)).status_code == 200


async def test_a_key_has_no_place_in_a_url(proxy: Proxy) -> None:
    key = (await proxy.finished_session(mode="eval"))["api_key"]
    response = await proxy.http.get("/rl/v1/start_session", params={"api_key": key, "mode": "eval"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "api_key"
    assert key not in response.text
    assert not proxy.service.sessions.live
