"""The only file that imports LiteLLM's internals (exactly 1.106.2, see the constraints).

Its app keeps its own start-up and lifespan; it runs behind our routes, not around them: nine
middlewares of its own (gzip, any-origin CORS, admission) would otherwise sit on every stream.

Calls of frozen models go through its library, which is what its app puts its own pipeline around:
that one, and its router, would retry, take other models, and add their own words to errors. What
the library gets wrong is seen to here: it asks providers twice, lets calls run whose client left,
and makes a whole answer of one that broke off.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from any_agent.config.model_list import ModelList, resolved, secrets_of
from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    ContextLengthExceeded,
    ProviderBusy,
    ProviderError,
    ProviderRefused,
    ProviderTimeout,
    ProviderUnavailable,
)
from any_agent.runtime.logs import Redactor
from proxy_ext.frozen.provider import Event, FrozenApi
from proxy_ext.frozen.streams import close, sse, with_reasons

log = logging.getLogger(__name__)

_MAX_MESSAGE = 500
"""Characters of a provider's message that a client sees."""
_MAX_WAIT = 60.0
_INPUT = (
    *("input_cost_per_token", "cache_read_input_token_cost"),
    "cache_creation_input_token_cost",
)
_OURS = "any-agent"
_LATE = (
    "anyio._backends._asyncio",
    "litellm.llms.anthropic.pass_through.messages.streaming_iterator",
    "litellm.responses.mcp.litellm_proxy_mcp_handler",
)
_CLASS = re.compile(r"^(?:litellm\.)?(?:[A-Za-z]+(?:Error|Exception)\s*[:-]\s*)+")
_HINT = re.compile(r"\. Handle with `litellm\.[A-Za-z]+`\.$")


