"""Prompts from a tokenizer's own chat template, and exact continuation for any template.

The continuation is learned from what the template writes between two turns. A made-up conversation
is rendered twice: up to an assistant turn, and on with the new messages. Where both agree up to the
end of that turn, what follows in the second is what this template writes for the new messages. It
is encoded alone: nothing that was sampled is tokenized again, and nothing of the conversation
before is rendered.

That the result does not depend on the conversation before is verified once for each sequence of
roles, over several made-up conversations. A template that numbers its turns, or moves a system
message to the front, is not continued.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from any_agent.chat import bridge_probes as probes
from any_agent.chat.message_validation import validate_messages
from any_agent.chat.names import nameless_roles
from any_agent.chat.system_messages import LeadingSystem
from any_agent.chat.template import ChatTemplate, contains_switch, find_switch_words
from any_agent.chat.template_kwargs import SWITCHES
from any_agent.types import Message, Tool

_THINKING = re.compile(r"<think>(?:(?!<think>).)*?</think>\s*", re.DOTALL)
_THINKING_OPENED = re.compile(r"<think>\s*$")
_ENDS = re.compile(r"end|eot|eom|eos|</s>|return|call", re.IGNORECASE)
"""Names of tokens that end a message. gpt-oss writes another one after an earlier answer than
after the last one; what begins the next message instead has no such name."""
_MAX_CHECKS = 256
_MAX_ROLES = 24


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The properties of new messages on which their continuation depends."""

    roles: tuple[str, ...]
    calls: int
    tools: bool


@dataclass(frozen=True, slots=True)
class _Suffix:
    """The text that the template writes from the end of the answer on."""

    end: str | None
    """The token that ends the turn in the midst of a conversation; None if nothing but the
    next message's beginning does."""
    text: str
    """The text after that token."""


@dataclass(frozen=True, slots=True)
class ContinuationCheck:
    """The verified result for one sequence of roles: continued exactly, or refused."""

    refusal: str | None
    """Why these messages are not continued; None if they are."""
    strips_thinking: bool = False
    """True if the template removes the answer's reasoning when these messages follow."""


