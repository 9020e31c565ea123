"""A call as the service checks it, and what holds of its answer in any API."""

from __future__ import annotations

from typing import Any

from any_agent.chat import ChatFormat
from any_agent.completions.apis import all_apis
from any_agent.completions.parsed_request import ParseContext, ParsedRequest
from any_agent.record import InteractionTree
from any_agent.types import GenerationHyperparameters, SessionMode
from tests.support.laws.apis import Api, Given
from tests.support.laws.record import heard

CONTEXT = 4096


def checked(api: Api, body: Any, chat: ChatFormat, tree: InteractionTree) -> ParsedRequest:
    """As the service does; raises AnyAgentError."""
    context = ParseContext(
        SessionMode.TRAIN,
        GenerationHyperparameters(max_new_tokens=512),
        "m",
        chat.renderer.known_settings,
        chat=chat,
        context_length=CONTEXT,
        tree=tree,
    )
    (registered,) = (each for each in all_apis() if each.name == api.name)
    return registered.parse(body, context)


def require_same(given: Given, whole: Given) -> None:
    """A stream and the whole answer of the same ids."""
    assert heard(given) == heard(whole)
    assert given.interaction == whole.interaction and given.finish == whole.finish
    if given.api != "chat":
        assert given.whole == whole.whole
