"""The trainer's metrics at `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from any_agent.runtime.disk_space import DiskSpace
from any_agent.runtime.metrics import Exposition, Metric, Reading

STEP = Metric("any_agent_train_step", "gauge", "Train steps made in this trial.")
VERSION = Metric(
    "any_agent_train_version", "gauge", "The highest weight version ever published in this trial."
)
DISK_FULL = Metric(
    "any_agent_train_disk_full",
    "gauge",
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
SECONDS = Metric(
    "any_agent_train_seconds_total",
    "counter",
    "Seconds of training by phase, up to the latest step's line: "
    + ", ".join(f"{phase} ({what})" for phase, what in PHASES.items())
    + ".",
    ("phase",),
)
TOKENS_COMPUTED = Metric(
    "any_agent_train_tokens_computed_total",
    "counter",
    "Tokens that went through the model with a gradient, padding included.",
)
TOKENS_IN_ROWS = Metric(
    "any_agent_train_tokens_in_rows_total",
    "counter",
    "Tokens of the rows trained on, prompts included. Divided by the computed ones: below 1 is "
    "padding, above 1 are shared prefixes that were computed once.",
)
TOKENS = Metric(
    "any_agent_train_tokens_total",
    "counter",
    "Sampled tokens trained on, in each epoch of a batch; its rate is tokens/s.",
)
INTERACTIONS = Metric("any_agent_train_interactions_total", "counter", "Interactions trained on.")
TRAINED = Metric("any_agent_train_sessions_total", "counter", "Sessions trained on.")
REJECTED = Metric(
    "any_agent_train_sessions_rejected_total",
    "counter",
    "Sessions that were not trained on, by reason; zero_variance: all of their group scored alike.",
    ("reason",),
)
SINCE_REWARD = Metric(
    "any_agent_train_since_step_reward_mean",
    "gauge",
    "Mean score of all sessions that came since the latest step's line, those that are not trained "
    "on among them; absent while there is none.",
)
SINCE_SESSIONS = Metric(
    "any_agent_train_since_step_sessions",
    "gauge",
    "Sessions with a score that came since the latest step's line; dull: all of their group scored "
    "alike.",
    ("dull",),
)
_STEP_GAUGES: Mapping[str, Metric] = {
    "reward": Metric(
        "any_agent_train_reward_mean", "gauge", "Mean score of the latest step's sessions."
    ),
    "truncated": Metric(
        "any_agent_train_truncated_rows",
        "gauge",
        "Rows of the latest batch with an output that train.mask_truncated left out of the loss.",
    ),
    "lone_roles": Metric(
        "any_agent_train_lone_roles",
        "gauge",
        "Roles in the latest batch that only one of several sessions of its group has: with "
        "train.group_by=role they have no baseline, and advantages of 0.",
    ),
    "staleness_mean": Metric(
        "any_agent_train_staleness_mean_steps",
        "gauge",
        "Steps by which the tokens that the latest step trained on were behind, mean.",
    ),
    "staleness_max": Metric(
        "any_agent_train_staleness_max_steps", "gauge", "The same of the oldest token."
    ),
    "grad_norm": Metric(
        "any_agent_train_grad_norm", "gauge", "The gradient's norm before clipping, latest step."
    ),
    "learning_rate": Metric(
        "any_agent_train_learning_rate", "gauge", "The learning rate of the latest step."
    ),
    "loss": Metric("any_agent_train_loss", "gauge", "The policy loss of the latest step."),
    "mismatch": Metric(
        "any_agent_train_logprob_mismatch",
        "gauge",
        "E[r - log r - 1], r the trainer's over the engine's probability of a sampled token, "
        "latest step: how far engine and trainer disagree (nats). Near 0, but for staleness: an "
        "older token was sampled before the weights changed.",
    ),
    "mismatch_fresh": Metric(
        "any_agent_train_logprob_mismatch_fresh",
        "gauge",
        "The same over tokens of age 0, which the step's own weights sampled: near 0. Absent where "
        "the latest step had none.",
    ),
    "mismatch_max": Metric(
        "any_agent_train_logprob_difference_max",
        "gauge",
        "The largest difference of a token's log-probabilities in engine and trainer, latest step "
        "(nats).",
    ),
    "is_capped": Metric(
        "any_agent_train_capped_ratio",
        "gauge",
        "Share of the latest step's tokens whose importance weight was truncated.",
    ),
    "is_masked": Metric(
        "any_agent_train_masked_ratio",
        "gauge",
        "Share of the latest step's tokens that train.is_mode=mask, train.off_policy_threshold, "
        "train.rejection_k1, _k2, _k3 or train.second_moment took out of the gradient.",
    ),
    "weight": Metric(
        "any_agent_train_importance_weight_mean",
        "gauge",
        "Mean importance weight (trainer's over engine's probability, capped), latest step.",
    ),
    "entropy": Metric(
        "any_agent_train_entropy_nats", "gauge", "Mean entropy of the policy at trained tokens."
    ),
    "kl": Metric(
        "any_agent_train_reference_kl_nats",
        "gauge",
        "Mean estimate of the divergence from the reference at trained tokens; 0 without one.",
    ),
}
"""Gauges of the latest step, by their names in its line of metrics.jsonl."""
CLIPPED = Metric(
    "any_agent_train_clipped_ratio",
    "gauge",
    "Share of the latest step's tokens whose probability ratio was clipped, at either side.",
    ("side",),
)
STALENESS = Metric(
    "any_agent_train_staleness_ratio",
    "gauge",
    "Share of the latest step's trained tokens by their age in steps.",
    ("age",),
)
LENGTHS = Metric(
    "any_agent_train_length",
    "gauge",
    "Lengths in the latest batch: tokens of a call's prompt, of its output, turns of a session.",
    ("of", "statistic"),
)
CUT = Metric(
    "any_agent_train_cut_ratio",
    "gauge",
    "Share of the latest batch's outputs that were cut by their length.",
)
TRACKER_FAILURES = Metric(
    "any_agent_train_tracker_failures_total",
    "counter",
    "Failures of a tracker (tracking.to), which is tried again and gets what it lacks.",
    ("tracker",),
)
EVAL_STEP = Metric("any_agent_eval_step", "gauge", "The step that was evaluated last.")
EVAL_REWARD = Metric(
    "any_agent_eval_reward_mean", "gauge", "Mean reward over the items of the latest evaluation."
)
EVAL_CI95 = Metric(
    "any_agent_eval_reward_ci95",
    "gauge",
    "The 95 % confidence interval of that mean; bound: low or high.",
    ("bound",),
)
EVAL_EPISODES = Metric(
    "any_agent_eval_episodes_total",
    "counter",
    "Runs of evaluations by outcome: scored, or the reason for no score.",
    ("outcome",),
)
EVAL_SECONDS = Metric("any_agent_eval_seconds_total", "counter", "Seconds spent on evaluations.")

_TOTALS = (TOKENS, TOKENS_COMPUTED, TOKENS_IN_ROWS, INTERACTIONS, TRAINED, EVAL_SECONDS)
_LABELLED_TOTALS = (SECONDS, REJECTED, EVAL_EPISODES)
METRICS = (
    *(STEP, VERSION, DISK_FULL, SECONDS, TOKENS, TOKENS_COMPUTED, TOKENS_IN_ROWS),
    *(INTERACTIONS, TRAINED, REJECTED, SINCE_REWARD, SINCE_SESSIONS),
    *(*_STEP_GAUGES.values(), CLIPPED),
    *(STALENESS, LENGTHS, CUT),
    *(TRACKER_FAILURES, EVAL_STEP, EVAL_REWARD, EVAL_CI95, EVAL_EPISODES, EVAL_SECONDS),
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
        self._totals: dict[Metric, float] = dict.fromkeys(_TOTALS, 0)
        self._labelled: dict[Metric, Counter[str]] = {m: Counter() for m in _LABELLED_TOTALS}
        self._labelled[SECONDS].update(dict.fromkeys(PHASES, 0))
        self._latest: Mapping[str, Any] = {}
        self._evaluated: Mapping[str, Any] = {}

    def record_position(self, *, step: int, version: int) -> None:
        """Record where training stands; also right after a resume."""
        self._step, self.version = step, version

    def record_step(self, line: Mapping[str, Any]) -> None:
        """Record a finished step from its line of metrics.jsonl."""
        self._labelled[SECONDS].update(line["seconds"])
        self._totals[TOKENS] += int(line["tokens"])
        self._totals[TOKENS_COMPUTED] += int(line["tokens_computed"])
        self._totals[TOKENS_IN_ROWS] += int(line["tokens_in_rows"])
        self._totals[INTERACTIONS] += line["interactions"]
        self._latest = line

    def record_sessions(self, trained: Collection[str], rejected: Mapping[str, str]) -> None:
        """Record the fate of a batch's sessions; ``rejected`` has the reasons."""
        self._totals[TRAINED] += len(trained)
        self._labelled[REJECTED].update(rejected.values())

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Record a finished evaluation from its line of metrics.jsonl."""
        found = line["eval"]
        self._labelled[EVAL_EPISODES].update({"scored": found["episodes"], **found["failed"]})
        self._totals[EVAL_SECONDS] += found["seconds"]
        self._evaluated = line

    def exposition(self) -> Exposition:
        return Exposition("trainer", self._read)

    def _read(self) -> Iterable[Reading]:
        yield STEP, self._step
        yield VERSION, self.version
        yield DISK_FULL, int(self.disk.waiting is not None)
        if since := self._since_step():
            dull = since["dull"]
            yield SINCE_SESSIONS, {("false",): since["sessions"] - dull, ("true",): dull}
            if since["reward"] is not None:
                yield SINCE_REWARD, since["reward"]
        yield from self._totals.items()
        for metric, counts in self._labelled.items():
            # Copies: the loop may add a reason meanwhile.
            copy = Counter(dict(counts))
            if metric is REJECTED:
                copy.update(dict(self._rejected_early()))
            yield metric, {(label,): number for label, number in copy.items()}
        failures = self._tracker_failures()
        yield TRACKER_FAILURES, {(tracker,): number for tracker, number in failures.items()}
        latest, evaluated = self._latest, self._evaluated
        if latest:
            gauges = _STEP_GAUGES.items()
            yield from ((metric, latest[name]) for name, metric in gauges if name in latest)
            yield CLIPPED, {(side,): latest[f"clipped_{side}"] for side in ("low", "high")}
            yield STALENESS, {(age,): share for age, share in latest["staleness"].items()}
            lengths = latest["lengths"].items()
            yield LENGTHS, {(of, how): n for of, both in lengths for how, n in both.items()}
            if latest["cut"] is not None:
                yield CUT, latest["cut"]
        if evaluated:
            found = evaluated["eval"]
            yield EVAL_STEP, evaluated["step"]
            if found["reward"] is not None:
                yield EVAL_REWARD, found["reward"]
            if found["ci95"] is not None:
                yield EVAL_CI95, dict(zip((("low",), ("high",)), found["ci95"], strict=True))
