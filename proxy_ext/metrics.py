"""What one rank shows at `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar, get_args

from any_agent.completions.untrainable import REASONS
from any_agent.loop_lag import LOOP_LAG
from any_agent.rundir.registry import rank_name
from any_agent.runtime.metrics import Exposition, Metric, Reading, Values
from any_agent.types import Continuation, SessionMode, SessionState
from proxy_ext.admission.implicit_session import JoinKind
from proxy_ext.calls.stats import FIRST, NO_SESSION, CallOutcome, RetryOutcome
from proxy_ext.frozen.spend_caps import CAPS
from proxy_ext.frozen.stats import OUTCOMES
from proxy_ext.service import RankService
from proxy_ext.sessions.expiry import LateOutcome
from proxy_ext.web.quotas import QUOTAS

S = TypeVar("S", bound=str)
CREATED = Metric(
    "any_agent_sessions_created_total",
    "counter",
    "Sessions ever created in this trial: at any moment the sum of any_agent_sessions.",
    ("mode",),
)
SESSIONS = Metric(
    "any_agent_sessions",
    "gauge",
    "Sessions of this trial by state, ended ones included.",
    ("mode", "state"),
)
OPENS_REFUSED = Metric(
    "any_agent_opens_refused_total",
    "counter",
    "start_session requests that were refused, by the error's code (no_capacity: 429).",
    ("code",),
)
SLOTS_ADMITTED = Metric(
    "any_agent_slots_admitted", "gauge", "Slots for train sessions taken so far, reserved ones too."
)
SLOTS_LIMIT = Metric(
    "any_agent_slots_limit", "gauge", "Slots for train sessions that the trainer allows so far."
)
SLOTS_RESERVED = Metric(
    "any_agent_slots_reserved", "gauge", "Slots taken by sessions that are not open yet."
)
GROUPS_TOO_SMALL = Metric(
    "any_agent_groups_too_small_total",
    "counter",
    "Groups whose sessions were rejected because fewer of them were finalized than "
    "sessions.min_group_size asks for.",
)
QUOTAS_EXCEEDED = Metric(
    "any_agent_quotas_exceeded_total",
    "counter",
    "Requests that a tenant's quota refused (429 quota_exceeded), by the quota.",
    ("quota",),
)
SLOTS_WAITING = Metric("any_agent_slots_waiting", "gauge", "Slots that opens wait for.")
CALLS_RUNNING = Metric("any_agent_calls_running", "gauge", "Model calls under way.")
CALLS_LIMIT = Metric(
    "any_agent_calls_limit", "gauge", "Model calls that are taken at once; others get 429."
)
CALLS_REFUSED = Metric(
    "any_agent_calls_refused_total",
    "counter",
    "Model calls that were refused because as many as the limit were under way (429).",
)
CALLS = Metric(
    "any_agent_calls_total",
    "counter",
    "Model calls that ended: completed (durable, in a session), aborted (the client left or the "
    "session ended) or failed; mode none: calls without a session.",
    ("mode", "outcome"),
)
CALL_SECONDS = Metric(
    "any_agent_call_seconds",
    "histogram",
    "Seconds from the engine's being asked until the answer is durable, of completed calls.",
)
FIRST_TOKEN_SECONDS = Metric(
    "any_agent_first_token_seconds",
    "histogram",
    "Seconds from the engine's being asked until its first tokens, of streamed calls.",
)
PROMPT_TOKENS = Metric(
    "any_agent_prompt_tokens_total", "counter", "Prompt tokens of completed calls.", ("mode",)
)
OUTPUT_TOKENS = Metric(
    "any_agent_output_tokens_total", "counter", "Sampled tokens of completed calls.", ("mode",)
)
INTERACTIONS = Metric(
    "any_agent_interactions_total",
    "counter",
    "Recorded calls by how the prompt came about: first (of its session), exact (begins with the "
    "parent's ids), branch (has a parent whose ids could not be continued), root (a later call "
    "that extends nothing recorded: a sub-agent's, or a rewritten history).",
    ("mode", "continuation"),
)
BRANCHES = Metric(
    "any_agent_branches_total",
    "counter",
    "Recorded calls that continue none exactly and are not their session's first, by reason.",
    ("reason",),
)
OVERRIDES = Metric(
    "any_agent_overrides_total",
    "counter",
    "Completed calls in which the run's sampling replaced what the agent asked for.",
    ("parameter",),
)
IGNORED = Metric(
    "any_agent_ignored_parameters_total",
    "counter",
    "Completed calls with a parameter that had no effect (see x-any-agent-ignored), by its name; "
    "of names beyond the first 32, other.",
    ("parameter",),
)
UNTRAINABLE = Metric(
    "any_agent_untrainable_interactions_total",
    "counter",
    "Interactions of train sessions that are never trained on, by reason (see docs/parameters.md); "
    "undelivered: as any_agent_undelivered_answers_total, eval sessions' too.",
    ("reason",),
)
UNDELIVERED = Metric(
    "any_agent_undelivered_answers_total",
    "counter",
    "Recorded answers that reached nobody and are never trained on.",
)
POLICY_CALLS = Metric(
    "any_agent_policy_calls_by_name_total",
    "counter",
    "Calls of the policy by the name that they gave it; of names beyond the first 32, other.",
    ("name",),
)
FROZEN_CALLS = Metric(
    "any_agent_frozen_calls_total",
    "counter",
    "Calls of frozen models that ended: completed, aborted (the client left or the session ended) "
    "or failed (at the provider).",
    ("model", "outcome"),
)
FROZEN_RUNNING = Metric(
    "any_agent_frozen_calls_running", "gauge", "Calls of frozen models under way."
)
FROZEN_REFUSED = Metric(
    "any_agent_frozen_calls_refused_total",
    "counter",
    "Calls of frozen models that were refused: cap session or tenant (402), or max_calls (429).",
    ("cap",),
)
FROZEN_SECONDS = Metric(
    "any_agent_frozen_call_seconds",
    "histogram",
    "Seconds of completed calls of frozen models, until they are durable.",
)
FROZEN_TOKENS = Metric(
    "any_agent_frozen_tokens_total",
    "counter",
    "Tokens of calls of frozen models, as the provider counts them.",
    ("model", "kind"),
)
FROZEN_USD = Metric(
    "any_agent_frozen_usd_total",
    "counter",
    "What calls of frozen models cost, in USD.",
    ("model",),
)
FROZEN_UNPRICED = Metric(
    "any_agent_frozen_unpriced_calls_total",
    "counter",
    "Calls of frozen models whose price is not known: no cap sees them.",
    ("model",),
)
IMPLICIT_CALLS = Metric(
    "any_agent_implicit_calls_total",
    "counter",
    "Model calls that named no session, by how they got theirs (sessions.implicit): opened, "
    "continued, ambiguous (continued where another had said the same), retried or reused (one in "
    "which nothing had been said).",
    ("how",),
)
IMPLICIT_OPEN = Metric(
    "any_agent_implicit_sessions_open", "gauge", "Open sessions that model calls opened."
)
IMPLICIT_ENDED = Metric(
    "any_agent_implicit_sessions_ended_total",
    "counter",
    "Of these, those that had been idle for long enough or reached their ttl, "
    "and went to the grader.",
)
RETRIES = Metric(
    "any_agent_retries_total",
    "counter",
    "Model calls that their SDK marked as retries, by what they got: joined (the call under way), "
    "replayed (its recorded answer), recovered (one of before a restart) or new (a call of their "
    "own: there was none to take up).",
    ("got",),
)
REPLAYS = Metric(
    "any_agent_idempotent_replays_total",
    "counter",
    "Requests with an Idempotency-Key that were answered as their first ones had been.",
)
REWARDS = Metric(
    "any_agent_rewards_total",
    "counter",
    "Rewards that were set or revised, of a completion or of a whole session (final); each name "
    "counts.",
    ("of",),
)
LATE_REWARDS = Metric(
    "any_agent_late_rewards_total",
    "counter",
    "Sessions that awaited their reward until its deadline, by what became of them: rewarded (it "
    "had come), rejected, zero, graded or grader_failed (rejected, too).",
    ("outcome",),
)
GRADING = Metric(
    "any_agent_sessions_grading", "gauge", "Sessions that the grader is at work on, or will be."
)
VERSION = Metric("any_agent_weight_version", "gauge", "The weight version that the rank serves.")
PAUSES = Metric(
    "any_agent_update_pauses_total", "counter", "Pauses of sampling for a weight update."
)
PAUSE_SECONDS = Metric(
    "any_agent_update_pause_seconds_total", "counter", "Seconds in all of these pauses."
)
ENGINE_UP = Metric(
    "any_agent_engine_up", "gauge", "1 while the rank's engine serves, 0 while calls wait for it."
)
RESUBMISSIONS = Metric(
    "any_agent_resubmissions_total",
    "counter",
    "Calls sent to the engine again with their partial answer, after a weight update or after the "
    "engine's death.",
    ("reason",),
)
KEYS_REFUSED = Metric(
    "any_agent_keys_refused_total",
    "counter",
    "Requests refused before their route: invalid_api_key (none, or not valid), forbidden (a key "
    "of another scope).",
    ("code",),
)
AUDIT_LOST = Metric(
    "any_agent_audit_lines_lost_total",
    "counter",
    "Lines that the audit log did not take: its disk failed, or was too slow.",
)
JOURNAL_WRITES = Metric(
    "any_agent_journal_writes_total",
    "counter",
    "Writes committed to the journal; several share a commit.",
)
JOURNAL_COMMIT_SECONDS = Metric(
    "any_agent_journal_commit_seconds",
    "histogram",
    "Seconds of a commit to the journal, its fsync included.",
)
JOURNAL_FULL = Metric(
    "any_agent_journal_full",
    "gauge",
    "1 while the journal's disk is full, as its last write found; calls are answered with 507.",
)
JOURNAL_DAMAGED = Metric(
    "any_agent_journal_damaged_total",
    "counter",
    "Sessions ended because what was stored of them was damaged, this start's included.",
)
JOURNAL_BYTES = Metric(
    "any_agent_journal_bytes", "gauge", "Bytes that the rank's journal takes on disk."
)
TREE_BYTES = Metric(
    "any_agent_tree_bytes",
    "gauge",
    "About how many bytes of what live sessions recorded are in memory (sessions.hot_bytes at "
    "most, and what is in use).",
)
TREE_READS = Metric(
    "any_agent_tree_reads_total",
    "counter",
    "Sessions that were wanted and had to be read from the journal. Many: sessions.hot_bytes is "
    "too low.",
)
ARCHIVED = Metric(
    "any_agent_archived_sessions",
    "gauge",
    "Sessions of this trial whose content was moved from the journal to an archive.",
)
ARCHIVE_BYTES = Metric(
    "any_agent_archive_bytes", "gauge", "Bytes that the rank's archives take on disk."
)

MODES = (*SessionMode, NO_SESSION)
CONTINUATIONS = (FIRST, *Continuation)
METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))


def exposition(service: RankService) -> Exposition:
    """The rank's metrics, read from its parts at each scrape."""
    name = rank_name(service.rank)
    return Exposition(name, lambda: _read(service), rank=str(service.rank))


