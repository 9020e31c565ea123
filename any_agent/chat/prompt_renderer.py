"""What writes prompts and what follows an answer: a model's template, or one of `renderers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from any_agent.chat.bridge import Proof, TemplateBridge
from any_agent.chat.template import ChatTemplate
from any_agent.chat.template_kwargs import SWITCHES
from any_agent.types import Message, Tool


class PromptRenderer(Protocol):
    """Messages, already validated, to token ids. Thread-safe."""

    @property
    def known_settings(self) -> frozenset[str]:
        """Names of the ``chat_template_kwargs`` that change something."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def keeps_spellings(self) -> bool:
        """Whether special tokens that a text only spells stay plain text."""

    def with_settings(self, settings: Mapping[str, Any]) -> PromptRenderer:
        """The same with some settings changed; ValueError if it takes no such value."""

    def prompt_ids(
        self, messages: list[Message], tools: list[Tool] | None, *, generation: bool = True
    ) -> list[int]:
        """A whole conversation, with the generation prompt unless told otherwise."""

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
        """What follows an output when these messages come next; None where it is not known."""

    def prove(self, roles: Sequence[str], *, calls: int = 0, tools: bool = False) -> Proof:
        """Whether messages of these roles, after an answer with so many calls, are continued."""


class TemplateRenderer:
    """By the tokenizer's own chat template, which every engine would use as well."""

    def __init__(
        self,
        template: ChatTemplate,
        stop_ids: Sequence[int],
        *,
        retention: str,
        may_think: bool = True,
    ) -> None:
        """``may_think`` False: there is no reasoning that the template could take out."""
        self._template = template
        self._stop_ids = stop_ids
        self._retention = retention
        self._may_think = may_think

    @cached_property
    def _bridge(self) -> TemplateBridge:
        nothing_to_take = self._retention == "template" and not self._may_think
        retention = "all" if nothing_to_take else self._retention
        return TemplateBridge(self._template, self._stop_ids, retention=retention)

    @property
    def known_settings(self) -> frozenset[str]:
        return self._template.known_settings

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._template.settings

    @property
    def keeps_spellings(self) -> bool:
        return self._template.keeps_spellings

    def with_settings(self, settings: Mapping[str, Any]) -> TemplateRenderer:
        template = self._template.with_settings({**self.settings, **settings})
        may_think = self._may_think or any(settings.get(name) for name in SWITCHES)
        return TemplateRenderer(
            template, self._stop_ids, retention=self._retention, may_think=may_think
        )

    def prompt_ids(
        self, messages: list[Message], tools: list[Tool] | None, *, generation: bool = True
    ) -> list[int]:
        return self._template.ids(messages, tools, generation=generation)

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
        return self._bridge.following_ids(
            output_ids, new, tools, said=said, prompt_tail=prompt_tail, past=past
        )

    def prove(self, roles: Sequence[str], *, calls: int = 0, tools: bool = False) -> Proof:
        return self._bridge.prove(roles, calls=calls, tools=tools)


class LibraryRenderer:
    """By one of PyPI's ``renderers``, where it was asked for or there is no template.

    Special tokens spelled in a text become control tokens here: it encodes texts itself.
    """

    keeps_spellings = False

    def __init__(
        self,
        tokenizer: Any,
        renderer: Any,
        stop_ids: Sequence[int],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        from renderers import template_field_names

        self.settings: Mapping[str, Any] = dict(settings or {})
        self.known_settings = frozenset(template_field_names(renderer.config))
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._stops = frozenset(stop_ids)

    @cached_property
    def _opening(self) -> list[int]:
        """The end of a prompt."""
        return self.prompt_ids([{"role": "user", "content": "ok"}], None)[-16:]

    def with_settings(self, settings: Mapping[str, Any]) -> LibraryRenderer:
        from renderers import create_renderer, merge_chat_template_kwargs

        config = merge_chat_template_kwargs(self._renderer.config, settings)
        renderer = create_renderer(self._tokenizer, config)
        merged = {**self.settings, **settings}
        return LibraryRenderer(self._tokenizer, renderer, tuple(self._stops), merged)

    def prompt_ids(
        self, messages: list[Message], tools: list[Tool] | None, *, generation: bool = True
    ) -> list[int]:
        return list(
            self._renderer.render_ids(messages, tools=tools, add_generation_prompt=generation)
        )

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
        """By the family's own bridge.

        It declines what it would not have written itself, such as a turn that ended inside its
        reasoning. What follows a turn that did end is the same whatever was in it, so there it is
        taken from a turn of nothing but that end.
        """
        before = [int(i) for i in prompt_tail] or self._opening
        output = [int(i) for i in output_ids]
        new = _named(new, said)
        ended = bool(output) and output[-1] in self._stops
        seen = output[-1:] if ended else output
        rendered = self._renderer.bridge_to_next_turn(before, seen, new, tools=tools)
        ids = [] if rendered is None else list(rendered.token_ids)
        if ids[: len(before) + len(seen)] != before + seen:
            return None
        return ids[len(before) + len(seen) :] or None

    def prove(self, roles: Sequence[str], *, calls: int = 0, tools: bool = False) -> Proof:
        if "assistant" in roles or "calling" in roles:
            return Proof("the renderer continues with no answer that was not sampled")
        return Proof(None)


def _named(new: list[Message], said: Message | None) -> list[Message]:
    """Tools' results with their tools' names, which some families write."""
    names = {c.get("id"): c["function"]["name"] for c in (said or {}).get("tool_calls") or ()}
    return [
        {**m, "name": names[m["tool_call_id"]]}
        if m["role"] == "tool" and "name" not in m and m.get("tool_call_id") in names
        else m
        for m in new
    ]
