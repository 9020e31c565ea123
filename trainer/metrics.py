"""What the trainer shows at `/metrics`: counts since it started, gauges of its latest step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from any_agent.runtime.metrics import Exposition, Metric, Reading

STEP = Metric("any_agent_train_step", "gauge", "Optimizer steps made in this trial.")
VERSION = Metric(
    "any_agent_train_version", "gauge", "The highest weight version ever published in this trial."
)
SECONDS = Metric(
    "any_agent_train_seconds_total",
    "counter",
    "Seconds that steps took by phase: wait (for trajectories), train, publish (new weights).",
    ("phase",),
)
TOKENS = Metric(
    "any_agent_train_tokens_total", "counter", "Sampled tokens trained on; its rate is tokens/s."
)
INTERACTIONS = Metric("any_agent_train_interactions_total", "counter", "Interactions trained on.")
TRAINED = Metric("any_agent_train_sessions_total", "counter", "Sessions trained on.")
REJECTED = Metric(
    "any_agent_train_sessions_rejected_total",
    "counter",
    "Sessions that were not trained on, by reason; zero_variance: all of their group scored alike.",
    ("reason",),
)
REWARD = Metric("any_agent_train_reward_mean", "gauge", "Mean score of the latest step's sessions.")
STALENESS_MEAN = Metric(
    "any_agent_train_staleness_mean_steps",
    "gauge",
    "Optimizer steps by which the tokens that the latest step trained on were behind, mean.",
)
STALENESS_MAX = Metric(
    "any_agent_train_staleness_max_steps", "gauge", "As the mean, of the oldest token."
)
GRAD_NORM = Metric(
    "any_agent_train_grad_norm", "gauge", "The gradient's norm before clipping, latest step."
)
LOSS = Metric("any_agent_train_loss", "gauge", "The policy loss of the latest step.")
MISMATCH = Metric(
    "any_agent_train_logprob_mismatch",
    "gauge",
    "E[r - log r - 1], r the trainer's over the engine's probability of a sampled token, latest "
    "step: how far engine and trainer disagree (nats). Near 0, but for staleness.",
)
CLIPPED = Metric(
    "any_agent_train_clipped_ratio",
    "gauge",
    "Share of the latest step's tokens whose probability ratio was clipped, at either side.",
    ("side",),
)
CAPPED = Metric(
    "any_agent_train_capped_ratio",
    "gauge",
    "Share of the latest step's tokens whose importance weight was capped.",
)
WEIGHT = Metric(
    "any_agent_train_importance_weight_mean",
    "gauge",
    "Mean importance weight (trainer's over engine's probability, capped), latest step.",
)
ENTROPY = Metric(
    "any_agent_train_entropy_nats", "gauge", "Mean entropy of the policy at trained tokens."
)
EVAL_STEP = Metric("any_agent_eval_step", "gauge", "The step that was evaluated last.")
EVAL_REWARD = Metric(
    "any_agent_eval_reward_mean", "gauge", "Mean reward over the items of the latest evaluation."
)
EVAL_CI95 = Metric(
    "any_agent_eval_reward_ci95",
    "gauge",
    "Where that mean lies with 95 % confidence; bound: low or high.",
    ("bound",),
)
EVAL_EPISODES = Metric(
    "any_agent_eval_episodes_total",
    "counter",
    "Runs of evaluations by outcome: scored, or why there is no score.",
    ("outcome",),
)
EVAL_SECONDS = Metric("any_agent_eval_seconds_total", "counter", "Seconds spent on evaluations.")

METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))
PHASES = ("wait", "train", "publish")
_LATEST: Mapping[str, Metric] = {
    "reward": REWARD,
    "staleness_mean": STALENESS_MEAN,
    "staleness_max": STALENESS_MAX,
    "grad_norm": GRAD_NORM,
    "loss": LOSS,
    "mismatch": MISMATCH,
    "is_capped": CAPPED,
    "weight": WEIGHT,
    "entropy": ENTROPY,
}
"""By their names in a line of metrics.jsonl."""


class TrainerMetrics:
    """Plain numbers; the loop writes them, a scrape in another thread reads them.

    ``rejected_early``: sessions rejected before they came into a batch, by reason.
    """

    def __init__(self, rejected_early: Callable[[], Mapping[str, int]]) -> None:
        self._rejected_early = rejected_early
        self.version = 0
        self._step = 0
        self._seconds: Counter[str] = Counter()
        self._tokens = 0
        self._interactions = 0
        self._trained = 0
        self._rejected: Counter[str] = Counter()
        self._latest: Mapping[str, Any] = {}
        self._evaluated: Mapping[str, Any] = {}
        self._episodes: Counter[str] = Counter()
        self._eval_seconds = 0.0

    def now(self, *, step: int, version: int) -> None:
        """Where training stands, also right after a resume."""
        self._step, self.version = step, version

    def stepped(self, line: Mapping[str, Any]) -> None:
        """A step is over; its line of metrics.jsonl."""
        for phase, seconds in line["seconds"].items():
            self._seconds[phase] += seconds
        self._tokens += int(line["tokens"])
        self._interactions += line["interactions"]
        self._latest = line

    def settled(self, trained: Iterable[str], rejected: Mapping[str, str]) -> None:
        """What became of a batch's sessions; those rejected with their reasons."""
        self._trained += len(list(trained))
        self._rejected.update(rejected.values())

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """An evaluation is over; its line of metrics.jsonl."""
        found = line["eval"]
        self._episodes.update({"scored": found["episodes"], **found["failed"]})
        self._eval_seconds += found["seconds"]
        self._evaluated = line

    def exposition(self) -> Exposition:
        return Exposition("trainer", self._read)

    def _read(self) -> Iterable[Reading]:
        yield STEP, self._step
        yield VERSION, self.version
        yield SECONDS, {(phase,): self._seconds[phase] for phase in PHASES}
        yield TOKENS, self._tokens
        yield INTERACTIONS, self._interactions
        yield TRAINED, self._trained
        # Copies: the loop may add a reason meanwhile.
        rejected = Counter(dict(self._rejected)) + Counter(dict(self._rejected_early()))
        yield REJECTED, {(reason,): number for reason, number in rejected.items()}
        latest = self._latest
        if latest:
            yield from ((metric, latest[name]) for name, metric in _LATEST.items())
            yield CLIPPED, {(side,): latest[f"clipped_{side}"] for side in ("low", "high")}
        yield from self._read_evaluation()

    def _read_evaluation(self) -> Iterable[Reading]:
        yield EVAL_EPISODES, {(outcome,): n for outcome, n in dict(self._episodes).items()}
        yield EVAL_SECONDS, self._eval_seconds
        if self._evaluated:
            found = self._evaluated["eval"]
            yield EVAL_STEP, self._evaluated["step"]
            if found["reward"] is not None:
                yield EVAL_REWARD, found["reward"]
            if found["ci95"] is not None:
                yield EVAL_CI95, dict(zip((("low",), ("high",)), found["ci95"], strict=True))


def last_reported(path: Path) -> int:
    """The step of the last line of `metrics.jsonl` that was written whole; 0 for none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
