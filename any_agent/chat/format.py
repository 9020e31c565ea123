"""One model's chat format: messages to token ids and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from any_agent.chat.bridge import derive_bridge
from any_agent.chat.messages import validate_messages, validate_tools
from any_agent.chat.output.detokenise import token_bytes_of
from any_agent.chat.output.message import ParsedMessage
from any_agent.chat.output.plain import TextParser
from any_agent.chat.output.reader import OutputReader
from any_agent.chat.output.stream import StreamParser
from any_agent.errors import AnyAgentError, TemplateError
from any_agent.types import Message, Tool


class ChatFormat:
    """Renders, continues and parses for one tokenizer; made by :func:`load_chat_format`.

    Stateless between calls, so one instance serves every session.
    """

    def __init__(
        self,
        tokenizer: Any,
        renderer: Any,
        stop_token_ids: Sequence[int],
        *,
        keep_thinking: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.name: str = renderer.config.name
        self.vocab_size = len(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """In characters: no text takes fewer tokens than its length over this."""
        self._token_texts: dict[int, str] = {}
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stop_token_ids))
        self._renderer = renderer
        self._keep_thinking = keep_thinking
        self._stop_set = frozenset(self.stop_token_ids)
        self._reader = OutputReader(
            renderer, tokenizer, self.decode, self.stop_token_ids, family=self.name
        )
        self._token_bytes = token_bytes_of(tokenizer, self.decode)
        self._turn_ends = [(i, self.decode([i])) for i in self.stop_token_ids]

    def render(self, messages: list[Message], tools: list[Tool] | None) -> list[int]:
        """The prompt's token ids, up to and with the generation prompt.

        Raises:
            InvalidRequest: a message or tool has no valid shape.
            TemplateError: the template refuses it, or no tokenizer can encode it.
        """
        return _ints(
            self._template(
                lambda: self._renderer.render_ids(
                    validate_messages(messages),
                    tools=validate_tools(tools),
                    add_generation_prompt=True,
                )
            )
        )

    def bridge(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        new_messages: list[Message],
        tools: list[Tool] | None,
    ) -> list[int] | None:
        """A next turn's prompt ids, which begin with ``prompt_ids + output_ids``.

        Only the new messages are rendered. None where the family declines, or where the ids
        it gives do not begin so; the caller then renders the whole anew.

        Raises:
            InvalidRequest, TemplateError: as :meth:`render`.
        """
        if not new_messages:
            return None
        prompt, output = _ints(prompt_ids), _ints(output_ids)
        new, tools = validate_messages(new_messages), validate_tools(tools)
        if any(m["role"] == "assistant" for m in new):
            return None
        if self.name == "default":
            ids = self._template(lambda: self._derived(prompt, output, new, tools))
        else:
            ids = self._bridged(prompt, output, new, tools)
        seen = len(prompt) + len(output)
        if ids is None or len(ids) <= seen or ids[:seen] != prompt + output:
            return None
        return _ints(ids)

    def _bridged(
        self, prompt: list[int], output: list[int], new: list[Message], tools: list[Tool] | None
    ) -> list[int] | None:
        """By the family's own bridge.

        It declines what it would not have written itself, such as a turn that ended inside its
        reasoning. What follows a turn that did end is the same whatever was in it, so there it is
        taken from a turn of nothing but that end.
        """

        def bridge(completion: list[int]) -> list[int] | None:
            rendered = self._template(
                lambda: self._renderer.bridge_to_next_turn(prompt, completion, new, tools=tools)
            )
            return None if rendered is None else _ints(rendered.token_ids)

        ids = bridge(output)
        if ids is None and output and output[-1] in self._stop_set:
            end = prompt + output[-1:]
            ids = bridge(output[-1:])
            if ids is not None and ids[: len(end)] == end:
                return prompt + output + ids[len(end) :]
        return ids

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int], tools: list[Tool] | None
    ) -> ParsedMessage:
        """Text, reasoning and tool calls of one output; calls only if the request had tools.

        Text ends at the first stop token. A call is what named a tool, truncated or not.
        """
        parser = self.stream_parser(prompt_ids=prompt_ids, tools=tools, stop=())
        parser.feed(_ints(output_ids))
        return parser.finish(matched_stop=None)[1]

    def stream_parser(
        self,
        *,
        prompt_ids: Sequence[int],
        tools: list[Tool] | None,
        stop: tuple[str, ...],
        forced: Sequence[int] = (),
    ) -> StreamParser:
        """A parser for one output as it is sampled; the text ends before a stop string.

        ``forced``: the prompt's last tokens, which begin a call: they are read as output.
        """
        return self._reader.parser(prompt_ids, tools, stop, forced)

    def text_parser(self, stop: tuple[str, ...]) -> StreamParser:
        """A parser for an output that is plain text, as a legacy completion's."""
        return TextParser(self._reader.detokenisers(), self._stop_set, stop)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text; ``special``: with those that the tokenizer puts around one."""
        return _ints(self.tokenizer.encode(text, add_special_tokens=special))

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, also where they are a part of a character."""
        return self._token_bytes(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        return str(
            self.tokenizer.decode(
                _ints(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
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
            raise TemplateError(
                f"the chat template cannot render these messages: {type(e).__name__}: {e}",
                param="messages",
            ) from e

    def _derived(
        self,
        prompt: list[int],
        output: list[int],
        new_messages: list[Message],
        tools: list[Tool] | None,
    ) -> list[int] | None:
        return derive_bridge(
            self._render_text,
            lambda text: self.tokenizer.encode(text, add_special_tokens=False),
            self._turn_ends,
            prompt,
            output,
            new_messages,
            tools,
            keep_thinking=self._keep_thinking,
        )

    def _render_text(
        self, messages: list[Message], tools: list[Tool] | None, generation_prompt: bool
    ) -> str:
        return self.decode(
            self._renderer.render_ids(
                messages, tools=tools, add_generation_prompt=generation_prompt
            )
        )


def _ints(ids: Sequence[int]) -> list[int]:
    """Plain Python ints: tokenizers refuse numpy's."""
    tolist = getattr(ids, "tolist", None)
    return list(tolist()) if tolist is not None else list(ids)