class TemplateRenderer:
    """Renders validated messages to token ids by the model's own template. Thread-safe.

    Every engine would use that template as well.
    """

    def __init__(
        self,
        template: ChatTemplate,
        stop_ids: Sequence[int],
        *,
        retention: str,
        may_think: bool = True,
    ) -> None:
        """``may_think`` False: there is no reasoning that the template could remove."""
        self.known_settings = template.known_settings
        """Names of the ``chat_template_kwargs`` that change something."""
        self.settings: Mapping[str, Any] = template.settings
        self.escapes_special_tokens = template.escapes_special_tokens
        """True if special tokens that a text only spells stay plain text."""
        self._template = template
        self._stop_ids = stop_ids
        self._retention = retention
        self._may_think = may_think
        self._stops = frozenset(stop_ids)
        self._added = {i: token for token, i in template.added.items()}
        pattern = sorted(map(re.escape, template.added), key=len, reverse=True)
        self._token = re.compile("|".join(pattern) or "(?!)")
        self._closer = TruncationCloser(template, self._stops)
        self._leading = LeadingSystem(template.ids)
        self._plain: dict[bool, str] = {}
        self._checks = lru_cache(maxsize=_MAX_CHECKS)(self._run_check)

    def with_settings(self, settings: Mapping[str, Any]) -> TemplateRenderer:
        """Return a renderer with some settings changed; ValueError for a value it refuses."""
        template = self._template.with_settings({**self.settings, **settings})
        may_think = self._may_think or any(settings.get(name) for name in SWITCHES)
        return TemplateRenderer(
            template, self._stop_ids, retention=self._retention, may_think=may_think
        )

    @cached_property
    def nameless_roles(self) -> frozenset[str]:
        """Roles whose messages' names the template leaves out."""

        def text(messages: list[Message], tools: list[Tool] | None) -> str:
            prepared, tools, _ = self._template.prepare(messages, tools)
            return self._template.text(prepared, tools, generation=True)

        return nameless_roles(text)

    def prompt_ids(
        self, messages: list[Message], tools: list[Tool] | None, *, generation: bool = True
    ) -> list[int]:
        """Render a whole conversation, by default with the generation prompt."""
        joined = self._leading.join(messages, tools=bool(tools))
        return self._template.ids(joined, tools, generation=generation)

    def following_ids(
        self,
        output_ids: Sequence[int],
        new: list[Message],
        tools: list[Tool] | None,
        *,
        answer: Message | None,
        prompt_tail: Sequence[int],
        past: Sequence[Message] = (),
    ) -> list[int] | None:
        """Return the ids that follow a prompt and its output; None where that is not verified.

        ``past``, the messages before the output, is rendered only if it has a switch word.
        """
        probe = probes.probe_answer_for(answer, new)
        check = self._check(_Pattern(_shorten(new), min(2, _count_calls(probe)), bool(tools)))
        if check.refusal or self._drops_reasoning(check, new):
            return None
        real: list[Message] = []
        if contains_switch(self._switch_words, past):
            real = self._leading.join(validate_messages(list(past)), tools=bool(tools))
        prepared, _, mark = self._template.prepare([*real, probe, *new], None)
        real, probe, new = prepared[: len(real)], prepared[len(real)], prepared[len(real) + 1 :]
        # One tool in place of the real ones, which may be long: verified to give the same.
        stand_in = probes.TOOLS[0] if tools else None
        try:
            before = self._render_before(probe, stand_in, real)
            after = self._render_after(real or [probes.USER], probe, new, stand_in)
            suffix = self._suffix(before, after, is_call=_count_calls(probe) > 0)
        except Exception:
            # The template refuses this answer with these messages. Rendering the whole
            # conversation decides whether it refuses that, too.
            return None
        if suffix is None:
            return None
        return self._encode_suffix(suffix, output_ids, prompt_tail, mark) or None

    def check_continuation(
        self, roles: Sequence[str], *, calls: int = 0, tools: bool = False
    ) -> ContinuationCheck:
        """Check if messages of these roles after an answer with ``calls`` are continued."""
        new = [{"role": role, "content": ""} for role in roles]
        return self._check(_Pattern(_shorten(new), min(2, calls), tools))

    def _drops_reasoning(self, check: ContinuationCheck, new: list[Message]) -> bool:
        if self._retention == "tool_cycle":
            return any(m["role"] == "user" for m in new)
        return self._retention == "template" and self._may_think and check.strips_thinking

    def _encode_suffix(
        self,
        suffix: _Suffix,
        output_ids: Sequence[int],
        prompt_tail: Sequence[int],
        mark: str | None,
    ) -> list[int]:
        encode = self._template.encode
        text = (suffix.end or "") + suffix.text
        last = int(output_ids[-1]) if len(output_ids) else -1
        token = self._added.get(last)
        if token is not None and text.startswith(token):
            return self._encode_after(last, text[len(token) :], mark)
        if token is not None and last in self._stops:
            # The model ended its turn in another way than the template would have.
            return self._encode_after(last, suffix.text, mark)
        if last in self._stops:
            return encode(suffix.text, mark)
        before = prompt_tail if len(prompt_tail) else self._generation_prompt
        return [*self._closer.closing_ids(before, output_ids), *encode(text, mark)]

    def _encode_after(self, token_id: int, text: str, mark: str | None) -> list[int]:
        """Encode a text that stands after a token, which may absorb its white space."""
        ids = self._template.encode(self._added[token_id] + text, mark)
        return ids[1:] if ids[:1] == [token_id] else self._template.encode(text, mark)

    @cached_property
    def _switch_words(self) -> tuple[str, ...]:
        """Words in earlier messages that change what the template writes for the new ones."""
        probe, new = probes.probe_answer([]), [probes.USER]

        def suffix_after(past: list[Message]) -> _Suffix | None:
            (*past, last, first), _, _ = self._template.prepare([*past, probe, *new], None)
            before = self._template.text([*past, last], None, generation=False)
            return self._suffix(before, self._render_after(past, last, [first], None))

        try:
            return find_switch_words(self._template.searched_words, probes.USER, suffix_after)
        except Exception:
            # The template refuses a plain question and answer; what it takes is checked later.
            return ()

    def _render_before(
        self, probe: Message, tools: list[Tool] | None, past: Sequence[Message] = ()
    ) -> str:
        """Render the conversation up to the probe answer, cached for an answer without calls.

        ``past``: the real messages before it; without them a made-up one is used.
        """
        if past or _count_calls(probe):
            return self._template.text([*(past or [probes.USER]), probe], tools, generation=False)
        plain = self._plain.get(bool(tools))
        if plain is None or self._template.is_dated:
            plain = self._template.text([probes.USER, probe], tools, generation=False)
            self._plain[bool(tools)] = plain
        return plain

    def _render_after(
        self, past: list[Message], probe: Message, new: list[Message], tools: list[Tool] | None
    ) -> str:
        return self._template.text([*past, probe, *new], tools, generation=True)

    def _suffix(self, before: str, after: str, *, is_call: bool = False) -> _Suffix | None:
        """Return what follows the probe answer.

        None if the answer, or what stands before it, differs with and without the new messages.
        """
        head, found, rest = before.partition(probes.PROBE_ANSWER)
        head_after, found_after, rest_after = after.partition(probes.PROBE_ANSWER)
        if not found or not found_after or _strip_thinking(head) != _strip_thinking(head_after):
            return None
        turn, end = self._turn_end(rest)
        if end is None and turn and not is_call:
            # Something stands between the answer and its end that the model might not write.
            return None
        if not rest_after.startswith(turn):
            return None
        rest_after = rest_after[len(turn) :]
        token = self._token.match(rest_after)
        if end is None:
            return _Suffix(None, rest_after)
        if token is None:
            # The turn goes on, as where messages of one role are merged.
            return None
        if token[0] == end or _ENDS.search(token[0]):
            return _Suffix(token[0], rest_after[token.end() :])
        return _Suffix(None, rest_after)

    def _turn_end(self, rest: str) -> tuple[str, str | None]:
        """Return the last turn's text after the answer, and the token that ends it, if any."""
        found = list(self._token.finditer(rest))
        if found and not rest[found[-1].end() :].strip():
            end = found[-1][0]
            if self._template.added[end] in self._stops:
                return rest[: found[-1].start()], end
        return rest.rstrip(), None

    def _check(self, pattern: _Pattern) -> ContinuationCheck:
        if len(pattern.roles) > _MAX_ROLES:
            # Such a pattern is as long as the request, and is not kept.
            return ContinuationCheck("too many messages at once")
        return self._checks(pattern)

    def _run_check(self, pattern: _Pattern) -> ContinuationCheck:
        calls = [(f"call{n}aaaa", f"ok{n}") for n in range(pattern.calls)]
        new = probes.probe_messages(pattern.roles, calls)
        prepared, _, _ = self._template.prepare([probes.probe_answer(calls), *new], None)
        probe, new = prepared[0], prepared[1:]
        suffixes: set[_Suffix] = set()
        lengths: set[int] = set()
        for past in probes.PASTS:
            past, _, _ = self._template.prepare(past, None)
            for tools in probes.TOOLS if pattern.tools else (None,):
                try:
                    before = self._template.text([*past, probe], tools, generation=False)
                    whole = self._render_after(past, probe, new, tools)
                    prompt = self._template.text(past, tools, generation=True)
                except Exception as e:
                    refusal = f"the template refuses them: {e}"
                    continue
                suffix = self._suffix(before, whole, is_call=bool(calls))
                if suffix is None:
                    return ContinuationCheck("the template rewrites what stands before them")
                if not _strip_thinking(whole).startswith(_strip_thinking(prompt).rstrip()):
                    return ContinuationCheck(
                        "the template writes another prompt once it is answered"
                    )
                if not self._encodes_apart(whole, suffix):
                    return ContinuationCheck(
                        "the tokenizer joins what stands on both sides of the turn's end"
                    )
                suffixes.add(suffix)
                lengths.add(len(past))
        if len(suffixes) > 1:
            return ContinuationCheck(
                "what the template writes for them depends on what stands before"
            )
        if len(lengths) < 2:
            return ContinuationCheck(refusal if not lengths else "too few conversations take them")
        return ContinuationCheck(None, self._strips_thinking(probe, new, pattern))

    def _encodes_apart(self, whole: str, suffix: _Suffix) -> bool:
        encode = self._template.encode
        at = len(whole) - len(suffix.text)
        after = (
            encode(suffix.text)
            if suffix.end is None
            else self._encode_after(self._template.added[suffix.end], suffix.text, None)
        )
        return encode(whole[:at]) + after == encode(whole)

    def _strips_thinking(self, probe: Message, new: list[Message], pattern: _Pattern) -> bool:
        probe = {**probe, "reasoning_content": probes.PROBE_REASONING}
        tools = probes.TOOLS[0] if pattern.tools else None
        try:
            before = self._template.text([probes.USER, probe], tools, generation=False)
            after = self._render_after([probes.USER], probe, new, tools)
        except Exception:
            return False
        return probes.PROBE_REASONING in before and probes.PROBE_REASONING not in after

    @cached_property
    def _generation_prompt(self) -> list[int]:
        """The ids that the template writes after the last message, for the answer to begin."""
        try:
            question = self._template.text([probes.USER], None, generation=False)
            prompt = self._template.text([probes.USER], None, generation=True)
        except Exception:
            return []
        return self._template.encode(prompt.removeprefix(question))


