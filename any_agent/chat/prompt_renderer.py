"""Rendering of prompts and continuations by PyPI's ``renderers``, and the two ways to render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from any_agent.chat.bridge import ContinuationCheck, TemplateRenderer
from any_agent.chat.names import nameless_roles
from any_agent.chat.system_messages import LeadingSystem
from any_agent.types import Message, Tool


class LibraryRenderer:
    """Renders by one of PyPI's ``renderers``, if it was configured or there is no template.

    Special tokens spelled in a text become control tokens here: it encodes texts itself.
    """

    escapes_special_tokens = False

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
        self._leading = LeadingSystem(
            lambda messages, tools: renderer.render_ids(messages, tools=tools)
        )

    @cached_property
    def nameless_roles(self) -> frozenset[str]:
        """Roles whose messages' names the renderer leaves out."""
        return nameless_roles(self.prompt_ids)

    @cached_property
    def _opening(self) -> list[int]:
        """The last ids of a short prompt."""
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
        joined = self._leading.join(messages, tools=bool(tools))
        return list(
            self._renderer.render_ids(joined, tools=tools, add_generation_prompt=generation)
        )

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
        """Return the ids that the family's own bridge writes.

        The bridge declines what it would not have written itself, such as a turn that ended inside
        its reasoning. What follows a turn that did end is the same whatever was in it, so there it
        is taken from a turn of nothing but that end.
        """
        before = [int(i) for i in prompt_tail] or self._opening
        output = [int(i) for i in output_ids]
        ended = bool(output) and output[-1] in self._stops
        seen = output[-1:] if ended else output
        new = _with_tool_names(new, answer)
        rendered = self._renderer.bridge_to_next_turn(before, seen, new, tools=tools)
        ids = [] if rendered is None else list(rendered.token_ids)
        if ids[: len(before) + len(seen)] != before + seen:
            return None
        return ids[len(before) + len(seen) :] or None

    def check_continuation(
        self, roles: Sequence[str], *, calls: int = 0, tools: bool = False
    ) -> ContinuationCheck:
        if "assistant" in roles or "calling" in roles:
            return ContinuationCheck("the renderer continues with no answer that was not sampled")
        return ContinuationCheck(None)


PromptRenderer: TypeAlias = TemplateRenderer | LibraryRenderer


def _with_tool_names(new: list[Message], answer: Message | None) -> list[Message]:
    """Add to tools' results their tools' names, which some families write."""
    names = {c.get("id"): c["function"]["name"] for c in (answer or {}).get("tool_calls") or ()}
    return [
        {**m, "name": names[m["tool_call_id"]]}
        if m["role"] == "tool" and "name" not in m and m.get("tool_call_id") in names
        else m
        for m in new
    ]
