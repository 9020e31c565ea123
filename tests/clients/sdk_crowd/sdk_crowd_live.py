"""200 sessions at once with each unmodified client, on a loop and in threads, on a bare install."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.clients.client import APART
from tests.clients.environment import python_with
from tests.clients.live import Live
from tests.support.e2e.serving import environment

REPOSITORY = Path(__file__).resolve().parents[3]
CROWD = REPOSITORY / "tests" / "support" / "sdk" / "crowd.py"
COUNT = 200
_KINDS = 10
_LIMIT = 600.0
"""Seconds."""


@pytest.mark.parametrize("major", [2, 3])
def test_every_call_lands_in_its_own_session(live: Live, major: int, tmp_path: Path) -> None:
    """Nothing else is installed there: what this imports of any-agent is light."""
    python = python_with(f"sdk-openai-{major}")
    done = subprocess.run(
        [python, CROWD, str(COUNT)],
        cwd=tmp_path,
        env=environment(
            **APART,
            PYTHONPATH=str(REPOSITORY),
            OPENAI_BASE_URL=f"{live.url}/v1",
            OPENAI_API_KEY="an-own-key",
            ANTHROPIC_BASE_URL=live.url,
            ANTHROPIC_API_KEY="an-own-key",
        ),
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(asked) for _, asked in kinds] == [1] + _KINDS * [COUNT]
    with httpx.Client(base_url=live.url, timeout=60) as http:
        for kind, asked in kinds:
            for session_id, texts in asked.items():
                assert _recorded(http, session_id) == texts, (kind, session_id)


def _recorded(http: httpx.Client, session_id: str) -> list[str]:
    content = http.get(f"/rl/v1/sessions/{session_id}/content").json()
    return [one["message_delta"][-1]["content"] for one in content["interactions"]]
