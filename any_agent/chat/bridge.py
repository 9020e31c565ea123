"""Exact continuation for any chat template: learn what it writes between two turns.

A made-up conversation is rendered twice, ending at an assistant turn and going on with the new
messages. Where both agree up to the end of that turn, what follows in the second is what this
template writes for the new messages, and it is encoded alone: nothing that was sampled is
tokenised again, and nothing of the conversation before is rendered.

That it does not depend on the conversation before is proven once for each sequence of roles,
over several made-up conversations; a template that numbers its turns, or moves a system message
to the front, is not continued.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from any_agent.chat import bridge_probes as made_up
from any_agent.chat.message_validation import validate_messages
from any_agent.chat.template import ChatTemplate
from any_agent.chat.template_switches import contains_switch, find_switch_words
from any_agent.chat.truncated_answer import TruncationCloser
from any_agent.types import Message, Tool

_THINKING = re.compile(r"<think>(?:(?!<think>).)*?</think>\s*", re.DOTALL)
_THINKING_OPENED = re.compile(r"<think>\s*$")
_ENDS = re.compile(r"end|eot|eom|eos|</s>|return|call", re.IGNORECASE)
"""Names of tokens that end a message. gpt-oss writes another one after an earlier answer than
after the last one; what begins the next message instead has no such name."""
_MAX_PROOFS = 256
_MAX_ROLES = 24


@dataclass(frozen=True, slots=True)
class _Kinds:
    """What the proof of a bridge depends on."""

    roles: tuple[str, ...]
    calls: int
    tools: bool


@dataclass(frozen=True, slots=True)
class _Following:
    """What the template writes from the end of the answer on."""

    end: str | None
    """The token that ends the turn in the midst of a conversation; None if nothing but the
    next message's beginning does."""
    text: str
    """What comes after that."""


@dataclass(frozen=True, slots=True)
class Proof:
    """That a sequence of roles is continued exactly, or why not."""

    refused: str | None
    strips_thinking: bool = False
    """Whether the template takes the answer's thinking out when these messages follow."""


