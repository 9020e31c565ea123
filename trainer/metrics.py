"""The trainer's metrics at `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from any_agent.runtime.disk_space import DiskSpace
from any_agent.runtime.metrics import Exposition, Metric, Reading, Values


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", meaning, labels)


STEP = _gauge("any_agent_train_step", "Train steps made in this trial.")
VERSION = _gauge(
    "any_agent_train_version", "The highest weight version ever published in this trial."
)
DISK_FULL = _gauge(
    "any_agent_train_disk_full",
    "1 while the trainer waits for space on a full disk; it goes on by itself.",
)
PHASES: Mapping[str, str] = {
    "wait": "for trajectories",
    "pack": "rows, manifest, micro-batches",
    "forward": "passes of the model, and the loss",
    "backward": "passes",
    "optimizer": "clipping and update",
    "sync": "new weights to all engines, acknowledgement",
    "report": "this line",
    "checkpoint": "writing it",
    "evaluate": "an evaluation",
}
"""The phases in their order. The last three follow a step's line, and stand in the next one."""
SECONDS = _counter(
    "any_agent_train_seconds_total",
    "Seconds of training by phase, up to the latest step's line: "
    + ", ".join(f"{phase} ({what})" for phase, what in PHASES.items())
    + ".",
    "phase",
)
TOKENS_COMPUTED = _counter(
    "any_agent_train_tokens_computed_total",
    "Tokens that went through the model with a gradient, padding included.",
)
TOKENS_IN_ROWS = _counter(
    "any_agent_train_tokens_in_rows_total",
    "Tokens of the rows trained on, prompts included. Divided by the computed ones: below 1 is "
    "padding, above 1 are shared prefixes that were computed once.",
)
TOKENS = _counter(
    "any_agent_train_tokens_total",
    "Sampled tokens trained on, in each epoch of a batch; its rate is tokens/s.",
)
INTERACTIONS = _counter("any_agent_train_interactions_total", "Interactions trained on.")
TRAINED = _counter("any_agent_train_sessions_total", "Sessions trained on.")
REJECTED = _counter(
    "any_agent_train_sessions_rejected_total",
    "Sessions that were not trained on, by reason; zero_variance: all of their group scored alike, "
    "or with train.group_by=role all of each role.",
    "reason",
)
SINCE_REWARD = _gauge(
    "any_agent_train_since_step_reward_mean",
    "Mean score of all sessions that came since the latest step's line, those that are not trained "
    "on among them; absent while there is none.",
)
SINCE_SESSIONS = _gauge(
    "any_agent_train_since_step_sessions",
    "Sessions with a score that came since the latest step's line; dull: all of their group scored "
    "alike.",
    "dull",
)
_OF_STEP: Mapping[str, Metric] = {
    "reward": _gauge("any_agent_train_reward_mean", "Mean score of the latest step's sessions."),
    "truncated": _gauge(
        "any_agent_train_truncated_rows",
        "Rows of the latest batch with an output that train.mask_truncated left out of the loss.",
    ),
    "lone_roles": _gauge(
        "any_agent_train_lone_roles",
        "Roles in the latest batch that only one of several sessions of its group has: with "
        "train.group_by=role they have no baseline, and advantages of 0.",
    ),
    "staleness_mean": _gauge(
        "any_agent_train_staleness_mean_steps",
        "Steps by which the tokens that the latest step trained on were behind, mean.",
    ),
    "staleness_max": _gauge("any_agent_train_staleness_max_steps", "The same of the oldest token."),
    "grad_norm": _gauge(
        "any_agent_train_grad_norm", "The gradient's norm before clipping, latest step."
    ),
    "learning_rate": _gauge(
        "any_agent_train_learning_rate", "The learning rate of the latest step."
    ),
    "loss": _gauge("any_agent_train_loss", "The policy loss of the latest step."),
    "mismatch": _gauge(
        "any_agent_train_logprob_mismatch",
        "E[r - log r - 1], r the trainer's over the engine's probability of a sampled token, "
        "latest step: how far engine and trainer disagree (nats). Near 0, but for staleness: an "
        "older token was sampled before the weights changed.",
    ),
    "mismatch_fresh": _gauge(
        "any_agent_train_logprob_mismatch_fresh",
        "The same over tokens of age 0, which the step's own weights sampled: near 0. Absent where "
        "the latest step had none.",
    ),
    "mismatch_max": _gauge(
        "any_agent_train_logprob_difference_max",
        "The largest difference of a token's log-probabilities in engine and trainer, latest step "
        "(nats).",
    ),
    "is_capped": _gauge(
        "any_agent_train_capped_ratio",
        "Share of the latest step's tokens whose importance weight was truncated.",
    ),
    "is_masked": _gauge(
        "any_agent_train_masked_ratio",
        "Share of the latest step's tokens that train.is_mode=mask, train.off_policy_threshold, "
        "train.rejection_k1, _k2, _k3 or train.second_moment took out of the gradient.",
    ),
    "weight": _gauge(
        "any_agent_train_importance_weight_mean",
        "Mean importance weight (trainer's over engine's probability, capped), latest step.",
    ),
    "entropy": _gauge(
        "any_agent_train_entropy_nats", "Mean entropy of the policy at trained tokens."
    ),
    "kl": _gauge(
        "any_agent_train_reference_kl_nats",
        "Mean estimate of the divergence from the reference at trained tokens; 0 without one.",
    ),
    "teacher_kl": _gauge(
        "any_agent_train_teacher_kl_nats",
        "Mean divergence from the teacher, over the whole vocabulary, at trained tokens; 0 without "
        "one.",
    ),
    "cut": _gauge(
        "any_agent_train_cut_ratio",
        "Share of the latest batch's outputs that were cut by their length.",
    ),
}
"""Gauges of the latest step, by their names in its line of metrics.jsonl."""
CLIPPED = _gauge(
    "any_agent_train_clipped_ratio",
    "Share of the latest step's tokens whose probability ratio was clipped, at either side.",
    "side",
)
STALENESS = _gauge(
    "any_agent_train_staleness_ratio",
    "Share of the latest step's trained tokens by their age in steps.",
    "age",
)
LENGTHS = _gauge(
    "any_agent_train_length",
    "Lengths in the latest batch: tokens of a call's prompt, of its output, turns of a session.",
    "of",
    "statistic",
)
TRACKER_FAILURES = _counter(
    "any_agent_train_tracker_failures_total",
    "Failures of a tracker (tracking.to), which is tried again and gets what it lacks.",
    "tracker",
)
EVAL_STEP = _gauge("any_agent_eval_step", "The step that was evaluated last.")
EVAL_REWARD = _gauge(
    "any_agent_eval_reward_mean", "Mean reward over the items of the latest evaluation."
)
EVAL_CI95 = _gauge(
    "any_agent_eval_reward_ci95",
    "The 95 % confidence interval of that mean; bound: low or high.",
    "bound",
)
EVAL_EPISODES = _counter(
    "any_agent_eval_episodes_total",
    "Runs of evaluations by outcome: scored, or the reason for no score.",
    "outcome",
)
EVAL_SECONDS = _counter("any_agent_eval_seconds_total", "Seconds spent on evaluations.")

