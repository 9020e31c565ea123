"""The rows of one train step, made from sessions.

A session is a leased :class:`Trajectory`, whose tree is still to be scored, or the rows of a
:class:`SampledSession` that a workflow of this process returned.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from any_agent.config import TrainConfig
from any_agent.config.presets import RETURNS_OF_TOKENS
from any_agent.record import (
    InteractionTree,
    TrainabilityWatch,
    count_calls,
    discarded,
    interaction_row,
    propagate_rewards,
)
from any_agent.record import to_tensors as row_to_tensors
from any_agent.types import Row as PlainRow
from any_agent.types import SampledSession, Trajectory, runs_of
from trainer.advantage import SessionRewards, estimate_advantages, overlong_penalty
from trainer.kl_reward import found_divergences, less_divergence, with_returns
from trainer.rows import (
    Row,
    count_trained,
    is_trained,
    mark_fresh,
    mask_cut,
    mask_stale,
    with_training_signal,
)
from trainer.updates import divide

log = logging.getLogger(__name__)
_DOCUMENT = "docs/how-to/troubleshoot.md#my-reward-does-not-rise"

_RECENT_GROUPS = 64
_NOTICED = 8
"""The least groups that a notice about them is made of."""
_NOTICED_SHARE = 0.75

Session: TypeAlias = Trajectory | SampledSession
Group: TypeAlias = Sequence[Session]
"""The sessions that share a baseline."""


@dataclass(slots=True)
class TrainingBatch:
    """The rows of one step, and the fate of its sessions."""

    rows: list[Row] = field(default_factory=list)
    minibatches: list[list[int]] = field(default_factory=list)
    """The numbers of the rows of each optimizer update, in their order."""
    trained: list[str] = field(default_factory=list)
    """The sessions with at least one token in the loss."""
    rejected: dict[str, str] = field(default_factory=dict)
    """The other sessions with their reasons: `stale`, `truncated`, `too_long` or `unusable` (they
    count in their baseline), or `untrainable`."""
    sampled: set[str] = field(default_factory=set)
    """The sessions that a workflow of this process returned; ranks have the others."""
    scores: list[float] = field(default_factory=list)
    named: dict[str, list[float]] = field(default_factory=dict)
    """Each named reward's values, of the sessions that have it."""
    ages: list[int] = field(default_factory=list)
    """The train steps between each trained token's version and this step."""
    lengths: dict[str, list[int]] = field(
        default_factory=lambda: {"prompt": [], "output": [], "turns": []}
    )
    """The tokens of each call's prompt and output, and the calls of each session, also of rejected
    ones."""
    cut: list[bool] = field(default_factory=list)
    """For each call whose end is known, whether its output was cut by its length."""
    truncated: int = 0
    """Rows with an output that `train.mask_truncated` left out of the loss."""
    lone_roles: int = 0
    """Roles that only one of several sessions of a group has, with `train.group_by` `role`."""


@dataclass(slots=True)
class _Member:
    """A session in its group, as a step takes it."""

    rewards: SessionRewards
    rows: list[Row]
    """The rows of the counted interactions, still without advantages."""
    problem: tuple[str, str] | None
    """The reason for which no step can take these rows, and its words."""
    divergences: Sequence[torch.Tensor] = ()
    """Each row's divergences from the reference, at its trained tokens."""


def session_rewards(session: Session, config: TrainConfig) -> SessionRewards:
    """Return each interaction's reward after propagation through the tree, and if it counts.

    Rewards have a row's precision. A sampled session's rewards are propagated already. The penalty
    of a long output is subtracted afterwards: it belongs to its own interaction alone, that of a
    row with several outputs to the longest.
    """
    if isinstance(session, SampledSession):
        return SessionRewards(
            rewards=[
                float(row["rewards"]) - overlong_penalty(_longest_output(row), config)
                for row in session.rows
            ],
            counted=[bool(row["loss_mask"].any()) for row in session.rows],
            tokens=[int(row["loss_mask"].sum()) for row in session.rows],
            roles=session.roles,
        )
    nodes = session.interactions
    r = propagate_rewards(nodes, discount=config.discount, final_reward=session.final_reward)
    gone = discarded(nodes)
    return SessionRewards(
        rewards=[
            float(np.float32(r[node.id])) - overlong_penalty(len(node.output_ids), config)
            for node in nodes
        ],
        counted=[node.trainable and node.id not in gone for node in nodes],
        tokens=[len(node.output_ids) for node in nodes],
        roles=[node.role for node in nodes],
    )


