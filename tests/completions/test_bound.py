"""A format after reasoning that the prompt has opened, without tools."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from any_agent.completions.parsed_request import ParsedRequest
from any_agent.completions.prepare import check_request
from any_agent.completions.prompt import Prompt
from any_agent.completions.structured_output import grammar_of_answer
from any_agent.engine import Capabilities
from any_agent.errors import UnsupportedParameter
from any_agent.types import id_array
from tests.support.completions.params import TOOL, parse
from tests.support.errors import fails_with
from tests.support.families import family

ODD = {"type": "array", "items": {"type": "integer", "multipleOf": 5}, "uniqueItems": True}


def grammar(schema: dict[str, Any], *, able: bool = True, **asked: Any) -> tuple[str, str]:
    """The grammar that is asked for, and the one that is sent."""
    chat = family("qwen3_5", thinking=True).chat
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    call = replace(parse("eval", response_format=wanted, **asked), structural_tag=able)
    prompt = Prompt(id_array(chat.render(call.messages, call.tools)))
    assert chat.ends_in_reasoning(prompt.ids)
    plain = call.gconfig.grammar
    assert plain is not None
    return plain, grammar_of_answer(chat, prompt, call, plain)


def test_a_format_after_opened_reasoning_is_a_tag_where_the_engine_enforces_one() -> None:
    assert list(orjson.loads(grammar({"type": "object"})[1])) == ["structural_tag"]
    for schema, able in (({"type": "object"}, False), (ODD, True)):
        plain, sent = grammar(schema, able=able)
        assert sent == plain
    with fails_with(UnsupportedParameter, "uniqueItems"):
        grammar(ODD, tools=[TOOL])


@pytest.mark.parametrize("able", [True, False])
async def test_a_checked_call_knows_whether_its_engine_has_tags(able: bool) -> None:
    async def capabilities() -> Capabilities:
        return Capabilities(structural_tag=able)

    engine = SimpleNamespace(capabilities=capabilities)
    completer: Any = SimpleNamespace(chat=SimpleNamespace(vocab_size=10), engine=engine)
    answer: Any = None
    call = parse("eval", response_format={"type": "json_object"})
    asked = await check_request(completer, lambda: ParsedRequest(call, answer), 1)
    assert asked == ParsedRequest(replace(call, structural_tag=able), answer)
