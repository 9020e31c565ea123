"""Each law as a check of what was recorded, by means that the service does not use itself."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from jinja2 import UndefinedError

from any_agent.record import InteractionTree
from any_agent.types import Interaction, Message, Tool
from tests.support.chat_streams import joined
from tests.support.families import Family
from tests.support.laws.outputs import Output

_ANSWERING = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""What an answer is made of: in its text they are tokens when it is sent back."""
_SAID = ("content", "reasoning_content")


def check_message(fam: Family, message: Message, output: Output, tools: list[Tool] | None) -> None:
    """A well-formed output is read as what was meant by it.

    Values that a family writes without quotes have no type where their tool is not known: "7" is
    7 there.
    """
    known = {tool["function"]["name"] for tool in tools or ()}

    def meant(name: str, values: Any) -> tuple[str, Any]:
        if name in known or not fam.spec.bare_values:
            return name, values
        return name, {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}

    assert (message.get("content") or "") == (output.content or "").strip(), output
    assert (message.get("reasoning_content") or "") == (output.reasoning or "").strip(), output
    calls = [
        meant(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    assert calls == [meant(call.name, call.arguments) for call in output.calls or ()], output


def check_parsing(
    fam: Family,
    tree: InteractionTree,
    node: Interaction,
    tools: list[Tool] | None,
    stop: tuple[str, ...],
) -> None:
    """The recorded ids, read whole, are the message that the agent got."""
    prompt = tree.prompt_ids(node.id)
    parser = fam.chat.stream_parser(
        prompt_ids=prompt,
        tools=tools,
        stop=stop,
        forced=prompt[len(prompt) - node.request.get("forced", 0) :],
        call_seed=node.id.encode(),
    )
    deltas = parser.feed(node.output_ids.tolist())
    rest, parsed = parser.finish()
    assert joined([*deltas, *rest]) == parsed
    assert parsed.to_message() == node.output_message


def check_continuation(
    fam: Family,
    tree: InteractionTree,
    node: Interaction,
    messages: list[Message],
    tools: list[Tool] | None,
) -> None:
    """The prompt begins with the parent's ids; the rest is the template's text, once encoded."""
    assert node.parent_id is not None
    parent = tree[node.parent_id]
    before = [*tree.prompt_ids(parent.id).tolist(), *parent.output_ids.tolist()]
    prompt = tree.prompt_ids(node.id).tolist()
    assert prompt[: len(before)] == before
    # A forced call's opening is no part of the conversation.
    suffix = prompt[len(before) : len(prompt) - node.request.get("forced", 0)]
    said = fam.chat.decode(suffix)
    ends = [*fam.spec.ends, *([fam.spec.past_end] if fam.spec.past_end else [])]
    ended = bool(len(parent.output_ids)) and parent.output_ids[-1] in fam.end_ids
    new = len(node.message_delta)
    tail = None
    for wrapped in (False, True):
        whole = _template_text(fam, messages, tools, wrapped=wrapped)
        tail = None if whole is None else _tail(fam, whole, said, ends, ended=ended)
        if tail is not None:
            break
    assert whole is not None and tail is not None, (whole, said)
    # A special token that a new message spells out is plain text; the template's are tokens.
    inert_messages = _inert(fam, messages, new)
    if inert_messages == messages:
        assert fam.encode(said) == suffix, said
        return
    inert = _template_text(fam, inert_messages, tools, wrapped=wrapped)
    before_tail = whole[: len(whole) - len(tail)]
    assert inert is not None and inert.startswith(before_tail)
    head = said[: len(said) - len(tail)]
    assert _specials(fam, suffix) == _specials(fam, fam.encode(head + inert[len(before_tail) :]))


def check_conversation(
    tree: InteractionTree, node: Interaction, messages: list[Message], tools: list[Tool] | None
) -> None:
    """What is continued is what the request says has been said, under the same tools."""
    assert node.parent_id is not None
    parent = tree[node.parent_id]
    before = [*tree.messages(parent.id), parent.output_message]
    covered = messages[: len(messages) - len(node.message_delta)]
    assert [_meant(m) for m in covered] == [_meant(m) for m in before]
    assert (tree.path(parent.id)[0].tools or None) == (tools or None)


def _meant(message: Message) -> dict[str, Any]:
    """A message as everyone reads it, whatever its form."""
    plain = _plain(message)
    calls = [
        (c["function"]["name"], value_of(c["function"]["arguments"]))
        for c in message.get("tool_calls") or []
    ]
    return {"role": plain["role"], "content": plain["content"].strip(), "calls": calls}


def value_of(arguments: Any) -> Any:
    """What a call's arguments are, as text or as an object; none at all is none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return ("broken", arguments)


def _tail(fam: Family, whole: str, said: str, ends: list[str], *, ended: bool) -> str | None:
    """What was added, from where the template writes it; None if the whole conversation does not
    end so, after an answer."""
    if not ended:
        # The missing end is bridged, perhaps with what closes an open block before it.
        at = min(at for end in ends if (at := said.find(end)) >= 0)
        rests = (said[at + len(end) :] for end in ends if said[at:].startswith(end))
        return next((rest for rest in (said[at:], *rests) if whole.endswith(rest)), None)
    # GLM's end is the next turn's first token, and need not be the one that was sampled.
    before = whole.removesuffix(said)
    follows = fam.name == "glm" or before.endswith(tuple(ends))
    return said if whole.endswith(said) and follows else None


def _inert(fam: Family, messages: list[Message], new: int) -> list[Message]:
    """The same, where the last ``new`` messages spell out no special token."""

    def changed(value: Any, marks: tuple[str, ...]) -> Any:
        if isinstance(value, str):
            for mark in marks:
                value = value.replace(mark, "spelled")
            return value
        if isinstance(value, dict):
            return {k: changed(v, marks) for k, v in value.items()}
        return [changed(v, marks) for v in value] if isinstance(value, list) else value

    answered = tuple(mark for mark in fam.spec.specials if mark not in _ANSWERING)
    return [
        *messages[: len(messages) - new],
        *(
            {
                key: changed(
                    value,
                    answered
                    if message["role"] == "assistant" and key in _SAID
                    else fam.spec.specials,
                )
                for key, value in message.items()
            }
            for message in messages[len(messages) - new :]
        ),
    ]


def _specials(fam: Family, ids: list[int]) -> list[str]:
    return [
        token for token in map(fam.chat.decode, ([i] for i in ids)) if token in fam.spec.specials
    ]


def _template_text(
    fam: Family, messages: list[Message], tools: list[Tool] | None, *, wrapped: bool
) -> str | None:
    """The whole conversation as the model's own template writes it, which may take arguments that
    are no object as they are, or (``wrapped``) in an object; None if it does not take them."""
    kwargs = {"enable_thinking": fam.thinking} if fam.spec.enable_thinking else {}
    # Not every template takes text for arguments.
    with contextlib.suppress(TypeError, UndefinedError):
        return str(
            fam.chat.tokenizer.apply_chat_template(
                [_plain(m, wrapped=wrapped) for m in messages],
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
                **kwargs,
            )
        )
    return None


def _plain(message: Message, *, wrapped: bool = False) -> Message:
    """As templates take it: text contents, arguments as values."""
    out = {k: v for k, v in message.items() if v is not None}
    content = out.get("content", "")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    out["content"] = content
    if out.get("tool_calls"):
        out["tool_calls"] = [
            {"function": _function(call["function"], wrapped=wrapped)} for call in out["tool_calls"]
        ]
    return out


def _function(function: dict[str, Any], *, wrapped: bool) -> dict[str, Any]:
    text = function["arguments"]
    try:
        value = json.loads(text) if isinstance(text, str) else text
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        value = text
    if wrapped and not isinstance(value, dict):
        value = {"arguments": text}
    return {"name": function["name"], "arguments": value}
