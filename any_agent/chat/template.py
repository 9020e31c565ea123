"""A tokenizer's own chat template: messages to text, and text to token ids."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from any_agent.chat.special_token_escape import SpecialTokenEscaper
from any_agent.types import Message, Tool

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
"""What every template is given; the other names that it reads are settings."""
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
        spelled = SpecialTokenEscaper(self.added)
        self._spelled = spelled if self._can_break(spelled) else None
        self._write_calls = self._find_dialect()

    def with_settings(self, settings: Mapping[str, Any]) -> ChatTemplate:
        """The same template with other settings, sharing what does not depend on them."""
        other = object.__new__(ChatTemplate)
        other.__dict__.update(self.__dict__)
        other.settings = dict(settings)
        return other

    @property
    def keeps_spellings(self) -> bool:
        """Whether special tokens that a text only spells stay plain text."""
        return self._spelled is not None

    @cached_property
    def is_dated(self) -> bool:
        """Whether it may write the time, and so another text from one moment to the next."""
        return "strftime_now" in str(self._tokenizer.chat_template)

    @cached_property
    def known_settings(self) -> frozenset[str]:
        """Names that the template reads beyond what every template is given."""
        from jinja2 import meta, nodes

        tree = self._syntax
        names = meta.find_undeclared_variables(tree)
        # What is set inside a loop counts as undeclared, too; a setting is asked for first.
        stored = {n.name for n in tree.find_all(nodes.Name) if n.ctx != "load"}
        asked = {
            test.node.name
            for test in tree.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        # Functions, and names of tokens such as bos_token, are no settings.
        taken = _GIVEN | set(tree.environment.globals) | (stored - asked) | {"raise_exception"}
        return frozenset(n for n in names - taken if not n.endswith("_token"))

    @cached_property
    def searched_words(self) -> frozenset[str]:
        """What it compares texts with or looks for in them, such as ``/no_think``."""
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
        """A conversation's token ids, with the generation prompt unless told otherwise."""
        messages, tools, mark = self.prepared(messages, tools)
        return self.encode(self.text(messages, tools, generation=generation), mark)

    def prepared(
        self, messages: list[Message], tools: list[Tool] | None
    ) -> tuple[list[Message], list[Tool] | None, str | None]:
        """In the form that this template reads, spelled tokens broken up by the mark, if any."""
        messages = [self._write_calls(m) if m.get("tool_calls") else m for m in messages]
        if self._spelled is None:
            return messages, tools, None
        return self._spelled.broken_up(messages, tools)

    def text(self, messages: list[Message], tools: list[Tool] | None, *, generation: bool) -> str:
        """What the template writes for prepared messages."""
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
        """The ids of a text, special tokens read as such; the mark is left out."""
        if mark is None:
            return self._encode(text)
        return [i for piece in text.split(mark) for i in self._encode(piece)]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens spelled out."""
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _can_break(self, spelled: SpecialTokenEscaper) -> bool:
        """Whether a text in pieces is the same text; not where each piece begins with a space."""
        said = "a " + " b".join(list(self.added)[:8]) + " c"
        (message,), _, mark = spelled.broken_up([{"role": "user", "content": said}], None)
        if mark is None:
            return True
        ids = self.encode(message["content"], mark)
        return self.decode(ids) == said and not set(ids) & set(self.added.values())

    def _find_dialect(self) -> Callable[[Message], Message]:
        """How this template wants a call's arguments: as an object, or as JSON text."""
        for objects in (True, False):
            writes = _CallWriter(objects, objects)
            if self._writes('{"key0": "value0"}', writes):
                broken = objects and self._writes('{"key0": "value0', writes)
                return _CallWriter(objects, broken or not objects)
        return _CallWriter(True, True)

    def _writes(self, arguments: str, writes: Callable[[Message], Message]) -> bool:
        call = {"name": "name0", "arguments": arguments}
        said = writes(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call0aaaa", "type": "function", "function": call}],
            }
        )
        with contextlib.suppress(Exception):
            text = self.text([{"role": "user", "content": "ok"}, said], None, generation=False)
            return all(word in text for word in ("name0", "key0", "value0"))
        return False


class _CallWriter:
    """Calls in the form that a template reads; ``takes_broken``: also what is no JSON, as text."""

    def __init__(self, objects: bool, takes_broken: bool) -> None:
        self._objects = objects
        self._takes_broken = takes_broken

    def __call__(self, message: Message) -> Message:
        calls = [
            {**call, "function": {**f, "arguments": self._arguments(f["arguments"])}}
            for call in message["tool_calls"]
            for f in (call["function"],)
        ]
        return {**message, "tool_calls": calls}

    def _arguments(self, arguments: Any) -> Any:
        if not self._objects:
            return arguments if isinstance(arguments, str) else json.dumps(arguments)
        if not isinstance(arguments, str):
            return arguments
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(arguments)
            if "\\u" in arguments:
                # Half a surrogate pair has no text: such arguments stay as they were written.
                json.dumps(value, ensure_ascii=False).encode()
            if isinstance(value, dict) or self._takes_broken:
                return value
        return arguments if self._takes_broken else {"arguments": arguments}


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids, for any number of threads at once."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        lock = threading.Lock()

        def slow(text: str) -> list[int]:
            with lock:
                return list(tokenizer.encode(text, add_special_tokens=False))

        return slow
    # Once, here: the tokenizer's own encode sets these on every call, under others' feet.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False

    def fast(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    return fast