def _longest_output(row: PlainRow) -> int:
    """Return the tokens of a row's longest output that has trained ones, grammars' among them."""
    trained = row["loss_mask"] == 1
    runs = runs_of(trained | (row["versions"] >= 0))
    return max((end - start for start, end in runs if trained[start:end].any()), default=0)


def training_batch(
    groups: Sequence[Group],
    config: TrainConfig,
    *,
    step: int,
    eta: int,
    step_of_version: Mapping[int, int],
    temperature: float = 1.0,
    reference: Callable[[Sequence[Row]], Sequence[torch.Tensor]] | None = None,
    misfit: Callable[[Row], tuple[str, str] | None] = lambda row: None,
) -> TrainingBatch:
    """Estimate advantages over the groups, then make one row per counted interaction, and divide
    the rows into minibatches.

    Stale tokens are masked; then the rows get their tokens' weights in the loss, if these differ.
    ``temperature`` applies to rows that do not state their own. ``reference`` returns the reference
    model's log-probabilities of rows' trained tokens, for a divergence in the reward. Sessions are
    rejected that have a row for which ``misfit`` returns a reason and its words, or one of more
    tokens than the config allows.
    """
    members = [[_member(one, config, temperature, misfit) for one in group] for group in groups]
    if config.kl_reward_coef:
        assert reference is not None, "the trainer has a reference model"
        fit = [one for of_group in members for one in of_group if one.problem is None]
        found = iter(found_divergences([row for one in fit for row in one.rows], reference))
        for one in fit:
            one.divergences = list(islice(found, len(one.rows)))
            one.rewards = less_divergence(one.rewards, one.divergences, config.kl_reward_coef)
    estimates = estimate_advantages([[one.rewards for one in group] for group in members], config)
    batch = TrainingBatch()
    of_rows: list[Row] = []
    owners: list[tuple[int, str]] = []
    for number, (group, of_group, estimate) in enumerate(
        zip(groups, members, estimates, strict=True)
    ):
        batch.lone_roles += estimate.lone_roles
        dropped = config.dynamic_sampling == "drop" and _outcomes(group, config)[1]
        for session, one, advantages, score in zip(
            group, of_group, estimate.advantages, estimate.scores, strict=True
        ):
            if score is not None:
                batch.scores.append(score)
            _add_lengths(batch, session)
            if isinstance(session, SampledSession):
                batch.sampled.add(session.session_id)
            else:
                for name, value in session.named_rewards.items():
                    batch.named.setdefault(name, []).append(value)
            if dropped:
                batch.rejected[session.session_id] = "zero_variance"
                continue
            if one.problem is not None:
                reason, why = one.problem
                log.warning("session %s is not trained on: a row %s", session.session_id, why)
                batch.rejected[session.session_id] = reason
                continue
            counted = (a for a, c in zip(advantages, one.rewards.counted, strict=True) if c)
            rows = [
                row | {"advantages": torch.tensor(advantage, dtype=torch.float32)}
                for row, advantage in zip(one.rows, counted, strict=True)
            ]
            if config.kl_reward_coef and config.advantage_estimator in RETURNS_OF_TOKENS:
                factor = 0 if estimate.zero_variance else config.kl_reward_coef / estimate.scale
                pairs = zip(rows, one.divergences, strict=True)
                rows = [with_returns(row, divergence, factor) for row, divergence in pairs]
            if config.reward_coef != 1:
                rows = [
                    row | {"advantages": config.reward_coef * row["advantages"]} for row in rows
                ]
            rows, truncated = _without_cut(rows, masks=config.mask_truncated)
            batch.truncated += truncated
            gone = truncated > 0 and not any(map(is_trained, rows))
            rows = [
                mask_stale(row, step_of_version=step_of_version, step=step, eta=eta) for row in rows
            ]
            left = [
                mark_fresh(row, step_of_version=step_of_version, step=step)
                for row in rows
                if bool(row["loss_mask"].any())
            ]
            of_rows += left
            owners += [(number, session.session_id)] * len(left)
            for row in left:
                trained = row["versions"][row["loss_mask"].bool()].tolist()
                batch.ages += [step - step_of_version[version] for version in trained]
            if left:
                batch.trained.append(session.session_id)
            else:
                why = "untrainable" if not rows else "truncated" if gone else "stale"
                batch.rejected[session.session_id] = why
    batch.minibatches = divide(of_rows, owners, config.minibatches)
    sessions = [session for _, session in owners]
    batch.rows = _weighted_parts(of_rows, sessions, batch.minibatches, config)
    return batch


