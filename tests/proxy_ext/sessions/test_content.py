"""What was said in a session, as whoever grades it from outside gets it."""

from __future__ import annotations

import pytest

from any_agent.errors import Conflict, NotFound
from proxy_ext.sessions.grading import graded_session
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start


async def talk(proxy: Proxy, **fields: object) -> dict[str, str]:
    """A session of two turns and a branch."""
    session = await proxy.open(**fields)
    first = await proxy.complete(session["api_key"])
    answer = first["choices"][0]["message"]
    more = [*HELLO, answer, {"role": "user", "content": "Another."}]
    await proxy.complete(session["api_key"], more)
    await proxy.complete(session["api_key"], [{"role": "user", "content": "And now for what?"}])
    return session


async def test_the_shown_content_is_what_the_grader_is_given(proxy: Proxy) -> None:
    session = await talk(proxy, task_id="t", metadata={"answer": 5})
    await proxy.client.feedback("down", text="No.", api_key=session["api_key"])
    await proxy.client.set_final_reward(session["api_key"], {"correct": 1.0})
    content = await proxy.client.session_content(session["session_id"], session["api_key"])
    live = proxy.service.sessions.live[session["session_id"]]
    given = content.graded()
    assert given == await graded_session(proxy.service.sessions, live)
    assert [len(one["messages"]) for one in given["interactions"]] == [1, 3, 1]
    assert given["metadata"] == {"answer": 5}
    (said,) = given["feedback"]
    assert said.pop("at") > 0
    assert said == {"interaction_id": None, "value": -1.0, "text": "No.", "by": "session"}


async def test_content_that_is_not_kept_is_not_shown(start: Start, proxy: Proxy) -> None:
    session = await talk(proxy)
    await proxy.client.delete_session(session["session_id"])
    with fails_with(Conflict, "deleted"):
        await proxy.client.session_content(session["session_id"])
    with pytest.raises(NotFound):
        await proxy.client.session_content("no-such-0-1")
    proxy = await start("sessions.store_content=false", admit=10)
    session = await talk(proxy)
    with fails_with(Conflict, "sessions.store_content", code="content_not_stored"):
        await proxy.client.session_content(session["session_id"])
