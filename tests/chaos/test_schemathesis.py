"""The API tried by its own description: what it says it takes is taken, what it says it answers is
what it answers, and nothing that is sent makes it fail."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.errors import InvalidSchema
from schemathesis.specs.openapi import checks

from any_agent.auth.access import Scope
from any_agent.errors import StoreUnavailable
from proxy_ext.api.model_routes import model_call_handlers
from proxy_ext.web.permissions import RULES
from tests.chaos.conftest import Figure
from tests.proxy_ext.api.test_openapi import OPERATIONS, SCHEMA
from tests.support.chaos.killable import KillableProxy, engine_in_thread
from tests.support.proxy import HELLO

ADMIN = "operator-secret"
SEED = 20_261_120
SHORT, LONG = 300, 5000
"""Cases in all."""
ROUTES = [
    route for route in OPERATIONS if route[1].startswith(("/rl/", "/grant", "/export", "/health"))
]
MODEL_CALLS = {f"/v1{path}" for path in model_call_handlers()}
API = schemathesis.openapi.from_dict(
    # Keys are ours to send.
    {
        **SCHEMA,
        "paths": {
            path: {m: {**o, "security": []} for m, o in methods.items()}
            for path, methods in SCHEMA["paths"].items()
        },
    }
)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
_SOON = 0.02
"""Seconds that a poll may wait here."""


class Service:
    """A rank's proxy, with sessions in every state for cases to be about."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.raw = requests.Session()
        self.raw.trust_env = False
        headers = {"Authorization": f"Bearer {ADMIN}"}
        self._admin = httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False)
        self._sessions: dict[str, tuple[str, str]] = {}
        """By what is to be true of it: a session's id and its key."""
        self._numbers = itertools.count()

    def unique(self) -> str:
        return f"-{next(self._numbers)}"

    def recover(self) -> None:
        """Undo what a case may have done: the run trains, its engine samples, slots are free."""
        for method, path, body in (
            ("PUT", "/rl/v1/run", {"state": "training"}),
            ("POST", "/rl/v1/resume", None),
            (
                "PUT",
                "/rl/v1/capacity",
                {"limit": 10**6, "ttl": 3600, "owner": f"o{next(self._numbers)}"},
            ),
        ):
            response = self._admin.request(method, path, json=body)
            assert response.status_code == 200, response.text

    def session(self, kind: str) -> tuple[str, str]:
        """An open, a called, a finalized or an aborted one."""
        known = self._sessions.get(kind)
        wanted = {"called": "open"}.get(kind, kind)
        if known is not None and self._state(known[0]) == wanted:
            return known
        opened = self._admin.post("/rl/v1/start_session", json={"group_size": 1, "task_id": "t"})
        assert opened.status_code == 200, opened.text
        session = opened.json()["session_id"], opened.json()["api_key"]
        headers = {"Authorization": f"Bearer {session[1]}"}
        steps: list[tuple[str, dict[str, Any]]] = []
        if kind in ("called", "finalized"):
            steps.append(("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}))
        if kind == "finalized":
            steps.append(("/rl/v1/finalize", {"final_reward": 1.0}))
        if kind == "aborted":
            steps.append((f"/rl/v1/sessions/{session[0]}/abort", {}))
        for path, body in steps:
            response = self._admin.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
        self._sessions[kind] = session
        return session

    def _state(self, session_id: str) -> str:
        response = self._admin.get(f"/rl/v1/sessions/{session_id}")
        return str(response.json().get("state"))

    def close(self) -> None:
        self.raw.close()
        self._admin.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Service]:
    with engine_in_thread(tiny_model_dir) as engine:
        proxy = KillableProxy(
            tmp_path_factory.mktemp("schemathesis"),
            tiny_model_dir,
            engine.url,
            f"server.admin_key={ADMIN}",
            f"sessions.max_wait={_SOON}",
        )
        proxy.start()
        service = Service(proxy.url)
        try:
            service.recover()
            yield service
        finally:
            service.close()
            proxy.close()


KINDS = ("open", "called", "finalized", "aborted")
SEEN: Counter[int] = Counter()


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_every_route_answers_as_its_schema_says(
    route: tuple[str, str], service: Service, long: bool, figure: Figure
) -> None:
    method, path = route
    operation = API[path][method]
    # Some take nothing, or nothing that may be wrong.
    share = (LONG if long else SHORT) // (len(ROUTES) - 7) + 1
    statuses: Counter[int] = Counter()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        try:
            cases = operation.as_strategy(generation_mode=mode)
            _run(service, route, mode, cases, (share + 1) // 2, statuses)
        except (InvalidSchema, Unsatisfiable):
            # There is no way to be wrong: it takes nothing.
            assert mode is GenerationMode.NEGATIVE
    SEEN.update(statuses)
    figure(f"{sum(statuses.values())} cases: {dict(sorted(statuses.items()))}")


def _run(
    service: Service,
    route: tuple[str, str],
    mode: GenerationMode,
    cases: st.SearchStrategy[Any],
    count: int,
    statuses: Counter[int],
) -> None:
    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, kind=st.sampled_from((*KINDS, None)), own=st.booleans())
    def run(case: Any, kind: str | None, own: bool) -> None:
        key = ADMIN
        if "Idempotency-Key" in case.headers:
            # Else an earlier case's answer may come again, whatever is wrong with this one.
            case.headers["Idempotency-Key"] += service.unique()
        if kind is not None and mode is GenerationMode.POSITIVE:
            if case.path == "/export_trajectories" and kind in ("open", "called"):
                # It would wait for their end.
                kind = "finalized"
            session, its_key = service.session(kind)
            _name(case, route, session)
            key = its_key if own and Scope.SESSION in RULES[route].scopes else key
        _shorten(case)
        headers = {"Authorization": f"Bearer {key}"}
        response = case.call(base_url=service.url, session=service.raw, headers=headers, timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            _check_error(response.json())
        if case.operation.label in DISTURBING:
            service.recover()

    run()


DISTURBING = (
    "PUT /rl/v1/run",
    "PUT /rl/v1/capacity",
    "POST /rl/v1/pause",
    "POST /rl/v1/version",
)


def _name(case: Any, route: tuple[str, str], session: str) -> None:
    """Have the case be about a session that there is."""
    if "X-Any-Agent-Session" in {p["name"] for p in OPERATIONS[route].get("parameters", ())}:
        case.headers["X-Any-Agent-Session"] = session
        case.query.pop("session_id", None)
    if "session_id" in (case.path_parameters or {}):
        case.path_parameters["session_id"] = session
    body = case.body
    if isinstance(body, dict):
        for field, value in (("session_id", session), ("session_ids", [session])):
            if field in body:
                body[field] = value
        for field in ("interaction_id", "completion_id"):
            body.pop(field, None)


def _shorten(case: Any) -> None:
    """Shorten the wait of a poll; one that is out of bounds stays, to be refused."""
    body = case.body
    if not (case.path.endswith("/lease") and isinstance(body, dict)):
        return
    wait = body.get("wait", 30.0)
    if isinstance(wait, int | float) and 0 <= wait <= 300:
        body["wait"] = min(_SOON, wait)


def _check_error(data: Any) -> None:
    error = data["error"]
    assert error["message"], data
    assert len(json.dumps(data)) < 4096, "an error grows with what was sent"


def test_unknown_fields_are_refused(service: Service) -> None:
    refused = 0
    for (method, path), operation in OPERATIONS.items():
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            continue
        session, key = service.session("called")
        response = service.raw.request(
            method,
            service.url + path.replace("{session_id}", session),
            json={"surprise": 1},
            headers={"Authorization": f"Bearer {key if path in MODEL_CALLS else ADMIN}"},
            timeout=30,
        )
        error = response.json()["error"]
        assert response.status_code == 400, (path, error)
        # Agents' parameters that nothing knows are recorded; the call lacks what it needs.
        reasons = ("surprise", "required", "must be") if path in MODEL_CALLS else ("surprise",)
        needs = "required" in error["message"]
        assert needs or any(one in error["message"] for one in reasons), (path, error)
        refused += 1
    assert refused > 15


def test_zz_no_case_of_any_route_was_answered_with_a_5xx(figure: Figure, long: bool) -> None:
    """No 5xx; the store was not made to fail here, so none may be explained by it."""
    total = sum(SEEN.values())
    figure(f"{total} cases over {len(ROUTES)} routes: {dict(sorted(SEEN.items()))}")
    assert total >= (LONG if long else SHORT)
    assert not [status for status in SEEN if status >= 500]
    assert StoreUnavailable.status not in SEEN
    assert SEEN[200] > total / 10, "nearly everything was refused: that proves little"
