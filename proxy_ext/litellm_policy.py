"""The policy's calls in LiteLLM: its guardrails judge them, and its callbacks and its count of
spending learn of them.

They never enter its pipeline. A call that is over is told to it in its standard payload.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from any_agent.errors import ConfigError
from proxy_ext.litellm_keys import hash_in
from proxy_ext.litellm_proxy import load_proxy
from proxy_ext.litellm_shim import quieten

log = logging.getLogger(__name__)

METRICS_PREFIX = "litellm_"
"""The beginning of the names of the metrics of LiteLLM's callback for Prometheus."""
_MAX_REASON = 500  # characters of a guardrail's words
_GUARDRAIL_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class PolicyEvent:
    """A call of the policy, a reward or a session's end, for LiteLLM's callbacks."""

    kind: str
    """``completion``, ``reward`` or ``end``."""
    id: str
    model: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    parameters: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tenant: str | None
    began: float
    ended: float


def require_guardrails(names: Sequence[str], path: str) -> None:
    """Raise ConfigError for a guardrail that the configuration does not define."""
    for name in names:
        if _guardrail(name) is None:
            raise ConfigError(
                f"litellm.policy_guardrails names {name}, which {path} does not define under "
                "guardrails"
            )


def _guardrail(name: str) -> Any:
    import litellm
    from litellm.integrations.custom_guardrail import CustomGuardrail

    own = (one for one in litellm.callbacks if isinstance(one, CustomGuardrail))
    return next((one for one in own if one.guardrail_name == name), None)


async def judge(
    name: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any] | None = None,
) -> str | None:
    """Return why a guardrail refuses a prompt or, where one is given, an answer; None if it does
    not, or is one for the other time."""
    import litellm
    from litellm.proxy import proxy_server
    from litellm.proxy._types import UserAPIKeyAuth
    from litellm.types.guardrails import GuardrailEventHooks

    guardrail = _guardrail(name)
    for kind in ("pre_call", "during_call") if answer is None else ("post_call",):
        if not guardrail._event_hook_is_event_type(GuardrailEventHooks(kind)):
            continue
        # A copy: a guardrail may change what it is given.
        given = copy.deepcopy(list(messages))
        data = {"model": model, "messages": given, "metadata": {"guardrails": [name]}}
        response = None
        if answer is not None:
            choice = {"index": 0, "message": dict(answer), "finish_reason": "stop"}
            response = litellm.ModelResponse(model=model, choices=[choice])
        try:
            async with asyncio.timeout(_GUARDRAIL_TIMEOUT):
                result = await proxy_server.proxy_logging_obj._execute_guardrail_hook(
                    callback=guardrail,
                    hook_type=kind,
                    data=data,
                    user_api_key_dict=UserAPIKeyAuth(),
                    call_type="acompletion",
                    response=response,
                )
        except TimeoutError:
            return f"it did not answer within {_GUARDRAIL_TIMEOUT:g} s"
        except Exception as error:
            detail = getattr(error, "detail", None) or getattr(error, "message", None) or error
            return str(detail)[:_MAX_REASON]
        if isinstance(result, str):
            return result[:_MAX_REASON]
        told = result.get("messages", given) if isinstance(result, dict) else given
        if answer is None and told != list(messages):
            return "it would rewrite the messages, which are recorded as the agent sent them"
    return None


async def load_callbacks(path: str) -> None:
    """Read the configuration and set its callbacks up, in a process that serves nothing."""
    load_proxy(path)
    from litellm.proxy import proxy_server

    router, _, _ = await proxy_server.proxy_config.load_config(router=None, config_file_path=path)
    proxy_server.proxy_logging_obj.startup_event(llm_router=router, redis_usage_cache=None)
    quieten()