_COUNTERS = (
    *(SECONDS, TOKENS, TOKENS_COMPUTED, TOKENS_IN_ROWS, INTERACTIONS, TRAINED, REJECTED),
    *(EVAL_EPISODES, EVAL_SECONDS),
)
METRICS = (
    *(STEP, VERSION, DISK_FULL, SINCE_REWARD, SINCE_SESSIONS),
    *_COUNTERS,
    *_OF_STEP.values(),
    *(CLIPPED, STALENESS, LENGTHS, TRACKER_FAILURES, EVAL_STEP, EVAL_REWARD, EVAL_CI95),
)


class TrainerMetrics:
    """Counts since the trainer's start, and the latest step's line.

    The loop writes them, and a scrape in another thread reads them. ``rejected_early`` returns the
    numbers of sessions that were rejected before they came into a batch, by reason. ``disk`` knows
    of a wait for space. ``tracker_failures`` returns their numbers by tracker, ``since_step`` what
    :meth:`trainer.batch.ScoresSinceStep.read` does.
    """

    def __init__(
        self,
        rejected_early: Callable[[], Mapping[str, int]],
        disk: DiskSpace | None = None,
        tracker_failures: Callable[[], Mapping[str, int]] = dict,
        since_step: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._rejected_early = rejected_early
        self._tracker_failures = tracker_failures
        self._since_step = since_step
        self.disk = disk or DiskSpace()
        self.version = 0
        self._step = 0
        self._counts: dict[Metric, Counter[str]] = {metric: Counter() for metric in _COUNTERS}
        """Numbers by the value of the metric's label, "" if it has none."""
        self._counts[SECONDS].update(dict.fromkeys(PHASES, 0))
        self._latest: Mapping[str, Any] = {}
        self._evaluated: Mapping[str, Any] = {}

    def record_position(self, *, step: int, version: int) -> None:
        """Record where training stands; also right after a resume."""
        self._step, self.version = step, version

    def record_step(self, line: Mapping[str, Any]) -> None:
        """Record a finished step from its line of metrics.jsonl."""
        self._counts[SECONDS].update(line["seconds"])
        self._counts[TOKENS][""] += int(line["tokens"])
        self._counts[TOKENS_COMPUTED][""] += int(line["tokens_computed"])
        self._counts[TOKENS_IN_ROWS][""] += int(line["tokens_in_rows"])
        self._counts[INTERACTIONS][""] += line["interactions"]
        self._latest = line

    def record_sessions(self, trained: Collection[str], rejected: Mapping[str, str]) -> None:
        """Record the fate of a batch's sessions; ``rejected`` has the reasons."""
        self._counts[TRAINED][""] += len(trained)
        self._counts[REJECTED].update(rejected.values())

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Record a finished evaluation from its line of metrics.jsonl."""
        found = line["eval"]
        self._counts[EVAL_EPISODES].update({"scored": found["episodes"], **found["failed"]})
        self._counts[EVAL_SECONDS][""] += found["seconds"]
        self._evaluated = line

    def exposition(self) -> Exposition:
        return Exposition("trainer", self._read)

    def _read(self) -> Iterable[Reading]:
        yield STEP, self._step
        yield VERSION, self.version
        yield DISK_FULL, int(self.disk.waiting is not None)
        if since := self._since_step():
            dull = since["dull"]
            yield SINCE_SESSIONS, _labelled({"false": since["sessions"] - dull, "true": dull})
            if since["reward"] is not None:
                yield SINCE_REWARD, since["reward"]
        for metric, counts in self._counts.items():
            # Copies: the loop may add a reason meanwhile.
            copy = Counter(dict(counts))
            if metric is REJECTED:
                copy.update(dict(self._rejected_early()))
            yield metric, _labelled(copy) if metric.labels else copy[""]
        yield TRACKER_FAILURES, _labelled(self._tracker_failures())
        latest, evaluated = self._latest, self._evaluated
        if latest:
            found = ((metric, latest.get(name)) for name, metric in _OF_STEP.items())
            yield from ((metric, value) for metric, value in found if value is not None)
            yield CLIPPED, _labelled({side: latest[f"clipped_{side}"] for side in ("low", "high")})
            yield STALENESS, _labelled(latest["staleness"])
            lengths = latest["lengths"].items()
            yield LENGTHS, {(of, how): n for of, both in lengths for how, n in both.items()}
        if evaluated:
            figures = evaluated["eval"]
            yield EVAL_STEP, evaluated["step"]
            if figures["reward"] is not None:
                yield EVAL_REWARD, figures["reward"]
            if figures["ci95"] is not None:
                yield EVAL_CI95, _labelled(dict(zip(("low", "high"), figures["ci95"], strict=True)))


def _labelled(numbers: Mapping[str, float]) -> Values:
    """Return the values of a metric with one label."""
    return {(label,): number for label, number in numbers.items()}
