"""The table of a session's states and of everything that moves it from one to the next.

Every change of a session calls :func:`target` first; docs/reference/sessions.md is made from here.
An event that is not in the table is refused, with the state and what to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from any_agent.errors import AnyAgentError, Conflict, SessionClosed
from any_agent.types import SessionMode, SessionState
from proxy_ext.journal.base import EXPORT_OWNER, GRANT_OWNER, SessionRow, for_export, handed_out

OPEN, AWAITING = SessionState.OPEN, SessionState.AWAITING_REWARD
FINALIZED, LEASED = SessionState.FINALIZED, SessionState.LEASED
TRAINED, REJECTED = SessionState.TRAINED, SessionState.REJECTED
EVALUATED, EXPIRED, ABORTED = SessionState.EVALUATED, SessionState.EXPIRED, SessionState.ABORTED

STATES = {
    OPEN: "accepts calls and rewards",
    AWAITING: "accepts no more calls; waits for its rewards until a deadline",
    FINALIZED: "waits to be trained on; its rewards can still be revised",
    LEASED: "leased by the trainer or by an export",
    TRAINED: "used by an optimizer step, or exported for training elsewhere",
    REJECTED: "never trained on, for a recorded reason",
    EVALUATED: "an eval session that has ended",
    EXPIRED: "ended because its time ran out",
    ABORTED: "discarded by its owner, or ended by damage",
}
"""The meaning of each state."""


class Event(StrEnum):
    """An event of a session."""

    OPEN = "open"
    CALL = "call"
    REWARD = "set_reward"
    HEARTBEAT = "heartbeat"
    AWAIT = "await_reward"
    FINALIZE = "finalize"
    DEADLINE = "deadline"
    EXPIRE = "expire"
    ABORT = "abort"
    VETO = "veto"
    DELETE = "delete"
    DISCARD = "group_too_small"
    LEASE = "lease"
    RELEASE = "release"
    TRAIN = "ack_trained"
    REJECT = "ack_rejected"
    REPLAY = "replay"
    DAMAGE = "damage"


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of the table; ``before`` None: the session does not exist yet."""

    before: SessionState | None
    event: Event
    after: SessionState
    mode: SessionMode | None = None
    """Restricts the line to sessions of this mode."""
    when: str = ""


@dataclass(frozen=True, slots=True)
class StateRule:
    """The authors, the effect and the refusal of an event."""

    by: str
    request: str
    """The HTTP request; empty for events of the service itself."""
    does: str
    code: str = "session_closed"
    """The error code of a refusal: `session_closed` is 410, every other one 409."""