async def flush_callbacks() -> None:
    """Have the callbacks that collect what they are told send it; others do so as Python ends."""
    import litellm
    from litellm.integrations.custom_batch_logger import CustomBatchLogger

    for callback in {id(each): each for each in litellm._async_success_callback}.values():
        if isinstance(callback, CustomBatchLogger):
            try:
                await callback.flush_queue()
            except Exception as error:
                log.warning("LiteLLM's callback could not send: %s", error)


async def tell(event: PolicyEvent, input_cost: float, output_cost: float) -> None:
    """Give an event to LiteLLM's logging callbacks, in its standard payload."""
    told = _Told.of(event, input_cost, output_cost)
    logged, args = told.logged, (told.response, told.began, told.ended)
    await logged.async_success_handler(*args)
    if logged._should_run_sync_callbacks_for_async_calls():
        await asyncio.to_thread(logged.success_handler, *args)


async def charge(event: PolicyEvent, input_cost: float, output_cost: float) -> None:
    """Have LiteLLM count a call of a virtual key's: for the budgets of the key, its user and its
    team, and in its log of spending."""
    from litellm.litellm_core_utils.litellm_logging import get_standard_logging_object_payload
    from litellm.proxy.hooks.proxy_track_cost_callback import ProxyDBLogger

    told = _Told.of(event, input_cost, output_cost)
    payload = get_standard_logging_object_payload(
        kwargs=told.logged.model_call_details,
        init_response_obj=told.response,
        start_time=told.began,
        end_time=told.ended,
        logging_obj=told.logged,
        status="success",
    )
    kwargs = {**told.logged.model_call_details, "standard_logging_object": payload}
    # LiteLLM logs what fails in it.
    await ProxyDBLogger().async_log_success_event(kwargs, told.response, told.began, told.ended)


@dataclass(frozen=True, slots=True)
class _Told:
    """An event as LiteLLM knows calls that are over."""

    logged: Any
    """LiteLLM's own object of a call."""
    response: Any
    began: datetime
    ended: datetime

    @classmethod
    def of(cls, event: PolicyEvent, input_cost: float, output_cost: float) -> Self:
        """``input_cost``, ``output_cost``: USD of a token."""
        import litellm
        from litellm.litellm_core_utils.litellm_logging import Logging

        began, ended = (datetime.fromtimestamp(at, UTC) for at in (event.began, event.ended))
        logged = Logging(
            model=event.model,
            messages=event.messages,
            stream=False,
            call_type="acompletion",
            start_time=began,
            litellm_call_id=event.id,
            function_id="any-agent",
            kwargs={},
        )
        logged.update_environment_variables(
            model=event.model,
            user=event.tenant or "",
            optional_params=dict(event.parameters),
            litellm_params={"metadata": _metadata(event), "api_base": ""},
            custom_llm_provider="any_agent",
        )
        usage = litellm.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.output_tokens,
            total_tokens=event.prompt_tokens + event.output_tokens,
        )
        choice = {"index": 0, "message": event.answer, "finish_reason": event.finish_reason}
        response = litellm.ModelResponse(
            id=event.id, model=event.model, created=int(event.ended), choices=[choice], usage=usage
        )
        # LiteLLM takes a cost that is given, and has no price for the policy.
        cost = event.prompt_tokens * input_cost + event.output_tokens * output_cost
        response._hidden_params["response_cost"] = cost
        logged.model_call_details |= {"response_cost": cost, "completion_start_time": ended}
        return cls(logged, response, began, ended)


def _metadata(event: PolicyEvent) -> dict[str, Any]:
    about = {**event.metadata, "any_agent_event": event.kind}
    # Of names that LiteLLM does not know it passes on those in here alone.
    known: dict[str, Any] = {"user_api_key_auth_metadata": about}
    if (key := hash_in(event.tenant)) is not None:
        # LiteLLM finds the key's user and team.
        known |= {"user_api_key": key, "user_api_key_hash": key}
    else:
        known["user_api_key_user_id"] = event.tenant
    return {**about, **known}
