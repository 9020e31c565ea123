"""The parsers of one model's outputs, by the grammar of its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from any_agent.chat.output.choice_grammar import ChoiceGrammar, Part
from any_agent.chat.output.detokenizer import detokenizer_factory
from any_agent.chat.output.grammar import OutputGrammar
from any_agent.chat.output.grammars import grammar_of
from any_agent.chat.output.grammars.harmony import HarmonyMachine
from any_agent.chat.output.markers import TEXT, Markers, Piece, TokenSpans
from any_agent.chat.output.message import MessageBuilder, ToolCallIds
from any_agent.chat.output.stream_parser import BufferedParser, IncrementalParser, StreamParser
from any_agent.types import IdArray, Tool, plain_ids

_TAIL = 64  # the number of a prompt's last tokens that show how its output begins
_REASONING_TAIL = 16  # the number of them that show that reasoning is open


class OutputParserFactory:
    """Makes parsers; it has no state between outputs, so one serves every call."""

    def __init__(
        self,
        renderer: Any,
        tokenizer: Any,
        decode: Callable[[Sequence[int]], str],
        stop_ids: Sequence[int],
        *,
        family: str,
    ) -> None:
        """``family``: the renderer's name; for ``default`` the chat template decides.

        ``decode``: ids to text, special tokens spelled out.
        """
        self._renderer = renderer
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)
        self.new_detokenizer = detokenizer_factory(tokenizer, decode)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self.grammar: OutputGrammar | None = grammar_of(family, template)
        """None: the renderer itself parses outputs, at their end."""
        marks = self.grammar.marks if self.grammar else {}
        self._vocab: dict[str, int] = tokenizer.get_vocab()
        by_id: dict[int, Piece] = {
            self._vocab[mark]: (mark, kind) for mark, kind in marks.items() if mark in self._vocab
        }
        in_text = {mark: kind for mark, kind in marks.items() if mark not in self._vocab}
        self._markers = Markers(by_id, self._stop_ids, in_text)
        self.spans = TokenSpans(by_id)
        """The object that locates an output's reasoning tokens and text tokens."""
        self._choice = ChoiceGrammar(self.grammar, self._vocab) if self.grammar else None
        stop = self.grammar.one_call_stop if self.grammar else None
        self._one_call_stop = self._vocab.get(stop) if stop else None

    def one_call_stop_ids(self) -> tuple[int, ...] | None:
        """Return the tokens after which one call is complete; None if no single token ends it."""
        return None if self._one_call_stop is None else (self._one_call_stop,)

    def stream_parser(
        self,
        *,
        prompt_ids: Sequence[int] | IdArray,
        tools: list[Tool] | None,
        stop: tuple[str, ...],
        forced: Sequence[int] = (),
        call_seed: bytes = b"",
    ) -> StreamParser:
        """Return a parser for one output as it is sampled; calls are read only if there are tools.

        The text ends before a stop string. ``forced``: the prompt's last tokens, which begin a call
        and are parsed as output. ``call_seed``: answers with different seeds have different ids of
        calls.
        """
        builder = MessageBuilder(ToolCallIds(prompt_ids, call_seed))
        grammar = self.grammar
        if grammar is None:
            return BufferedParser(
                self._renderer,
                self._decode,
                self.new_detokenizer(),
                builder,
                prompt_ids=plain_ids(prompt_ids),
                tools=tools,
                stop_ids=self._stop_ids,
                stop=stop,
            )
        end = len(prompt_ids) - len(forced)
        tail = plain_ids(prompt_ids[max(0, end - _TAIL) : end])
        in_reasoning = grammar.turn_start is None and self._ends_in_think(tail)
        machine = grammar.new_machine(builder, tools or (), in_reasoning)
        if isinstance(machine, HarmonyMachine):
            machine.prompt(self._header(tail))
        return IncrementalParser(
            self.new_detokenizer(), self._markers, machine, builder, stop, plain_ids(forced)
        )

    def ends_in_reasoning(self, prompt_ids: Sequence[int] | IdArray) -> bool:
        """Return True if the prompt has opened reasoning, or a message that may be reasoning."""
        tail = plain_ids(prompt_ids[-_TAIL:])
        if self.grammar is not None and self.grammar.turn_start is not None:
            return any(mark == "<|message|>" for mark, _ in self._header(tail))
        return self._ends_in_think(tail)

    def open_call(self, prompt_ids: Sequence[int] | IdArray, name: str | None) -> str | None:
        """Return the text that, after this prompt, makes the model call a tool (any one, if None).

        Special tokens are spelled out. None if no such text is known for this model.
        """
        if self.grammar is None or self.grammar.calls is None:
            return None
        before = self.grammar.leave_reasoning if self.ends_in_reasoning(prompt_ids) else ""
        return before + self.grammar.calls.open(name)

    def text_or_calls(
        self, prompt_ids: Sequence[int] | IdArray, text: Mapping[str, Any], names: Sequence[str]
    ) -> Part | None:
        """Return a structural tag for an answer that is a text of a form, or calls these tools.

        Reasoning that the prompt has opened comes first, and is free. ``text``: the form, as a
        part of a structural tag (`json_schema`, `regex`). None if a call of this family could not
        be distinguished from a text.
        """
        if self._choice is None:
            return None
        in_reasoning = self.ends_in_reasoning(prompt_ids)
        return self._choice.grammar(dict(text), names, in_reasoning=in_reasoning)

    def _ends_in_think(self, tail: list[int]) -> bool:
        """Return True if the prompt ends with ``<think>`` and white space."""
        return self._decode(tail[-_REASONING_TAIL:]).rstrip().endswith("<think>")

    def _header(self, tail: list[int]) -> list[Piece]:
        """Return the pieces of the output's own header that stand at the prompt's end."""
        assert self.grammar is not None
        start = self._vocab.get(self.grammar.turn_start or "")
        if start not in tail:
            return []
        tail = tail[len(tail) - 1 - tail[::-1].index(start) :]
        pieces: list[Piece] = []
        for i in tail:
            piece = self._markers.by_id.get(i)
            pieces.append(piece or (self._decode([i]), TEXT))
            if piece is not None and piece[0] == "<|message|>":
                break
        return pieces
