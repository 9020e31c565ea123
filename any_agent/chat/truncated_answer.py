"""Closing tokens for what a truncated answer left open: a think block, a tool call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from any_agent.chat.template import ChatTemplate

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
