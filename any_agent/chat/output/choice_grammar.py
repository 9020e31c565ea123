"""Grammars that let the model choose: a text of a given form, or calls of its tools.

They are structural tags in SGLang's (xgrammar's) form, of which the embedded engine reads the same
parts. Markers stand in them as token ids: a text that spells a marker is no marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from any_agent.chat.output.grammar import CallSyntax, OutputGrammar

Part: TypeAlias = dict[str, Any]

_OBJECT: Part = {"type": "json_schema", "json_schema": {"type": "object"}}
_KEY: Part = {"type": "regex", "pattern": "[A-Za-z0-9_.-]{1,64}"}


class ChoiceGrammar:
    """Makes choice grammars for one family and vocabulary."""

    def __init__(self, grammar: OutputGrammar, vocab: Mapping[str, int]) -> None:
        self._grammar = grammar
        self._marks = {mark: vocab[mark] for mark in grammar.marks if mark in vocab}
        longest_first = sorted(self._marks, key=len, reverse=True)
        # Without markers the pattern matches nothing.
        self._cut = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def grammar(self, text: Part, names: Sequence[str], *, in_reasoning: bool) -> Part | None:
        """Return the grammar of an answer that is this text, or calls of these tools if any.

        ``in_reasoning``: the prompt has opened reasoning, which comes first. None where a call
        could not be distinguished from a text: it begins with no token of its own.
        """
        answer = _sequence(*self._fixed(self._grammar.text_opening), text)
        calls = self._grammar.calls
        if names:
            if calls is None or self._fixed(calls.opening + calls.begin)[0]["type"] != "token":
                return None
            answer = _either(answer, self._calls(calls, names))
        # Some families begin each answer with a line break.
        answer = _sequence(_optional("\n"), answer)
        if in_reasoning:
            end, *rest = self._fixed(self._grammar.leave_reasoning.lstrip())
            answer = _sequence(self._until(_const(""), end), *rest, answer)
        return {"type": "structural_tag", "format": answer}

    def _calls(self, calls: CallSyntax, names: Sequence[str]) -> Part:
        one = _sequence(
            *self._fixed(calls.begin),
            _either(*map(_const, names)),
            *self._fixed(calls.between),
            _sequence(_optional(" "), _OBJECT)
            if calls.parameter is None
            else self._parameters(*calls.parameter),
            *self._fixed(calls.end),
        )
        more: list[Part] = []
        if calls.separator is not None:
            more = [{"type": "star", "content": _sequence(_const(calls.separator), one)}]
        return _sequence(*self._fixed(calls.opening), one, *more, *self._fixed(calls.closing))

    def _parameters(self, before: str, between: str, after: str) -> Part:
        *first, begin = self._fixed(between)
        end, *rest = self._fixed(after)
        one = _sequence(*self._fixed(before), _KEY, *first, self._until(begin, end), *rest)
        return {"type": "star", "content": one}

    def _fixed(self, text: str) -> list[Part]:
        """Return the parts of a fixed text, its markers as tokens."""
        return [
            {"type": "token", "token": self._marks[piece]}
            if piece in self._marks
            else _const(piece)
            for piece in self._cut.split(text)
            if piece
        ]

    def _until(self, begin: Part, end: Part) -> Part:
        """Return a part for any text between ``begin`` and the first ``end``."""
        content: Part = {"type": "any_text"}
        if end["type"] == "token":
            # xgrammar's text may hold markers, so that nothing would ever end it.
            content["excludes"] = [m for m, i in self._marks.items() if i == end["token"]]
        return {"type": "tag", "begin": _edge(begin), "content": content, "end": _edge(end)}


def _const(text: str) -> Part:
    return {"type": "const_string", "value": text}


def _optional(text: str) -> Part:
    return {"type": "optional", "content": _const(text)}


def _either(*parts: Part) -> Part:
    return {"type": "or", "elements": list(parts)}


def _sequence(*parts: Part) -> Part:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def _edge(part: Part) -> Any:
    return part["value"] if part["type"] == "const_string" else part