def _member(
    session: Session,
    config: TrainConfig,
    temperature: float,
    misfit: Callable[[Row], tuple[str, str] | None],
) -> _Member:
    rewards = session_rewards(session, config)
    rows, problem, limit = _rows(session, rewards, temperature), None, config.max_row_tokens
    for row in rows:
        problem, length = misfit(row), len(row["input_ids"])
        if config.mask_truncated and isinstance(session, SampledSession) and "cut" not in row:
            problem = "unusable", "lacks the field cut, which train.mask_truncated needs"
        if limit is not None and length > limit:
            problem = "too_long", f"has {length} tokens, above train.max_row_tokens={limit}"
        if problem is not None:
            break
    return _Member(rewards, rows, problem)


def _weighted_parts(
    rows: Sequence[Row],
    sessions: Sequence[str],
    minibatches: Sequence[Sequence[int]],
    config: TrainConfig,
) -> list[Row]:
    """Return the rows with their tokens' factors in the loss of their minibatch."""
    out = list(rows)
    for part in minibatches:
        places: dict[str, list[int]] = {}
        for k in part:
            places.setdefault(sessions[k], []).append(k)
        mine = [[rows[k] for k in one] for one in places.values()]
        found = weighted(mine, config.aggregation, config.constant_length)
        for k, row in zip((k for one in places.values() for k in one), found, strict=True):
            out[k] = row
    return out


def weighted(
    sessions: Sequence[Sequence[Row]], aggregation: str | None, constant_length: int | None = None
) -> list[Row]:
    """Return all rows, with the factor u of their tokens in ``L = (1/N) sum_t u_t l_t``.

    N trained tokens are in R rows of S sessions, n of them in a row or session. `token`: u = 1,
    which needs no tensor. `turn`: u = N / (R n of the row). `session`: u = N / (S n of the
    session). `constant`: u = N / (S ``constant_length``).

    Sources: DAPO (arXiv 2503.14476) for `token`, GRPO (arXiv 2402.03300) for `turn` and `session`,
    Dr.GRPO (arXiv 2503.20783) for `constant`.
    """
    if aggregation == "token":
        return [row for rows in sessions for row in rows]
    counts = [[int(row["loss_mask"].sum()) for row in rows] for rows in sessions if rows]
    total, turns = sum(map(sum, counts)), sum(map(len, counts))
    out = []
    for rows, ns in zip(filter(None, sessions), counts, strict=True):
        length = constant_length if aggregation == "constant" else sum(ns)
        assert length is not None, "settings are completed"
        for row, n in zip(rows, ns, strict=True):
            parts = turns * n if aggregation == "turn" else len(counts) * length
            out.append(row | {"token_weights": torch.tensor(total / parts, dtype=torch.float32)})
    return out


