"""sessions.md: a session's states and what can happen in each, from the table in code."""

from __future__ import annotations

from any_agent.types import SessionState
from proxy_ext.sessions import state_machine as lifecycle
from proxy_ext.sessions.state_machine import Event, Transition

_WIDTH = 28

HEAD = """# Sessions: their states, and what can happen in each

<!-- Written by tools/docs/generate.py from proxy_ext/sessions/state_machine.py; change that. -->

A session is one trajectory of one agent. It is opened, takes model calls and rewards, and is
finalized; the trainer leases it with its group, and says what became of it. This page is made from
the one table that the service asks before it changes anything, so what is not here cannot happen.

A change is on disk before it is answered, together with its answer where the request had an
`Idempotency-Key`. `GET /rl/v1/sessions/{id}` says what happened to a session: its state and the
reason, who opened it, every reward with who gave it and when, its deadlines, the weight versions of
its tokens, and where its content is.
"""
MATRIX_HEAD = """## Every event in every state

In bold the state that it leads to; else the status and code of the refusal, whose message says the
state, the reason and what to do. 410 is for good, 409 may be otherwise later.
"""
TAIL = """## Rewards

- A completion's own reward is its unnamed reward + the sum of weight * value over its named ones;
  the final reward likewise. `sessions.reward_weights` has the weights; without any, every name
  weighs 1, and with some, an unknown name is refused (422 `unknown_reward_name`).
- `POST /rl/v1/set_reward` takes `{"reward": 1}`, `{"reward": 0.2, "name": "format"}` or
  `{"reward": {"correct": 1, "format": 0.2}}` for a completion (`completion_id`; default: the last
  one), and `{"final_reward": ...}` for the session. The same name again replaces its value; other
  names stay.
- Rewards can be revised until a trainer leases the session, also when it is finalized: the trainer
  gets what was last acknowledged. From then on they are fixed, also if the lease runs out: a step
  may have taken the session that was killed before it could say so, and a resume makes that step
  again as it was. (An export that is given back fixes nothing.)
- `finalize` once more changes nothing. With the same final reward, or none, it is answered with the
  session as it is then (200); with another one it is refused (409 `already_finalized`), and the
  final reward that stands stays: the first one, or what `set_reward` has made of it since. So a
  client that did not hear the first answer asks again, and no reward is lost in silence. A session
  that was aborted, or has expired, stays 410.
- No session becomes worth 0 in silence. `finalize` without any reward is refused (422 `no_reward`,
  `sessions.require_reward`); with `{"await_reward": true, "deadline": seconds}` it waits, and at
  the deadline a session without a reward goes by `sessions.late_reward`: `reject` (the reason says
  so), `zero` (its history says who gave the 0), or `grade`: `sessions.grader` is called in a
  process of its own, and if it raises, hangs beyond `sessions.grader_timeout`, dies or returns what
  is no finite number, the session is rejected, and the reason says which.
- A key names its lane's newest session. With `session_id` the same key also names an earlier one,
  whose agent has opened the next with it meanwhile; so do its tenant's key and an admin's.
- A session that awaits its reward makes no calls, so it is not among the running ones; its tokens
  grow old meanwhile, so it counts as buffered wherever staleness is bounded.

## Requests in a URL

Every field of a body may stand in the query instead, by its name: `POST
/rl/v1/finalize?session_id=...&final_reward=1.0` is the same request as one with that body, also for
its `Idempotency-Key` and for the rank that a router sends it to. Rewards by name, `metadata` and
lists of objects are JSON there; a list of texts is given by naming it several times. Body and query
may say the same; where they differ, the request is refused (400, `param` names the field), and so
are an unknown parameter, NaN and Infinity. `api_key` has no place in a URL. Model calls are not so
strict ([calls.md](calls.md)).

## Granted slots

`POST /grant_capacity` grants one slot beside the trainer's; `POST /rl/start_session` takes it, on
whichever rank it is, before any open may take one of the trainer's, or a place in a group. An open
with an `Idempotency-Key`, or with the `api_key` of an earlier session, belongs to one rank, which
alone keeps its answer; there the router brings the slot, one at a time
(`POST /grant_capacity` with `"change": -1` at one rank, then with 1 at the other). A
rank that is away is passed over, but for the one that such an open belongs to, which is waited for.
A slot is lost if the router, or the rank that gives it away, dies at that moment. A grant that
nobody uses holds nothing up; `GET /rl/v1/capacity` shows how many there are (`grants`).

`task_id` may be left out. The session is in no group then, also on one of the trainer's slots, and
its id is `task-<rank>-<n>`.

## Time

`sessions.ttl` (or the open's own `ttl`, if shorter) is absolute. `sessions.idle_timeout` begins
anew with every call, reward and heartbeat; a call under way counts, and so does a restart of the
service, as nobody could be heard meanwhile. Neither goes by the wall clock: a row remembers the
boot clock, so that a clock set forward or back expires nothing, also while the service is down.
After a reboot of the machine only the wall clock is left.

Sessions that model calls opened ([implicit-sessions.md](../how-to/implicit-sessions.md)) do not
expire when they are idle (`sessions.implicit_idle_timeout`): their agent is done, and they
await their reward, which `sessions.grader` gives at once.

## Deletion and veto

`POST /rl/v1/sessions/{id}/veto` keeps a finalized session out of training and keeps its record.
`DELETE /rl/v1/sessions/{id}` erases texts, tokens and metadata from the store's files, ends the
session first if it is not over, and leaves its row (ids, states, times, rewards) so that counts and
refusals stay right. Both are refused (409 `in_training`) once a trainer has had the session; it can
be deleted when it was trained on, or left out, and no checkpoint is kept that a resume could begin
from before that step. When training has ended, what waits can be vetoed and deleted again.

## Eval sessions

`mode: eval` takes no slot and is never trained on; it ends as `evaluated`. With `version` (a
number, or `"current"`) it is pinned: every token of it is of that weight version. Once the engine
serves another one its calls get 409 `version_gone`; a call that an update cuts off gets the same,
and what was sampled of it is kept as untrainable.
"""


