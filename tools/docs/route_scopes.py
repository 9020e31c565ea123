"""Write docs/reference/keys.md: kinds of keys and their routes, from the table in code."""

from __future__ import annotations

from any_agent.auth.access import Scope
from proxy_ext.web.permissions import LITELLM_ALIVE, RULES

HEAD = """# Keys: who may do what

<!-- Written by tools/docs/generate.py from proxy_ext/web/permissions.py; change that. -->

| scope | form | made by | good for |
|---|---|---|---|
| admin | any text, or `sk-admin.<id>.<secret>` | `server.admin_key`; `any-agent keys create \
--scope admin` | everything |
| trainer | `sk-trainer.<id>.<secret>` | `any-agent keys create --scope trainer`; the run's own is \
derived | slots, leases, acks, exports, versions, metrics; opening sessions of agents that it runs \
itself |
| tenant | `sk-tenant.<id>.<secret>` | `any-agent keys create --scope tenant --tenant NAME` | \
opening sessions, and everything about its own |
| tenant | `sk-...` | LiteLLM, as a [virtual key](../how-to/litellm.md#virtual-keys) | \
the same, by LiteLLM's budgets |
| session | `sk-v1.<rank>.<lane>.<hmac>` | `start_session` | one session; with `rewards: judge` \
neither its rewards nor its [end](rewards.md#who-rewards) |
| judge | `sk-judge.<rank>.<lane>.<hmac>` | `start_session` with `rewards` of `judge` or `both` | \
the rewards and the end of one session |
| none | `sk-engine.<hmac>` | derived at each start of the service | the run's engines, by its \
ranks, its trainer and the doctor |
| none | `sk-metrics.<hmac>` | derived, not stored | the trainer's metrics, which the router reads |

A key is sent as `Authorization: Bearer <key>`, `x-api-key: <key>` or, as by Azure's clients,
`api-key: <key>`; a session's key also as the first part of the path, `/<key>/v1/...`. Behind such a
prefix other keys in the headers are ignored ("DUMMY", `sk-proj-...`), because SDKs require some
key; but the valid key of another session gets 400 `session_mismatch`.

Without any admin key, a service on a loopback address is open: every client that reaches it is an
operator, a session may be named by its id, and web pages are refused. The first admin key ends the
open mode, also while the service runs. The open mode returns only at a later start, and only if
every admin key was revoked: an expired key does not reopen it. Without an admin key, no other
address is bound.

## Where a client finds its key

`ANY_AGENT_KEY` has an operator's key, which no agent gets, and `ANY_AGENT_API_KEY` a tenant's.

- `any-agent status`, `sessions` and `doctor` take `--key`, else the first that is set of
  `ANY_AGENT_KEY`, `ANY_AGENT_SERVER__ADMIN_KEY`, `ANY_AGENT_API_KEY` and, where it holds a key of
  any-agent, `OPENAI_API_KEY`.
- What opens sessions (the SDK, `any-agent run`, `eval`) takes `api_key=` or `--api-key-file`, else
  `ANY_AGENT_API_KEY`, else `OPENAI_API_KEY`.

## Create, revoke, rotate

`any-agent keys create|list|revoke|rotate` work on the trial's folder (`keys.json`), and a running
service follows within two seconds. A trial that does not exist is refused, with the names of those
that do; `create --new-trial` makes a key before the first start. A key is shown once; its hash is
kept. A revoked tenant's key opens no more sessions; sessions that it opened continue with
their own keys until they end. `rotate` puts a new secret before the others in `secret.key`: it
signs new session keys, and earlier ones stay valid until `rotate --drop-old`. The run's own
trainer and router use a key derived from that secret and follow automatically; the engines' key,
in `engine-key.yaml` (mode 0600), is derived from it at each start of the service.

## Engines

Engines that the service starts require its key on every route, those that change weights included:
another user of the machine can neither sample nor replace weights. They listen on loopback, or on
a node's private address in a job of several nodes. No command line shows the key: the embedded
engine reads it from its file (`--key-file`), SGLang from the same file (`--config`, as its
`api-key`, which SGLang requires on its routes for operators, too). Without a key there are only
`GET /health` of the embedded engine, whose answer is empty, and SGLang's `/health`,
`/health_generate` and `/metrics`. SGLang writes its settings to its log: the service masks the key
there. For engines that run already (`engine.urls`) set `engine.key`,
best as `ANY_AGENT_ENGINE__KEY`: ranks and the trainer get it, the router does not.

An embedded engine that is started without a key listens on loopback only and answers only to its
names, so that no web page reaches it. With and without one it bounds connections, and the time of
heads and bodies, as the router does.

A tenant's limits (`--open-sessions`, `--requests-per-second`, `--tokens-per-second`) are for the
whole service, over all of its keys; `server.tenant_*` are the defaults. With `server.journal` they
are [counted once for all ranks](../how-to/operate-redis.md#limits-of-tenants). Without it each rank
enforces its share, rounded up: as a group lives on one rank, `open_sessions` should be at least
`group_size` times the ranks then, because with fewer a group cannot have all of its sessions open
at once. Groups are a tenant's own, too: two tenants' `group_id` may be the same.

## Answers

- 401 `invalid_api_key`: no key, or an invalid one: forged, revoked, expired.
- 403 `forbidden`: a key of another scope. Refusals come before the request's body is read.
- 404 `session_not_found`: the session does not exist or is not the caller's; both get the same
  answer. A session's key with the id of a session that was not opened under it gets 400
  `session_mismatch`, whether or not that session exists; the key's earlier sessions may be named.
- 404 `not_found`: no such route. Without `litellm.config` LiteLLM's own routes answer so, too, for
  every key, except """
