"""Parts of the operator's that fail: callbacks that block or raise, and a Redis that is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import litellm
from tests.support.ports import own_port

pytestmark = pytest.mark.service

ILL = """
import time
from litellm.integrations.custom_logger import CustomLogger


class Raises(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        raise RuntimeError("this callback is broken")


class Blocks(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        if "any_agent_event" in kwargs["litellm_params"]["metadata"]:
            time.sleep(3600)


raises, blocks = Raises(), Blocks()
"""
WAITING = 4
UNANSWERED = 64  # events that the process of the callbacks is given before it answers one
SESSIONS = 40


async def test_no_call_waits_for_a_callback_that_blocks_or_a_redis_that_is_gone(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    (tmp_path / "ill.py").write_text(ILL)

    def change(data: dict[str, Any]) -> None:
        data["litellm_settings"] |= {
            "callbacks": ["ill.raises", "ill.blocks"],
            "cache": True,
            "cache_params": {"type": "redis", "host": "127.0.0.1", "port": own_port()},
        }

    own = {"max_waiting_events": WAITING}
    async with litellm.running(tmp_path, tiny_model_dir, change, own=own) as rank:
        slowest = 0.0
        for _ in range(SESSIONS):
            began = time.monotonic()
            # Each answer is there though nothing of LiteLLM's is told.
            key = await litellm.session(rank.http)
            for model in ("policy", "planner"):
                await litellm.call(rank.http, key, model)
            await litellm.end(rank.http, key)
            slowest = max(slowest, time.monotonic() - began)
        assert (await rank.http.get("/readyz")).status_code == 200
        dropped = (await litellm.events_counted(rank.http))["dropped"]
        ended = time.monotonic()
    ended = time.monotonic() - ended
    print(f"{SESSIONS} sessions, the slowest {slowest:.2f} s; {dropped:.0f} events dropped")
    # A session has a call, a reward and an end of the policy's.
    assert dropped >= 3 * SESSIONS - UNANSWERED - WAITING - 1, "an event was lost without a count"
    assert slowest < 20, "a part of the operator's held up a call"
    assert ended < 60, "a callback that blocks held up the end of the rank"
