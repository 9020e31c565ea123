"""The miniatures are what they claim to be: their renderer is the template, their answers fit."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.chat.format_probes import TOOLS
from tests.support.families import Call, Family, family, names

ASK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]


def template(fam: Family, talk: list[dict[str, Any]], tools: Any, *, prompt: bool) -> list[int]:
    kwargs = {"enable_thinking": fam.thinking} if fam.spec.enable_thinking else {}
    return list(
        fam.chat.tokenizer.apply_chat_template(
            talk, tools=tools, add_generation_prompt=prompt, return_dict=False, **kwargs
        )
    )


@pytest.mark.parametrize("name", names())
def test_the_renderer_and_the_template_agree_on_a_prompt(name: str) -> None:
    fam = family(name)
    named = fam.load(renderer=fam.spec.renderer)
    assert named.name == fam.spec.renderer
    tools = TOOLS if fam.spec.calls else None
    for chat in (named, fam.chat):
        assert chat.render(ASK, tools) == template(fam, ASK, tools, prompt=True)
    assert 500 < fam.chat.vocab_size < 650
    assert set(fam.chat.stop_token_ids) <= fam.end_ids


# Templates take reasoning out of earlier turns, and gpt-oss writes a call otherwise than its model.
@pytest.mark.parametrize("name", [n for n in names() if not family(n).reasons])
def test_an_answer_and_a_call_are_what_the_template_writes(name: str) -> None:
    fam = family(name)
    three = Call("add", {"a": 1, "b": 2})
    called = {
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
    }
    cases: list[tuple[Any, list[int], Any]] = [({"content": "Three."}, fam.say("Three."), None)]
    if fam.spec.calls:
        cases.append((called, fam.say(calls=(three,)), TOOLS))
    for message, said, tools in cases:
        assert said[-1] in fam.end_ids and fam.encode(fam.chat.decode(said)) == said
        prompt = template(fam, ASK, tools, prompt=True)
        whole = template(fam, [*ASK, {"role": "assistant", **message}], tools, prompt=False)
        # GLM's next turn begins with the token that ended the answer.
        text = fam.chat.decode([*whole, *([said[-1]] if name == "glm" else [])])
        assert text.removesuffix("\n") == fam.chat.decode(prompt + said)
