"""The metrics of one rank, each with the counter that it reads at a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar, get_args

from any_agent.completions.untrainable import REASONS
from any_agent.rundir.registry import rank_name
from any_agent.runtime.metrics import LOOP_LAG, Exposition, Metric, Value, Values
from any_agent.types import Continuation, SessionMode, SessionState
from proxy_ext.admission.implicit_session import JoinKind
from proxy_ext.calls.stats import FIRST, NO_SESSION, CallOutcome, RetryOutcome
from proxy_ext.frozen.call import OUTCOMES
from proxy_ext.frozen.spend_caps import CAPS
from proxy_ext.litellm_events import EVENT_OUTCOMES
from proxy_ext.service import RankService
from proxy_ext.sessions.expiry import LateOutcome
from proxy_ext.web.quotas import QUOTAS

S = TypeVar("S", bound=str)
Read: TypeAlias = Callable[[RankService], Value | Values]
MODES = (*SessionMode, NO_SESSION)
CONTINUATIONS = (FIRST, *Continuation)
SPAN_OUTCOMES = ("sent", "failed", "dropped")


def _counter(name: str, meaning: str, read: Read, *labels: str) -> tuple[Metric, Read]:
    return Metric(f"any_agent_{name}_total", "counter", meaning, labels), read


def _gauge(name: str, meaning: str, read: Read, *labels: str) -> tuple[Metric, Read]:
    return Metric(f"any_agent_{name}", "gauge", meaning, labels), read


def _histogram(name: str, meaning: str, read: Read) -> tuple[Metric, Read]:
    return Metric(f"any_agent_{name}", "histogram", meaning), read


def _by_one(counts: Counter[str], always: Iterable[str] = ()) -> Values:
    """``always``: label values that are shown from the start, so that rates have them."""
    return {(key,): counts[key] for key in dict.fromkeys((*always, *counts))}


def _by_two(counts: Counter[tuple[str, S]], one: Sequence[str], two: Sequence[S]) -> Values:
    return {(a, b): counts[a, b] for a in one for b in two}


_METRICS: tuple[tuple[Metric, Read], ...] = (
    (LOOP_LAG, lambda s: {(rank_name(s.rank),): s.loop_lag}),
    _counter(
        "sessions_created",
        "Sessions ever created in this trial: at any moment the sum of any_agent_sessions.",
        lambda s: _by_one(s.sessions.counts.created, SessionMode),
        "mode",
    ),
    _gauge(
        "sessions",
        "Sessions of this trial by state, ended ones included.",
        lambda s: _by_two(s.sessions.counts.now, tuple(SessionMode), tuple(SessionState)),
        "mode",
        "state",
    ),
    _counter(
        "opens_refused",
        "start_session requests that were refused, by the error's code (no_capacity: 429).",
        lambda s: _by_one(s.opening.refused),
        "code",
    ),
    _gauge(
        "slots_admitted",
        "Slots for train sessions taken so far, reserved ones too.",
        lambda s: s.sessions.admission.admitted,
    ),
    _gauge(
        "slots_limit",
        "Slots for train sessions that the trainer allows so far.",
        lambda s: s.sessions.admission.limit,
    ),
    _gauge(
        "slots_reserved",
        "Slots taken by sessions that are not open yet.",
        lambda s: s.sessions.reserved,
    ),
    _counter(
        "groups_too_small",
        "Groups whose sessions were rejected because fewer of them were finalized than "
        "sessions.min_group_size asks for.",
        lambda s: s.sessions.groups.too_small,
    ),
    _counter(
        "quotas_exceeded",
        "Requests that a tenant's quota refused (429 quota_exceeded), by the quota.",
        lambda s: _by_one(s.quotas.refused, QUOTAS),
        "quota",
    ),
    _gauge(
        "quotas_exact",
        "1 if tenants' quotas are counted once for all ranks; 0 if each rank enforces its share of "
        "them: without server.journal, or while its Redis does not answer.",
        lambda s: int(s.quotas.exact),
    ),
    _gauge(
        "slots_waiting", "Slots that waiting opens need.", lambda s: s.sessions.admission.waiting
    ),
    _gauge("calls_running", "Model calls under way.", lambda s: len(s.calls)),
    _gauge(
        "calls_limit",
        "Model calls that run at once at most; others get 429.",
        lambda s: s.calls.concurrency.limit,
    ),
    _counter(
        "calls_refused",
        "Model calls refused because as many as the limit were under way (429).",
        lambda s: s.calls.concurrency.refused,
    ),
    _counter(
        "calls",
        "Model calls that ended: completed (durable, in a session), aborted (the client left or "
        "the session ended) or failed; mode none: calls without a session.",
        lambda s: _by_two(s.calls.stats.ended, MODES, get_args(CallOutcome)),
        "mode",
        "outcome",
    ),
    _histogram(
        "call_seconds",
        "Seconds from the request to the engine until the answer is durable, of completed calls.",
        lambda s: s.calls.stats.seconds,
    ),
    _histogram(
        "first_token_seconds",
        "Seconds from the request to the engine until its first tokens, of streamed calls.",
        lambda s: s.calls.stats.first_token_seconds,
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens of completed calls.",
        lambda s: _by_one(s.calls.stats.prompt_tokens, MODES),
        "mode",
    ),
    _counter(
        "output_tokens",
        "Sampled tokens of completed calls.",
        lambda s: _by_one(s.calls.stats.output_tokens, MODES),
        "mode",
    ),
    _counter(
        "interactions",
        "Recorded calls by how the prompt continues the session: first (of its session), exact "
        "(begins with the parent's ids), branch (has a parent whose ids could not be "
        "continued), root (a later call that extends nothing recorded: a sub-agent's, or a "
        "rewritten history).",
        lambda s: _by_two(s.calls.stats.interactions, tuple(SessionMode), CONTINUATIONS),
        "mode",
        "continuation",
    ),
    _counter(
        "branches",
        "Recorded calls that continue none exactly and are not their session's first, by reason.",
        lambda s: _by_one(s.calls.stats.branches),
        "reason",
    ),
    _counter(
        "overrides",
        "Completed calls in which the run's sampling replaced a parameter of the agent's.",
        lambda s: _by_one(s.calls.stats.overrides),
        "parameter",
    ),
    _counter(
        "ignored_parameters",
        "Completed calls with a parameter that had no effect (see x-any-agent-ignored), by its "
        "name; of names beyond the first 32, other.",
        lambda s: _by_one(s.calls.stats.ignored),
        "parameter",
    ),
    _counter(
        "untrainable_interactions",
        "Interactions of train sessions that are never trained on, by reason (see "
        "docs/reference/parameters.md); undelivered: as any_agent_undelivered_answers_total, with "
        "those of eval sessions.",
        lambda s: _by_one(
            s.calls.stats.untrainable + Counter(undelivered=s.sessions.undelivered), REASONS
        ),
        "reason",
    ),
    _counter(
        "untrainable_sessions",
        "Finalized train sessions with more calls that are not trained on than calls that are, by "
        "the reason of most of these (see finalize's untrainable_calls).",
        lambda s: _by_one(s.sessions.trainability.sessions),
        "reason",
    ),
    _counter(
        "undelivered_answers",
        "Recorded answers that reached no client and are never trained on.",
        lambda s: s.sessions.undelivered,
    ),
    _counter(
        "policy_calls_by_name",
        "Calls of the policy by the model name in the request; of names beyond the first 32, "
        "other.",
        lambda s: _by_one(s.frozen.policy.calls),
        "name",
    ),
    _counter(
        "frozen_calls",
        "Calls of frozen models that ended: completed, aborted (the client left or the session "
        "ended) or failed (at the provider).",
        lambda s: _by_two(s.frozen.stats.ended, s.frozen.labels, OUTCOMES),
        "model",
        "outcome",
    ),
    _gauge("frozen_calls_running", "Calls of frozen models under way.", lambda s: len(s.frozen)),
    _counter(
        "frozen_calls_refused",
        "Calls of frozen models that were refused: cap session or tenant (402), or max_calls "
        "(429).",
        lambda s: _by_one(
            s.frozen.spending.refused + Counter(max_calls=s.frozen.stats.turned_away),
            (*CAPS, "max_calls"),
        ),
        "cap",
    ),
    _histogram(
        "frozen_call_seconds",
        "Seconds of completed calls of frozen models, until they are durable.",
        lambda s: s.frozen.stats.seconds,
    ),
    _counter(
        "frozen_tokens",
        "Tokens of calls of frozen models, as the provider counts them.",
        lambda s: _by_two(s.frozen.stats.tokens, s.frozen.labels, ("input", "output")),
        "model",
        "kind",
    ),
    _counter(
        "frozen_usd",
        "What calls of frozen models cost, in USD.",
        lambda s: {(m,): s.frozen.stats.usd.get(m, 0.0) for m in s.frozen.labels},
        "model",
    ),
    _counter(
        "frozen_unpriced_calls",
        "Calls of frozen models without a known price: no cap counts them.",
        lambda s: _by_one(s.frozen.stats.unpriced, s.frozen.labels),
        "model",
    ),
    _counter(
        "litellm_events",
        "The policy's calls, rewards and ends for LiteLLM's callbacks (litellm.config), by "
        "outcome: told, failed (they took too long, or their process ended; one that raises is "
        "logged by LiteLLM) or dropped (litellm.max_waiting_events were waiting); and the "
        "policy's calls for its virtual keys: charged, or uncharged (LiteLLM failed, or too many "
        "waited).",
        lambda s: {} if s.events is None else _by_one(s.events.outcomes, EVENT_OUTCOMES),
        "outcome",
    ),
    _counter(
        "trace_spans",
        "Spans of tracing.endpoint by outcome: sent, failed (its collector did not take them) or "
        "dropped (too many waited for it).",
        lambda s: {} if s.traces is None else _by_one(s.traces.outcomes, SPAN_OUTCOMES),
        "outcome",
    ),
    _counter(
        "implicit_calls",
        "Model calls that named no session, by how they got theirs (sessions.implicit): opened, "
        "continued, ambiguous (continued where another session had the same answer), retried or "
        "reused (a session without any answer).",
        lambda s: _by_one(s.implicit.calls, get_args(JoinKind)),
        "how",
    ),
    _gauge(
        "implicit_sessions_open",
        "Open implicit sessions: those that model calls opened.",
        lambda s: len(s.sessions.conversations),
    ),
    _counter(
        "implicit_sessions_ended",
        "Implicit sessions that were idle for long enough or reached their ttl, and went to the "
        "grader.",
        lambda s: s.expiry.implicit_ended,
    ),
    _counter(
        "retries",
        "Model calls that their SDK marked as retries, by their outcome: joined (the call under "
        "way), replayed (its recorded answer), recovered (an answer of before a restart) or new "
        "(a call of their own, as there was none to repeat).",
        lambda s: {(got,): s.calls.stats.retries[got] for got in get_args(RetryOutcome)},
        "got",
    ),
    _counter(
        "idempotent_replays",
        "Requests with an Idempotency-Key that were answered as their first ones.",
        lambda s: s.answers.replayed,
    ),
    _counter(
        "rewards",
        "Rewards that were set or revised, of a completion or of a whole session (final); each "
        "name counts.",
        lambda s: _by_one(s.rewards.given, ("completion", "final")),
        "of",
    ),
    _counter(
        "late_rewards",
        "Sessions that awaited their reward until its deadline, by outcome: rewarded (it had "
        "come), rejected, zero, graded or grader_failed (rejected, too).",
        lambda s: _by_one(s.expiry.outcomes, get_args(LateOutcome)),
        "outcome",
    ),
    _gauge(
        "sessions_grading",
        "Sessions that are being graded or wait for it.",
        lambda s: s.expiry.grading,
    ),
    _gauge("weight_version", "The weight version that the rank serves.", lambda s: s.run.version),
    _counter(
        "update_pauses", "Pauses of sampling for a weight update.", lambda s: s.run.pauses.count
    ),
    _counter(
        "update_pause_seconds", "Seconds in all of these pauses.", lambda s: s.run.pauses.seconds
    ),
    _gauge(
        "engine_up",
        "1 while the rank's engine serves, 0 while calls wait for it.",
        lambda s: not s.engine.away,
    ),
    _counter(
        "resubmissions",
        "Calls sent to the engine again with their partial answer, after a weight update or "
        "after the engine's death.",
        lambda s: _by_one(s.engine.resubmitted, ("update", "death")),
        "reason",
    ),
    _counter(
        "keys_refused",
        "Requests refused before their route: invalid_api_key (none, or not valid), forbidden "
        "(a key of another scope).",
        lambda s: _by_one(s.audit.refused),
        "code",
    ),
    _counter(
        "audit_lines_lost",
        "Lines missing in the audit log: its disk failed, or was too slow.",
        lambda s: s.audit.dropped,
    ),
    _counter(
        "journal_writes",
        "Writes committed to the journal; several share a commit.",
        lambda s: s.journal.stats.writes,
    ),
    _histogram(
        "journal_commit_seconds",
        "Seconds of a commit to the journal, its fsync included.",
        lambda s: s.journal.stats.commit_seconds,
    ),
    _gauge(
        "journal_full",
        "1 while the journal's disk is full, as its last write found; calls are answered with 507.",
        lambda s: int(s.journal.stats.full),
    ),
    _gauge(
        "journal_log_away",
        "1 while the journal's Redis (server.journal) cannot be written, as the last write found; "
        "calls are answered with 503, or 507 if it has no room.",
        lambda s: int(s.journal.stats.log_away),
    ),
    _counter(
        "journal_damaged",
        "Sessions ended because their record was damaged, this start's included.",
        lambda s: s.journal.stats.damaged,
    ),
    _gauge(
        "journal_bytes", "Bytes that the rank's journal takes on disk.", lambda s: s.journal.size()
    ),
    _gauge(
        "disk_free_bytes",
        "Bytes free on the disk of the run's folder, and of the journal's where that is another.",
        lambda s: {(n,): d.free for n, d in s.disks.items() if d.free is not None},
        "disk",
    ),
    _gauge(
        "disk_full_in_seconds",
        "Seconds until this disk is full, if it goes on filling as it did in the last hour; +Inf "
        "if it does not fill up, and in the first ten minutes.",
        lambda s: {(name,): disk.seconds_left for name, disk in s.disks.items()},
        "disk",
    ),
    _gauge(
        "tree_bytes",
        "Estimated bytes of live sessions' interactions in memory (at most sessions.hot_bytes "
        "and what is in use).",
        lambda s: s.sessions.trees.bytes,
    ),
    _counter(
        "tree_reads",
        "Sessions whose interactions had to be read from the journal. If they are many, "
        "sessions.hot_bytes is too low.",
        lambda s: s.sessions.trees.reads,
    ),
    _gauge(
        "archived_sessions",
        "Sessions of this trial whose content was moved from the journal to an archive.",
        lambda s: s.archive.sessions,
    ),
    _gauge(
        "archive_bytes", "Bytes that the rank's archives take on disk.", lambda s: s.archive.bytes
    ),
    _counter(
        "archive_removed_sessions",
        "Sessions whose archives were removed, the oldest first, because all were larger than "
        "sessions.archive_bytes, or than its default.",
        lambda s: {(s.archive_limit_kind,): s.archive.removed},
        "limit",
    ),
)
METRICS = tuple(metric for metric, _ in _METRICS)


def exposition(service: RankService) -> Exposition:
    """Return the rank's metrics, which are read from its parts at each scrape."""
    name = rank_name(service.rank)
    return Exposition(
        name, lambda: ((metric, read(service)) for metric, read in _METRICS), rank=str(service.rank)
    )