def _read(service: RankService) -> Iterable[Reading]:
    yield from _sessions(service)
    yield from _calls(service)
    yield from _frozen(service)
    yield VERSION, service.run.version
    yield PAUSES, service.run.pauses.count
    yield PAUSE_SECONDS, service.run.pauses.seconds
    yield ENGINE_UP, not service.engine.away
    yield RESUBMISSIONS, _by_one(service.engine.resubmitted, ("update", "death"))
    yield LOOP_LAG, {(rank_name(service.rank),): service.loop_lag}
    yield KEYS_REFUSED, _by_one(service.audit.refused)
    yield AUDIT_LOST, service.audit.dropped
    yield JOURNAL_WRITES, service.journal.stats.writes
    yield JOURNAL_COMMIT_SECONDS, service.journal.stats.commit_seconds
    yield JOURNAL_BYTES, service.journal.size()
    yield TREE_BYTES, service.sessions.trees.bytes
    yield TREE_READS, service.sessions.trees.reads
    yield ARCHIVED, service.archive.sessions
    yield ARCHIVE_BYTES, service.archive.bytes
    yield JOURNAL_FULL, int(service.journal.stats.full)
    yield JOURNAL_DAMAGED, service.journal.stats.damaged


def _sessions(service: RankService) -> Iterable[Reading]:
    counts = service.sessions.counts
    # All of them, also those of which there are none: a sum over states misses nothing.
    yield CREATED, _by_one(counts.created, SessionMode)
    yield SESSIONS, _by_two(counts.now, tuple(SessionMode), tuple(SessionState))
    yield OPENS_REFUSED, _by_one(service.opening.refused)
    slots = service.leases.capacity()
    yield SLOTS_ADMITTED, slots.admitted
    yield SLOTS_LIMIT, slots.limit
    yield SLOTS_RESERVED, slots.reserved
    yield SLOTS_WAITING, slots.waiting
    yield GROUPS_TOO_SMALL, service.sessions.groups.too_small
    yield QUOTAS_EXCEEDED, _by_one(service.quotas.refused, QUOTAS)
    yield UNDELIVERED, service.sessions.undelivered
    yield REPLAYS, service.answers.replayed
    yield REWARDS, _by_one(service.rewards.given, ("completion", "final"))
    yield LATE_REWARDS, _by_one(service.late.outcomes, get_args(LateOutcome))
    yield GRADING, service.late.grading
    yield IMPLICIT_CALLS, _by_one(service.implicit.calls, get_args(JoinKind))
    yield IMPLICIT_OPEN, len(service.sessions.conversations)
    yield IMPLICIT_ENDED, service.expiry.implicit_ended


