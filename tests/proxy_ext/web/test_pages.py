"""What is decided before a route is reached, and which routes a key is needed for."""

from __future__ import annotations

import httpx

from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start


async def test_open_mode_serves_no_web_page(proxy: Proxy) -> None:
    # An image or a form on a page carries no Origin.
    for site, served in (
        ("cross-site", False),
        ("same-site", False),
        ("same-origin", True),
        ("none", True),
    ):
        before = (await proxy.capacity())["admitted"]
        asking = {"Sec-Fetch-Site": site}
        response = await proxy.http.get("/rl/v1/start_session", headers=asking)
        assert response.status_code == (200 if served else 403), response.text
        assert served or "server.admin_key" in response.json()["error"]["message"]
        assert (await proxy.capacity())["admitted"] == before + served
    for path in ("/rl/v1/run", "/rl/v1/version"):
        assert (await proxy.http.get(path)).status_code == 200, "no key is needed"


async def test_with_a_key_the_run_is_told_to_its_holders_and_pages_are_served(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret")
    key = (await proxy.open(mode="eval"))["api_key"]
    async with httpx.AsyncClient(base_url=proxy.url) as stranger:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Bearer {key}"}, 200),
            ({"x-api-key": "operator-secret", "Sec-Fetch-Site": "cross-site"}, 200),
        ):
            for path in ("/rl/v1/run", "/rl/v1/version"):
                response = await stranger.get(path, headers=headers)
                assert response.status_code == status, (path, headers, response.text)


async def test_a_key_has_no_place_in_a_url(proxy: Proxy) -> None:
    key = (await proxy.finished_session(mode="eval"))["api_key"]
    response = await proxy.http.get("/rl/v1/start_session", params={"api_key": key, "mode": "eval"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "api_key"
    assert key not in response.text
    assert not proxy.service.sessions.live
