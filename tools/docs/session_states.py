"""Write sessions.md: a session's states and transitions, from the table in code."""

from __future__ import annotations

from any_agent.types import SessionState
from proxy_ext.sessions import state_machine as lifecycle
from proxy_ext.sessions.state_machine import Event, Transition

_WIDTH = 28

HEAD = """# Sessions: states and events

<!-- Written by tools/docs/generate.py from proxy_ext/sessions/state_machine.py; change that. -->

A session is one trajectory of one agent. It is opened, accepts model calls and rewards, and is
finalized; the trainer leases it with its group, and acknowledges it as trained or rejected. This
page is made from the one table that the service checks before each change, so other changes cannot
happen.

A change is on disk before it is answered, together with its answer if the request has an
`Idempotency-Key`. `GET /rl/v1/sessions/{id}` shows a session's history: its state and the reason,
who opened it, every reward with its author and time, its deadlines, the weight versions of its
tokens, and where its content is.
"""
MATRIX_HEAD = """## Every event in every state

A state in bold is the next state. Otherwise the cell has the status and code of the refusal, whose
message has the state, the reason and the remedy. 410 is permanent; 409 may change later.
"""
TAIL = """## Rewards

- A completion's own reward is its unnamed reward + the sum of weight * value over its named ones;
  the final reward likewise. `sessions.reward_weights` has the weights; without any, every name
  weighs 1, and with some, an unknown name is refused (422 `unknown_reward_name`).
- `POST /rl/v1/set_reward` takes `{"reward": 1}`, `{"reward": 0.2, "name": "format"}` or
  `{"reward": {"correct": 1, "format": 0.2}}` for a completion (`completion_id`; default: the last
  one), and `{"final_reward": ...}` for the session. The same name again replaces its value; other
  names stay.
- `POST /rl/v1/feedback` sets the reward named `feedback`: `{"thumbs": "up"}` is 1, `"down"` is -1,
  and `{"score": 0.5}` any number. With `completion_id` it is that completion's, else the session's
  final one. Under a tenant's key the id of an answer finds its session, so whoever shows answers to
  users keeps their ids alone. The last feedback counts; its weight, who may give it and until when
  are as for every reward. Words are not recorded: a judge that reads them sends a score.
- Rewards can be revised until a trainer leases the session, also after it is finalized: the trainer
  gets the last acknowledged ones. From then on they are fixed, even if the lease runs out: a step
  that was killed before its acknowledgement may have taken the session, and a resume repeats that
  step as it was. (An export that is given back fixes nothing.)
- A second `finalize` changes nothing. With the same final reward, or none, its answer is the
  session's present state (200). With another final reward it is refused (409 `already_finalized`),
  and the current one stays: the first one, or a later one of `set_reward`. So a client that did not
  get the first answer can repeat the request, and no reward is lost silently. A session that was
  aborted, or has expired, stays 410.
- A missing reward never silently counts as 0. `finalize` without any reward is refused (422
  `no_reward`, `sessions.require_reward`). With `{"await_reward": true, "deadline": seconds}` the
  session waits, and at the deadline `sessions.late_reward` decides about a session without a
  reward: `reject` (with a reason), `zero` (recorded in its history as the service's), or `grade`:
  `sessions.grader` is called in a process of its own. If the grader raises, exceeds
  `sessions.grader_timeout`, dies or returns anything but finite numbers, the session is rejected,
  and the reason names the failure.
- A key names its lane's newest session. With `session_id` the same key also names an earlier
  session of the agent; so do its tenant's key and an admin's.
- A session that awaits its reward makes no calls, so it does not count as running. Its tokens grow
  old meanwhile, so it counts as buffered wherever staleness is bounded.

## Who rewards

`start_session` takes `rewards`; without it, the run's `sessions.rewards` counts (null: `judge`
where the service's own grader rewards, else `agent`), and with `api_key` the choice of that key's
session before. The session keeps it; its record shows it as `rewarded_by`. If the operator sets
`sessions.rewards`, an opening with a tenant's key may name what is stricter (`agent` < `both` <
`judge`), never what is looser (403 `judge_only`); openings with an admin's or the trainer's key
may name any.
Sessions that a workflow opens for agents on a dataset (`OpenAIProxyClient`) are `agent`: the
workflow sets what they return. AReaL's `start_session` takes `rewards`, too; its answer has no
`judge_key`, so with `judge` only a tenant's or an admin's key can reward such a session.

| `rewards` | the session's key | others |
|---|---|---|
| `agent` | sets rewards, and ends the session with them | its tenant and admins likewise |
| `judge` | sets none (403 `judge_only`) | its tenant, admins and the `judge_key` set them |
| `both` | sets rewards, until a judge has rewarded the same object | the same as `judge` |

- `start_session` returns `judge_key` (`sk-judge...`) for `judge` and `both`: it rewards, ends,
  aborts and reads this session, and does nothing else. Never give it to the agent.
- In both kinds `finalize` under the session's key (also AReaL's `end_session`) ends the session's
  calls, and the session awaits the judge: until `sessions.reward_deadline`, and at least until its
  ttl would have ended, so that no agent can outrun its judge. The judge's `finalize` ends it; at
  the deadline `sessions.late_reward` decides. A `deadline` under the session's key is refused,
  except with `late_reward: grade` where the opening named no `rewards`: the grader is the judge
  then, and decides at any deadline. The session's key
  cannot abort, veto or delete the session either, nor read its content, whose `metadata` may have
  the answer (403 `judge_only`). A session that expires is not trained on.
- `both`: an object is one completion, or the final reward. A judge's first reward of an object
  replaces all that the agent gave it, under any name, and from then on the agent's are refused
  there. Rewards of different objects add up as always, so an agent's rewards of its completions
  count beside the judge's final one: choose `judge` for agents that may not influence their score.
- In the open mode (no admin key) a caller without a key counts as the session's agent here: rewards
  need the `judge_key`. Such a caller can still abort a session or open others, because every local
  program is an operator in the open mode. Use keys for agents that you do not trust.
- In a session that a model call opened (`sessions.implicit`) a tenant's key counts as the agent's,
  because the agent has it. **Agents that have a tenant's key** can also open sessions by
  `start_session`, be their own judge there and pay themselves. Set `sessions.rewards=judge` beside
  the service's own grader (`late_reward: grade`, `implicit`): then the grader and the operator's
  keys alone reward tenants' sessions. A tenant gets no `judge_key`, its key counts as the agent's,
  and its openings name no `rewards`.
- `late_reward: grade` gives sessions without a reward their grade. With `both` an agent's reward
  is a reward, so the grader is not called then: choose `judge` where the grader must decide.

## Requests in a URL

Every field of a body may be in the query instead, by its name: `POST
/rl/v1/finalize?session_id=...&final_reward=1.0` is the same request as one with that body, also for
its `Idempotency-Key` and for the rank that a router sends it to. In the query, rewards by name,
`metadata` and lists of objects are JSON; for a list of texts, repeat the name. Body and query may
have the same field with the same value; if the values differ, the request is refused (400, `param`
names the field), and so are an unknown parameter, NaN and Infinity. `api_key` is not accepted in a
URL. Model calls are less strict ([calls.md](calls.md)).

## Granted slots

`POST /grant_capacity` grants one slot beside the trainer's; `POST /rl/start_session` takes it, on
whichever rank it is, before any open may take one of the trainer's, or a place in a group. An open
with an `Idempotency-Key`, or with the `api_key` of an earlier session, belongs to one rank, which
alone keeps its answer. The router moves the slot to that rank, one at a time
(`POST /grant_capacity` with `"change": -1` at one rank, then with 1 at the other). The router skips
a rank that is away, but it waits for the rank that such an open belongs to.
A slot is lost if the router, or the rank that gives it away, dies at that moment. An unused grant
delays nothing; `GET /rl/v1/capacity` shows the number of grants (`grants`).

`task_id` may be omitted. The session then belongs to no group, also on one of the trainer's slots,
and its id is `task-<rank>-<n>`.

## Time

`sessions.ttl` (or the open's own `ttl`, if shorter) is absolute. `sessions.idle_timeout` begins
anew with every call, reward and heartbeat; a call under way counts, and so does a restart of the
service, during which no heartbeat could arrive. Both use the boot clock, which a row records, not
the wall clock: a clock that is set forward or back expires nothing, also while the service is down.
After a reboot of the machine the wall clock is used.

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
    lines = [
        f"| {_state(t.before)} | `{t.event}` | {_state(t.after)} | {_condition(t)} |"
        for t in lifecycle.TRANSITIONS
    ]
    parts = [
        HEAD,
        "## States\n",
        "\n".join(["| state | meaning |", "|---|---|", *states]) + "\n",
        _diagram(),
        "## Events\n",
        _events(),
        "## Every transition\n",
        "\n".join(["| from | event | to | if |", "|---|---|---|---|", *lines]) + "\n",
        MATRIX_HEAD,
        _matrix(),
        TAIL,
    ]
    return "\n".join(parts)


def _diagram() -> str:
    """Return every transition from one state to another, as a tree."""
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