def _calls(service: RankService) -> Iterable[Reading]:
    stats = service.calls.stats
    yield CALLS_RUNNING, len(service.calls)
    yield CALLS_LIMIT, service.calls.concurrency.limit
    yield CALLS_REFUSED, service.calls.concurrency.refused
    yield CALLS, _by_two(stats.ended, MODES, get_args(CallOutcome))
    yield CALL_SECONDS, stats.seconds
    yield FIRST_TOKEN_SECONDS, stats.first_token_seconds
    yield PROMPT_TOKENS, _by_one(stats.prompt_tokens, MODES)
    yield OUTPUT_TOKENS, _by_one(stats.output_tokens, MODES)
    yield INTERACTIONS, _by_two(stats.interactions, tuple(SessionMode), CONTINUATIONS)
    yield BRANCHES, _by_one(stats.branches)
    yield OVERRIDES, _by_one(stats.overrides)
    yield IGNORED, _by_one(stats.ignored)
    lost = Counter(undelivered=service.sessions.undelivered)
    yield UNTRAINABLE, _by_one(stats.untrainable + lost, REASONS)
    yield RETRIES, {(got,): stats.retries[got] for got in get_args(RetryOutcome)}


def _frozen(service: RankService) -> Iterable[Reading]:
    frozen, stats = service.frozen, service.frozen.stats
    models = frozen.names
    yield POLICY_CALLS, _by_one(frozen.policy.calls)
    yield FROZEN_CALLS, _by_two(stats.ended, models, OUTCOMES)
    yield FROZEN_RUNNING, len(frozen)
    refused = frozen.spending.refused + Counter(max_calls=stats.turned_away)
    yield FROZEN_REFUSED, _by_one(refused, (*CAPS, "max_calls"))
    yield FROZEN_SECONDS, stats.seconds
    kinds = {"input": stats.input_tokens, "output": stats.output_tokens}
    yield FROZEN_TOKENS, {(m, kind): kinds[kind][m] for m in models for kind in kinds}
    yield FROZEN_USD, {(m,): stats.usd.get(m, 0.0) for m in models}
    yield FROZEN_UNPRICED, _by_one(stats.unpriced, models)


def _by_one(counts: Counter[str], always: Iterable[str] = ()) -> Values:
    """``always``: label values that are shown before they first occur, so that rates have them."""
    return {(key,): counts[key] for key in dict.fromkeys((*always, *counts))}


def _by_two(counts: Counter[tuple[str, S]], one: Sequence[str], two: Sequence[S]) -> Values:
    return {(a, b): counts[a, b] for a in one for b in two}
