"""A proxy that starts again goes on where the last one was."""

from __future__ import annotations

from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start


async def test_an_export_does_not_close_a_group(start: Start, proxy: Proxy) -> None:
    first = await proxy.finished_session(group_id="g", group_size=2)
    await proxy.export(first["session_id"])
    again = await start()
    assert (await again.capacity())["reserved"] == 1
    second = await again.finished_session(group_id="g", group_size=2)
    ids = [first["session_id"], second["session_id"]]
    await again.service.leases.give_back(ids, "export")
    assert [t.session_id for t in await again.lease()] == ids


async def test_the_state_of_the_run_survives_a_restart(start: Start, proxy: Proxy) -> None:
    """One that was finished and is given more steps goes on before its trainer is there, too:
    whoever comes early must not hear that all is over."""
    for step, state in ((100, "finished"), (99, "training")):
        await proxy.client.set_run("finished", step=step, checkpoint="/ckpt")
        proxy = await start()
        run = (await proxy.http.get("/rl/v1/run")).json()
        assert (run["state"], run["step"], run["checkpoint"]) == (state, step, "/ckpt")
        if state == "finished":
            response = await proxy.http.post("/rl/v1/start_session", json={"wait": 60})
            assert response.json()["error"]["code"] == "run_finished"


async def test_after_a_restart_a_key_leads_to_its_newest_session(
    start: Start, proxy: Proxy
) -> None:
    first = await proxy.finished_session()
    key = first["api_key"]
    second = await proxy.open(api_key=key)
    again = await start()
    await again.complete(key)
    response = await again.post("/rl/v1/finalize", {"final_reward": 1}, key)
    assert response.json()["session_id"] == second["session_id"]
    third = await again.open(api_key=key, mode="eval")
    id = third["session_id"]
    assert (await again.post(f"/rl/v1/sessions/{id}/abort", {}, key)).status_code == 200
    last = await start()
    response = await last.call(key)
    assert response.json()["error"]["state"] == "aborted"
