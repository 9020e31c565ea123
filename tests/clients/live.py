"""A whole service, router and proxy, whose engine says what a test tells it to."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from any_agent.chat import ChatFormat, load_chat_format
from tests.support.chaos.killable import engine_in_thread
from tests.support.e2e.serving import serve
from tests.support.scripted_engine import ScriptedEngine
from tests.support.true_logprobs import TrueModel

_LIMIT = 60.0
_CONTEXT = 131072
"""Of the engine, in tokens: some agents begin with a prompt and tools of 60 KB."""


@dataclass(frozen=True, slots=True)
class Live:
    """The service, and the engine behind it."""

    url: str
    engine: ScriptedEngine
    chat: ChatFormat

    def open(self) -> dict[str, Any]:
        """An eval session: its id and key."""
        body = {"mode": "eval"}
        answer = httpx.post(f"{self.url}/rl/v1/start_session", json=body, timeout=_LIMIT)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def continued(self) -> Counter[str]:
        """Interactions recorded so far, by how their prompts came about."""
        answer = httpx.get(f"{self.url}/metrics", timeout=_LIMIT)
        assert answer.status_code == 200, answer.text
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(answer.text):
            if family.name == "any_agent_interactions":
                for sample in family.samples:
                    found[sample.labels["continuation"]] += int(sample.value)
        return found

    def sessions(self) -> set[str]:
        """The ids of all sessions so far."""
        answer = httpx.get(f"{self.url}/rl/v1/sessions", params={"limit": 1000}, timeout=_LIMIT)
        assert answer.status_code == 200, answer.text
        return {str(session["session_id"]) for session in answer.json()}

    def put(self, what: str, body: dict[str, Any]) -> None:
        """Tell the service what a trainer would."""
        answer = httpx.put(f"{self.url}/rl/v1/{what}", json=body, timeout=_LIMIT)
        assert answer.status_code == 200, answer.text

    def tokens(self, answer: str) -> int:
        """How many an answer comes to, with the one that ends it."""
        return len(self.chat.tokenizer.encode(answer, add_special_tokens=False)) + 1

    def says(self, text: str, *, end: bool = True) -> list[int]:
        """Have the engine sample this next, special tokens spelled out; return its tokens."""
        ids = self.chat.tokenizer.encode(text, add_special_tokens=False)
        said = [*ids, *([self.chat.stop_token_ids[0]] if end else [])]
        self.engine.say(said)
        return said


@contextlib.contextmanager
def live_service(model: Path, folder: Path) -> Iterator[Live]:
    """`any-agent serve --no-train` in ``folder``."""
    chat = load_chat_format(str(model), enable_thinking=False)
    with engine_in_thread(model) as engine:
        engine.context_length = _CONTEXT
        engine.told = {"max_req_input_len": _CONTEXT - 6}
        settings = [
            f"model.path={model}",
            "model.enable_thinking=false",
            f"engine.urls={engine.url}",
            "server.ranks=1",
            "server.port=0",
        ]
        # The service finds out at its start that it holds the run's weights.
        engine.model = TrueModel(model)
        with serve("--no-train", *settings, cwd=folder) as served:
            engine.model = None
            yield Live(served.url, engine, chat)
