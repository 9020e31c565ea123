"""One model's chat format: messages to token ids and back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from any_agent.chat.format_variants import FormatVariants, render_key
from any_agent.chat.message_validation import validate_messages, validate_tools
from any_agent.chat.output.detokenizer import token_bytes_of
from any_agent.chat.output.message import ParsedMessage
from any_agent.chat.output.parser_factory import OutputParserFactory
from any_agent.chat.output.stream_parser import StreamParser
from any_agent.chat.output.text_parser import TextParser
from any_agent.chat.output.token_spans import TokenSpans
from any_agent.chat.prompt_renderer import PromptRenderer
from any_agent.chat.template_kwargs import check_settings, effort_settings
from any_agent.errors import AnyAgentError, InvalidRequest, TemplateError
from any_agent.types import BranchReason, IdArray, Message, Tool, plain_ids

log = logging.getLogger(__name__)

_TAIL = 64
"""A generation prompt is shorter."""


class ChatFormat:
    """Renders, continues and parses for one tokenizer; made by :func:`load_chat_format`.

    Stateless between calls, so one instance serves every session, in any thread.
    """

    render_key: bytes = b""
    """What tells a variant's conversations from those of the run's own settings; b"" where they
    are written the same but for the generation prompt."""

    def __init__(
        self,
        tokenizer: Any,
        renderer: Any,
        stop_token_ids: Sequence[int],
        writer: PromptRenderer,
        *,
        name: str,
        keeps_thinking: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        """The family's, as PyPI's ``renderers`` calls it; "default" for any other."""
        self.writer = writer
        self.keeps_thinking = keeps_thinking
        """Whether earlier reasoning stays in the context whatever the template does with it."""
        self.vocab_size = len(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """In characters: no text takes fewer tokens than its length over this."""
        self._token_texts: dict[int, str] = {}
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_token_ids))
        self._renderer = renderer
        self._variants: FormatVariants[ChatFormat] = FormatVariants()
        self._added = frozenset(tokenizer.get_added_vocab().values())
        self._stop_set = frozenset(self.stop_token_ids)
        self._reader = OutputParserFactory(
            renderer, tokenizer, self.decode, self.stop_token_ids, family=self.name
        )
        self._token_bytes = token_bytes_of(tokenizer, self.decode)

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        """The prompt's token ids, up to and with the generation prompt.

        Raises:
            InvalidRequest: a message or tool has no valid shape.
            TemplateError: the template refuses it, or no tokenizer can encode it.
        """
        checked, checked_tools = validate_messages(messages), validate_tools(tools)
        return plain_ids(self._template(lambda: self.writer.prompt_ids(checked, checked_tools)))

    def bridge(
        self,
        output_ids: Sequence[int] | IdArray,
        new_messages: list[Message],
        tools: list[Tool] | None,
        *,
        said: Message | None = None,
        prompt_tail: Sequence[int] | IdArray = (),
        past: Sequence[Message] = (),
    ) -> list[int] | None:
        """The ids that follow a prompt and its output when these messages come next.

        They end the turn if the output does not (a truncated one), hold the new messages and
        the next generation prompt, and are what the template writes there; its cost is that of
        the new messages. ``said`` is the assistant's message as the caller has it, of which the
        calls' ids and names are used. ``prompt_tail``: the prompt's last ids, for an output
        that was truncated after an opening which the prompt's end made. ``past``: the messages
        before ``said``, in which some templates look for words (``/no_think``).

        None where it is not proven what the template would write (:meth:`decline_reason`);
        the caller then renders the whole anew.

        Raises:
            InvalidRequest: a new message or tool has no valid shape.
        """
        if not new_messages:
            return None
        new, checked_tools = validate_messages(new_messages), validate_tools(tools)
        try:
            (said,) = validate_messages([said]) if said is not None else (None,)
            return self.writer.following_ids(
                plain_ids(output_ids),
                new,
                checked_tools,
                said=said,
                prompt_tail=plain_ids(prompt_tail),
                past=past,
            )
        except Exception as e:
            # Whether the conversation can be rendered at all is for the whole to say.
            log.debug("no bridge: %s: %s", type(e).__name__, e)
            return None

    def decline_reason(self, new_messages: list[Message]) -> BranchReason:
        """Why :meth:`bridge` gave None: "thinking_stripped" or "template_declines"."""
        if self.keeps_thinking or not any(m.get("role") == "user" for m in new_messages):
            return "template_declines"
        return "thinking_stripped"

    def variant(self, settings: Mapping[str, Any]) -> ChatFormat:
        """The same format under a call's own ``chat_template_kwargs``.

        Raises:
            InvalidRequest: a value that is no short plain one, or that the template refuses.
            UnsupportedParameter: the template has no such setting.
        """
        checked = check_settings(settings, self.writer.known_settings)
        own = self.writer.settings
        if all(name in own and own[name] is value for name, value in checked):
            return self

        def make() -> ChatFormat:
            made = copy.copy(self)
            made.writer = self.writer.with_settings(dict(checked))
            made.render_key = render_key(self.writer, made.writer, checked)
            return made

        try:
            return self._variants.get(checked, make)
        except Exception as e:
            why = str(e)[:500].encode(errors="replace").decode()
            raise InvalidRequest(
                f"chat_template_kwargs are refused: {why}", param="chat_template_kwargs"
            ) from e

    def effort_kwargs(self, effort: str) -> Mapping[str, Any]:
        """``reasoning_effort`` as settings for :meth:`variant`; {} where there is no such control.

        Raises:
            InvalidRequest: there is no such effort.
        """
        return effort_settings(effort, self.writer.known_settings, self.writer.settings)

    def forced_call_ids(self, prompt_ids: Sequence[int] | IdArray, name: str) -> list[int] | None:
        """The ids that, put after this prompt, make the model call that tool ("": any one).

        An open reasoning block is closed first. None where no such text is known for the family,
        or the name spells a special token.
        """
        if not self._added.isdisjoint(self.encode(name, special=False)):
            return None
        text = self._reader.open_call(plain_ids(prompt_ids[-_TAIL:]), name or None)
        return None if text is None else self.encode(text, special=False)

    def ends_in_reasoning(self, prompt_ids: Sequence[int] | IdArray) -> bool:
        """Return whether the prompt has opened the answer's reasoning."""
        return self._reader.ends_in_reasoning(prompt_ids)

    def text_or_calls(
        self, prompt_ids: Sequence[int] | IdArray, text: Mapping[str, Any], names: Sequence[str]
    ) -> dict[str, Any] | None:
        """A structural tag for an answer to this prompt that has a form, or calls these tools.

        Reasoning that the prompt has opened comes first, and is free. ``text``: the form, as a
        part of a structural tag (`json_schema`, `regex`). None where a call of this family could
        not be told from a text.
        """
        return self._reader.text_or_calls(prompt_ids, dict(text), names)

    @property
    def spans(self) -> TokenSpans:
        """Which of an output's tokens are reasoning, and which are text."""
        return self._reader.spans

    def one_call_stop_ids(self) -> tuple[int, ...] | None:
        """The tokens after which one call is whole; None if no one token says so."""
        return self._reader.one_call_stop_ids

    def parse(
        self,
        output_ids: Sequence[int] | IdArray,
        *,
        prompt_ids: Sequence[int] | IdArray,
        tools: list[Tool] | None,
    ) -> ParsedMessage:
        """Text, reasoning and tool calls of one output; calls only if the request had tools.

        Text ends at the first stop token. A call is what named a tool, truncated or not.
        """
        parser = self.stream_parser(prompt_ids=prompt_ids, tools=tools, stop=())
        parser.feed(plain_ids(output_ids))
        return parser.finish(matched_stop=None)[1]

    def stream_parser(
        self,
        *,
        prompt_ids: Sequence[int] | IdArray,
        tools: list[Tool] | None,
        stop: tuple[str, ...],
        forced: Sequence[int] = (),
        call_seed: bytes = b"",
    ) -> StreamParser:
        """A parser for one output as it is sampled; the text ends before a stop string.

        ``forced``: the prompt's last tokens, which begin a call: they are read as output.
        ``call_seed``: answers of different ones have different ids of calls.
        """
        return self._reader.parser(prompt_ids, tools, stop, forced, call_seed)

    def text_parser(self, stop: tuple[str, ...]) -> StreamParser:
        """A parser for an output that is plain text, as a legacy completion's."""
        return TextParser(self._reader.detokenisers(), self._stop_set, stop)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text; ``special``: with those that the tokenizer puts around one."""
        return plain_ids(self.tokenizer.encode(text, add_special_tokens=special))

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, also where they are a part of a character."""
        return self._token_bytes(token_id)

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """The text of token ids, special tokens spelled out."""
        return str(
            self.tokenizer.decode(
                plain_ids(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def token_text(self, token_id: int) -> str:
        """One token's text by itself; part of a character shows as the replacement character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id])
        return text

    def _template(self, render: Callable[[], Any]) -> Any:
        """The boundary to foreign code: whatever a template raises is about the request."""
        try:
            return render()
        except AnyAgentError:
            raise
        except Exception as e:
            why = f"{type(e).__name__}: {e}"[:500].encode(errors="replace").decode()
            raise TemplateError(
                f"the chat template cannot render these messages: {why}", param="messages"
            ) from e
