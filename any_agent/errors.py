"""One exception tree. Each class names the HTTP status and the code that a caller sees.

AnyAgentError                      500 internal_error
├── InvalidRequest                 400 invalid_request
│   ├── UnsupportedParameter       400 unsupported_parameter
│   ├── ContextLengthExceeded      400 context_length_exceeded
│   ├── TemplateError              400 template_error
│   └── SessionMismatch            400 session_mismatch
├── Unauthenticated                401 invalid_api_key
├── SpendCapExceeded               402 spend_cap_exceeded
├── Forbidden                      403 forbidden
├── NotFound                       404 not_found
├── Conflict                       409 conflict
│   ├── RunFinished                409 run_finished
│   └── VersionGone                409 version_gone
├── StaleOwner                     409 stale_owner
├── SessionClosed                  410 session_closed
│   └── SessionDamaged             410 session_damaged
├── PayloadTooLarge                413 payload_too_large
├── Unprocessable                  422 unprocessable
│   └── InvalidTrajectory          422 invalid_trajectory (a ValueError, too)
├── TooManyRequests                429 no_capacity
├── ReplyLost                      502 reply_lost
├── ProviderError                  502 provider_error
│   ├── ProviderRefused            400 provider_refused
│   ├── ProviderBusy               429 provider_busy
│   ├── ProviderUnavailable        503 provider_unavailable
│   └── ProviderTimeout            504 provider_timeout
├── EngineUnavailable              503 engine_unavailable
├── EngineMismatch                 500 engine_mismatch
├── StoreUnavailable               503 store_unavailable
│   ├── StoreBusy                  503 store_busy
│   └── StoreFull                  507 store_full
├── ServiceUnavailable             503 service_unavailable
│   └── Draining                   503 draining
├── WrongService                   502 wrong_service
├── ConfigError                    500 bad_config (exit code 2)
│   └── DatasetError               500 bad_dataset
├── StartupError                   500 startup_failed (exit code 1)
├── TrainingError                  500 training_failed
├── RolloutError                   500 rollout_failed
└── AgentFailed                    500 agent_failed
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

_TURNED_AWAY = (429, 503, 507)
_RETRYABLE = 2.0
"""Seconds, where nothing better is known."""


class AnyAgentError(Exception):
    """The root. ``message`` says what is wrong and what to do about it."""

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed later; otherwise SDKs are told not to retry."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after = retry_after
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape, so that its SDKs show the message."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _openai_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error | self.details}

    def headers(self) -> dict[str, str]:
        """``Retry-After`` where a later try may succeed, ``x-should-retry: false`` elsewhere.

        Whoever is turned away for want of anything (429, 503, 507) is told when to come again.
        """
        wait = self.retry_after
        if wait is None and self.status in _TURNED_AWAY:
            wait = _RETRYABLE
        if wait is not None:
            return {"Retry-After": str(max(1, math.ceil(wait)))}
        return {} if self.retryable else {"x-should-retry": "false"}


def _openai_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


class InvalidRequest(AnyAgentError):
    status = 400
    default_code = "invalid_request"


class UnsupportedParameter(InvalidRequest):
    default_code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class TemplateError(InvalidRequest):
    """The chat template cannot render these messages."""

    default_code = "template_error"


class SessionMismatch(InvalidRequest):
    """Two places of one request name different sessions."""

    default_code = "session_mismatch"


class Unauthenticated(AnyAgentError):
    status = 401
    default_code = "invalid_api_key"


class SpendCapExceeded(AnyAgentError):
    """Nothing is left for calls of frozen models. SDKs try a 402 once, and a 429 again."""

    status = 402
    default_code = "spend_cap_exceeded"


class Forbidden(AnyAgentError):
    status = 403
    default_code = "forbidden"


class NotFound(AnyAgentError):
    status = 404
    default_code = "not_found"


class Conflict(AnyAgentError):
    status = 409
    default_code = "conflict"


class RunFinished(Conflict):
    default_code = "run_finished"


class StaleOwner(AnyAgentError):
    """A later start of the trainer has taken over from the one that asks."""

    status = 409
    default_code = "stale_owner"


class VersionGone(Conflict):
    """The engine does not serve the weight version that a session is pinned to."""

    default_code = "version_gone"

    @classmethod
    def of(cls, pinned: object, serving: int) -> VersionGone:
        """What a call of a pinned session is told."""
        return cls(
            f"the session is pinned to weight version {pinned}, and the engine serves {serving}; "
            'open another one with version "current"',
            details={"pinned": pinned, "serving": serving},
        )

    @classmethod
    def at_open(cls, wanted: object, serving: int) -> VersionGone:
        """What an open is told that wants to pin its session to another version."""
        return cls(
            f"weight version {wanted} cannot be had: the engine serves {serving}; open with "
            f'version {serving}, or "current"',
            details={"pinned": wanted, "serving": serving},
        )


class SessionClosed(AnyAgentError):
    status = 410
    default_code = "session_closed"


class SessionDamaged(SessionClosed):
    """What is stored of the session cannot be read whole."""

    default_code = "session_damaged"


class PayloadTooLarge(AnyAgentError):
    status = 413
    default_code = "payload_too_large"


class Unprocessable(AnyAgentError):
    status = 422
    default_code = "unprocessable"


class InvalidTrajectory(Unprocessable, ValueError):
    """A workflow returned what cannot be trained on; names the field and what it must be."""

    default_code = "invalid_trajectory"


class TooManyRequests(AnyAgentError):
    status = 429
    default_code = "no_capacity"
    retryable = True


class ReplyLost(AnyAgentError):
    """A rank died after it got the request: whether it did what was asked is not known."""

    status = 502
    default_code = "reply_lost"
    repeatable = False
    """Whether the request may be sent again as it was: what it asks for happens once."""

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true"} if self.repeatable else super().headers()


class ProviderError(AnyAgentError):
    """The provider of a frozen model answered what is no answer, or refuses the operator."""

    status = 502
    default_code = "provider_error"


class ProviderRefused(ProviderError):
    """It does not take this request."""

    status = 400
    default_code = "provider_refused"


class ProviderBusy(ProviderError):
    status = 429
    default_code = "provider_busy"
    retryable = True


class ProviderUnavailable(ProviderError):
    """It cannot be reached, or fails."""

    status = 503
    default_code = "provider_unavailable"
    retryable = True


class ProviderTimeout(ProviderError):
    """It took too long. It may charge for that, and would for another try."""

    status = 504
    default_code = "provider_timeout"


class EngineUnavailable(AnyAgentError):
    status = 503
    default_code = "engine_unavailable"
    retryable = True


class EngineMismatch(AnyAgentError):
    """The engine answered something else than it was asked for: nothing of it may be recorded."""

    default_code = "engine_mismatch"


class StoreUnavailable(AnyAgentError):
    status = 503
    default_code = "store_unavailable"
    retryable = True


class StoreBusy(StoreUnavailable):
    """The store took nothing: what was asked for was not even begun."""

    default_code = "store_busy"


class StoreFull(StoreUnavailable):
    """The store's disk has no room; what is stored can be read."""

    status = 507
    default_code = "store_full"


