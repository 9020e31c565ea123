"""The events that LiteLLM's callbacks are told, where no LiteLLM is needed to see them."""

from __future__ import annotations

from any_agent.protocol.training import Rejection
from proxy_ext.litellm_events import PolicyEvents
from proxy_ext.litellm_policy import PolicyEvent
from tests.support.proxy import Proxy


class Heard(PolicyEvents):
    """The events of a rank's sessions, kept."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy.service.config, part="rank-0")
        self.events: list[PolicyEvent] = []
        proxy.service.sessions.listeners = (self,)

    def _put(self, event: PolicyEvent) -> None:
        self.events.append(event)


def ends(told: list[PolicyEvent]) -> list[tuple[str, str, str | None]]:
    ended = [event.metadata for event in told if event.kind == "end"]
    return [(end["session_id"], end["state"], end["reason"]) for end in ended]


async def test_a_train_session_ends_when_the_trainer_acknowledges_it(proxy: Proxy) -> None:
    heard = Heard(proxy)
    taught = (await proxy.finished_session())["session_id"]
    refused = (await proxy.finished_session())["session_id"]
    for _ in range(2):
        assert await proxy.lease()
    rejected = [Rejection(session_id=refused, reason="stale")]
    for _ in range(2):
        # The trainer repeats an acknowledgement whose answer was lost.
        await proxy.client.ack(owner="trainer", trained=[taught], rejected=rejected, step=1)
    assert ends(heard.events) == [(taught, "trained", None), (refused, "rejected", "stale")]


async def test_a_replayed_session_sends_no_second_end_event(proxy: Proxy) -> None:
    heard = Heard(proxy)
    id = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[id], rejected=[], step=1)
    await proxy.client.replay(owner="trainer", session_ids=[id])
    assert ends(heard.events) == [(id, "trained", None)]