TABLE_HEAD = """  The rank answers these, with any key. With it the others are served by scope:
  [litellm.md](../how-to/litellm.md#keys-and-routes).

## Routes

Every path works at the service's URL and at each rank's. Sessions' and tenants' keys give access to
their own sessions only. Requests to routes that are marked in the last column are written to the
audit log.

"""
TAIL = """
`GET /rl/v1/sessions` shows a tenant its own sessions. `GET /rl/v1/overview`, which the router alone
has, is for admin keys: it shows everybody's figures. An export leases the exported sessions, so
only the trainer and the operator may export.

## Audit log

`<trial>/audit/rank-<n>.jsonl`, `router.jsonl` (at most 8 files of 4 MB each) and `keys.jsonl`:
the time, the caller (the key's id, never the key), route, sessions, status, and the client's
address: `client` as the part itself sees it, `for` as the router reports it, signed
with the run's secret, so that a client that reaches a rank directly cannot forge it. Refused keys
and failures are written, too. In a flood of refusals five a second are written, and the next line
has the number of missing ones (`suppressed`), so that a flood does not displace other lines.
`any_agent_keys_refused_total` counts all refusals. Lines are written concurrently with the
requests, so a line of the last moment may be lost with its process, and
`any_agent_audit_lines_lost_total` counts lines that the disk refused. A new key's line in
`keys.jsonl` is on disk before the key works, and a line of `any-agent sessions prune --apply` in
`prune.jsonl` before anything is removed.
"""


def render() -> str:
    """Return the document."""
    alive = sorted(f"`{method} {path}`" for method, path in LITELLM_ALIVE)
    scopes = list(Scope)
    names = ["no key" if scope is Scope.NONE else scope.value for scope in scopes]
    rows = [f"| route | {' | '.join(names)} | audited |", "|---" * (len(scopes) + 2) + "|"]
    for (method, path), rule in RULES.items():
        marks = ["yes" if scope in rule.scopes else "" for scope in scopes]
        marks.append("yes" if rule.audited else "")
        rows.append(f"| `{method} {path}` | {' | '.join(marks)} |")
    return HEAD + " and ".join(alive) + ".\n" + TABLE_HEAD + "\n".join(rows) + "\n" + TAIL
