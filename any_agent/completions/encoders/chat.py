"""`/v1/chat/completions`: its answers, whole and streaming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from any_agent.completions.call_types import Delta, Head
from any_agent.completions.logprobs import LogprobsEncoder, TopLogprobs, top_logprobs_of
from any_agent.completions.params.call import ChatCall
from any_agent.custom_calls import CUSTOM, is_custom, with_inputs
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction, Message

DONE = b"data: [DONE]\n\n"
_MESSAGE_FIELDS = ("content", "reasoning_content", "tool_calls")


class ChoicesEncoder:
    """Encodes an answer as OpenAI's choices. The part that all its events share is encoded once."""

    _object = _event_object = b"chat.completion"
    _text_field = b"delta"
    """The field of an event's choice that has the new text."""
    _nothing = b"{}"
    """The value of that field in a choice's last event."""

    def __init__(
        self, call: ChatCall, head: Head, logprobs: LogprobsEncoder, fingerprint: str
    ) -> None:
        self._call = call
        self._head = head
        self._logprobs = logprobs
        base = {
            "id": head.id,
            "created": int(head.created_at),
            "model": call.model,
            "system_fingerprint": fingerprint,
        }
        self._base = orjson.dumps(base)[:-1]
        self._head_bytes = b'data: %b,"object":"%b"' % (self._base, self._event_object)
        self._starts = [
            b'%b,"choices":[{"index":%d,"%b":' % (self._head_bytes, k, self._text_field)
            for k in range(head.choices)
        ]
        # Where usage is requested, OpenAI's other chunks have a null usage.
        self._end = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    def whole(self, answers: list[Interaction]) -> bytes:
        choices = b",".join(self._choice(k, answer) for k, answer in enumerate(answers))
        return b'%b,"object":"%b","choices":[%b],"usage":%b}' % (
            self._base,
            self._object,
            choices,
            self._usage(answers),
        )

    def end(self, index: int, interaction: Interaction) -> bytes:
        """Return the event that ends a choice."""
        reason = orjson.dumps(self._finish_reason(interaction))
        return self._event(index, self._nothing, None, reason)

    def last(self, answers: list[Interaction]) -> bytes:
        """Return the events after all choices: the usage, if it was requested, and [DONE]."""
        if not self._call.include_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (
            self._head_bytes,
            self._usage(answers),
            DONE,
        )

    def failed(self, error: AnyAgentError) -> bytes:
        """Return an error event, without [DONE]."""
        return b"data: %b\n\n" % orjson.dumps(error.body())

    def _event(
        self,
        index: int,
        text: bytes,
        logprobs: bytes | None = None,
        finish_reason: bytes = b"null",
    ) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._starts[index],
            text,
            logprobs or b"null",
            finish_reason,
            self._end,
        )

    def _choice(self, index: int, interaction: Interaction) -> bytes:
        choice = {
            "index": index,
            **self._answer(index, interaction.output_message),
            "finish_reason": self._finish_reason(interaction),
        }
        logprobs = None
        if self._call.logprobs:
            logprobs = self._encode_logprobs(
                index,
                interaction.output_ids.tolist(),
                interaction.output_logprobs.tolist(),
                top_logprobs_of(interaction),
            )
        return b'%b,"logprobs":%b}' % (orjson.dumps(choice)[:-1], logprobs or b"null")

    def _new_logprobs(self, item: Delta) -> bytes | None:
        if not (self._call.logprobs and item.output_ids):
            return None
        return self._encode_logprobs(item.index, item.output_ids, item.logprobs, item.top_logprobs)

    def _answer(self, index: int, message: Message) -> dict[str, Any]:
        """Return the answer's field of a whole choice."""
        raise NotImplementedError

    def _encode_logprobs(
        self, index: int, ids: list[int], logprobs: list[float], top: TopLogprobs | None
    ) -> bytes:
        raise NotImplementedError

    def _finish_reason(self, interaction: Interaction) -> str:
        return interaction.finish_reason

    def _usage(self, answers: list[Interaction]) -> bytes:
        """Return OpenAI's `usage`: the prompt counted once, and the tokens of every choice."""
        output = sum(len(answer.output_ids) for answer in answers)
        return orjson.dumps(
            {
                "prompt_tokens": self._head.prompt_tokens,
                "completion_tokens": output,
                "total_tokens": self._head.prompt_tokens + output,
            }
        )


class ChatEncoder(ChoicesEncoder):
    """Encodes one chat call's answer."""

    _event_object = b"chat.completion.chunk"

    def __init__(
        self, call: ChatCall, head: Head, logprobs: LogprobsEncoder, fingerprint: str
    ) -> None:
        super().__init__(call, head, logprobs, fingerprint)
        self._custom: set[tuple[int, int]] = set()
        """The choices and indices of custom tools' calls in a stream."""

    def start(self, index: int) -> bytes:
        """Return the first event of a choice."""
        return self._event(index, b'{"role":"assistant","content":"","refusal":null}')

    def delta(self, item: Delta) -> bytes:
        """Return the event of newly certain text; nothing for a delta without content."""
        message = item.message
        logprobs = self._new_logprobs(item)
        if message.content and not (message.reasoning_content or message.tool_calls):
            # A fast path: nearly every event is one of these.
            content = b'{"content":%b}' % orjson.dumps(message.content)
        else:
            fields = {key: value for key in _MESSAGE_FIELDS if (value := getattr(message, key))}
            if self._call.custom and message.tool_calls:
                fields["tool_calls"] = self._steps(item.index, message.tool_calls)
                fields = {key: value for key, value in fields.items() if value}
            if self._call.legacy_functions:
                fields = _with_function_call(fields)
            if not fields and logprobs is None:
                return b""
            content = orjson.dumps(fields)
        return self._event(item.index, content, logprobs)

    def end(self, index: int, interaction: Interaction) -> bytes:
        """Return the events that end a choice; the inputs of custom tools are known only now."""
        if not self._call.custom:
            return super().end(index, interaction)
        calls = with_inputs(interaction.output_message).get("tool_calls") or ()
        inputs = [
            {"index": k, CUSTOM: {"input": call[CUSTOM]["input"]}}
            for k, call in enumerate(calls)
            if is_custom(call)
        ]
        events = self._event(index, orjson.dumps({"tool_calls": inputs})) if inputs else b""
        return events + super().end(index, interaction)

    def _steps(self, choice: int, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the steps of calls, of a custom tool's without its arguments."""
        out = []
        for step in steps:
            at = (choice, step["index"])
            if is_custom(step):
                self._custom.add(at)
                custom = {"name": step["function"]["name"], "input": ""}
                out.append(
                    {"index": step["index"], "id": step["id"], "type": CUSTOM, CUSTOM: custom}
                )
            elif at not in self._custom:
                out.append(step)
        return out

    def _finish_reason(self, interaction: Interaction) -> str:
        reason = interaction.finish_reason
        older = self._call.legacy_functions and reason == "tool_calls"
        return "function_call" if older else reason

    def _answer(self, index: int, message: Message) -> dict[str, Any]:
        if self._call.legacy_functions:
            message = _with_function_call(message)
        return {"message": {"refusal": None, **with_inputs(message)}}

    def _encode_logprobs(
        self, index: int, ids: list[int], logprobs: list[float], top: TopLogprobs | None
    ) -> bytes:
        return self._logprobs.chat(ids, logprobs, top)


def _with_function_call(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, or a delta of one, with its first call as a legacy `function_call`."""
    out = dict(message)
    for call in out.pop("tool_calls", None) or ():
        if call.get("index", 0) == 0:
            out.setdefault("function_call", call["function"])
    return out
