"""What is decided before a route is reached, and which routes a key is needed for."""

from __future__ import annotations

from tests.support.proxy import Proxy


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


async def test_a_key_has_no_place_in_a_url(proxy: Proxy) -> None:
    key = (await proxy.finished_session(mode="eval"))["api_key"]
    response = await proxy.http.get("/rl/v1/start_session", params={"api_key": key, "mode": "eval"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "api_key"
    assert key not in response.text
    assert not proxy.service.sessions.live
