"""LiteLLM as a library, and its app without a configuration (exactly 1.106.2, see the
constraints). `proxy_ext.litellm_proxy` has its app with an operator's own one.

Its app keeps its own start-up and lifespan; it runs behind our routes, not around them: nine
middlewares of its own (gzip, any-origin CORS, admission) would otherwise handle every stream.

Calls of frozen models use its library, not its app's pipeline or its router: these would retry,
choose other models, and add text to errors. This module corrects three faults of the library: it
calls providers twice, lets calls go on whose client left, and completes an answer that broke off.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import secrets
from collections.abc import AsyncGenerator, Mapping
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
    seconds_of,
)
from any_agent.runtime.logs import Redactor
from proxy_ext.litellm_streams import Event, as_json, close, lacks_finish_reason, stream_events

log = logging.getLogger(__name__)

_MAX_MESSAGE = 500  # characters of a provider's message that a client sees
_MAX_RETRY_AFTER = 60.0
_INPUT_COST, _OUTPUT_COST = "input_cost_per_token", "output_cost_per_token"
_INPUT_COSTS = (_INPUT_COST, "cache_read_input_token_cost", "cache_creation_input_token_cost")
_OURS = "any-agent"  # the source of models that this module has registered at LiteLLM
_MODULES = (
    "anyio._backends._asyncio",
    "litellm.llms.anthropic.pass_through.messages.streaming_iterator",
    "litellm.responses.mcp.litellm_proxy_mcp_handler",
)
_CLASS = re.compile(r"^(?:litellm\.)?(?:[A-Za-z]+(?:Error|Exception)\s*[:-]\s*)+")
_HINT = re.compile(r"\. Handle with `litellm\.[A-Za-z]+`\.$")


def load_app() -> Any:
    """Import LiteLLM's proxy app, set to need no network and no database."""
    # Read at import: prices from the package, not from the network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    # LiteLLM would fetch, from this host, what a client names; see _fetch_nothing.
    os.environ["MAX_IMAGE_URL_DOWNLOAD_SIZE_MB"] = "0"
    import litellm  # noqa: F401

    quieten()
    # LiteLLM requires a master key; this one is shown to no caller.
    os.environ["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(24)}"
    for name in ("DATABASE_URL", "CONFIG_FILE_PATH", "WORKER_CONFIG"):
        os.environ.pop(name, None)
    from litellm.proxy import proxy_server

    proxy_server.general_settings["disable_model_info_refresh"] = True
    quieten()
    return proxy_server.app


def quieten() -> None:
    """Let LiteLLM log errors only, by our handlers."""
    for name in ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        # LiteLLM's own handlers would bypass ours, which cut keys out.
        logger.handlers.clear()


def load_provider(model_list: ModelList) -> LiteLLMProvider | None:
    """Return the provider of the frozen models, if there are any.

    ConfigError for a model that cannot be used.
    """
    return LiteLLMProvider(model_list) if model_list else None


def lifespan(app: Any) -> AbstractAsyncContextManager[Any]:
    """Return LiteLLM's own start-up and shutdown."""
    context: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    return context


# -- frozen models -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiteLLMDeployment:
    """One place where a frozen model is served: an entry of the model list, references resolved.

    ``api`` is a name of `any_agent.completions.apis`.
    """

    name: str
    model: str
    """The model's name at LiteLLM, with the provider's name before it."""
    provider: str
    params: dict[str, Any] = field(repr=False)
    price: str | None
    """The name under which LiteLLM knows the price; None if it does not."""
    weight: float
    """Its share of the calls, among the places of its model."""
    keeps_responses: bool
    """True for a provider of the Responses API, which knows `previous_response_id`."""
    redact: Redactor = field(repr=False)

    @property
    def priced(self) -> bool:
        """Return True if the price of its tokens is known."""
        return self.price is not None

    async def complete(self, api: str, params: Mapping[str, Any], within: float) -> dict[str, Any]:
        """Return the body of an answer in ``within`` seconds; ProviderError."""
        try:
            return as_json(await self._call(api, params, within))
        except Exception as error:
            raise self._error(error) from None

    async def stream(
        self, api: str, params: Mapping[str, Any], within: float
    ) -> AsyncGenerator[Event]:
        """Yield the answer's events; closing the generator ends the call at the provider.

        ProviderError, also for an error event, and for a stream that breaks off before its end.
        """
        more: dict[str, Any] = {"stream": True}
        if api in ("chat", "completions"):
            more["stream_options"] = {**params.get("stream_options", {}), "include_usage": True}
        source: Any = None
        begun = False
        try:
            source = await self._call(api, {**params, **more}, within)
            async for event in stream_events(source):
                if event.get("type") == "error":
                    raise self._broken_off(event)
                begun = True
                yield event
            if lacks_finish_reason(source):
                # LiteLLM has made up an end.
                raise self._broken_off({})
        except Exception as error:
            known = self._error(error)
            if begun and known is not error and not isinstance(known, ProviderTimeout):
                # The error's own text, of any library, is in the log.
                known = self._broken_off({})
            raise known from None
        finally:
            await close(source)

    def cost(self, api: str, usage: Mapping[str, Any]) -> float | None:
        """Return the USD of a usage in the API's form; None if that is not known."""
        if self.price is None:
            return None
        try:
            return usd_of(self.price, self.provider, api, usage)
        except Exception:
            log.exception("LiteLLM cannot compute the cost of a call of %s", self.name)
            return None

    def count(self, text: str) -> int:
        """Return about how many tokens a text has, for a call without a reported usage."""
        return count_tokens(self.model, text)

    async def _call(self, api: str, params: Mapping[str, Any], within: float) -> Any:
        import litellm

        call = {
            "chat": litellm.acompletion,
            "completions": litellm.atext_completion,
            "responses": litellm.aresponses,
            "messages": litellm.anthropic_messages,
            "embeddings": litellm.aembedding,
        }[api]
        # The operator's parameters come last, so that none of a client's replaces them.
        own = {"timeout": within, **self.params, "num_retries": 0, "max_retries": 0}
        return await call(**{**params, **own})

    def _broken_off(self, event: Event) -> ProviderUnavailable:
        """Return the error of an answer without an end, with the message of its error event."""
        error = event.get("error")
        text = error.get("message") if isinstance(error, dict) else event.get("message")
        why = f": {self.redact.text(text)[:_MAX_MESSAGE]}" if isinstance(text, str) else ""
        return ProviderUnavailable(f"the provider of {self.name} broke off its answer{why}")

    def _error(self, error: Exception) -> AnyAgentError:
        """Return the client's error, with the provider's message where that is of the request."""
        if isinstance(error, AnyAgentError):
            return error
        import litellm

        status = getattr(error, "status_code", None)
        text = self.redact.text(_message_of(error))[:_MAX_MESSAGE]
        who = f"the provider of {self.name}"
        log.info("%s failed with %s %s: %s", who, status, type(error).__name__, text)
        if isinstance(error, litellm.ContextWindowExceededError):
            return ContextLengthExceeded(f"{who}: {text}", param="messages")
        if isinstance(error, litellm.Timeout):
            return ProviderTimeout(f"{who} did not answer in time")
        if status == 429:
            return ProviderBusy(f"{who} is busy: {text}", retry_after=_retry_after(error))
        if status in (400, 413, 422):
            return ProviderRefused(f"{who}: {text}")
        if status in (401, 403, 404, 405):
            return ProviderError(
                f"{who} refuses this service ({status}): its operator must look at "
                "frozen.model_list"
            )
        if isinstance(status, int):
            return ProviderUnavailable(f"{who} cannot be reached, or fails ({status}); try again")
        log.warning("a call of %s failed in LiteLLM", self.name, exc_info=error)
        return ProviderError(f"LiteLLM cannot make this call of {self.name}; see the service's log")


class LiteLLMProvider:
    """The deployments of a model list, by their model's name."""

    def __init__(self, model_list: ModelList) -> None:
        """Raise ConfigError for an entry that LiteLLM cannot use."""
        entries = resolved(model_list, os.environ)
        redact = Redactor(secrets_of(model_list, os.environ))
        _set_up()
        self.deployments: dict[str, list[LiteLLMDeployment]] = {}
        for number, entry in enumerate(entries):
            deployment = _deployment(entry, number, redact)
            self.deployments.setdefault(deployment.name, []).append(deployment)

    async def close(self) -> None:
        """Close the connections to providers."""
        from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

        with suppress(Exception):
            await close_litellm_async_clients()


def _set_up() -> None:
    # A call in Anthropic's form to another provider imports a module of the app: at the first call
    # that would stop every stream for five seconds.
    load_app()
    import litellm

    # For embeddings LiteLLM takes 0 retries as none given.
    litellm.DEFAULT_MAX_RETRIES = 0
    litellm.num_retries = None
    # Servers that speak OpenAI's API need not have its Responses.
    litellm.use_chat_completions_url_for_anthropic_messages = True
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    # LiteLLM would fetch some models' tokenizers to count tokens: its own counts for all.
    litellm.disable_hf_tokenizer_download = True
    warm_up()
    _fetch_nothing()


def warm_up() -> None:
    """Import what LiteLLM and its clients would import at a first call, and stop every stream for
    seconds by it."""
    import litellm
    import openai

    for name in _MODULES:
        importlib.import_module(name)
    client = openai.AsyncOpenAI(api_key="none")
    for name in ("chat", "completions", "embeddings", "responses"):
        getattr(client, name)
    litellm.token_counter(model="openai/gpt-4o", text="one")


def _fetch_nothing() -> None:
    """Stop LiteLLM from fetching images and files that a client names, and from waiting for them.

    It would fetch some only to count their tokens, some despite MAX_IMAGE_URL_DOWNLOAD_SIZE_MB.
    """
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
    # The sizes of images change no price.
    token_counter.get_image_dimensions = lambda data: (300, 300)
    # A file would add a tool that the provider runs.
    AnthropicConfig.add_code_execution_tool = lambda self, messages, tools: tools


def _refuse(*_: Any, **__: Any) -> Any:
    import litellm

    raise litellm.ImageFetchError(
        "this service fetches nothing for a model: send it in the request"
    )


async def _refuse_later(*_: Any, **__: Any) -> Any:
    _refuse()


def _deployment(entry: Mapping[str, Any], number: int, redact: Redactor) -> LiteLLMDeployment:
    import litellm
    from litellm.utils import ProviderConfigManager

    name, params = entry["model_name"], dict(entry["litellm_params"])
    weight = float(params.pop("weight", None) or 1.0)
    if (params.get("api_base") or params.get("base_url")) and not params.get("api_key"):
        # Otherwise LiteLLM would take another provider's key from the environment.
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
        weight=weight,
        keeps_responses=responses is not None,
        redact=redact,
    )


