"""The exception tree, with the HTTP status and the code of each class.

AnyAgentError                      500 internal_error
├── InvalidRequest                 400 invalid_request
│   ├── UnsupportedParameter       400 unsupported_parameter
│   ├── ContextLengthExceeded      400 context_length_exceeded
│   ├── TemplateError              400 template_error
│   └── SessionMismatch            400 session_mismatch
├── Unauthenticated                401 invalid_api_key
├── SpendCapExceeded               402 spend_cap_exceeded
├── BudgetExhausted                402 budget_exhausted
├── Forbidden                      403 forbidden
├── NotFound                       404 not_found
├── MethodNotAllowed               405 method_not_allowed
├── Conflict                       409 conflict
│   ├── RunFinished                409 run_finished
│   └── VersionGone                409 version_gone
├── StaleOwner                     409 stale_owner
├── SessionClosed                  410 session_closed
│   └── SessionDamaged             410 session_damaged
├── PayloadTooLarge                413 payload_too_large
├── UnsupportedEncoding            415 unsupported_encoding
├── Misdirected                    421 misdirected
├── Unprocessable                  422 unprocessable
│   └── InvalidTrajectory          422 invalid_trajectory (a ValueError, too)
├── NoWebSocket                    426 no_websocket
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
│   ├── RunNotReady                503 run_starting
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
from collections.abc import Iterable
from typing import Any, ClassVar

_BUSY_STATUSES = (429, 503, 507)
"""Statuses of refusals for want of capacity: all of them name a time for the next attempt."""
_DEFAULT_RETRY_AFTER = 2.0
RUN_STATE_HEADER = "x-any-agent-run-state"
"""Header of a 503 whose run has no place yet (``queued``), or is being started (``starting``): its
client waits, for longer than for a service that is away."""
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class AnyAgentError(Exception):
    """The root of the tree. ``message`` states what failed and what to do about it."""

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    """True if the same request may succeed later; otherwise a header tells SDKs not to retry."""

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, retryable: bool | None = None
    ) -> None:
        """Set the class variables that are given; the others are inherited."""
        super().__init_subclass__()
        cls.status = cls.status if status is None else status
        cls.default_code = code or cls.default_code
        cls.retryable = cls.retryable if retryable is None else retryable

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
        """Return the error in OpenAI's shape, so that its SDKs show the message."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        error: dict[str, Any] = {
            "message": self.message,
            "type": _OPENAI_TYPES.get(self.status, other),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error | self.details}

    def headers(self) -> dict[str, str]:
        """Return ``Retry-After`` where a later attempt may succeed, else ``x-should-retry: false``.

        Every refusal for want of capacity (429, 503, 507) has a ``Retry-After``.
        """
        wait = self.retry_after
        if wait is None and self.status in _BUSY_STATUSES:
            wait = _DEFAULT_RETRY_AFTER
        if wait is not None:
            return {"Retry-After": str(max(1, math.ceil(wait)))}
        return {} if self.retryable else {"x-should-retry": "false"}


class InvalidRequest(AnyAgentError, status=400, code="invalid_request"):
    """The request is malformed."""


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    """The request has a parameter that the service does not support."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt is longer than the model's context."""


class TemplateError(InvalidRequest, code="template_error"):
    """The chat template cannot render these messages."""


class SessionMismatch(InvalidRequest, code="session_mismatch"):
    """Two places of one request name different sessions."""


class Unauthenticated(AnyAgentError, status=401, code="invalid_api_key"):
    """The request has no key where one is required, or an invalid key."""


class SpendCapExceeded(AnyAgentError, status=402, code="spend_cap_exceeded"):
    """No money is left for calls of frozen models. SDKs do not retry a 402, as they do a 429."""


class BudgetExhausted(AnyAgentError, status=402, code="budget_exhausted"):
    """An account of a cloud has used up its budget; ``details`` say of what, and until when."""


class Forbidden(AnyAgentError, status=403, code="forbidden"):
    """The key is valid, but its scope does not allow the request."""


class NotFound(AnyAgentError, status=404, code="not_found"):
    """The named object does not exist."""


class MethodNotAllowed(AnyAgentError, status=405, code="method_not_allowed"):
    """The path exists, for other methods."""

    @classmethod
    def of(cls, method: str, path: str, allowed: Iterable[str]) -> MethodNotAllowed:
        """Return the error for a method that is none of the allowed ones."""
        names = ", ".join(sorted(allowed))
        return cls(f"{path} takes {names}, not {method}", details={"allowed": names})

    def headers(self) -> dict[str, str]:
        """Return the headers of the tree's root with the methods that are allowed."""
        allowed = self.details.get("allowed")
        return {**super().headers(), **({"Allow": allowed} if allowed else {})}


class Conflict(AnyAgentError, status=409, code="conflict"):
    """The request does not fit the object's present state."""


class RunFinished(Conflict, code="run_finished"):
    """The training has finished and takes no more sessions."""


class StaleOwner(AnyAgentError, status=409, code="stale_owner"):
    """A later start of the trainer has replaced the one that sent the request."""


class VersionGone(Conflict, code="version_gone"):
    """The engine does not serve the weight version that a session is pinned to."""

    @classmethod
    def of(cls, pinned: object, serving: int) -> VersionGone:
        """Return the error for a call of a pinned session."""
        return cls(
            f"the session is pinned to weight version {pinned}, and the engine serves {serving}; "
            'open another one with version "current"',
            details={"pinned": pinned, "serving": serving},
        )

    @classmethod
    def at_open(cls, wanted: object, serving: int) -> VersionGone:
        """Return the error for opening a session that is to be pinned to another version."""
        return cls(
            f"weight version {wanted} is not available: the engine serves {serving}; open with "
            f'version {serving}, or "current"',
            details={"pinned": wanted, "serving": serving},
        )