def _add_lengths(batch: TrainingBatch, session: Session) -> None:
    calls: list[tuple[int, int]] = []
    # Tokens of prompt and output, and of the output.
    if isinstance(session, SampledSession):
        calls += [(len(row["input_ids"]), int(row["loss_mask"].sum())) for row in session.rows]
        for row in session.rows:
            if "cut" in row:
                outputs = runs_of((row["versions"] >= 0).tolist())
                batch.cut += [bool(row["cut"][start]) for start, _ in outputs]
    else:
        whole: dict[str | None, int] = {None: 0}
        for node in session.interactions:  # parents come first
            output = len(node.output_ids)
            whole[node.id] = whole[node.parent_id] + len(node.prompt_delta_ids) + output
            calls.append((whole[node.id], output))
            batch.cut.append(node.cut)
    batch.lengths["turns"].append(len(calls))
    batch.lengths["prompt"] += [tokens - output for tokens, output in calls]
    batch.lengths["output"] += [output for _, output in calls]


def in_stable_order(group: Group) -> Group:
    """Sort a group's sessions by their tokens, since the order of concurrent runs is random."""
    return sorted(group, key=_tokens_of)


def _tokens_of(session: Session) -> list[bytes]:
    if isinstance(session, SampledSession):
        return sorted(row["input_ids"].tobytes() for row in session.rows)
    tree = InteractionTree.from_interactions(session.interactions)
    rows = (interaction_row(tree, node.id, 0.0) for node in session.interactions)
    return sorted(row["input_ids"].tobytes() for row in rows)


def tokens_of(batch: TrainingBatch) -> list[int]:
    """Return the number of trained tokens of each row."""
    return [int(row["loss_mask"].sum()) for row in batch.rows]


def sampled_in(groups: Sequence[Group], temperature: float) -> list[SampledSession]:
    """Return the sessions that no rank has; ``temperature`` applies to rows without their own."""
    return [
        replace(one, temperatures=[temperature if t is None else t for t in one.temperatures])
        for group in groups
        for one in group
        if isinstance(one, SampledSession)
    ]


def versions_in(groups: Sequence[Group]) -> set[int]:
    """Return every weight version that sampled one of the groups' tokens."""
    sampled: list[npt.NDArray[np.int32]] = []
    for session in (session for group in groups for session in group):
        if isinstance(session, SampledSession):
            sampled += [row["versions"][row["loss_mask"].astype(bool)] for row in session.rows]
        else:
            sampled += [node.output_versions for node in session.interactions]
    return {int(version) for versions in sampled for version in np.unique(versions)}


def _rows(session: Session, rewards: SessionRewards, temperature: float) -> list[Row]:
    """Return the rows of the counted interactions, still without advantages."""
    if isinstance(session, SampledSession):
        known = (temperature if at is None else at for at in session.temperatures)
        plain: Iterable[tuple[PlainRow, float]] = zip(session.rows, known, strict=True)
    else:
        tree = InteractionTree.from_interactions(session.interactions)
        plain = (
            (_marked(interaction_row(tree, node.id, r), node.cut), node.gconfig.temperature)
            for node, r in zip(session.interactions, rewards.rewards, strict=True)
        )
    return [
        with_training_signal(row_to_tensors(row), temperature=at)
        for (row, at), one in zip(plain, rewards.counted, strict=True)
        if one
    ]


def _without_cut(rows: Sequence[Row], *, masks: bool) -> tuple[list[Row], int]:
    """Return the rows without their marks of cut outputs, these out of the loss if it ``masks``
    them, and the number of rows of which that took tokens."""
    out, truncated = [], 0
    for row in rows:
        masked = mask_cut(row) if masks else row
        truncated += count_trained([masked]) < count_trained([row])
        out.append({name: values for name, values in masked.items() if name != "cut"})
    return out, truncated


def _marked(row: PlainRow, cut: bool) -> PlainRow:
    """Return an interaction's row with its tokens marked if its output was cut off."""
    return row | {"cut": row["loss_mask"] == 1} if cut else row


def _outcomes(group: Group, config: TrainConfig) -> tuple[list[float], bool]:
    """Return the scores of a group's sessions, and whether they have nothing to compare.

    By what was achieved: equal outcomes of unequal length have nothing to compare.
    """
    config = config.model_copy(update={"overlong_length": None})
    rewards = [session_rewards(session, config) for session in group]
    scores = [r.score for r in rewards if r.score is not None]
    return scores, estimate_advantages([rewards], config)[0].zero_variance


