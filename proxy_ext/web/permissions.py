"""The table of routes and of the keys that may use them. `proxy_ext.middleware` applies it.

A route that is missing here is an error at the start of the proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi.routing import iter_route_contexts
from starlette.routing import compile_path

from any_agent.auth.access import METRICS_SCOPES, Scope
from any_agent.completions.apis import all_apis
from any_agent.errors import StartupError

EVERYBODY = frozenset(Scope)
KEYS = EVERYBODY - {Scope.NONE}  # callers with any key
AGENTS = frozenset({Scope.ADMIN, Scope.TENANT, Scope.SESSION})
JUDGES = AGENTS | {Scope.JUDGE}
"""Callers that reward and end sessions; `proxy_ext.sessions.rewards` says which."""
OPENERS = frozenset({Scope.ADMIN, Scope.TENANT})
TRAINERS = frozenset({Scope.ADMIN, Scope.TRAINER})
STARTERS = OPENERS | TRAINERS
"""Callers that open sessions: a trainer that runs agents on a dataset does so itself."""


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The rule of one method of one path."""

    scopes: frozenset[Scope]
    audited: bool = False
    """True if the audit log has each use, not only refusals."""


_AUDITED = "audited"
_TABLE: dict[str, tuple[frozenset[Scope], str]] = {
    # Recorded answers. Model calls are allowed by :func:`allow_model_calls`.
    "GET /v1/responses/{response_id}": (AGENTS, ""),
    "GET /responses/{response_id}": (AGENTS, ""),
    "DELETE /v1/responses/{response_id}": (AGENTS, ""),
    "DELETE /responses/{response_id}": (AGENTS, ""),
    "GET /v1/responses/{response_id}/input_items": (AGENTS, ""),
    "GET /responses/{response_id}/input_items": (AGENTS, ""),
    "GET /v1/models": (KEYS, ""),
    "GET /models": (KEYS, ""),
    "GET /v1/models/{model}": (KEYS, ""),
    "GET /models/{model}": (KEYS, ""),
    # Sessions.
    "POST /rl/v1/start_session": (STARTERS, ""),
    "GET /rl/v1/start_session": (OPENERS, ""),
    "POST /rl/v1/set_reward": (JUDGES, ""),
    "POST /rl/v1/feedback": (JUDGES, ""),
    "POST /rl/v1/finalize": (JUDGES, ""),
    "GET /rl/v1/sessions": (OPENERS, ""),
    "GET /rl/v1/tasks/next": (OPENERS, ""),
    "GET /rl/v1/sessions/{session_id}": (JUDGES, ""),
    "GET /rl/v1/sessions/{session_id}/content": (JUDGES, ""),
    "GET /rl/v1/sessions/{session_id}/interactions": (OPENERS, ""),
    "GET /rl/v1/sessions/{session_id}/interactions/{interaction_id}/tokens": (OPENERS, ""),
    "DELETE /rl/v1/sessions/{session_id}": (AGENTS, _AUDITED),
    "POST /rl/v1/sessions/{session_id}/heartbeat": (JUDGES, ""),
    "POST /rl/v1/sessions/{session_id}/abort": (JUDGES, _AUDITED),
    "POST /rl/v1/sessions/{session_id}/veto": (AGENTS, _AUDITED),
    # The run.
    "GET /rl/v1/run": (KEYS, ""),
    "PUT /rl/v1/run": (TRAINERS, _AUDITED),
    "GET /rl/v1/version": (KEYS, ""),
    "POST /rl/v1/version": (TRAINERS, _AUDITED),
    "POST /rl/v1/pause": (TRAINERS, _AUDITED),
    "POST /rl/v1/resume": (TRAINERS, _AUDITED),
    # Trajectories. An export leases what it exports, so it needs a trainer's key.
    "GET /rl/v1/capacity": (TRAINERS, ""),
    "PUT /rl/v1/capacity": (TRAINERS, ""),
    "POST /rl/v1/lease": (TRAINERS, ""),
    "POST /rl/v1/ack": (TRAINERS, ""),
    "POST /rl/v1/export_trajectories": (TRAINERS, _AUDITED),
    # AReaL's names.
    "POST /rl/start_session": (STARTERS, ""),
    "POST /rl/set_reward": (JUDGES, ""),
    "POST /rl/end_session": (JUDGES, ""),
    "POST /grant_capacity": (TRAINERS, ""),
    "POST /export_trajectories": (TRAINERS, _AUDITED),
    "GET /health": (EVERYBODY, ""),
    # Health and metrics.
    "GET /healthz": (EVERYBODY, ""),
    "GET /readyz": (EVERYBODY, ""),
    "GET /metrics": (METRICS_SCOPES, ""),
    "GET /openapi.json": (EVERYBODY, ""),
    "HEAD /openapi.json": (EVERYBODY, ""),
}

