"""Each law as a check of what was recorded, by means that the service does not use itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import UndefinedError

from any_agent.chat import MessageDelta
from any_agent.record import InteractionTree
from any_agent.types import Interaction, Message, Tool
from tests.families import Family
from tests.laws.outputs import Output


def merged(deltas: Iterable[MessageDelta]) -> Message:
    """What a client puts together from a stream's deltas, empty fields left out."""
    out: Message = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for key in ("content", "reasoning_content"):
            text = getattr(delta, key)
            if text:
                out[key] = out.get(key, "") + text
        for part in delta.tool_calls or []:
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": {"arguments": ""}})
            function = calls[part["index"]]["function"]
            told = part.get("function") or {}
            if "name" in told:
                assert "name" not in function, "a name is told once"
                function["name"] = told["name"]
            function["arguments"] += told.get("arguments") or ""
    if calls:
        out["tool_calls"] = calls
    return out


def check_message(message: Message, output: Output) -> None:
    """A well-formed output is read as what was meant by it."""
    assert (message.get("content") or "") == (output.content or "").strip(), output
    assert (message.get("reasoning_content") or "") == (output.reasoning or "").strip(), output
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    assert calls == [(call.name, call.arguments) for call in output.calls or ()], output


def check_parsing(
    fam: Family,
    tree: InteractionTree,
    node: Interaction,
    tools: list[Tool] | None,
    stop: tuple[str, ...],
) -> None:
    """The recorded ids, read whole, are the message that the agent got."""
    parser = fam.chat.stream_parser(prompt_ids=tree.prompt_ids(node.id), tools=tools, stop=stop)
    deltas = parser.feed(node.output_ids.tolist())
    rest, parsed = parser.finish(matched_stop=None)
    assert parsed.to_message() == node.output_message
    assert merged([*deltas, *rest]) == {
        k: v for k, v in node.output_message.items() if k != "role" and v
    }


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
    suffix = prompt[len(before) :]
    said = fam.chat.decode(suffix)
    ends = [*fam.spec.ends, *([fam.spec.past_end] if fam.spec.past_end else [])]
    ended = bool(len(parent.output_ids)) and parent.output_ids[-1] in fam.end_ids
    wholes = list(_template_texts(fam, messages, tools))
    assert any(_goes_on(fam, whole, said, ends, ended=ended) for whole in wholes), (wholes, said)
    # A special token that a message spells out is text to the service, and a token to us.
    added = str([_plain(m) for m in node.message_delta])
    if not any(mark in added for mark in fam.spec.specials):
        assert fam.encode(said) == suffix, said


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
        (c["function"]["name"], _value(c["function"]["arguments"]))
        for c in message.get("tool_calls") or []
    ]
    return {"role": plain["role"], "content": plain["content"].strip(), "calls": calls}


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return ("broken", arguments)


def _goes_on(fam: Family, whole: str, said: str, ends: list[str], *, ended: bool) -> bool:
    """Whether a conversation ends with what was added, and an answer stands before that."""
    if not ended:
        # The missing end is bridged, perhaps with what closes an open block before it.
        at = min(at for end in ends if (at := said.find(end)) >= 0)
        rests = (said[at + len(end) :] for end in ends if said[at:].startswith(end))
        return whole.endswith(said[at:]) or any(whole.endswith(rest) for rest in rests)
    # GLM's end is the next turn's first token, and need not be the one that was sampled.
    before = whole.removesuffix(said)
    return whole.endswith(said) and (fam.name == "glm" or before.endswith(tuple(ends)))


def _template_texts(
    fam: Family, messages: list[Message], tools: list[Tool] | None
) -> Iterator[str]:
    """The whole conversation as the model's own template writes it, for each way in which it may
    take arguments that are no object: as they are, or in an object."""
    kwargs = {"enable_thinking": fam.thinking} if fam.spec.enable_thinking else {}
    for wrapped in (False, True):
        # Not every template takes text for arguments.
        with contextlib.suppress(TypeError, UndefinedError):
            yield str(
                fam.chat.tokenizer.apply_chat_template(
                    [_plain(m, wrapped=wrapped) for m in messages],
                    tools=tools,
                    add_generation_prompt=True,
                    tokenize=False,
                    **kwargs,
                )
            )


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
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        value = text
    if wrapped and not isinstance(value, dict):
        value = {"arguments": text}
    return {"name": function["name"], "arguments": value}
