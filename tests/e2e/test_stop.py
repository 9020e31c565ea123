"""A clean stop loses nothing: no step that was made, no answer under way, no open session."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.shutdown import Terminated
from any_agent.launcher.trial import latest_weights
from tests.support.e2e.live_run import live_config, some_steps, steps_of
from tests.support.e2e.serving import Served, serve

STREAMS, TOKENS = 100, 300


class Talk:
    """An eval session and its messages."""

    def __init__(self, url: str) -> None:
        opened = httpx.post(f"{url}/rl/v1/start_session", json={"mode": "eval"}).json()
        self.id, self.key = opened["session_id"], opened["api_key"]
        self.messages: list[Any] = [{"role": "user", "content": "count"}]

    def stream(self, url: str, *, max_tokens: int) -> Iterator[str]:
        """A turn's words as they come; the whole turn has joined the talk at its end."""
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=self.key, max_retries=0, timeout=240)
        text, finish = "", None
        with client:
            for chunk in client.chat.completions.create(
                model="x", messages=self.messages, max_tokens=max_tokens, stream=True
            ):
                choice = chunk.choices[0]
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                yield choice.delta.content or ""
        assert finish is not None, "the stream was cut"
        answer = {"role": "assistant", "content": text}
        self.messages += [answer, {"role": "user", "content": "go on"}]


def info(url: str, talk: Talk) -> Any:
    return httpx.get(
        f"{url}/rl/v1/sessions/{talk.id}", headers={"Authorization": f"Bearer {talk.key}"}
    ).json()


def test_sigterm_lets_streams_end_and_open_sessions_are_found_again(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    arguments = ["--no-train", "--model", str(tiny_model_dir), "model.enable_thinking=false"]
    arguments += ["server.port=0", "server.ranks=1", f"sampling.max_new_tokens={TOKENS}"]
    arguments += [f"rollout.max_concurrent={STREAMS}", f"engine.max_running_requests={STREAMS}"]
    with serve(*arguments, cwd=tmp_path) as served:
        talks = [Talk(served.url) for _ in range(STREAMS)]
        begun = threading.Barrier(len(talks) + 1, timeout=240)
        threads = [
            threading.Thread(target=_read, args=(talk, served, begun), daemon=True)
            for talk in talks
        ]
        for thread in threads:
            thread.start()
        begun.wait()
        assert served.signal(signal.SIGTERM, 240) == 0
        for thread in threads:
            thread.join(120)
        assert [len(talk.messages) for talk in talks] == [3] * STREAMS
        assert "Traceback" not in served.output.read_text()
    with serve(*arguments, cwd=tmp_path) as served:
        for talk in talks[:2]:
            assert (info(served.url, talk)["state"], info(served.url, talk)["interactions"]) == (
                "open",
                1,
            )
            list(talk.stream(served.url, max_tokens=4))
            assert info(served.url, talk)["interactions"] == 2
        assert served.signal(signal.SIGTERM, 240) == 0


def _read(talk: Talk, served: Served, begun: threading.Barrier) -> None:
    words = talk.stream(served.url, max_tokens=TOKENS)
    next(words)
    begun.wait()
    list(words)


def test_an_interrupt_ends_a_service_that_a_script_started_in_the_background(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    arguments = ["--no-train", "--model", str(tiny_model_dir), "server.port=0", "server.ranks=1"]
    with serve(*arguments, cwd=tmp_path, in_background=True) as served:
        children = served.children
        assert served.interrupt(60) == 130
        assert children and not any(child.is_running() for child in children)


def test_every_part_ends_well_at_sigterm(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = live_config(tmp_path, tiny_model_dir, **{"train.steps": 1000})
    with pytest.raises(Terminated), Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(some_steps(node, 2))
        raise Terminated
    codes = {name: part.exit_code for name, part in node.parts.items()}
    # A trainer's 0 says that training is done.
    assert codes.pop("trainer") == 143
    assert set(codes.values()) == {0}
    made, saved = steps_of(node.dir)[-1]["step"], latest_weights(config)
    assert made >= 2
    assert saved is not None
    assert saved.step == made
