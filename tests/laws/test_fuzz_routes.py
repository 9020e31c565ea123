"""Arbitrary bodies over HTTP: an answer as the SDKs read it, or a refusal in the API's own shape;
never a failure, and the record has what was answered and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.record import InteractionTree
from tests.laws.test_fuzz import quiet
from tests.support.families import family
from tests.support.laws.apis import MESSAGES, NEW, Api, Given
from tests.support.laws.bodies import BODIES, FIXED, SAID
from tests.support.laws.record import check_ids, heard
from tests.support.laws.service import Lab, Talk, lab_of

__all__ = ["quiet"]

RAW = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"x"',
    "a number": b"7",
    "cut": b'{"input": "x"',
    "no text": b"\xff\xfe\x00{}",
    "marked": b'\xef\xbb\xbf{"input": "x"}',
    "not a number": b'{"input": NaN}',
    "half a character": b'{"input": "\\ud800"}',
    "half a name": b'{"input": "x", "\\ud800": 1}',
    "nested": b'{"input": %s%s}' % (b"[" * 2000, b"]" * 2000),
    "nested parts": b'{"input": [%s"x"%s]}' % (b'{"role": "user", "content": [' * 9, b"]}" * 9),
    "a huge number": b'{"input": "x", "temperature": 1%s}' % (b"0" * 5000),
    "a huge name": b'{"input": "x", "%s": 1}' % (b"x" * 1_000_000),
    "many names": b'{"input": "x", %s}' % b", ".join(b'"n%d": 1' % k for k in range(20_000)),
    "many items": b'{"input": [%s]}' % b", ".join([b'{"role": "user", "content": ""}'] * 20_000),
    "a text too long": b'{"input": [{"role": "user", "content": "%s"}]}' % (b"long " * 200_000),
}
"""Bodies of Responses; of Messages, once what is said there has its name."""


@dataclass
class Live:
    """A proxy on an event loop of its own: hypothesis has none."""

    portal: BlockingPortal
    lab: Lab

    def open(self) -> Talk:
        return self.portal.call(self.lab.open)

    def post(self, talk: Talk, api: Api, body: bytes) -> tuple[int, bytes]:
        response = self.portal.call(self.lab.proxy.post, api.path, body, talk.key)
        return response.status_code, response.content

    def recorded(self, talk: Talk) -> InteractionTree:
        nodes = self.portal.call(partial(self.lab.proxy.recorded, talk.id))
        return InteractionTree.from_interactions(nodes)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    opened = lab_of(family("qwen3", thinking=True), tmp_path_factory.mktemp("live"), true=False)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opened) as lab:
        yield Live(portal, lab)


def require_refused(api: Api, status: int, data: bytes) -> None:
    assert 400 <= status < 500, (status, data)
    kind, code, message = api.problem(json.loads(data))
    assert kind and code and message
    assert len(data) < 4096, "an error grows with what was sent"


@pytest.mark.parametrize("api", NEW, ids=lambda api: api.name)
def test_any_body_is_recorded_or_refused(live: Live, api: Api, quiet: settings) -> None:
    talk, answers = live.open(), dict[str, Given]()
    engine, size = live.lab.engine, live.lab.fam.chat.vocab_size

    @quiet
    @given(BODIES[api.name], st.booleans(), st.booleans(), SAID)
    def run(body: dict[str, Any], tools: bool, stream: bool, ids: list[int]) -> None:
        engine.hush()
        engine.say([i % size for i in ids])
        whole = {**body, **(FIXED[api.name] if tools else {}), "stream": stream}
        status, data = live.post(talk, api, json.dumps(whole).encode())
        if status != 200:
            require_refused(api, status, data)
            return
        (answer,) = api.streamed(data) if stream else api.whole(data)
        answers[answer.interaction] = answer

    try:
        run()
    finally:
        engine.hush()
    tree = live.recorded(talk)
    assert {node.id for node in tree} == answers.keys()
    assert answers, "everything was refused: that proves little"
    for node in tree:
        check_ids(live.lab, tree, node)
        assert heard(answers[node.id]) == heard(node.output_message)


@pytest.mark.parametrize("api", NEW, ids=lambda api: api.name)
def test_what_is_no_call_is_refused_and_not_recorded(live: Live, api: Api) -> None:
    talk = live.open()
    for body in RAW.values():
        if api is MESSAGES:
            body = body.replace(b'"input":', b'"max_tokens": 8, "messages":')
        require_refused(api, *live.post(talk, api, body))
    assert len(live.recorded(talk)) == 0