class TemplateBridge:
    """Continues answers by what a template writes; one for each template and its settings."""

    def __init__(self, template: ChatTemplate, stop_ids: Sequence[int], *, retention: str) -> None:
        self._template = template
        self._stops = frozenset(stop_ids)
        self._retention = retention
        self._added = {i: token for token, i in template.added.items()}
        pattern = sorted(map(re.escape, template.added), key=len, reverse=True)
        self._token = re.compile("|".join(pattern) or "(?!)")
        self._unclosed = TruncationCloser(template, self._stops)
        self._plain: dict[bool, str] = {}
        self._proofs: dict[_Kinds, Proof] = {}
        self._generation_ids = self._generation_prompt()

    def following_ids(
        self,
        output_ids: Sequence[int],
        new: list[Message],
        tools: list[Tool] | None,
        *,
        said: Message | None,
        prompt_tail: Sequence[int],
        past: Sequence[Message] = (),
    ) -> list[int] | None:
        """The ids that follow a prompt and its output; None where that is not proven.

        ``past``, what was before the output, is looked at where something in it is telling.
        """
        reply = made_up.probe_answer_for(said, new)
        proof = self._proof(_Kinds(_runs(new), min(2, _calls(reply)), bool(tools)))
        if proof.refused or self._forgets(proof, new):
            return None
        real = validate_messages(list(past)) if contains_switch(self._telling, past) else []
        prepared, _, mark = self._template.prepared([*real, reply, *new], None)
        real, reply, new = prepared[: len(real)], prepared[len(real)], prepared[len(real) + 1 :]
        # A tool in place of the real ones, which may be long: it is proven to be the same.
        stand_in = made_up.TOOLS[0] if tools else None
        try:
            before = self._before(reply, stand_in, real)
            after = self._after(real or [made_up.USER], reply, new, stand_in)
            following = self._following(before, after, is_call=_calls(reply) > 0)
        except Exception:
            # This answer and these messages do not go together in this template; whether the
            # whole conversation does is for the whole rendering to say.
            return None
        if following is None:
            return None
        return self._ids(following, output_ids, prompt_tail, mark) or None

    def prove(self, roles: Sequence[str], *, calls: int = 0, tools: bool = False) -> Proof:
        """Whether messages of these roles after an answer with ``calls`` are continued."""
        new = [{"role": role, "content": ""} for role in roles]
        return self._proof(_Kinds(_runs(new), min(2, calls), tools))

    def _forgets(self, proof: Proof, new: list[Message]) -> bool:
        if self._retention == "tool_cycle":
            return any(m["role"] == "user" for m in new)
        return self._retention == "template" and proof.strips_thinking

    def _ids(
        self,
        following: _Following,
        output_ids: Sequence[int],
        prompt_tail: Sequence[int],
        mark: str | None,
    ) -> list[int]:
        encode = self._template.encode
        text = (following.end or "") + following.text
        last = int(output_ids[-1]) if len(output_ids) else -1
        token = self._added.get(last)
        if token is not None and text.startswith(token):
            return self._encode_after(last, text[len(token) :], mark)
        if token is not None and last in self._stops:
            # The model ended its turn in another way than the template would have.
            return self._encode_after(last, following.text, mark)
        if last in self._stops:
            return encode(following.text, mark)
        before = prompt_tail if len(prompt_tail) else self._generation_ids
        return [*self._unclosed.closing_ids(before, output_ids), *encode(text, mark)]

    def _encode_after(self, token_id: int, text: str, mark: str | None) -> list[int]:
        """Ids of a text that stands after a token, which may eat its white space."""
        ids = self._template.encode(self._added[token_id] + text, mark)
        return ids[1:] if ids[:1] == [token_id] else self._template.encode(text, mark)

    @cached_property
    def _telling(self) -> tuple[str, ...]:
        """Words in earlier messages that change what is written for the new ones."""
        reply, new = made_up.probe_answer([]), [made_up.USER]

        def follows(past: list[Message]) -> _Following | None:
            (*past, last, first), _, _ = self._template.prepared([*past, reply, *new], None)
            before = self._template.text([*past, last], None, generation=False)
            return self._following(before, self._after(past, last, [first], None), is_call=False)

        words = self._template.searched_words
        try:
            return find_switch_words(words, made_up.USER, follows)
        except Exception:
            # It takes no plain question and answer; what it does take is proven where it comes.
            return ()

    def _before(
        self, reply: Message, tools: list[Tool] | None, past: Sequence[Message] = ()
    ) -> str:
        """The made-up conversation up to the answer; the same for every answer without calls.

        ``past``: the real one.
        """
        if past or _calls(reply):
            return self._template.text([*(past or [made_up.USER]), reply], tools, generation=False)
        plain = self._plain.get(bool(tools))
        if plain is None or self._template.is_dated:
            plain = self._template.text([made_up.USER, reply], tools, generation=False)
            self._plain[bool(tools)] = plain
        return plain

    def _after(
        self, past: list[Message], reply: Message, new: list[Message], tools: list[Tool] | None
    ) -> str:
        return self._template.text([*past, reply, *new], tools, generation=True)

    def _following(self, before: str, after: str, *, is_call: bool) -> _Following | None:
        """What follows the answer; None if the answer, or what stands before it, is not the same
        with and without the new messages."""
        head, said, rest = before.partition(made_up.SAID)
        head_after, said_after, rest_after = after.partition(made_up.SAID)
        if not said or not said_after or _bare(head) != _bare(head_after):
            return None
        turn, end = self._turn_end(rest)
        if end is None and turn and not is_call:
            # Something stands between the answer and its end that the model might not write.
            return None
        if not rest_after.startswith(turn):
            return None
        rest_after = rest_after[len(turn) :]
        found = self._token.match(rest_after)
        if end is None:
            return _Following(None, rest_after)
        if found is None:
            # The turn goes on, as where messages of one role are merged.
            return None
        if found[0] == end or _ENDS.search(found[0]):
            return _Following(found[0], rest_after[found.end() :])
        return _Following(None, rest_after)

    def _turn_end(self, rest: str) -> tuple[str, str | None]:
        """What the last turn has after the answer, and the token that ends it, if one does."""
        found = list(self._token.finditer(rest))
        if found and not rest[found[-1].end() :].strip():
            end = found[-1][0]
            if self._template.added[end] in self._stops:
                return rest[: found[-1].start()], end
        return rest.rstrip(), None

    def _proof(self, kinds: _Kinds) -> Proof:
        proof = self._proofs.get(kinds)
        if proof is None:
            if len(kinds.roles) > _MAX_ROLES:
                return Proof("too many messages at once")
            if len(self._proofs) >= _MAX_PROOFS:
                self._proofs.clear()
            proof = self._proofs[kinds] = self._prove(kinds)
        return proof

    def _prove(self, kinds: _Kinds) -> Proof:
        calls = [(f"call{n}aaaa", f"ok{n}") for n in range(kinds.calls)]
        new = made_up.probe_messages(kinds.roles, calls)
        reply = made_up.probe_answer(calls)
        prepared, _, _ = self._template.prepared([reply, *new], None)
        reply, new = prepared[0], prepared[1:]
        seen: set[_Following] = set()
        lengths: set[int] = set()
        for past in made_up.PASTS:
            past, _, _ = self._template.prepared(past, None)
            for tools in made_up.TOOLS if kinds.tools else (None,):
                try:
                    before = self._template.text([*past, reply], tools, generation=False)
                    whole = self._after(past, reply, new, tools)
                    prompt = self._template.text(past, tools, generation=True)
                except Exception as e:
                    refusal = f"the template refuses them: {e}"
                    continue
                following = self._following(before, whole, is_call=bool(calls))
                if following is None:
                    return Proof("the template rewrites what stands before them")
                if not _bare(whole).startswith(_bare(prompt).rstrip()):
                    return Proof("the template writes another prompt once it is answered")
                if not self._encodes_apart(whole, following):
                    return Proof("the tokenizer joins what stands on both sides of the turn's end")
                seen.add(following)
                lengths.add(len(past))
        if len(seen) > 1:
            return Proof("what the template writes for them depends on what stands before")
        if len(lengths) < 2:
            return Proof(refusal if not lengths else "too few conversations take them")
        return Proof(None, self._strips_thinking(reply, new, kinds))

    def _encodes_apart(self, whole: str, following: _Following) -> bool:
        encode = self._template.encode
        at = len(whole) - len(following.text)
        after = (
            encode(following.text)
            if following.end is None
            else self._encode_after(self._template.added[following.end], following.text, None)
        )
        return encode(whole[:at]) + after == encode(whole)

    def _strips_thinking(self, reply: Message, new: list[Message], kinds: _Kinds) -> bool:
        reply = {**reply, "reasoning_content": made_up.THOUGHT}
        tools = made_up.TOOLS[0] if kinds.tools else None
        try:
            before = self._template.text([made_up.USER, reply], tools, generation=False)
            after = self._template.text([made_up.USER, reply, *new], tools, generation=True)
        except Exception:
            return False
        return made_up.THOUGHT in before and made_up.THOUGHT not in after

    def _generation_prompt(self) -> list[int]:
        """What the template writes after the last message, for the answer to begin."""
        try:
            asked = self._template.text([made_up.USER], None, generation=False)
            prompt = self._template.text([made_up.USER], None, generation=True)
        except Exception:
            return []
        return self._template.encode(prompt.removeprefix(asked))


def _bare(text: str) -> str:
    """Without thinking, closed or just opened: templates take it out of earlier turns."""
    return _THINKING_OPENED.sub("", _THINKING.sub("", text))


def _calls(reply: Message) -> int:
    return len(reply.get("tool_calls") or ())


def _runs(new: list[Message]) -> tuple[str, ...]:
    """The roles, of which more than two in a row are as two."""
    roles: list[str] = []
    for message in new:
        role = message["role"]
        if role == "assistant" and message.get("tool_calls"):
            role = "calling"
        if roles[-2:] != [role, role]:
            roles.append(role)
    return tuple(roles)


def example_roles() -> dict[str, dict[str, Any]]:
    """What agents do between two answers, by name: arguments of :meth:`TemplateBridge.prove`."""
    return {
        "a user's message after an answer": {"roles": ("user",)},
        "a tool's result after a call": {"roles": ("tool",), "calls": 1, "tools": True},
        "several tools' results": {"roles": ("tool", "tool"), "calls": 2, "tools": True},
        "a result and a user's message": {"roles": ("tool", "user"), "calls": 1, "tools": True},
        "a system message on the way": {"roles": ("system", "user")},
        "an answer among the new messages": {"roles": ("user", "assistant", "user")},
    }