class SessionClosed(AnyAgentError, status=410, code="session_closed"):
    """The session has ended."""


class SessionDamaged(SessionClosed, code="session_damaged"):
    """The session's stored record cannot be read completely."""


class PayloadTooLarge(AnyAgentError, status=413, code="payload_too_large"):
    """The body is larger than the service accepts."""


class UnsupportedEncoding(AnyAgentError, status=415, code="unsupported_encoding"):
    """The body has a `Content-Encoding` that the service does not take."""

    accepted: ClassVar[str] = "gzip, deflate"

    def headers(self) -> dict[str, str]:
        """Return the headers of the tree's root with the codings that are taken."""
        return {**super().headers(), "Accept-Encoding": self.accepted}


class Misdirected(AnyAgentError, status=421, code="misdirected"):
    """Another rank must open the session; the router finds it, so that no client gets this."""


class Unprocessable(AnyAgentError, status=422, code="unprocessable"):
    """The request is well-formed, but cannot be carried out."""


class InvalidTrajectory(Unprocessable, ValueError, code="invalid_trajectory"):
    """A workflow's result cannot be trained on; the message names the field and its requirement."""


class NoWebSocket(AnyAgentError, status=426, code="no_websocket"):
    """A client asks for a WebSocket; Codex, told so with this status, goes on with requests."""


class TooManyRequests(AnyAgentError, status=429, code="no_capacity", retryable=True):
    """No slot is free, or a limit is reached."""


class ReplyLost(AnyAgentError, status=502, code="reply_lost"):
    """A rank died after it had received the request: the effect of the request is unknown."""

    repeatable = False
    """True if the request may be sent again unchanged, because it takes effect only once."""

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true"} if self.repeatable else super().headers()


class ProviderError(AnyAgentError, status=502, code="provider_error"):
    """The provider of a frozen model sent an invalid response, or refuses the operator's key."""


class ProviderRefused(ProviderError, status=400, code="provider_refused"):
    """The provider refuses this request."""


class ProviderBusy(ProviderError, status=429, code="provider_busy", retryable=True):
    """The provider's rate limit is reached."""


class ProviderUnavailable(ProviderError, status=503, code="provider_unavailable", retryable=True):
    """The provider cannot be reached, or fails."""


class ProviderTimeout(ProviderError, status=504, code="provider_timeout"):
    """The provider took too long. It may charge for that request, and for another attempt too."""


class EngineUnavailable(AnyAgentError, status=503, code="engine_unavailable", retryable=True):
    """The inference engine cannot be reached, or is busy."""


class EngineMismatch(AnyAgentError, code="engine_mismatch"):
    """The engine's answer does not fit the request: nothing of it may be recorded."""


class StoreUnavailable(AnyAgentError, status=503, code="store_unavailable", retryable=True):
    """The store cannot write at present."""


class StoreBusy(StoreUnavailable, code="store_busy"):
    """The store did not accept the write: the request did not even begin."""


class StoreFull(StoreUnavailable, status=507, code="store_full"):
    """The store's disk is full; stored records can be read."""


class ServiceUnavailable(AnyAgentError, status=503, code="service_unavailable", retryable=True):
    """A client could not reach the service."""


class RunNotReady(ServiceUnavailable, code="run_starting"):
    """A service of several runs has not started this one yet; ``state`` of its details says why."""

    def headers(self) -> dict[str, str]:
        """Return the headers of the tree's root with the state, for whose end clients wait."""
        state = self.details.get("state")
        return {**super().headers(), **({RUN_STATE_HEADER: state} if state else {})}


class Draining(ServiceUnavailable, code="draining"):
    """A process that is stopping accepts no new request: this one did not even begin."""


class WrongService(AnyAgentError, status=502, code="wrong_service"):
    """The server at the URL is no service of any-agent, or one of another API version."""


class ConfigError(AnyAgentError, code="bad_config"):
    """The configuration is wrong; nothing was started."""

    exit_code = 2


class DatasetError(ConfigError, code="bad_dataset"):
    """A dataset, or an item of it, cannot be read."""


class StartupError(AnyAgentError, code="startup_failed"):
    """A process could not start; the ones that had started were stopped."""

    exit_code = 1


class TrainingError(AnyAgentError, code="training_failed"):
    """Training cannot go on; its results so far are kept."""


class RolloutError(AnyAgentError, code="rollout_failed"):
    """No episode of a batch may be trained on."""


class AgentFailed(AnyAgentError, code="agent_failed"):
    """One run of an agent produced nothing to train on; its code is the reason.

    ``agent_failed`` (it raised), ``agent_timeout``, ``agent_crashed`` (its process died),
    ``invalid_reward`` (it returned no valid reward), ``no_model_call`` (no call reached the
    service), ``returned_none`` (its episode returned None).
    """


_BY_CODE: dict[str, type[AnyAgentError]] = {}


def from_response(status: int, content: bytes, retry_after: str | None) -> AnyAgentError:
    """Return the error of a service's response, as the class that was raised there."""
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
    return kind(message, code=code, param=param, retry_after=seconds_of(retry_after))


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header; None without one, and for a date or junk."""
    text = retry_after or ""
    # "\u00b2" is a digit that is no number.
    return float(text) if text.isascii() and text.isdigit() else None


def _by_status(status: int) -> type[AnyAgentError]:
    if status in (502, 504):
        # A proxy in front of the service could not reach it.
        return ServiceUnavailable
    kinds = [kind for kind in AnyAgentError.__subclasses__() if kind.status == status]
    return kinds[0] if kinds and status != AnyAgentError.status else AnyAgentError