_OWNERS = "the session's key, its tenant, an admin"
_JUDGES = "the session's key, its judge, its tenant, an admin"
_TRAINER = "the trainer, an admin"
_SERVICE = "the service"
EVENTS = {
    Event.OPEN: StateRule(
        "a tenant, the trainer, an admin",
        "POST /rl/v1/start_session",
        "takes a slot (train sessions), writes the session, and returns its key",
    ),
    Event.CALL: StateRule(
        _OWNERS,
        "POST /v1/chat/completions",
        "records an interaction; renews the idle time",
    ),
    Event.REWARD: StateRule(
        _JUDGES,
        "POST /rl/v1/set_reward",
        "sets or revises a reward, of an interaction or the final one; renews the idle time; "
        "refused with 403 `judge_only` if only a judge may",
    ),
    Event.HEARTBEAT: StateRule(
        _JUDGES,
        "POST /rl/v1/sessions/{id}/heartbeat",
        "renews the idle time",
    ),
    Event.AWAIT: StateRule(
        _JUDGES,
        'POST /rl/v1/finalize {"await_reward": true}',
        "aborts calls under way and waits for rewards until the deadline; refused with 422 "
        "`no_interactions` for a train or an implicit session without a call",
    ),
    Event.FINALIZE: StateRule(
        _JUDGES,
        "POST /rl/v1/finalize",
        "aborts calls under way and ends the session; refused with 422 `no_reward` or "
        "`no_interactions` if nothing could be learned from it; a second one returns the "
        "session's present state; where a judge rewards, the session's key makes it "
        "`await_reward`",
    ),
    Event.DEADLINE: StateRule(
        _SERVICE,
        "",
        "ends a session that awaited its reward: with its rewards, if it has any, else by "
        "`sessions.late_reward`",
    ),
    Event.EXPIRE: StateRule(
        _SERVICE,
        "",
        "ends a session whose ttl, idle time or group's time ran out; aborts calls under way",
    ),
    Event.ABORT: StateRule(
        _JUDGES,
        "POST /rl/v1/sessions/{id}/abort",
        "discards the session; aborts calls under way; with `keep_place` another session may "
        "take its place in its group",
    ),
    Event.VETO: StateRule(
        _OWNERS,
        "POST /rl/v1/sessions/{id}/veto",
        "keeps a finalized session out of training",
        "not_finalized",
    ),
    Event.DELETE: StateRule(
        _OWNERS,
        "DELETE /rl/v1/sessions/{id}",
        "erases the session's texts, tokens and metadata; ends it first if it has not ended; "
        "refused while a resume of the training may need it",
        "in_training",
    ),
    Event.DISCARD: StateRule(
        _SERVICE,
        "",
        "rejects a session whose group closed with fewer than `sessions.min_group_size` sessions",
    ),
    Event.LEASE: StateRule(
        _TRAINER,
        "POST /rl/v1/lease",
        "leases the session with its closed group; alone if it is named, or to an export; only an "
        "export gets sessions that were opened on a grant",
        "not_finalized",
    ),
    Event.RELEASE: StateRule(
        _SERVICE,
        "",
        "takes the session back: its lease ran out, or its owner reported (PUT /rl/v1/capacity) "
        "that it does not know the session",
        "lease_lost",
    ),
    Event.TRAIN: StateRule(
        "its lease's owner",
        "POST /rl/v1/ack",
        "ends the session: an optimizer step used it; AReaL's `POST /export_trajectories` does "
        "this at once",
        "lease_lost",
    ),
    Event.REJECT: StateRule(
        "its lease's owner",
        "POST /rl/v1/ack",
        "ends the session: a step left it out, with the reason",
        "lease_lost",
    ),
    Event.REPLAY: StateRule(
        _TRAINER,
        'POST /rl/v1/lease {"replay": true}',
        "leases the session again to a training that resumes from before the step that used it",
        "not_replayable",
    ),
    Event.DAMAGE: StateRule(
        _SERVICE,
        "",
        "ends a session whose stored data cannot be read completely, and erases the rest",
    ),
}
"""The rule of each event."""