def _price(entry: Mapping[str, Any], number: int, model: str, provider: str) -> str | None:
    """Return the name of a price at LiteLLM, from its own table or the operator's configuration."""
    import litellm

    own = {**entry["model_info"], **entry["litellm_params"]}
    given = {key: own[key] for key in own if "cost" in key and own[key] is not None}
    try:
        known = dict(litellm.get_model_info(model, custom_llm_provider=provider))
    except Exception:
        known = {}
    if not known or litellm.model_cost.get(str(known["key"]), {}).get("source") == _OURS:
        known = {}
        # Of an unknown model LiteLLM makes a stream from a whole answer, and logs at every call
        # that it has no price. Costs are computed with another entry, below.
        free = dict.fromkeys((*_INPUT_COSTS, _OUTPUT_COST), 0.0)
        kind = {"mode": str(own.get("mode") or "chat"), "supports_native_streaming": True}
        about = {"litellm_provider": provider, "source": _OURS, **kind}
        litellm.register_model({f"{provider}/{model}": {**free, **about}})
    if not given:
        priced = known.get(_INPUT_COST) is not None and known.get("key")
        free_of_charge = not known.get(_INPUT_COST) and not known.get(_OUTPUT_COST)
        return str(model) if priced and not free_of_charge else None
    if known.get("mode") != "embedding" and own.get("mode") != "embedding":
        if {_INPUT_COST, _OUTPUT_COST} - given.keys() and not known:
            return None
    elif _INPUT_COST not in given:
        return None
    key = f"any-agent-frozen-{number}"
    base = {k: v for k, v in known.items() if "cost" in k and v is not None}
    if _INPUT_COST in given:
        # Otherwise cached tokens would be free, and no cap would count them.
        base |= dict.fromkeys(_INPUT_COSTS, given[_INPUT_COST])
    mode = own.get("mode") or known.get("mode") or "chat"
    litellm.register_model({key: {**base, **given, "litellm_provider": provider, "mode": mode}})
    return key


