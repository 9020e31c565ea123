"""A model of CAMEL-AI that calls an `EngineOpenAI`."""

from __future__ import annotations

from typing import Any, NoReturn

try:
    from camel.models import OpenAICompatibleModel
    from camel.utils import BaseTokenCounter
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "camel":
        raise
    raise ModuleNotFoundError(
        "CAMEL-AI is not installed here: pip install camel-ai", name=error.name
    ) from error

from any_agent.chat import ChatFormat
from any_agent.direct import EngineOpenAI

_TOKENS_PER_MESSAGE = 4
"""The approximate number of tokens that a template writes around each message."""


class AnyAgentOpenAICompatibleModel(OpenAICompatibleModel):  # type: ignore[misc]
    """The ``model`` of CAMEL's `ChatAgent` whose calls go to ``openai_client``.

    The client's engine samples them and records each token, and the client's ``set_last_reward``
    and ``export_interactions`` apply to them. Tools, ``response_format`` and streams are CAMEL's
    own (``model_config_dict={"stream": True}``). Await the agent's ``astep``: the client is
    asynchronous, and ``step`` raises a TypeError.

    ``tokenizer`` (default: the client's) or, instead, ``token_counter`` counts the tokens of
    CAMEL's memory. ``timeout`` (seconds) and ``max_retries`` are by default the client's.
    ``model_type`` is recorded and chooses nothing.
    """

    def __init__(
        self,
        model_type: str = "policy",
        *,
        openai_client: EngineOpenAI,
        tokenizer: Any = None,
        model_config_dict: dict[str, Any] | None = None,
        token_counter: BaseTokenCounter | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
    ) -> None:
        if not isinstance(openai_client, EngineOpenAI):
            raise TypeError(
                f"openai_client is a {type(openai_client).__name__}, which records nothing: give "
                "an EngineOpenAI, or use CAMEL's OpenAICompatibleModel with a service's URL"
            )
        options: dict[str, Any] = {"timeout": timeout, "max_retries": max_retries}
        options = {name: value for name, value in options.items() if value is not None}
        super().__init__(
            model_type,
            model_config_dict,
            api_key="none",
            url=str(openai_client.base_url),
            token_counter=token_counter or TokenCounter(tokenizer or openai_client.chat_format),
            timeout=timeout,
            client=_NoSyncClient(),
            async_client=openai_client.with_options(**options) if options else openai_client,
        )


class TokenCounter(BaseTokenCounter):  # type: ignore[misc]
    """Counts tokens with the policy's tokenizer, while CAMEL's counter loads another model's.

    ``tokenizer`` is a ChatFormat, a tokenizer of transformers, or the path of one.
    """

    def __init__(self, tokenizer: Any) -> None:
        if isinstance(tokenizer, ChatFormat):
            tokenizer = tokenizer.tokenizer
        elif isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._tokenizer = tokenizer

    def count_tokens_from_messages(self, messages: list[dict[str, Any]]) -> int:
        """Return their approximate number of tokens in a prompt, without pictures."""
        return sum(
            _TOKENS_PER_MESSAGE + sum(len(self.encode(text)) for text in _texts(message))
            for message in messages
        )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if message.get("tool_calls"):
        texts.append(str(message["tool_calls"]))
    return [text for text in texts if isinstance(text, str)]


class _NoSyncClient:
    """A placeholder for the synchronous client that CAMEL has beside the asynchronous one."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError("EngineOpenAI is asynchronous: await agent.astep(...), not agent.step(...)")