RULES: dict[tuple[str, str], RouteRule] = {}  # the rules by method and path template
FIXED_PATHS: set[str] = set()  # the paths without a parameter


def allow_model_calls(path: str) -> None:
    """Let agents' keys call an API at this path, and under `/v1`.

    A session's key is for that session, a tenant's key for the tenant's sessions.
    """
    for each in (f"/v1{path}", path):
        RULES["POST", each] = RouteRule(AGENTS)
        FIXED_PATHS.add(each)


for _path in (*(api.path for api in all_apis()), "/messages/count_tokens"):
    allow_model_calls(_path)
for _route, (_scopes, _note) in _TABLE.items():
    _method, _, _path = _route.partition(" ")
    RULES[_method, _path] = RouteRule(_scopes, audited=_note == _AUDITED)
FIXED_PATHS |= {path for _, path in RULES if "{" not in path}
_OPEN = {path: compile_path(path)[0] for _, path in RULES if "{" in path}

LITELLM_ALIVE = frozenset({("GET", "/health/liveliness"), ("GET", "/health/liveness")})
"""The routes of LiteLLM that we answer as it would, with any key and without one: a probe must not
make a rank import it. Without a configuration its other routes exist for no key."""
LITELLM_SCOPES = {"inference": AGENTS, "admin": frozenset({Scope.ADMIN})}


class LiteLLMRoutes:
    """The routes of LiteLLM's app, where an operator has a configuration of it, and their keys.

    `litellm_routes.txt` lists them; a route of a newer LiteLLM is closed until it is listed.
    """

    def __init__(self) -> None:
        self.rules: dict[tuple[str, str], str] = {}
        """The name of the scopes by method and path template."""
        for line in files(__package__).joinpath("litellm_routes.txt").read_text().splitlines():
            scope, methods, path = line.split()
            self.rules |= dict.fromkeys(((m, path) for m in methods.split(",")), scope)
        self._forms = {
            path: compile_path(path)[0] for path in dict.fromkeys(p for _, p in self.rules)
        }

    def rule(self, method: str, path: str) -> tuple[str, RouteRule] | None:
        """Return a request's template and rule; None if there is no route for it.

        LiteLLM takes the first of its templates that fits, so a key must be good for all of them.
        """
        fit = [each for each, form in self._forms.items() if form.fullmatch(path)]
        found = [t for t in fit if (method, t) in self.rules]
        if not found:
            return None
        scopes = frozenset.intersection(
            *(LITELLM_SCOPES[self.rules[method, template]] for template in found)
        )
        template = path if path in found else found[0]
        return template, RouteRule(scopes, audited=scopes == LITELLM_SCOPES["admin"])


def methods_of(template: str) -> list[str]:
    """Return the methods that a path template of ours takes."""
    return sorted(method for method, path in RULES if path == template)


def template_of(path: str) -> str | None:
    """Return the template of a request's path, or None where there is no route."""
    if path in FIXED_PATHS:
        return path
    return next((template for template, form in _OPEN.items() if form.fullmatch(path)), None)


def check_routes(routes: Iterable[Any]) -> None:
    """Raise StartupError for a route of the app that is not in the table."""
    missing = [f"{method} {path}" for method, path in listed(routes) if (method, path) not in RULES]
    if missing:
        raise StartupError(
            f"routes without a rule: {', '.join(missing)}; add each to proxy_ext/web/permissions.py"
        )


def listed(routes: Iterable[Any]) -> list[tuple[str, str]]:
    """Return every method and path template of an app's routes."""
    return [
        (method, str(route.path))
        for route in iter_route_contexts(list(routes))
        for method in sorted(route.methods or {"ANY"})
    ]
