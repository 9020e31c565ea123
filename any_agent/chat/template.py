"""A tokenizer's own chat template: messages to text, and text to token ids."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from any_agent.chat.message_validation import text_of
from any_agent.chat.output.detokenizer import decode_ids
from any_agent.types import Message, Tool

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
"""Names that every template gets; the other names that it reads are settings."""
_MAX_SWITCH_WORDS = 128
_SWITCH_ROLES = ("system", "developer", "user")
_OWN_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


class ChatTemplate:
    """Renders with one tokenizer and one set of settings (``chat_template_kwargs``).

    Thread-safe: it sets nothing in the tokenizer, and templates keep no state.
    """

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self._tokenizer = tokenizer
        self._encode = _encoder(tokenizer)
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        """Tokens that text is split at before anything else, with their ids."""
        escaper = SpecialTokenEscaper(self.added)
        self._escaper = escaper if self._can_escape(escaper) else None
        self._convert_calls = self._find_call_format()

    def with_settings(self, settings: Mapping[str, Any]) -> ChatTemplate:
        """Return this template with other settings, sharing what does not depend on them."""
        other = object.__new__(ChatTemplate)
        other.__dict__.update(self.__dict__)
        other.settings = dict(settings)
        return other

    @property
    def escapes_special_tokens(self) -> bool:
        """True if special tokens that a text only spells stay plain text."""
        return self._escaper is not None

    @cached_property
    def is_dated(self) -> bool:
        """True if the template may write the time, so that its text changes by the moment."""
        return "strftime_now" in str(self._tokenizer.chat_template)

    @cached_property
    def known_settings(self) -> frozenset[str]:
        """Names that the template reads beyond those that every template gets."""
        from jinja2 import meta, nodes

        tree = self._syntax
        names = meta.find_undeclared_variables(tree)
        # jinja2 reports names set inside a loop as undeclared, too; settings are tested first.
        stored = {n.name for n in tree.find_all(nodes.Name) if n.ctx != "load"}
        tested = {
            test.node.name
            for test in tree.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        # Functions, and names of tokens such as bos_token, are no settings.
        excluded = _GIVEN | set(tree.environment.globals) | (stored - tested) | {"raise_exception"}
        return frozenset(n for n in names - excluded if not n.endswith("_token"))

    @cached_property
    def searched_words(self) -> frozenset[str]:
        """Texts that the template compares with or searches for, such as ``/no_think``."""
        from jinja2 import nodes

        values: list[Any] = [
            const.value
            for kind in (nodes.Compare, nodes.Call, nodes.Test)
            for node in self._syntax.find_all(kind)
            for const in node.find_all(nodes.Const)
        ]
        for several in [v for v in values if isinstance(v, (list, tuple))]:
            values += several
        return frozenset(v for v in values if isinstance(v, str) and v.strip())

    @cached_property
    def _syntax(self) -> Any:
        from jinja2 import Environment

        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        return environment.parse(_OWN_TAGS.sub("", self._tokenizer.get_chat_template()))

    def ids(
        self, messages: list[Message], tools: list[Tool] | None, *, generation: bool = True
    ) -> list[int]:
        """Return a conversation's token ids, by default with the generation prompt."""
        messages, tools, mark = self.prepare(messages, tools)
        return self.encode(self.text(messages, tools, generation=generation), mark)

    def prepare(
        self, messages: list[Message], tools: list[Tool] | None
    ) -> tuple[list[Message], list[Tool] | None, str | None]:
        """Convert to the form that this template reads; the mark, if any, splits spelled tokens."""
        messages = [self._convert_calls(m) if m.get("tool_calls") else m for m in messages]
        if self._escaper is None:
            return messages, tools, None
        return self._escaper.escape(messages, tools)

    def text(self, messages: list[Message], tools: list[Tool] | None, *, generation: bool) -> str:
        """Return what the template writes for prepared messages."""
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=generation,
                tokenize=False,
                **self.settings,
            )
        )

    def encode(self, text: str, mark: str | None = None) -> list[int]:
        """Return the ids of a text, special tokens read as such; the mark is left out."""
        if mark is None:
            return self._encode(text)
        return [i for piece in text.split(mark) for i in self._encode(piece)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens spelled out."""
        return decode_ids(self._tokenizer, ids)

    def _can_escape(self, escaper: SpecialTokenEscaper) -> bool:
        """Check that a text encoded in pieces stays the same text.

        It does not if the tokenizer begins each piece with a space.
        """
        text = "a " + " b".join(list(self.added)[:8]) + " c"
        (message,), _, mark = escaper.escape([{"role": "user", "content": text}], None)
        if mark is None:
            return True
        ids = self.encode(message["content"], mark)
        return self.decode(ids) == text and not set(ids) & set(self.added.values())

    def _find_call_format(self) -> Callable[[Message], Message]:
        """Find how this template reads a call's arguments: as an object, or as JSON text."""
        for objects in (True, False):
            convert = partial(convert_calls, objects=objects, takes_broken=objects)
            if self._renders_call('{"key0": "value0"}', convert):
                broken = objects and self._renders_call('{"key0": "value0', convert)
                return partial(convert, takes_broken=broken or not objects)
        return partial(convert_calls, objects=True, takes_broken=True)

    def _renders_call(self, arguments: str, convert: Callable[[Message], Message]) -> bool:
        call = {"name": "name0", "arguments": arguments}
        message = convert(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call0aaaa", "type": "function", "function": call}],
            }
        )
        with contextlib.suppress(Exception):
            text = self.text([{"role": "user", "content": "ok"}, message], None, generation=False)
            return all(word in text for word in ("name0", "key0", "value0"))
        return False