ENDED = (TRAINED, REJECTED, EVALUATED, EXPIRED, ABORTED)
FINALIZED_ONCE = (FINALIZED, LEASED, TRAINED, REJECTED, EVALUATED)
"""The states of a session that was finalized."""
_SAME = "with the same final reward or none; nothing changes. Else 409 `already_finalized`"
_TRAIN, _EVAL = SessionMode.TRAIN, SessionMode.EVAL
_VETOED = "a guardrail of `litellm.policy_vetoes` refused an answer"
_NOT_NEEDED = "no kept checkpoint needs it"
_NOT_HAD = "no trainer has leased it"
_NOT_EXPORTED = "no export has leased it"
_LEASABLE = "by an export only if no trainer has leased it; only by an export if opened on a grant"
TRANSITIONS = (
    Transition(None, Event.OPEN, OPEN),
    Transition(OPEN, Event.CALL, OPEN),
    Transition(OPEN, Event.REWARD, OPEN),
    Transition(OPEN, Event.HEARTBEAT, OPEN),
    Transition(OPEN, Event.AWAIT, AWAITING),
    Transition(OPEN, Event.FINALIZE, FINALIZED, _TRAIN),
    Transition(OPEN, Event.FINALIZE, REJECTED, _TRAIN, _VETOED),
    Transition(OPEN, Event.FINALIZE, EVALUATED, _EVAL),
    Transition(OPEN, Event.EXPIRE, EXPIRED),
    Transition(OPEN, Event.ABORT, ABORTED),
    Transition(OPEN, Event.DELETE, ABORTED),
    Transition(AWAITING, Event.REWARD, AWAITING),
    Transition(AWAITING, Event.FINALIZE, FINALIZED, _TRAIN),
    Transition(AWAITING, Event.FINALIZE, REJECTED, _TRAIN, _VETOED),
    Transition(AWAITING, Event.FINALIZE, EVALUATED, _EVAL),
    Transition(AWAITING, Event.DEADLINE, FINALIZED, _TRAIN, "it has a reward, or got one"),
    Transition(
        AWAITING,
        Event.DEADLINE,
        REJECTED,
        _TRAIN,
        f"it has none, or its grader failed, or {_VETOED}",
    ),
    Transition(AWAITING, Event.DEADLINE, EVALUATED, _EVAL),
    Transition(AWAITING, Event.ABORT, ABORTED),
    Transition(AWAITING, Event.DELETE, ABORTED),
    *(Transition(over, Event.AWAIT, over, when=_SAME) for over in (AWAITING, *FINALIZED_ONCE)),
    *(Transition(over, Event.FINALIZE, over, when=_SAME) for over in FINALIZED_ONCE),
    Transition(FINALIZED, Event.REWARD, FINALIZED, when=_NOT_HAD),
    Transition(FINALIZED, Event.VETO, REJECTED, when=_NOT_HAD),
    Transition(FINALIZED, Event.DELETE, REJECTED, when=_NOT_HAD),
    Transition(FINALIZED, Event.DISCARD, REJECTED),
    Transition(FINALIZED, Event.LEASE, LEASED, when=_LEASABLE),
    Transition(FINALIZED, Event.REPLAY, LEASED),
    Transition(LEASED, Event.LEASE, LEASED, when="named by its lease's owner"),
    Transition(LEASED, Event.RELEASE, FINALIZED),
    Transition(LEASED, Event.TRAIN, TRAINED),
    Transition(LEASED, Event.REJECT, REJECTED),
    Transition(LEASED, Event.REPLAY, LEASED, when=_NOT_EXPORTED),
    Transition(TRAINED, Event.TRAIN, TRAINED, when="it was acknowledged before"),
    Transition(TRAINED, Event.REPLAY, LEASED, when=f"{_NOT_EXPORTED}, and its content is kept"),
    Transition(TRAINED, Event.DELETE, TRAINED, when=_NOT_NEEDED),
    Transition(REJECTED, Event.REJECT, REJECTED, when="it was acknowledged before"),
    Transition(REJECTED, Event.REPLAY, LEASED, when=f"{_NOT_EXPORTED}, and its content is kept"),
    Transition(REJECTED, Event.DELETE, REJECTED, when=_NOT_NEEDED),
    Transition(EVALUATED, Event.DELETE, EVALUATED),
    Transition(EXPIRED, Event.DELETE, EXPIRED),
    Transition(ABORTED, Event.DELETE, ABORTED),
    Transition(OPEN, Event.DAMAGE, ABORTED),
    Transition(AWAITING, Event.DAMAGE, ABORTED),
    Transition(FINALIZED, Event.DAMAGE, REJECTED),
    Transition(LEASED, Event.DAMAGE, REJECTED),
    *(Transition(over, Event.DAMAGE, over) for over in ENDED),
)
"""All lines of the table."""

_TABLE: defaultdict[tuple[SessionState | None, Event], list[Transition]] = defaultdict(list)
for _transition in TRANSITIONS:
    _TABLE[_transition.before, _transition.event].append(_transition)


def transitions(state: SessionState | None, event: Event) -> Sequence[Transition]:
    """Return the lines of the table for an event in a state; none if it is refused."""
    return _TABLE.get((state, event), ())


def target(row: SessionRow, event: Event, to: SessionState | None = None) -> SessionState:
    """Return the state that an event leads to: ``to``, or the first that the table has.

    SessionClosed (410) or Conflict (409) if the table has no such line.
    """
    if not allowed(row, event):
        raise refusal(row, event)
    after = [t.after for t in transitions(row.state, event) if t.mode in (None, row.mode)]
    to = to or after[0]
    assert to in after, f"{row.state} and {event} cannot lead to {to}"
    return to


def owner_after(row: SessionRow, event: Event, owner: str | None) -> str | None:
    """Return the owner of a session after an event that ``owner`` caused."""
    if row.owner == GRANT_OWNER and event in (Event.LEASE, Event.RELEASE):
        return GRANT_OWNER
    if event is Event.RELEASE and row.owner != EXPORT_OWNER:
        # The trainer that gives a session back stays its owner: it has had the session.
        return row.owner
    return owner


def allowed(row: SessionRow, event: Event) -> bool:
    """Return whether the table has a line for the event whose condition on the row holds."""
    if event is Event.REPLAY and (row.content != "stored" or for_export(row)):
        return False
    if event is Event.REWARD and handed_out(row):
        return False
    return any(t.mode in (None, row.mode) for t in transitions(row.state, event))