def _strip_thinking(text: str) -> str:
    """Remove reasoning, closed or just opened: templates take it out of earlier turns."""
    return _THINKING_OPENED.sub("", _THINKING.sub("", text))


def _count_calls(message: Message) -> int:
    return len(message.get("tool_calls") or ())


def _shorten(new: list[Message]) -> tuple[str, ...]:
    """Return the roles; more than two equal ones in a row count as two."""
    roles: list[str] = []
    for message in new:
        role = message["role"]
        if role == "assistant" and message.get("tool_calls"):
            role = "calling"
        if roles[-2:] != [role, role]:
            roles.append(role)
    return tuple(roles)


_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")


class TruncationCloser:
    """Closes blocks by a vocabulary's pairs: ``<x>`` with ``</x>``, ``x_begin`` with ``x_end``.

    An answer that was cut off inside a block continues with the tokens that close it, innermost
    first, so that the next message does not stand inside the reasoning or the call. They are part
    of the next prompt and never trained on.
    """

    def __init__(self, template: ChatTemplate, stops: Collection[int]) -> None:
        self._template = template
        added = template.added
        closers = {token: closer for token in added if (closer := _closer(token, added))}
        self._closes = {
            added[token]: added[closer]
            for token, closer in closers.items()
            if added[closer] not in stops
        }
        self._has_thinking = "<think>" in added
        self._closing = frozenset(self._closes.values())
        self._stops = frozenset(stops)
        self._harmony = [added[t] for t in _HARMONY] if all(t in added for t in _HARMONY) else []

    def closing_ids(self, prompt_tail: Sequence[int], output_ids: Sequence[int]) -> list[int]:
        """Return the tokens that close what a prompt's tail and its output leave open."""
        ids = [int(i) for part in (prompt_tail, output_ids) for i in part]
        if self._harmony:
            last = next((i for i in reversed(ids) if i in self._harmony), None)
            # Inside a header: end it, since a message without its beginning is malformed.
            return [self._harmony[3]] if last in self._harmony[:3] else []
        due: list[int] = []
        for i in ids:
            if i in self._stops:
                due.clear()
            elif i in self._closes:
                due.append(self._closes[i])
            elif i in self._closing and i in due:
                while due.pop() != i:
                    pass
        if self._has_thinking:
            return due[::-1]
        return due[::-1] + self._close_in_text(prompt_tail, [int(i) for i in output_ids])

    def _close_in_text(self, prompt_tail: Sequence[int], output: list[int]) -> list[int]:
        """Close thinking that is spelled out in a vocabulary without tokens for it.

        Only an answer that begins with ``<think>`` thinks; later the word is plain text.
        """
        text = self._template.decode(output)
        if "</think>" in text:
            return []
        opened = text.lstrip().startswith("<think>")
        if not opened:
            prompt = self._template.decode([int(i) for i in prompt_tail])
            opened = prompt.rstrip().endswith("<think>")
        return self._template.encode("</think>") if opened else []


def _closer(token: str, added: Mapping[str, int]) -> str | None:
    if token[:1] == "<" and f"</{token[1:]}" in added:
        return f"</{token[1:]}"
    for opening in ("begin", "start"):
        closer = token.replace(opening, "end")
        if closer != token and closer in added:
            return closer
    return None