def convert_calls(message: Message, *, objects: bool, takes_broken: bool) -> Message:
    """Convert calls to the form that a template reads.

    ``objects``: arguments as objects; ``takes_broken``: invalid JSON passes as text.
    """
    convert = partial(_as_object, takes_broken=takes_broken) if objects else _as_text
    calls = [
        {**call, "function": {**f, "arguments": convert(f["arguments"])}}
        for call in message["tool_calls"]
        for f in (call["function"],)
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _as_object(arguments: Any, *, takes_broken: bool) -> Any:
    if not isinstance(arguments, str):
        return arguments
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(arguments)
        if "\\u" in arguments:
            # Half a surrogate pair has no text: such arguments stay as they were written.
            json.dumps(value, ensure_ascii=False).encode()
        if isinstance(value, dict) or takes_broken:
            return value
    return arguments if takes_broken else {"arguments": arguments}


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function from text to ids that any number of threads may call at once."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        lock = threading.Lock()

        def slow(text: str) -> list[int]:
            with lock:
                return list(tokenizer.encode(text, add_special_tokens=False))

        return slow
    # Once, here: the tokenizer's own encode sets these on every call, which is not thread-safe.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False

    def fast(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    return fast


def find_switch_words(
    words: Iterable[str], user: Message, follows: Callable[[list[Message]], Any]
) -> tuple[str, ...]:
    """Return those ``words`` in earlier messages that change what the template writes later.

    An example is ``/no_think`` in a system prompt, from which on each turn begins with an empty
    think block. The words stand in the template itself, so each can be tried. ``follows`` renders
    what comes after a made-up conversation, and raises what the template raises.
    """
    usual = follows([user])
    found = []
    for word in sorted(words)[:_MAX_SWITCH_WORDS]:
        for past in ([{"role": "system", "content": word}, user], [{**user, "content": word}]):
            # A template that takes no system message refuses the real one, too.
            with contextlib.suppress(Exception):
                if follows(past) != usual:
                    found.append(word)
                    break
    return tuple(found)


def contains_switch(words: Sequence[str], past: Sequence[Message]) -> bool:
    """Return True if a message of a user or a system has one of the words."""
    if not words:
        return False
    texts = (text_of(m.get("content")) or "" for m in past if m.get("role") in _SWITCH_ROLES)
    return any(word in text for text in texts for word in words)


_ANSWER_TOKENS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Tokens that stay as they are in a model's own answer: templates look for them there."""


class SpecialTokenEscaper:
    """Splits the spellings of one vocabulary's added tokens, so that they stay plain text.

    An agent's text may hold ``<|im_end|>`` or ``<think>``, which a tool read or a user pasted. A
    tokenizer makes the control token of it, and so a web page could end the user's turn. A mark
    splits such a spelling before the template writes it, and the text is encoded in the pieces
    between the marks: the same characters, in plain tokens.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted({t for t in tokens if len(t) > 1}, key=len, reverse=True)
        self._any = _one_of(known)
        self._in_answer = _one_of([t for t in known if t not in _ANSWER_TOKENS])

    def escape(
        self, messages: list[Message], tools: list[Tool] | None
    ) -> tuple[list[Message], list[Tool] | None, str | None]:
        """Return messages and tools with the mark in each spelling, and the mark, None if unused.

        Without any such spelling the same objects come back.
        """
        tools_text = json.dumps(tools, ensure_ascii=False) if tools else ""
        if not self._any.search(tools_text) and not any(map(self._has_spelling, messages)):
            return messages, tools, None
        seen = {*tools_text, *json.dumps(messages, ensure_ascii=False)}
        mark = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in seen)
        return (
            [self._escape_message(m, mark) for m in messages],
            _map_texts(tools, partial(_split, self._any, mark=mark)),
            mark,
        )

    def _has_spelling(self, message: Message) -> bool:
        for key, value in message.items():
            if not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            if self._pattern(message, key).search(value):
                return True
        return False

    def _escape_message(self, message: Message, mark: str) -> Message:
        escaped: Message = {}
        for key, value in message.items():
            change = partial(_split, self._pattern(message, key), mark=mark)
            escaped[key] = _map_texts(value, change)
        return escaped

    def _pattern(self, message: Message, key: str) -> re.Pattern[str]:
        is_answer = message["role"] == "assistant" and key in ("content", "reasoning_content")
        return self._in_answer if is_answer else self._any


def _one_of(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _split(pattern: re.Pattern[str], text: str, mark: str) -> str:
    # Repeat until none is left: a split may leave another token's spelling.
    while pattern.search(text):
        text = pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)
    return text


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(k, change): _map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_texts(v, change) for v in value]
    return value
