"""Every route of the running app, and LiteLLM's, with every kind of key: at a proxy, and through
the router. The answers are those of the table in `proxy_ext.web.permissions`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp

from any_agent.auth.access import Scope
from any_agent.auth.key_store import create_key, revoke_key
from any_agent.completions.apis import plain_path
from any_agent.config import Config, load_resolved
from any_agent.keys import KeySigner
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import Registry
from proxy_ext.web import permissions as scopes
from tests.chaos.conftest import Figure
from tests.support.chaos.killable import engine_in_thread
from tests.support.ports import own_port
from tests.support.proxy import HELLO, our_app, until
from tests.support.real_parts import await_url, process, write_config
from tests.support.router import serving

ADMIN = "the-operators-own-key"
AT_ONCE = 16
_EVERY = 5
"""In the short form a key tries one of so many of LiteLLM's routes, the next key the next ones."""
_CLIENT_TIMEOUT = aiohttp.ClientTimeout(total=120)

SCOPE_OF = {
    "none": Scope.NONE,
    "garbage": None,
    "forged session": None,
    "forged tenant": None,
    "forged run": None,
    "revoked tenant": None,
    "expired tenant": None,
    "session": Scope.SESSION,
    "session as prefix": Scope.SESSION,
    "id as prefix": None,
    "other session": Scope.SESSION,
    "ended session": Scope.SESSION,
    "judge": Scope.JUDGE,
    "other judge": Scope.JUDGE,
    "forged judge": None,
    "tenant": Scope.TENANT,
    "other tenant": Scope.TENANT,
    "trainer": Scope.TRAINER,
    "run": Scope.TRAINER,
    "configured admin": Scope.ADMIN,
    "admin": Scope.ADMIN,
}
"""Every kind of key, and what it is good for; None: nothing."""
NOT_SENT = {
    # They wait for a browser, or for the answer of one.
    ("GET", "/sso/key/generate"),
    ("GET", "/sso/cli/poll/{key_id}"),
    # They fetch a new list from the network, by which later cells would differ.
    ("POST", "/reload/model_cost_map"),
    ("POST", "/reload/anthropic_beta_headers"),
}
"""Routes of LiteLLM that no good key is tried at."""
STRANGERS = ("other session", "other tenant", "other judge")
"""Genuine keys to which the session that is asked for is not there."""


@dataclass
class Service:
    """A rank's proxy and the router before it."""

    config: Config
    proxy: str
    router: str
    keys: dict[str, str]
    """Those that concern no one session."""
    http: aiohttp.ClientSession

    async def open(self, tenant: str = "tenant", **body: str) -> dict[str, Any]:
        """A session of a tenant."""
        url = f"{self.proxy}/rl/v1/start_session"
        async with self.http.post(url, json=body, headers=bearer(self.keys[tenant])) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def ended(self, rewards: str) -> dict[str, Any]:
        session = await self.open(rewards=rewards)
        url = f"{self.proxy}/rl/v1/sessions/{session['session_id']}/abort"
        async with self.http.post(url, headers=bearer(ADMIN)) as answer:
            assert answer.status == 200
        return session

    async def state(self, session: dict[str, Any]) -> str:
        url = f"{self.proxy}/rl/v1/sessions/{session['session_id']}"
        async with self.http.get(url, headers=bearer(ADMIN)) as answer:
            return str((await answer.json())["state"])


@dataclass(frozen=True)
class Answer:
    status: int
    code: str | None
    text: str


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def flipped(key: str) -> str:
    return key[:-1] + ("0" if key[-1] != "0" else "1")


def our_routes() -> list[tuple[str, str]]:
    """As the app that runs has them."""
    return scopes.listed(our_app().routes)


def make_keys(config: Config) -> dict[str, str]:
    """Before the service starts."""
    run_dir = trial_dir(config)
    path = run_dir.keys
    revoked, kept = create_key(path, "tenant", tenant="alice")
    revoke_key(path, kept.id)
    tenant = create_key(path, "tenant", tenant="alice")[0]
    run = KeySigner(run_dir.signing_secret()).run_key
    return {
        "none": "",
        "garbage": "garbage-that-is-no-key",
        "forged tenant": flipped(tenant),
        "forged run": flipped(run),
        "revoked tenant": revoked,
        "expired tenant": create_key(path, "tenant", tenant="alice", expires_in=1e-6)[0],
        "tenant": tenant,
        "other tenant": create_key(path, "tenant", tenant="bob")[0],
        "trainer": create_key(path, "trainer")[0],
        "run": run,
        "configured admin": ADMIN,
        "admin": create_key(path, "admin")[0],
    }


