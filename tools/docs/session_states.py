"""Write sessions.md: a session's states and transitions, from the table in code."""

from __future__ import annotations

from any_agent.types import SessionState
from proxy_ext.sessions import state_machine as lifecycle
from proxy_ext.sessions.state_machine import Event, Transition

HEAD = """# Sessions: states and events

<!-- Written by tools/docs/generate.py from proxy_ext/sessions/state_machine.py; change that. -->

A session is one trajectory of one agent. It is opened, accepts model calls and rewards, and is
finalized; the trainer leases it with its group, and acknowledges it as trained or rejected. This
page is made from the one table that the service checks before each change, so other changes cannot
happen.

A change is on disk before it is answered, together with its answer if the request has an
`Idempotency-Key`. `GET /rl/v1/sessions/{id}` shows a session's history: its state and the reason,
who opened it, every reward with its author and time, its deadlines, the weight versions of its
tokens, and where its content is. A key names its lane's newest session; with `session_id` it also
names an earlier session of the agent, and so do its tenant's key and an admin's.
[rewards.md](rewards.md) has when rewards are set, and by whom.
"""
USUAL = """The usual way of a train session is `open`, `finalized`, `leased`, `trained`; with a
late reward it is `awaiting_reward` before it is finalized. An eval session is `open`, then
`evaluated`.
"""
MATRIX_HEAD = """## Every event in every state

A state in bold is the next state. Otherwise the cell has the status and code of the refusal, whose
message has the state, the reason and the remedy. 410 is permanent; 409 may change later.
"""
TAIL = """## Granted slots

`POST /grant_capacity` grants one slot beside the trainer's; `POST /rl/start_session` takes it, on
whichever rank it is, before any open may take one of the trainer's, or a place in a group. An open
with an `Idempotency-Key`, or with the `api_key` of an earlier session, belongs to one rank: the
router moves the slot there (`POST /grant_capacity` with `"change": -1` at one rank, then with 1 at
the other), and waits for that rank if it is away. A slot is lost if the router, or the rank that
gives it away, dies at that moment. An unused grant delays nothing; `GET /rl/v1/capacity` shows the
number of grants (`grants`). Without a `task_id` the session belongs to no group, also on one of the
trainer's slots, and its id is `task-<rank>-<n>`.

## Time

`sessions.ttl` (or the open's own `ttl`, if shorter) is absolute. `sessions.idle_timeout` begins
anew with every call, reward and heartbeat; a call under way counts, and so does a restart of the
service, during which no heartbeat could arrive. Both use the boot clock, which a row records: a
wall clock that is set forward or back expires nothing, also while the service is down. After a
reboot of the machine the wall clock is used.

Sessions that model calls opened ([implicit-sessions.md](../how-to/implicit-sessions.md)) do not
expire when they are idle (`sessions.implicit_idle_timeout`): their agent is done, and they
await their reward, which `sessions.grader` gives at once.

## Deletion and veto

`POST /rl/v1/sessions/{id}/veto` keeps a finalized session out of training and keeps its record.
`DELETE /rl/v1/sessions/{id}` erases texts, tokens and metadata from the store's files, ends the
session first if it has not ended, and keeps its row (ids, states, times, rewards) so that counts
and refusals stay right. Both are refused (409 `in_training`) once a trainer has leased the session.
It can be deleted after it was trained on, or left out, when no kept checkpoint lets a resume begin
before that step. After the end of training, waiting sessions can be vetoed and deleted again.

## Eval sessions

`mode: eval` takes no slot and is never trained on; it ends as `evaluated`. With `version` (a
number, or `"current"`) it is pinned: every token has that weight version. Once the engine serves
another version, its calls get 409 `version_gone`; so does a call that an update cuts off, whose
tokens so far are kept as untrainable.
"""


def render() -> str:
    """Return the document of a session's states and transitions."""
    states = [f"| `{state}` | {meaning} |" for state, meaning in lifecycle.STATES.items()]
    parts = [
        HEAD,
        "## States\n",
        "\n".join(["| state | meaning |", "|---|---|", *states]) + "\n",
        USUAL,
        "## Events\n",
        _events(),
        "## Every transition\n",
        _transitions(),
        MATRIX_HEAD,
        _matrix(),
        TAIL,
    ]
    return "\n".join(parts)


def _transitions() -> str:
    """Return every transition; those that differ only in the state before stand in one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for t in lifecycle.TRANSITIONS:
        after = "the same" if t.before is t.after else _state(t.after)
        rows.setdefault((t.event, after, _condition(t)), []).append(_state(t.before))
    lines = [
        f"| {', '.join(before)} | `{e}` | {to} | {when} |" for (e, to, when), before in rows.items()
    ]
    return "\n".join(["| from | event | to | if |", "|---|---|---|---|", *lines]) + "\n"


def _events() -> str:
    rows = ["| event | request | by | effect |", "|---|---|---|---|"]
    for event, rule in lifecycle.EVENTS.items():
        request = f"`{rule.request}`" if rule.request else ""
        rows.append(f"| `{event}` | {request} | {rule.by} | {rule.does} |")
    return "\n".join(rows) + "\n"


def _matrix() -> str:
    """Return the effect of every event in every state: the next state, or the refusal's code."""
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