class ServiceUnavailable(AnyAgentError):
    """A client could not reach the service."""

    status = 503
    default_code = "service_unavailable"
    retryable = True


class Draining(ServiceUnavailable):
    """A part that stops ends what is under way and begins nothing: it was not even begun."""

    default_code = "draining"


class WrongService(AnyAgentError):
    """What answers at the URL is no service of any-agent, or one that speaks another version."""

    status = 502
    default_code = "wrong_service"


class ConfigError(AnyAgentError):
    """The configuration is wrong; nothing was started."""

    default_code = "bad_config"
    exit_code = 2


class DatasetError(ConfigError):
    """A dataset, or an item of it, cannot be read."""

    default_code = "bad_dataset"


class StartupError(AnyAgentError):
    """A part could not start; what had started was stopped."""

    default_code = "startup_failed"
    exit_code = 1


class TrainingError(AnyAgentError):
    """Training cannot go on; what it has so far is kept."""

    default_code = "training_failed"


class RolloutError(AnyAgentError):
    """The episodes of a batch came to nothing: none of them may be trained on."""

    default_code = "rollout_failed"


class AgentFailed(AnyAgentError):
    """One run of an agent gave nothing to train on: what it did wrong is the code.

    ``agent_failed`` (it raised), ``agent_timeout``, ``agent_crashed`` (its process died),
    ``invalid_reward`` (what it returned is no reward), ``no_model_call`` (no call reached the
    service).
    """

    default_code = "agent_failed"


_BY_CODE: dict[str, type[AnyAgentError]] = {}


def from_response(status: int, content: bytes, retry_after: str | None) -> AnyAgentError:
    """The error that a service answered, as the class that it raised there."""
    if not _BY_CODE:
        waiting = [AnyAgentError]
        while waiting:
            kind = waiting.pop()
            _BY_CODE.setdefault(kind.default_code, kind)
            waiting += kind.__subclasses__()
    try:
        error = json.loads(content)["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, code, param = content[:300].decode(errors="replace"), None, None
    kind = _BY_CODE.get(code or "") or _by_status(status)
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    return kind(message, code=code, param=param, retry_after=wait)


def _by_status(status: int) -> type[AnyAgentError]:
    if status in (502, 504):
        # Something in front of the service could not reach it.
        return ServiceUnavailable
    kinds = [kind for kind in AnyAgentError.__subclasses__() if kind.status == status]
    return kinds[0] if kinds and status != AnyAgentError.status else AnyAgentError