def refusal(row: SessionRow, event: Event, *, closing: bool = False) -> AnyAgentError:
    """Return the error of a forbidden event; ``closing``: the session is being ended."""
    code, advice = refused_with(row.state, event)
    if handed_out(row) and event in _HANDED_OUT:
        code, advice = _HANDED_OUT[event]
    elif row.state is FINALIZED and event is Event.LEASE:
        code, advice = "on_a_grant", "it was opened on a grant, so only an export can lease it"
    why = f" ({row.reason})" if row.reason else ""
    gone = "" if row.content == "stored" else f", and its content was {row.content}"
    state = "being ended" if closing else _describe(row)
    message = f"session {row.id} is {state}{why}{gone}; {advice}"
    kind = SessionClosed if code == "session_closed" else Conflict
    details = {"state": str(row.state), "reason": row.reason}
    return kind(message, code=code, details=details)


def already_finalized(row: SessionRow) -> Conflict:
    """Return the error of a session that is finalized again with another final reward."""
    now = "none" if row.final_reward is None else f"{row.final_reward:g}"
    revisable = allowed(row, Event.REWARD)
    advice = "set_reward revises it" if revisable else "it takes no more rewards"
    message = (
        f"session {row.id} is {_describe(row)} already with the final reward {now}: another final "
        f"reward is refused; {advice}"
    )
    details = {"state": str(row.state), "reason": row.reason}
    return Conflict(message, code="already_finalized", details=details)


def refused_with(state: SessionState, event: Event) -> tuple[str, str]:
    """Return the code of a refusal's error, and what to do."""
    return _EXCEPTIONS.get((event, state)) or (EVENTS[event].code, _ADVICE.get(event, _NEW))


def _describe(row: SessionRow) -> str:
    states = _EXPORT_STATES if for_export(row) else _STATE_TEXTS
    return states.get(row.state) or _STATE_TEXTS.get(row.state, str(row.state))


_STATE_TEXTS = {
    AWAITING: "awaiting its reward",
    LEASED: "handed to training",
    TRAINED: "trained on",
}
_EXPORT_STATES = {LEASED: "leased by an export", TRAINED: "exported"}
_NEW = "it takes no more calls or rewards: start a new session"
_NO_CALLS = (
    "it takes no more calls, but rewards until its deadline (set_reward, then finalize); for calls "
    "start a new session"
)
_REVISE = "set_reward can still revise its rewards; for more calls start a new session"
_VETO = "POST .../veto keeps it out of training; for more calls start a new session"
_TAKEN = "its trajectory was leased already, so it cannot be taken out of training"
_EXCEPTIONS = {
    (Event.CALL, AWAITING): ("session_closed", _NO_CALLS),
    (Event.HEARTBEAT, AWAITING): ("session_closed", _NO_CALLS),
    (Event.CALL, FINALIZED): ("session_closed", _REVISE),
    (Event.HEARTBEAT, FINALIZED): ("session_closed", _REVISE),
    (Event.ABORT, FINALIZED): ("session_closed", _VETO),
    (Event.VETO, OPEN): ("not_finalized", "abort it instead"),
    (Event.VETO, AWAITING): ("not_finalized", "abort it instead"),
    (Event.ABORT, LEASED): ("session_closed", _TAKEN),
    (Event.VETO, LEASED): ("in_training", _TAKEN),
    (Event.LEASE, LEASED): (
        "not_finalized",
        "it cannot be leased again before that lease has ended",
    ),
    (Event.LEASE, TRAINED): ("not_finalized", "it cannot be leased or exported once more"),
}
"""Refusals that differ from their event's usual one."""
for _ended in ENDED:
    for _event in (Event.ABORT, Event.VETO):
        _nothing = f"it is over, there is nothing to {_event}"
        _EXCEPTIONS[_event, _ended] = ("session_closed", _nothing)

_HANDED_OUT = {
    Event.REWARD: ("session_closed", "a trainer has had it, so its rewards are fixed"),
    Event.ABORT: ("session_closed", "a trainer has had it, and may train on it again"),
    Event.VETO: ("in_training", "a trainer has had it, and may train on it again"),
    Event.DELETE: ("in_training", "a trainer has had it, and may train on it again"),
    Event.LEASE: ("in_training", "a trainer has had it, and may train on it again"),
}
"""Refusals of sessions that a trainer has given back."""

_ADVICE = {
    Event.DELETE: (
        "a resume of the training may need it; delete it once it was trained on and the "
        "checkpoints from before that are gone"
    ),
    Event.LEASE: "only finalized ones can be leased or exported",
    Event.RELEASE: "its lease ran out or was taken back",
    Event.TRAIN: "its lease ran out or was taken back",
    Event.REJECT: "its lease ran out or was taken back",
    Event.REPLAY: "only what was finalized, and is still kept, can be trained on again",
}