def render() -> str:
    """The document of a session's states, and of what can happen in each."""
    states = [f"| `{state}` | {meaning} |" for state, meaning in lifecycle.STATES.items()]
    lines = [
        f"| {_state(t.before)} | `{t.event}` | {_state(t.after)} | {_condition(t)} |"
        for t in lifecycle.TRANSITIONS
    ]
    parts = [
        HEAD,
        "## States\n",
        "\n".join(["| state | meaning |", "|---|---|", *states]) + "\n",
        _diagram(),
        "## What can happen\n",
        _events(),
        "## Every move\n",
        "\n".join(["| from | what happens | to | if |", "|---|---|---|---|", *lines]) + "\n",
        MATRIX_HEAD,
        _matrix(),
        TAIL,
    ]
    return "\n".join(parts)


def _diagram() -> str:
    """Every move from one state to another, as a tree."""
    out = ["```text"]
    for state in (None, *lifecycle.STATES):
        moves = [t for t in lifecycle.TRANSITIONS if t.before is state and t.after is not state]
        out += [f"{state}" if state else "(no session)"] if moves else []
        for k, t in enumerate(moves):
            turn = "└" if k == len(moves) - 1 else "├"
            mode = f" ({t.mode})" if t.mode else ""
            out.append(f"{turn}─ {t.event}{mode} ".ljust(_WIDTH, "─") + f"> {t.after}")
    return "\n".join([*out, "```"]) + "\n"


def _events() -> str:
    rows = ["| event | request | by | what it does |", "|---|---|---|---|"]
    for event, rule in lifecycle.EVENTS.items():
        request = f"`{rule.request}`" if rule.request else ""
        rows.append(f"| `{event}` | {request} | {rule.by} | {rule.does} |")
    return "\n".join(rows) + "\n"


def _matrix() -> str:
    """What every event does in every state: the next state, or the refusal's code."""
    events = [event for event, rule in lifecycle.EVENTS.items() if rule.request and event != "open"]
    rows = [f"| | {' | '.join(f'`{state}`' for state in lifecycle.STATES)} |"]
    rows.append("|---" * (len(lifecycle.STATES) + 1) + "|")
    for event in events:
        cells = [_cell(state, event) for state in lifecycle.STATES]
        rows.append(f"| `{event}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(state: SessionState, event: Event) -> str:
    found = dict.fromkeys(f"**{t.after}**" for t in lifecycle.transitions(state, event))
    if found:
        return ", ".join(found)
    code, _ = lifecycle.refused_with(state, event)
    return f"{410 if code == 'session_closed' else 409} {code}"


def _state(state: SessionState | None) -> str:
    return f"`{state}`" if state else ""


def _condition(transition: Transition) -> str:
    mode = f"mode {transition.mode}" if transition.mode else ""
    return "; ".join(part for part in (mode, transition.when) if part)
