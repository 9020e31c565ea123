"""The miniatures are what they claim to be: their renderer is the template, their answers fit."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.chat.format_probes import TOOLS
from tests.support.errors import fails_with
from tests.support.families import Call, Family, family, names

ASK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]
THREE = Call("add", {"a": 1, "b": 2})


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
def test_an_answer_is_what_the_template_writes(name: str) -> None:
    fam = family(name)
    prompt = template(fam, ASK, None, prompt=True)
    said = fam.say("Three.")
    assert said[-1] in fam.end_ids
    whole = template(fam, [*ASK, {"role": "assistant", "content": "Three."}], None, prompt=False)
    # GLM's next turn begins with the token that ended the answer.
    text = fam.chat.decode([*whole, *([said[-1]] if name == "glm" else [])])
    assert text.removesuffix("\n") == fam.chat.decode(prompt + said)


@pytest.mark.parametrize(
    "name", [n for n in names() if family(n).spec.calls and not family(n).reasons]
)
def test_a_call_is_what_the_template_writes(name: str) -> None:
    fam = family(name)
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": THREE.name, "arguments": THREE.arguments}}],
    }
    prompt = template(fam, ASK, TOOLS, prompt=True)
    said = fam.say(calls=(THREE,))
    whole = template(fam, [*ASK, message], TOOLS, prompt=False)
    text = fam.chat.decode([*whole, *([said[-1]] if name == "glm" else [])])
    assert text.removesuffix("\n") == fam.chat.decode(prompt + said)
    assert fam.encode(fam.chat.decode(said)) == said


def test_a_family_refuses_what_it_cannot_say() -> None:
    with fails_with(ValueError, "reasoning"):
        family("llama3").say("x", reasoning="y")
    with fails_with(ValueError, "calls"):
        family("unknown_plain").say("x", calls=(THREE,))