def load_app() -> Any:
    """Import LiteLLM's proxy app, set to need no network and no database."""
    _load()
    # It wants a master key; nobody is ever told this one.
    os.environ["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(24)}"
    for name in ("DATABASE_URL", "CONFIG_FILE_PATH", "WORKER_CONFIG"):
        os.environ.pop(name, None)
    from litellm.proxy import proxy_server

    proxy_server.general_settings["disable_model_info_refresh"] = True
    _quieten()
    return proxy_server.app


def _load() -> None:
    # Read at import: prices from the package, not from the network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    # It would fetch what a client names, from this host; see _fetch_nothing.
    os.environ["MAX_IMAGE_URL_DOWNLOAD_SIZE_MB"] = "0"
    import litellm  # noqa: F401

    _quieten()


def _quieten() -> None:
    for name in ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        # Its own would write past ours, which cuts keys out.
        logger.handlers.clear()


def load_provider(model_list: ModelList) -> LiteLLMProvider | None:
    """What reaches the frozen models, if there are any; ConfigError for one that cannot be used."""
    if not model_list:
        return None
    entries = resolved(model_list, os.environ)
    return LiteLLMProvider(entries, secrets_of(model_list, os.environ))


def lifespan(app: Any) -> AbstractAsyncContextManager[Any]:
    """LiteLLM's own start-up and shutdown."""
    context: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    return context


# -- frozen models -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiteLLMDeployment:
    """One entry of the model list, its references resolved."""

    name: str
    model: str
    """As LiteLLM has it, with the provider's name before it."""
    provider: str
    params: dict[str, Any] = field(repr=False)
    price: str | None
    """Under which name LiteLLM knows the price; None: it does not."""
    keeps_responses: bool
    redact: Redactor = field(repr=False)

    @property
    def priced(self) -> bool:
        return self.price is not None

    async def whole(
        self, api: FrozenApi, params: Mapping[str, Any], *, within: float
    ) -> dict[str, Any]:
        """See :class:`proxy_ext.frozen.provider.Deployment`."""
        try:
            return _plain(await self._ask(api, params, within))
        except Exception as error:
            raise self._error(error) from None

    async def stream(
        self, api: FrozenApi, params: Mapping[str, Any], *, within: float
    ) -> AsyncGenerator[Event]:
        """See :class:`proxy_ext.frozen.provider.Deployment`."""
        more: dict[str, Any] = {"stream": True}
        if api in ("chat", "completions"):
            more["stream_options"] = {**params.get("stream_options", {}), "include_usage": True}
        source: Any = None
        begun = False
        try:
            source = await self._ask(api, {**params, **more}, within)
            events = sse(source) if api == "messages" else _events(source)
            async for event in events:
                if event.get("type") == "error":
                    raise self._broken_off(event)
                begun = True
                yield event
            if any(stream.received_finish_reason is None for stream in with_reasons(source)):
                # It has made up an end.
                raise self._broken_off({})
        except Exception as error:
            known = self._error(error)
            if begun and known is not error and not isinstance(known, ProviderTimeout):
                # In whichever words of whichever library: they are in the log.
                known = self._broken_off({})
            raise known from None
        finally:
            await close(source)

    def cost(self, api: FrozenApi, usage: Mapping[str, Any]) -> float | None:
        """See :class:`proxy_ext.frozen.provider.Deployment`."""
        if self.price is None:
            return None
        from litellm.cost_calculator import cost_per_token

        try:
            prompt, output = cost_per_token(
                model=self.price,
                custom_llm_provider=self.provider,
                usage_object=_usage(api, dict(usage)),
                call_type="embedding" if api == "embeddings" else "completion",
            )
        except Exception:
            log.exception("LiteLLM cannot say what a call of %s costs", self.name)
            return None
        return float(prompt + output)

    def count(self, text: str) -> int:
        """See :class:`proxy_ext.frozen.provider.Deployment`."""
        import litellm

        return int(litellm.token_counter(model=self.model, text=text))

    async def _ask(self, api: FrozenApi, params: Mapping[str, Any], within: float) -> Any:
        import litellm

        ask = {
            "chat": litellm.acompletion,
            "completions": litellm.atext_completion,
            "responses": litellm.aresponses,
            "messages": litellm.anthropic_messages,
            "embeddings": litellm.aembedding,
        }[api]
        # The operator's last: nothing of a client's takes its place.
        own = {"timeout": within, **self.params, "num_retries": 0, "max_retries": 0}
        return await ask(**{**params, **own})

    def _broken_off(self, event: Event) -> ProviderUnavailable:
        """What an event says of an answer that has no end."""
        error = event.get("error")
        said = error.get("message") if isinstance(error, dict) else event.get("message")
        why = f": {self.redact.text(said)[:_MAX_MESSAGE]}" if isinstance(said, str) else ""
        return ProviderUnavailable(f"the provider of {self.name} broke off its answer{why}")

    def _error(self, error: Exception) -> AnyAgentError:
        """What a client is told. What the provider says is shown where it is about the request."""
        if isinstance(error, AnyAgentError):
            return error
        import litellm

        status = getattr(error, "status_code", None)
        kind, said = type(error).__name__, self.redact.text(_message_of(error))
        log.info("the provider of %s: %s %s: %s", self.name, status, kind, said[:_MAX_MESSAGE])
        who = f"the provider of {self.name}"
        if isinstance(error, litellm.ContextWindowExceededError):
            return ContextLengthExceeded(f"{who}: {said[:_MAX_MESSAGE]}", param="messages")
        if isinstance(error, litellm.Timeout):
            return ProviderTimeout(f"{who} took too long")
        if status == 429:
            wait = _retry_after(error)
            return ProviderBusy(f"{who} is busy: {said[:_MAX_MESSAGE]}", retry_after=wait)
        if status in (400, 413, 422):
            return ProviderRefused(f"{who}: {said[:_MAX_MESSAGE]}")
        if status in (401, 403, 404, 405):
            return ProviderError(
                f"{who} refuses this service ({status}): its operator must look at "
                "frozen.model_list"
            )
        if isinstance(status, int):
            return ProviderUnavailable(f"{who} cannot be reached, or fails ({status}); try again")
        log.warning("a call of %s failed in LiteLLM", self.name, exc_info=error)
        return ProviderError(f"{who} could not be asked this")


class LiteLLMProvider:
    """Every deployment of a model list, its references resolved."""

    def __init__(self, model_list: Iterable[Mapping[str, Any]], secret: Iterable[str]) -> None:
        """ConfigError for an entry that LiteLLM does not know what to do with."""
        _set_up()
        redact = Redactor(secret)
        self.deployments: dict[str, list[tuple[float, LiteLLMDeployment]]] = {}
        for number, entry in enumerate(model_list):
            deployment = _deployment(entry, number, redact)
            weight = float(entry["litellm_params"].get("weight") or 1.0)
            self.deployments.setdefault(deployment.name, []).append((weight, deployment))

    async def close(self) -> None:
        """End its connections."""
        from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

        with suppress(Exception):
            await close_litellm_async_clients()


def _set_up() -> None:
    # Messages of another provider's model take a module of the app's: at the first call it would
    # stop every stream for five seconds.
    load_app()
    import litellm

    # Of embeddings it takes 0 retries for none said.
    litellm.DEFAULT_MAX_RETRIES = 0
    litellm.num_retries = None
    # Servers that speak OpenAI's API need not have its Responses.
    litellm.use_chat_completions_url_for_anthropic_messages = True
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    # It would fetch tokenizers of some models when it counts: all are counted with its own.
    litellm.disable_hf_tokenizer_download = True
    _import_early()
    _fetch_nothing()


def _import_early() -> None:
    """What it would import at the first call, which would stop every stream for two seconds."""
    import litellm
    import openai

    for name in _LATE:
        importlib.import_module(name)
    client = openai.AsyncOpenAI(api_key="none")
    for name in ("chat", "completions", "embeddings", "responses"):
        getattr(client, name)
    litellm.token_counter(model="openai/gpt-4o", text="one")


def _fetch_nothing() -> None:
    """It would fetch images and files that a client names, from this host, and wait for them: some
    only to count their tokens, some in spite of MAX_IMAGE_URL_DOWNLOAD_SIZE_MB."""
    import litellm
    from litellm.litellm_core_utils import token_counter, url_utils
    from litellm.litellm_core_utils.prompt_templates import factory, image_handling
    from litellm.llms.anthropic.chat.transformation import AnthropicConfig
    from litellm.llms.gigachat import file_handler
    from litellm.llms.vertex_ai.gemini import transformation

    litellm.user_url_validation = True
    for module in (token_counter, url_utils, factory, image_handling):
        for name in ("safe_get", "async_safe_get"):
            if hasattr(module, name):
                setattr(module, name, _refuse_later if name.startswith("async") else _refuse)
    file_handler._download_image_sync = _refuse
    file_handler._download_image_async = _refuse_later
    transformation._get_gcs_object_content_type = _refuse
    token_counter.get_image_dimensions = _dimensions
    # A file would bring a tool that the provider runs.
    AnthropicConfig.add_code_execution_tool = _only_these


def _refuse(*_: Any, **__: Any) -> Any:
    import litellm

    raise litellm.ImageFetchError(
        "this service fetches nothing for a model: send it in the request"
    )


async def _refuse_later(*_: Any, **__: Any) -> Any:
    _refuse()


def _dimensions(data: str) -> tuple[int, int]:
    """Of an image: nothing that is charged goes by them."""
    return 300, 300


def _only_these(_: Any, messages: Any, tools: Any) -> Any:
    return tools


def _deployment(entry: Mapping[str, Any], number: int, redact: Redactor) -> LiteLLMDeployment:
    import litellm
    from litellm.utils import ProviderConfigManager

    name, params = entry["model_name"], dict(entry["litellm_params"])
    params.pop("weight", None)
    if (params.get("api_base") or params.get("base_url")) and not params.get("api_key"):
        # Else it would take the key of another provider from the environment.
        params["api_key"] = "none"
    try:
        model, provider, _, _ = litellm.get_llm_provider(
            params["model"],
            custom_llm_provider=params.get("custom_llm_provider"),
            api_base=params.get("api_base"),
        )
        responses = ProviderConfigManager.get_provider_responses_api_config(provider, model)
    except Exception as error:
        raise ConfigError(
            f"LiteLLM cannot use the model {params['model']!r} of {name} in frozen.model_list: "
            f"{redact.text(_message_of(error))[:_MAX_MESSAGE]}"
        ) from None
    return LiteLLMDeployment(
        name=name,
        model=params["model"],
        provider=provider,
        params=params,
        price=_price(entry, number, model, provider),
        keeps_responses=responses is not None,
        redact=redact,
    )


def _price(entry: Mapping[str, Any], number: int, model: str, provider: str) -> str | None:
    """Have LiteLLM know what the model costs, by its own table and the operator's words."""
    import litellm

    own = {**entry["model_info"], **entry["litellm_params"]}
    said = {key: own[key] for key in own if "cost" in key and own[key] is not None}
    try:
        known = dict(litellm.get_model_info(model, custom_llm_provider=provider))
    except Exception:
        known = {}
    if not known or litellm.model_cost.get(str(known["key"]), {}).get("source") == _OURS:
        known = {}
        _make_known(f"{provider}/{model}", provider, str(own.get("mode") or "chat"))
    if not said:
        priced = known.get("input_cost_per_token") is not None and known.get("key")
        free = not known.get("input_cost_per_token") and not known.get("output_cost_per_token")
        return str(model) if priced and not free else None
    if known.get("mode") != "embedding" and own.get("mode") != "embedding":
        if {"input_cost_per_token", "output_cost_per_token"} - said.keys() and not known:
            return None
    elif "input_cost_per_token" not in said:
        return None
    key = f"any-agent-frozen-{number}"
    base = {k: v for k, v in known.items() if "cost" in k and v is not None}
    if "input_cost_per_token" in said:
        # Else what a provider has in its cache would be free, and pass every cap.
        base |= dict.fromkeys(_INPUT, said["input_cost_per_token"])
    mode = own.get("mode") or known.get("mode") or "chat"
    litellm.register_model({key: {**base, **said, "litellm_provider": provider, "mode": mode}})
    return key


def _make_known(key: str, provider: str, mode: str) -> None:
    """Of a model that LiteLLM has not heard of it asks for a whole answer, and makes a stream of
    that, and it complains of its price at every call. What we reckon with stands elsewhere."""
    import litellm

    free = dict.fromkeys((*_INPUT, "output_cost_per_token"), 0.0)
    said = {"litellm_provider": provider, "mode": mode, "source": _OURS}
    litellm.register_model({key: {**free, **said, "supports_native_streaming": True}})


def _plain(answer: Any) -> dict[str, Any]:
    """An answer, or an event, as JSON has it."""
    if isinstance(answer, dict):
        plain = answer
    else:
        plain = answer.model_dump(mode="json", exclude_unset=True, warnings=False)
        if "choices" in plain:
            plain = _without_nulls(plain)
    plain.pop("_hidden_params", None)
    return plain


def _without_nulls(value: Any) -> Any:
    """As its own app answers; of its own fields most have no value."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


async def _events(source: Any) -> AsyncGenerator[Event]:
    async for event in source:
        yield _plain(event)


def _usage(api: FrozenApi, usage: dict[str, Any]) -> Any:
    from litellm.types.utils import Usage

    if api == "responses":
        from litellm.responses.utils import ResponseAPILoggingUtils

        return ResponseAPILoggingUtils._transform_response_api_usage_to_chat_usage(usage)
    if api == "messages":
        from litellm.llms.anthropic.chat.transformation import AnthropicConfig

        return AnthropicConfig().calculate_usage(usage_object=usage, reasoning_content=None)
    return Usage(**usage)


def _message_of(error: Exception) -> str:
    """What the provider said, without what LiteLLM put around it."""
    body = getattr(error, "body", None)
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    text = str(getattr(error, "message", None) or error)
    text = _HINT.sub("", _CLASS.sub("", text.strip()))
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text


def _retry_after(error: Exception) -> float | None:
    headers = getattr(error, "litellm_response_headers", None) or {}
    said = str(headers.get("retry-after", ""))
    return min(float(said), _MAX_WAIT) if said.isdigit() else None
