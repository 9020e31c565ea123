"""One model's chat format: messages to token ids and back."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from any_agent.chat import format_probes as probes
from any_agent.chat.message_validation import validate_messages, validate_tools
from any_agent.chat.output.choice_grammar import ChoiceGrammar, Part
from any_agent.chat.output.detokenizer import decode_ids, detokenizer_factory, token_bytes_of
from any_agent.chat.output.grammar import OutputGrammar
from any_agent.chat.output.grammars import grammar_of
from any_agent.chat.output.grammars.harmony import HarmonyMachine
from any_agent.chat.output.markers import TEXT, Markers, Piece, TokenSpans
from any_agent.chat.output.message import MessageBuilder, ParsedMessage, ToolCallIds
from any_agent.chat.output.state_machine import TextMachine
from any_agent.chat.output.stream_parser import BufferedParser, IncrementalParser, StreamParser
from any_agent.chat.prompt_renderer import PromptRenderer
from any_agent.chat.template_kwargs import check_settings, effort_settings
from any_agent.errors import AnyAgentError, InvalidRequest, TemplateError
from any_agent.types import BranchReason, IdArray, Message, Tool, plain_ids

log = logging.getLogger(__name__)

_TAIL = 64  # the number of a prompt's last tokens that show how its output begins
_REASONING_TAIL = 16  # the number of them that show that reasoning is open
_MAX_GENERATION_PROMPT = 64  # tokens; every generation prompt is shorter
_MAX_VARIANTS = 32
_PROBE: list[Message] = [
    probes.SYSTEM,
    probes.USER,
    probes.REASONED,
    probes.NEXT,
    {**probes.REASONED, **probes.CALLED},
    probes.result(1, "3"),
    probes.TEXT,
]
_PROBES = (_PROBE, _PROBE[1:], _PROBE[:2], _PROBE[1:2], _PROBE[1:3])


class ChatFormat:
    """Renders, continues and parses for one tokenizer; made by :func:`load_chat_format`.

    Stateless between calls, so one instance serves every session, in any thread.
    """

    render_key: bytes = b""
    """16 bytes that separate a variant's conversations from those of the run's own settings; b""
    if at most the generation prompt differs."""

    def __init__(
        self,
        tokenizer: Any,
        library_renderer: Any,
        stop_token_ids: Sequence[int],
        renderer: PromptRenderer,
        *,
        name: str,
        keeps_thinking: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        """The family's name in PyPI's ``renderers``; "default" for any other."""
        self.renderer = renderer
        self.keeps_thinking = keeps_thinking
        """True if earlier reasoning stays in the context whatever the template does with it."""
        self.vocab_size = len(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token; no text takes fewer tokens than its length over this."""
        self._token_texts: dict[int, str] = {}
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_token_ids))
        # typed: True and 1 are equal, and not the same to a template.
        self._variants = lru_cache(maxsize=_MAX_VARIANTS, typed=True)(self._make_variant)
        self._added = frozenset(tokenizer.get_added_vocab().values())
        self.token_bytes = token_bytes_of(tokenizer, self.decode)
        """Return one token's bytes, even if they are a part of a character."""
        self.library_renderer = library_renderer
        self._stop_ids = frozenset(self.stop_token_ids)
        self.new_detokenizer = detokenizer_factory(tokenizer, self.decode)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self.grammar: OutputGrammar | None = grammar_of(name, template)
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

    @property
    def nameless_roles(self) -> frozenset[str]:
        """Roles whose messages' names no prompt shows, and no key has."""
        return self.renderer.nameless_roles

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        """Return the prompt's token ids, the generation prompt included.

        Raises:
            InvalidRequest: a message or tool has no valid shape.
            TemplateError: the template refuses it, or no tokenizer can encode it.
        """
        return self._rendered(messages, tools, generation=True)

    def answer_ids(
        self, messages: list[Message], tools: list[Tool] | None, prompt: Sequence[int]
    ) -> list[int]:
        """Return the ids of the last message, an assistant's, after the ``prompt`` before it.

        They are those that the template writes, up to the id that ends a turn.

        Raises:
            InvalidRequest: a message or tool has no valid shape.
            TemplateError: the template refuses it, or writes another prompt before an answer than
                for one; or no tokenizer can encode it.
        """
        whole = self._rendered(messages, tools, generation=False)
        output = whole[len(prompt) :]
        if whole[: len(prompt)] != list(prompt) or not output:
            raise TemplateError(
                "the chat template writes this answer in a way in which no model gives it; train "
                "on token ids instead",
                param="messages",
            )
        ends = [k for k, token in enumerate(output) if token in self._stop_ids]
        return output[: ends[0] + 1] if ends else output

    def _rendered(
        self, messages: list[Message], tools: list[Tool] | None, *, generation: bool
    ) -> list[int]:
        checked, checked_tools = validate_messages(messages), validate_tools(tools)
        try:
            ids = self.renderer.prompt_ids(checked, checked_tools, generation=generation)
            return plain_ids(ids)
        except AnyAgentError:
            raise
        except Exception as e:
            # Templates are foreign code: whatever one raises is about the request.
            why = f"{type(e).__name__}: {e}"[:500].encode(errors="replace").decode()
            raise TemplateError(
                f"the chat template cannot render these messages: {why}", param="messages"
            ) from e

    def bridge(
        self,
        output_ids: Sequence[int] | IdArray,
        new_messages: list[Message],
        tools: list[Tool] | None,
        *,
        answer: Message | None = None,
        prompt_tail: Sequence[int] | IdArray = (),
        past: Sequence[Message] = (),
    ) -> list[int] | None:
        """Return the ids that follow a prompt and its output when these messages come next.

        They end the turn if the output does not (a truncated one), hold the new messages and
        the next generation prompt, and are what the template writes there; the cost is that of
        the new messages. ``answer`` is the assistant's message as the caller has it, of which the
        calls' ids and names are used. ``prompt_tail``: the prompt's last ids, for an output
        that was truncated after an opening which the prompt's end made. ``past``: the messages
        before ``answer``, in which some templates search for words (``/no_think``).

        None where it is not verified what the template would write (:meth:`decline_reason`);
        the caller then renders the whole conversation anew.

        Raises:
            InvalidRequest: a new message or tool has no valid shape.
        """
        if not new_messages:
            return None
        new, checked_tools = validate_messages(new_messages), validate_tools(tools)
        try:
            (answer,) = validate_messages([answer]) if answer is not None else (None,)
            return self.renderer.following_ids(
                plain_ids(output_ids),
                new,
                checked_tools,
                answer=answer,
                prompt_tail=plain_ids(prompt_tail),
                past=past,
            )
        except Exception as e:
            # Rendering the whole conversation decides whether the request is wrong.
            log.debug("no exact continuation: %s: %s", type(e).__name__, e)
            return None

    def decline_reason(self, new_messages: list[Message]) -> BranchReason:
        """Return why :meth:`bridge` gave None: "thinking_stripped" or "template_declines"."""
        if self.keeps_thinking or not any(m.get("role") == "user" for m in new_messages):
            return "template_declines"
        return "thinking_stripped"

    def variant(self, settings: Mapping[str, Any]) -> ChatFormat:
        """Return the same format under a call's own ``chat_template_kwargs``.

        Raises:
            InvalidRequest: a value is not short and plain, or the template refuses it.
            UnsupportedParameter: the template has no such setting.
        """
        checked = check_settings(settings, self.renderer.known_settings)
        own = self.renderer.settings
        if all(name in own and own[name] is value for name, value in checked.items()):
            return self
        try:
            return self._variants(**checked)
        except Exception as e:
            why = str(e)[:500].encode(errors="replace").decode()
            raise InvalidRequest(
                f"chat_template_kwargs are refused: {why}", param="chat_template_kwargs"
            ) from e

    def _make_variant(self, /, **settings: Any) -> ChatFormat:
        made = copy.copy(self)
        vars(made).pop("_answer_lead", None)
        made.renderer = self.renderer.with_settings(settings)
        if made.nameless_roles != self.nameless_roles or any(
            _render_probe(self.renderer, probe, tools) != _render_probe(made.renderer, probe, tools)
            for probe in _PROBES
            for tools in (None, probes.TOOLS)
        ):
            key = repr(tuple(settings.items())).encode()
            made.render_key = hashlib.blake2b(key, digest_size=16).digest()
        return made

    def effort_kwargs(self, effort: str) -> Mapping[str, Any]:
        """Return ``reasoning_effort`` as settings for :meth:`variant`; {} without such a control.

        Raises:
            InvalidRequest: there is no such effort.
        """
        return effort_settings(effort, self.renderer.known_settings, self.renderer.settings)

    def forced_call_ids(self, prompt_ids: Sequence[int] | IdArray, name: str) -> list[int] | None:
        """Return the ids that, after this prompt, make the model call that tool ("": any one).

        An open reasoning block is closed first. None where no such text is known for the family,
        or the name spells a special token.
        """
        if not self._added.isdisjoint(self.encode(name, special=False)):
            return None
        tail = plain_ids(prompt_ids[-_MAX_GENERATION_PROMPT:])
        text = self.open_call(tail, name or None)
        return None if text is None else self.encode(text, special=False)

    def parse(
        self,
        output_ids: Sequence[int] | IdArray,
        *,
        prompt_ids: Sequence[int] | IdArray,
        tools: list[Tool] | None,
    ) -> ParsedMessage:
        """Return text, reasoning and tool calls of one output; calls only if the request had tools.

        Text ends at the first stop token. A call is what named a tool, truncated or not.
        """
        parser = self.stream_parser(prompt_ids=prompt_ids, tools=tools, stop=())
        parser.feed(plain_ids(output_ids))
        return parser.finish()[1]

    def text_parser(self, stop: tuple[str, ...]) -> StreamParser:
        """Return a parser for an output that is plain text, as a legacy completion's.

        There is no reasoning and no call, and nothing is trimmed.
        """
        builder = MessageBuilder(ToolCallIds(()), has_calls=False)
        markers = Markers({}, self._stop_ids, {})
        return IncrementalParser(
            self.new_detokenizer(), markers, TextMachine(builder), builder, stop
        )

    @cached_property
    def _answer_lead(self) -> str:
        """The white space that the template puts between the generation prompt and an answer."""
        asked, answer = probes.USER, probes.TEXT
        try:
            prompt = self.decode(plain_ids(self.renderer.prompt_ids([asked], None)))
            ids = plain_ids(self.renderer.prompt_ids([asked, answer], None, generation=False))
        except Exception:
            # Templates are foreign code; this one has another way to begin an answer.
            return ""
        lead = self.decode(ids).rpartition(answer["content"])[0]
        lead = lead.removeprefix(prompt) if lead.startswith(prompt) else ""
        return lead if lead.isspace() else ""

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
        custom: Collection[str] = (),
    ) -> StreamParser:
        """Return a parser for one output as it is sampled; calls are read only if there are tools.

        The text ends before a stop string. ``forced``: the prompt's last tokens, which begin a call
        and are parsed as output. ``call_seed``: answers with different seeds have different ids of
        calls. ``custom``: the names of custom tools.
        """
        builder = MessageBuilder(
            ToolCallIds(prompt_ids, call_seed),
            lead=self._answer_lead,
            has_calls=bool(tools),
            custom=custom,
        )
        grammar = self.grammar
        if grammar is None:
            return BufferedParser(
                self.library_renderer,
                self.decode,
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
        return self.decode(tail[-_REASONING_TAIL:]).rstrip().endswith("<think>")

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
            pieces.append(piece or (self.decode([i]), TEXT))
            if piece is not None and piece[0] == "<|message|>":
                break
        return pieces

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text; ``special``: with those that the tokenizer puts around one."""
        return plain_ids(self.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """Return the text of token ids, special tokens spelled out."""
        return decode_ids(self.tokenizer, ids)

    def token_text(self, token_id: int) -> str:
        """Return one token's text; a part of a character shows as the replacement character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id])
        return text


def _render_probe(
    renderer: PromptRenderer, probe: list[Message], tools: list[Tool] | None
) -> list[int] | str:
    try:
        return renderer.prompt_ids(probe, tools, generation=False)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
