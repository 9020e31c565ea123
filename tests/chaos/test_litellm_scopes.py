"""Every route of LiteLLM with every kind of key, at a rank with a LiteLLM configuration and through
the router: who lacks the scope is refused by us, and nothing of it reaches LiteLLM.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from any_agent.auth.access import Scope
from proxy_ext.web import permissions as scopes
from tests.chaos.conftest import Figure
from tests.chaos.test_scopes import (
    ADMIN,
    SCOPE_OF,
    Service,
    all_of,
    asker,
    bearer,
    every_kind,
    litellm_routes,
    send,
    service_at,
)
from tests.support import litellm
from tests.support.chaos.noting_proxy import NEW_ROUTE
from tests.support.fake_provider import Provider
from tests.support.waiting import until

_TURNS = 8
_ANSWERED_WITHIN = 4.0
_SCOPES = ("none", "session", "judge", "tenant", "trainer")
_EVERY = 10
_OURS = {(401, "invalid_api_key"), (403, "forbidden"), (404, "not_found")}
_OURS |= {(405, "method_not_allowed")}
"""Refusals of ours, by status and code."""


def refusal(kind: str, rule: scopes.RouteRule) -> tuple[int, str] | None:
    """Return the refusal that the table asks for; None for a good key."""
    scope = SCOPE_OF[kind]
    if scope is None or scope is Scope.NONE:
        return 401, "invalid_api_key"
    return None if scope in rule.scopes else (403, "forbidden")


async def test_every_route_of_litellm_lets_in_only_the_right_kinds_of_keys(
    tmp_path: Path,
    tiny_model_dir: Path,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
    long: bool,
) -> None:
    notes = tmp_path / "reached.txt"
    notes.touch()
    monkeypatch.setenv(litellm.VARIABLE, litellm.SECRET)
    monkeypatch.setenv("TEST_CALLBACK_LOG", str(tmp_path / "told.jsonl"))
    provider = Provider()
    async with provider.serve() as url:
        data = litellm.examples(url)
        data["general_settings"]["master_key"] = ADMIN
        path = litellm.write_litellm(tmp_path / "litellm", data)
        program = ("tests.support.chaos.noting_proxy", str(notes))
        own = {"config": str(path)}
        async with service_at(tmp_path, tiny_model_dir, *program, litellm=own) as service:

            async def serves() -> bool:
                async with service.http.get(f"{service.proxy}/readyz") as answer:
                    return "litellm" not in await answer.json()

            await until(serves, "LiteLLM", within=240)
            await nobody_gets_further_than_the_table_says(service, notes, figure, long=long)
            assert not provider.requests
            await an_admin_reaches_each(service, notes, figure)
            # Nothing that an admin did has opened a thing.
            keys, _ = await every_kind(service)
            for method, path_, rule in litellm_routes():
                if rule.scopes == scopes.LITELLM_SCOPES["admin"]:
                    said = await send(
                        service, method, service.proxy + path_, bearer(keys["session"])
                    )
                    assert said.status == 403, (method, path_, said)
            unknown = await send(service, "GET", service.proxy + NEW_ROUTE, bearer(ADMIN))
            assert (unknown.status, unknown.code) == (404, "not_found")
    log = (tmp_path / "proxy.log").read_text()
    assert litellm.SECRET not in log


async def nobody_gets_further_than_the_table_says(
    service: Service, notes: Path, figure: Figure, *, long: bool
) -> None:
    one = await asker(service)
    unknown = [("GET", NEW_ROUTE), ("POST", NEW_ROUTE), ("OPTIONS", "/key/generate")]

    # The router judges no key of these routes: it passes them on, as one of each scope shows.
    asked = [(service.proxy, kind) for kind in SCOPE_OF]
    asked += [(service.router, kind) for kind in _SCOPES]
    cells = []
    for number, (origin, kind) in enumerate(asked):
        every = 1 if long or (origin == service.proxy and kind in _SCOPES) else _EVERY
        for method, path, rule in litellm_routes()[number % every :: every]:
            if (wanted := refusal(kind, rule)) is not None:
                cells.append(one(origin, kind, method, path, wanted))
        cells += [one(origin, kind, *route, (404, "not_found")) for route in unknown]
    wrong = await all_of(cells)
    most = "all" if long else f"every {_EVERY}th, one of each scope at all"
    figure(
        f"{len(litellm_routes())} routes of LiteLLM, {len(SCOPE_OF)} keys at the rank, "
        f"{len(_SCOPES)} through the router, tried at {most}: {len(cells)} refused"
    )
    assert not wrong, "\n".join(wrong[:20])
    assert not reached(notes), "a refused request reached LiteLLM"


async def an_admin_reaches_each(service: Service, notes: Path, figure: Figure) -> None:
    turn = asyncio.Semaphore(_TURNS)
    late: list[str] = []
    within = aiohttp.ClientTimeout(total=_ANSWERED_WITHIN)

    async def one(method: str, path: str) -> str:
        body: Any = {} if method in ("POST", "PUT", "PATCH") else None
        async with turn:
            try:
                async with service.http.request(
                    method,
                    service.proxy + path,
                    json=body,
                    headers=bearer(ADMIN),
                    allow_redirects=False,
                    timeout=within,
                ) as answer:
                    text = (await answer.read()).decode(errors="replace")
            except TimeoutError:
                late.append(f"{method} {path}")
                return ""
        if (answer.status, code_in(text)) in _OURS or ADMIN in text or litellm.SECRET in text:
            return f"{method} {path}: {answer.status} {text[:300]}"
        return ""

    asked = litellm_routes()
    wrong = await asyncio.gather(*(one(method, path) for method, path, _ in asked))
    figure(f"{len(asked)} routes of LiteLLM for an admin; {len(late)} took longer: {late[:20]}")
    assert not any(wrong), "\n".join([each for each in wrong if each][:20])
    missing = {f"{method} {path}" for method, path, _ in asked} - reached(notes)
    assert not missing, sorted(missing)[:20]


def reached(notes: Path) -> set[str]:
    """The requests that reached LiteLLM, as method and path."""
    return set(notes.read_text().splitlines())


def code_in(text: str) -> str | None:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