class ScoresSinceStep:
    """The scores of all sessions since the latest step, of groups that teach nothing, too.

    Executors add them in their threads; the loop takes them, and a scrape reads them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = 0.0
        self._scored = 0
        self._dull = 0

    def add(self, scores: Sequence[float], *, dull: bool) -> None:
        """Add a group's scores; ``dull``: it teaches nothing."""
        with self._lock:
            self._sum += sum(scores)
            self._scored += len(scores)
            self._dull += len(scores) if dull else 0

    def read(self, *, take: bool = False) -> dict[str, Any]:
        """Return `reward` (the mean, None without any), `sessions`, and `dull`, how many of them
        had a group that teaches nothing; ``take``: and begin again."""
        with self._lock:
            mean = self._sum / self._scored if self._scored else None
            found = {"reward": mean, "sessions": self._scored, "dull": self._dull}
            if take:
                self._sum, self._scored, self._dull = 0.0, 0, 0
            return found


class ZeroVarianceGroups:
    """Counts groups that were left out: consecutive ones by reason, and among the last ones."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.trainability = TrainabilityWatch()
        self.scores = ScoresSinceStep()
        self._recent: deque[str | None] = deque(maxlen=_RECENT_GROUPS)
        """Why each of the last groups was left out; None for a useful one."""
        self._reasons: Counter[str] = Counter()
        """The reasons of the groups that were left out since the last useful one."""
        self._score: float | None = None
        """The score of the first run of the last group that had nothing to compare."""

    def reject_reason(self, group: Group) -> str | None:
        """Return why a group has nothing to learn from, and count it; None for a useful group.

        `untrainable`: no interaction counts; `zero_variance`: all sessions have the same score, and
        `train.dynamic_sampling` wants another one.
        """
        for session in group:
            if isinstance(session, Trajectory):
                self.trainability.add(count_calls(session.interactions))
        scores, dull = _outcomes(group, self._config)
        self.scores.add(scores, dull=dull)
        if not scores:
            reason = "untrainable"
        elif dull and self._config.dynamic_sampling == "refill":
            reason = "zero_variance"
        else:
            self._recent.append(None)
            self._reasons.clear()
            self._score = None
            return None
        if scores:
            self._score = scores[0]
        self.count(reason)
        return reason

    def refuse(self, group: Group, reason: str) -> None:
        """Count a group that was left out for another reason, with its scores."""
        self.scores.add(_outcomes(group, self._config)[0], dull=False)
        self.count(reason)

    @property
    def consecutive(self) -> int:
        """The number of groups that were left out since the last useful one."""
        return self._reasons.total()

    def count(self, reason: str) -> None:
        """Count one more group that was left out for ``reason``."""
        self._recent.append(reason)
        self._reasons[reason] += 1

    @property
    def notice(self) -> str | None:
        """A sentence for a waiting trainer, if most of the last groups were left out."""
        if self.consecutive >= _NOTICED:
            return f"{self}. Other tasks or rewards would help ({_DOCUMENT})"
        recent = tuple(self._recent)
        reasons = Counter(reason for reason in recent if reason is not None)
        if len(recent) < _NOTICED or reasons.total() < _NOTICED_SHARE * len(recent):
            return None
        text = f"{reasons.total()} of the last {len(recent)} groups had nothing to learn from"
        text += f" ({_listed(reasons)})"
        if reasons["zero_variance"]:
            text += f": an item whose runs {self._alike} is solved, or too hard"
        return f"{text}. Other tasks or rewards would help ({_DOCUMENT})"

    def __str__(self) -> str:
        text = f"{self.consecutive} groups in a row had nothing to learn from"
        text += f" ({_listed(self._reasons)})"
        if self._score is not None:
            text += f": the runs of an item {self._alike}"
            # Sessions of which each role scores alike may score differently.
            if self._config.group_by == "session":
                text += f", in the last group: {self._score:g}"
        return text

    @property
    def _alike(self) -> str:
        by_role = self._config.group_by == "role"
        return "score the same in each role" if by_role else "all score the same"


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