def usd_of(model: str, provider: str, api: str, usage: Mapping[str, Any]) -> float:
    """Return the USD of a usage in the API's form; LiteLLM's error if it knows no price."""
    from litellm.cost_calculator import cost_per_token

    prompt, output = cost_per_token(
        model=model,
        custom_llm_provider=provider,
        usage_object=_usage(api, dict(usage)),
        call_type="embedding" if api == "embeddings" else "completion",
    )
    return float(prompt + output)


def count_tokens(model: str, text: str) -> int:
    """Return about how many tokens a text has, for a call without a reported usage."""
    import litellm

    return int(litellm.token_counter(model=model, text=text))


def _usage(api: str, usage: dict[str, Any]) -> Any:
    from litellm.types.utils import Usage

    if api == "responses":
        from litellm.responses.utils import ResponseAPILoggingUtils

        return ResponseAPILoggingUtils._transform_response_api_usage_to_chat_usage(usage)
    if api == "messages":
        from litellm.llms.anthropic.chat.transformation import AnthropicConfig

        return AnthropicConfig().calculate_usage(usage_object=usage, reasoning_content=None)
    return Usage(**usage)


def _message_of(error: Exception) -> str:
    """Return the provider's message without LiteLLM's text around it."""
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
    seconds = seconds_of(str(headers.get("retry-after", "")))
    return None if seconds is None else min(seconds, _MAX_RETRY_AFTER)