@asynccontextmanager
async def service_at(
    tmp_path: Path, model: Path, *program: str, **sections: object
) -> AsyncIterator[Service]:
    """``program``: what runs in the proxy's place."""
    # Nor are LiteLLM's own pages at /ui there, without its configuration.
    server = {"ranks": 1, "ui": False}
    path = write_config(tmp_path, model, server=server, rollout={"batch_size": 8}, **sections)
    config = load_resolved(path, {"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN})
    trial_dir(config).create()
    keys = make_keys(config)
    port, log = own_port(), tmp_path / "proxy.log"
    proxy = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        engine = stack.enter_context(engine_in_thread(model))
        arguments = [*(program or ("proxy_ext",)), "--config", str(path), "--training"]
        arguments += ["--engine-url", engine.url, "--port", str(port)]
        child = stack.enter_context(process(log, *arguments, ANY_AGENT_SERVER__ADMIN_KEY=ADMIN))
        await asyncio.to_thread(await_url, f"{proxy}/healthz", child, log)
        registry = Registry(trial_dir(config).registry)

        def told() -> bool:
            registry.refresh()
            return registry.get("rank-0") is not None

        await until(told, "the rank's entry")
        connector = aiohttp.TCPConnector(limit=AT_ONCE)
        async with (
            serving(config) as (_, router_port),
            aiohttp.ClientSession(connector=connector, timeout=_CLIENT_TIMEOUT) as http,
        ):
            router = f"http://127.0.0.1:{router_port}"
            service = Service(config, proxy, router, keys, http)
            capacity = {"limit": 100_000, "ttl": 3600, "owner": "matrix"}
            url = f"{proxy}/rl/v1/capacity"
            async with http.put(url, json=capacity, headers=bearer(ADMIN)) as answer:
                assert answer.status == 200, await answer.text()
            yield service
        # Whatever was tried, no key got out.
        said = log.read_text() + "".join(
            p.read_text() for p in (trial_dir(config).path / "audit").iterdir()
        )
        for kind, key in keys.items():
            assert not key or key not in said, kind


def body_of(method: str, template: str, session: dict[str, Any]) -> dict[str, Any] | None:
    """One that the route takes, as far as it harms no other cell."""
    if method in ("GET", "HEAD"):
        return None
    id = session["session_id"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
        "/chat/completions": {"messages": HELLO, "max_tokens": 2},
        "/v1/completions": {"prompt": "a", "max_tokens": 2},
        "/completions": {"prompt": "a", "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/responses": {"input": "a", "max_output_tokens": 2},
        "/v1/messages": {"messages": HELLO, "max_tokens": 2},
        "/messages": {"messages": HELLO, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": HELLO},
        "/messages/count_tokens": {"messages": HELLO},
        "/v1/embeddings": {"input": "a", "model": "none"},
        "/embeddings": {"input": "a", "model": "none"},
        "/rl/v1/set_reward": {"final_reward": 1.0},
        "/rl/v1/feedback": {"thumbs": "up"},
        "/rl/set_reward": {"reward": 1.0},
        "/rl/start_session": {"task_id": "task"},
        "/rl/v1/finalize": {"final_reward": 1.0},
        "/rl/v1/capacity": {"limit": 100_000, "ttl": 3600, "owner": "matrix"},
        "/rl/v1/lease": {"owner": "matrix", "wait": 0},
        "/rl/v1/ack": {"owner": "matrix", "trained": [], "rejected": []},
        "/rl/v1/export_trajectories": {"session_ids": [id]},
        "/export_trajectories": {"session_id": id},
        "/rl/v1/pause": {"ttl": 0.01},
    }
    return bodies.get(template, {})


def concerns_a_session(template: str) -> bool:
    """A route that answers for one session, named by a key, a header or the path."""
    rules = [rule for (_, path), rule in scopes.RULES.items() if path == template]
    ours = any(rule.scopes in (scopes.AGENTS, scopes.JUDGES) for rule in rules)
    return ours or "{session_id}" in template


async def ask(
    service: Service, origin: str, kind: str, method: str, template: str, *, absent: bool = False
) -> tuple[Answer, dict[str, Any], str]:
    """The answer to this kind of key, about a session of its own making, and that session's id."""
    own = concerns_a_session(template)
    exports = template.endswith("export_trajectories")
    rewards = "judge" if kind == "judge" else "agent"
    ended = kind == "ended session" or exports
    session = await (service.ended(rewards) if ended else service.open(rewards=rewards))
    id = session["session_id"]
    if absent:
        id = id[:-4] + ("0000" if id[-4:] != "0000" else "1111")
    headers: dict[str, str] = {}
    path = template.replace("{session_id}", id).replace("{model}", "policy")
    path = path.replace("{response_id}", "resp_0")
    match kind:
        case "session" | "ended session":
            key = session["api_key"]
        case "forged session":
            key = flipped(session["api_key"])
        case "other session":
            key = (await service.open())["api_key"]
        case "judge" | "other judge" | "forged judge":
            judged = session if kind == "judge" else await service.open(rewards="judge")
            key = flipped(judged["judge_key"]) if "forged" in kind else judged["judge_key"]
        case "session as prefix":
            key, path = "DUMMY", f"/{session['api_key']}{path}"
        case "id as prefix":
            key, path = "", f"/{id}{path}"
        case _:
            key = service.keys[kind]
    keys = ("session", "ended session", "judge", "session as prefix", "id as prefix")
    named_by_key = kind in keys
    if own and not named_by_key and "{session_id}" not in template:
        headers["X-Any-Agent-Session"] = id
    answer = await send(
        service, method, origin + path, bearer(key) | headers, body_of(method, template, session)
    )
    return answer, session, id


async def send(
    service: Service, method: str, url: str, headers: dict[str, str], body: Any = None
) -> Answer:
    async with service.http.request(
        method, url, headers=headers, json=body, allow_redirects=False
    ) as response:
        text = (await response.read()).decode(errors="replace")
    for key in service.keys.values():
        assert not key or key not in text
    code = None
    if response.status >= 400 and text:
        code = json.loads(text)["error"]["code"]
    # Anthropic's errors have one, each its own.
    text = re.sub(r'"request_id":"req_[0-9a-f]+"', '"request_id":""', text)
    return Answer(response.status, code, text)


def verdict(rule: scopes.RouteRule, kind: str, template: str) -> str:
    """From the table alone."""
    if Scope.NONE in rule.scopes:
        return "answered"
    scope = SCOPE_OF[kind]
    if scope is None or scope is Scope.NONE:
        return "401"
    if scope not in rule.scopes:
        return "403"
    return "hidden" if kind in STRANGERS and concerns_a_session(template) else "answered"


_NOTHING_THERE = ("model_not_found", "response_not_found", "interaction_not_found", "no_known_task")
"""Codes of a route that was opened: no embeddings are configured, and no such answer or call."""


def was(answer: Answer) -> str:
    """What an answer amounts to."""
    hidden = {(404, "session_not_found"), (400, "session_mismatch")}
    if (answer.status, answer.code) in hidden:
        return "hidden"
    if answer.status == 401 and answer.code == "invalid_api_key":
        return "401"
    if answer.status == 403 and answer.code == "forbidden":
        return "403"
    assert answer.status < 500 and answer.status not in (401, 403, 405), answer
    assert answer.status != 404 or answer.code in _NOTHING_THERE, answer
    return "answered"


async def cell(service: Service, origin: str, kind: str, method: str, template: str) -> str:
    """Try one and say what is wrong, "" if nothing is."""
    rule = scopes.RULES[method, template]
    wanted = verdict(rule, kind, template)
    answer, session, id = await ask(service, origin, kind, method, template)
    if template == "/rl/v1/pause" and wanted == "answered":
        await send(service, "POST", f"{service.proxy}/rl/v1/resume", bearer(ADMIN))
    got = was(answer)
    if got != wanted:
        return f"{kind}: {method} {template} at {origin}: {answer} instead of {wanted}"
    if got != "answered" and concerns_a_session(template) and kind != "ended session":
        assert await service.state(session) == "open", (kind, method, template)
    if got == "hidden":
        other, _, absent = await ask(service, origin, kind, method, template, absent=True)
        if other.text.replace(absent, id) != answer.text or other.status != answer.status:
            return f"{kind}: {method} {template}: {answer} tells itself from {other}"
    return ""


async def all_of(tasks: Iterable[Any]) -> list[str]:
    """Results of many, a few at a time."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(task: Any) -> str:
        async with turn:
            return str(await task)

    return [result for result in await asyncio.gather(*map(one, tasks)) if result]


async def test_every_route_lets_in_only_the_kinds_of_keys_that_its_rule_names(
    tmp_path: Path, tiny_model_dir: Path, figure: Figure, long: bool
) -> None:
    routes = our_routes()
    assert sorted(routes) == sorted(scopes.RULES), "the table is the app's routes, no more or less"
    async with service_at(tmp_path, tiny_model_dir) as service:
        origins = (service.proxy, service.router)
        cells = list(itertools.product(origins, SCOPE_OF, routes))
        # A pause stops model calls, so it has its turn alone.
        quiet = [c for c in cells if c[2][1] != "/rl/v1/pause"]
        wrong = await all_of(cell(service, origin, kind, *route) for origin, kind, route in quiet)
        for origin, kind, route in cells:
            if route[1] == "/rl/v1/pause":
                wrong += await all_of([cell(service, origin, kind, *route)])
        figure(f"{len(routes)} own routes x {len(SCOPE_OF)} keys x 2 = {len(cells)} cells")
        assert not wrong, "\n".join(wrong[:20])
        await litellms_routes_are_not_there(service, figure, long=long)


async def every_kind(service: Service) -> tuple[dict[str, str], dict[str, str]]:
    """A key of each kind, and of some the path's beginning."""
    session, other, ended = await service.open(), await service.open(), await service.ended("agent")
    judged = await service.open(rewards="judge")
    keys = service.keys | {
        "session": session["api_key"],
        "other session": other["api_key"],
        "ended session": ended["api_key"],
        "forged session": flipped(session["api_key"]),
        "judge": judged["judge_key"],
        "other judge": (await service.open(rewards="judge"))["judge_key"],
        "forged judge": flipped(judged["judge_key"]),
    }
    prefixes = {
        "session as prefix": f"/{session['api_key']}",
        "id as prefix": f"/{session['session_id']}",
    }
    assert keys.keys() | prefixes.keys() == SCOPE_OF.keys()
    return keys, prefixes


@lru_cache
def litellm_routes() -> list[tuple[str, str, scopes.RouteRule]]:
    """LiteLLM's methods and paths with their rules; without what we answer at paths of ours, and
    without its two signs of life, which everybody gets from us."""
    table = scopes.LiteLLMRoutes()
    found = []
    for method, template in table.rules:
        path = re.sub(r"\{[^}]*\}", "x", re.sub(r"\{[^}]*:path\}", "x/y", template))
        plain, _ = plain_path(path, litellm=True)
        if scopes.template_of(plain) is None and (method, path) not in scopes.LITELLM_ALIVE:
            fits = table.rule(method, path)
            assert fits is not None, (method, template)
            if (method, template) not in NOT_SENT:
                found.append((method, path, fits[1]))
    assert table.rules.keys() >= NOT_SENT
    return found


async def asker(service: Service) -> Callable[..., Awaitable[str]]:
    """A function that asks with a kind of key, and says what is wrong with the answer."""
    keys, prefixes = await every_kind(service)

    async def one(
        origin: str, kind: str, method: str, path: str, wanted: tuple[int, str | None]
    ) -> str:
        url = origin + prefixes.get(kind, "") + path
        answer = await send(service, method, url, bearer(keys.get(kind, "")))
        if (answer.status, answer.code) == wanted:
            return ""
        return f"{kind}: {method} {url}: {answer} instead of {wanted}"

    return one


async def litellms_routes_are_not_there(service: Service, figure: Figure, *, long: bool) -> None:
    """404 for every key, where no configuration of LiteLLM is given."""
    one, every = await asker(service), 1 if long else _EVERY
    hidden = [
        (method, path)
        for method, path, _ in litellm_routes()
        # The router has a page of its own at `/`, and what Azure's clients ask for is ours, too.
        if path != "/" and scopes.template_of(plain_path(path)[0]) is None
    ]
    asked = enumerate(itertools.product((service.proxy, service.router), SCOPE_OF))
    cells = [
        one(origin, kind, *route, (404, "not_found"))
        for number, (origin, kind) in asked
        for route in hidden[number % every :: every]
    ]
    figure(
        f"{len(hidden)} routes of LiteLLM x {len(SCOPE_OF)} keys x 2, each key at every {every}th: "
        f"{len(cells)} cells"
    )
    wrong = await all_of(cells)
    assert not wrong, "\n".join(wrong[:20])
