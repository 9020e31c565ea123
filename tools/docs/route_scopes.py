"""docs/reference/keys.md: kinds of keys, and which routes each opens, from the table in code."""

from __future__ import annotations

from any_agent.auth.access import Scope
from proxy_ext.web.permissions import LITELLM, RULES

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
| session | `sk-v1.<rank>.<lane>.<hmac>` | `start_session` | one session |

A key is sent as `Authorization: Bearer <key>` or `x-api-key: <key>`; a session's key also as the
first part of the path, `/<key>/v1/...`. Behind such a prefix other keys in the headers mean nothing
("DUMMY", `sk-proj-...`), since SDKs want some key; but the valid key of another session is 400
`session_mismatch`.

Without any admin key, a service on a loopback address is open: whoever reaches it is the operator,
a session may be named by its id, and web pages are refused. The first admin key ends that, also
while the service runs; it does not come back before the next start, and only if every admin key was
revoked: one that has expired opens nothing. Another address is not bound without an admin key.

## Making, revoking, rotating

`any-agent keys create|list|revoke|rotate` work on the trial's folder (`keys.json`, mode 0600), also
before its first start, and a running service follows within two seconds. A key is shown once; its
hash is kept. A revoked tenant's key opens nothing more; the sessions that it opened go on with
their own keys until they end. `rotate` puts a new secret before the others in `secret.key`: it
signs new session keys, and those signed before stay good until `rotate --drop-old`. The run's own
trainer and router use a key derived from that secret and follow by themselves.

A tenant's limits (`--open-sessions`, `--requests-per-second`, `--tokens-per-second`) are of the
whole service, over all of its keys; `server.tenant_*` are the defaults. Each rank enforces its
share, rounded up. A group lives on one rank, so `open_sessions` should be at least `group_size`
times the ranks: with fewer a group cannot have all of its sessions open at once. Groups are a
tenant's own, too: two tenants' `group_id` may be the same.

## Answers

- 401 `invalid_api_key`: no key, or one that is not valid here: forged, revoked, expired.
- 403 `forbidden`: a key of another scope. Refusals come before the request's body is read.
- 404 `session_not_found`: a session that is not there, or not the caller's; both are answered
  alike. A session's key beside the id of a session that was not opened under it is 400
  `session_mismatch`, whether or not there is such a session; its earlier sessions may be named.
- 404 `not_found`: no such route. That is also the answer of LiteLLM's own routes, for every key,
  except """
TABLE_HEAD = """
## Routes

Every path is there for the service's URL and for each rank's. Sessions' and tenants' keys concern
their own sessions only. What is marked in the last column is written to the audit log.

"""
TAIL = """
`GET /rl/v1/sessions` shows a tenant its own sessions. An export leases what it exports, so it is
the trainer's and the operator's.

## Audit log

`<trial>/audit/rank-<n>.jsonl`, `router.jsonl` (at most 8 files of 4 MB each) and `keys.jsonl`:
when, who (never a key, only its id), route, sessions, status, and the client's address: `client` as
the part itself sees it, `for` as the router says. Refused keys are written, too, and what failed;
in a flood of these five a second, and the next one says how many are missing (`suppressed`), so
that no flood pushes out what was done. All refusals are counted in `any_agent_keys_refused_total`.
Writing is done beside the requests, so a line of the last moment may be lost with its process, and
`any_agent_audit_lines_lost_total` counts what a disk did not take.
`keys.jsonl` is on disk before the key that it tells of is good.
"""


def render() -> str:
    """The document."""
    alive = sorted(f"`{method} {path}`" for method, path in LITELLM)
    scopes = list(Scope)
    names = ["no key" if scope is Scope.NONE else scope.value for scope in scopes]
    rows = [f"| route | {' | '.join(names)} | audited |", "|---" * (len(scopes) + 2) + "|"]
    for (method, path), rule in RULES.items():
        marks = ["yes" if scope in rule.scopes else "" for scope in scopes]
        marks.append("yes" if rule.audited else "")
        rows.append(f"| `{method} {path}` | {' | '.join(marks)} |")
    return HEAD + " and ".join(alive) + ".\n" + TABLE_HEAD + "\n".join(rows) + "\n" + TAIL
