"""Algorithms by name: the settings of `train` that each of them chooses, and contradictions.

``docs/reference/algorithms.md`` has the formulas and the reason for each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """An algorithm: its advantage estimator, its loss, and other settings."""

    advantage_estimator: str
    loss: str
    others: Mapping[str, Any] = {}


PRESETS: Mapping[str, Preset] = {
    # With DAPO's clip and mean over tokens, which the field found better than the paper's own.
    "grpo": Preset("grpo", "grpo"),
    # A deviation or a length in a denominator biases the gradient.
    "dr_grpo": Preset(
        "grpo", "grpo", {"normalize_std": "none", "aggregation": "constant", "eps_high": 0.2}
    ),
    # Its length penalty depends on the task: train.overlong_length switches it on.
    "dapo": Preset("grpo", "grpo"),
    # The paper's mean over sequences; a row is the sequence whose ratio is clipped.
    "gspo": Preset("grpo", "gspo", {"aggregation": "turn"}),
    # As the paper's mean over sequences of geometric means.
    "gmpo": Preset("grpo", "gmpo", {"aggregation": "turn"}),
    "dppo": Preset("grpo", "dppo"),
    # The bound takes the place of the clip; 0.04 is the paper's, for all of its runs.
    "m2po": Preset("grpo", "reinforce", {"second_moment": 0.04}),
    "cispo": Preset("grpo", "cispo"),
    "sapo": Preset("grpo", "sapo", {"aggregation": "session"}),
    "vespo": Preset("grpo", "vespo"),
    # An output is one action: its log-probability is the sum over its tokens, not their mean.
    "rloo": Preset("rloo", "reinforce", {"aggregation": "constant"}),
    # As for RLOO: the baseline is the best one for the gradient of a whole output's sum.
    "opo": Preset("opo", "reinforce", {"aggregation": "constant"}),
    "maxrl": Preset("maxrl", "grpo"),
    # The paper's divergence is a penalty in the reward (kl_reward_coef), or k2 in the loss.
    "reinforce_pp": Preset("reinforce_pp", "grpo", {"eps_high": 0.2, "kl_estimator": "k2"}),
    "reinforce_pp_baseline": Preset(
        "reinforce_pp_baseline", "grpo", {"eps_high": 0.2, "kl_estimator": "k2"}
    ),
}
_COMMON: Mapping[str, Any] = {"aggregation": "token", "kl_estimator": "k3"}
_OF_ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"normalize_std": "group"},
    "rloo": {"normalize_std": "none"},
    "opo": {"normalize_std": "none"},
    "maxrl": {"normalize_std": "none"},
    "reinforce_pp": {"normalize_std": "batch"},
    "reinforce_pp_baseline": {"normalize_std": "batch"},
}
_OF_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"eps_low": 0.2, "eps_high": 0.28, "is_level": "token"},
    # Ratios of sequences are near 1; the importance weight is of the same kind.
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4, "is_level": "sequence"},
    # Of log ratios: the paper's, a wider room than of ratios.
    "gmpo": {"eps_low": 0.4, "eps_high": 0.4, "is_level": "sequence"},
    # Of probabilities: the paper's.
    "dppo": {"eps_low": 0.15, "eps_high": 0.15, "is_level": "token"},
    # The weight is bounded above, at 5, and not below.
    "cispo": {"eps_low": 1.0, "eps_high": 4.0, "is_level": "token"},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05, "is_level": "token"},
    # The paper's and its authors' code's, for all of their runs.
    "vespo": {
        **{"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
        "is_level": "token",
    },
    "reinforce": {"is_level": "token"},
}
_CONSTANTS = (
    *("eps_low", "eps_high", "tau_pos", "tau_neg"),
    *("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
)
_CLIPPED = ("grpo", "gspo")
"""The losses that have PPO's clip."""
RETURNS_OF_TOKENS = ("reinforce_pp", "reinforce_pp_baseline")
"""The estimators to which a token is an action: what comes before it is no part of its return."""
CONSTANT_LENGTH = 4096
"""The default of `sampling.max_new_tokens`, as Dr.GRPO divides by the longest possible output."""


def constants_of(loss: str) -> Mapping[str, Any]:
    """Return a loss's constants. Those that it has not are GRPO's, SAPO's and VESPO's: a loss of
    yours may use them."""
    others = {**_OF_LOSSES["vespo"], **_OF_LOSSES["sapo"], **_OF_LOSSES["grpo"]}
    return {**others, **_OF_LOSSES.get(loss, {})}


def completed(c: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not given, with the values of the preset.

    A loss or estimator that is not the preset's brings its own constants. Those of yours, under
    other names, have GRPO's.
    """
    chosen = PRESETS[c["preset"]]
    estimator = c["advantage_estimator"] or chosen.advantage_estimator
    loss = c["loss"] or chosen.loss

    def kept(knob: str) -> bool:
        """Return whether the preset's value means something to the chosen estimator and loss."""
        if knob in _OF_ESTIMATORS["grpo"]:
            return estimator == chosen.advantage_estimator
        return loss == chosen.loss or knob not in (*_CONSTANTS, "second_moment")

    knobs = {
        **_COMMON,
        **_OF_ESTIMATORS.get(estimator, _OF_ESTIMATORS["grpo"]),
        **_OF_LOSSES.get(loss, _OF_LOSSES["grpo"]),
        **{knob: value for knob, value in chosen.others.items() if kept(knob)},
        "advantage_estimator": estimator,
        "loss": loss,
    }
    if not c["kl_coef"]:
        del knobs["kl_estimator"]
    taught = bool(c["teacher_coef"])
    if taught:
        knobs["teacher_kind"] = "reverse"
    knobs["dynamic_sampling"] = "keep" if taught or not c["reward_coef"] else "refill"
    if (c["aggregation"] or knobs["aggregation"]) == "constant":
        knobs["constant_length"] = CONSTANT_LENGTH
    if c["overlong_length"] is not None:
        knobs |= {"overlong_buffer": max(c["overlong_length"] // 5, 1), "overlong_penalty": 1.0}
    return {name: value for name, value in knobs.items() if c[name] in (None, "")}


def contradiction(c: Mapping[str, Any]) -> str | None:
    """Return the first contradiction in completed settings, with the remedy; None if none."""
    return next(chain(_in_the_loss(c), _in_the_batch(c)), None)


def _in_the_loss(c: Mapping[str, Any]) -> Iterator[str]:
    loss = c["loss"]
    for knob in _CONSTANTS if loss in _OF_LOSSES else ():
        if c[knob] is not None and knob not in _OF_LOSSES[loss]:
            users = " or ".join(name for name, knobs in _OF_LOSSES.items() if knob in knobs)
            yield (
                f"train.{knob} has no effect on train.loss={loss}: leave it out, or set "
                f"train.loss to {users}"
            )
    if c["dual_clip"] is not None and loss in _OF_LOSSES:
        if loss not in _CLIPPED:
            yield (
                f"train.dual_clip has no effect on train.loss={loss}: leave it out, or set "
                f"train.loss to {' or '.join(_CLIPPED)}"
            )
        elif c["dual_clip"] <= 1 + c["eps_high"]:
            yield (
                f"train.dual_clip={c['dual_clip']:g} must be above 1 + train.eps_high "
                f"({1 + c['eps_high']:g}), where positive advantages are clipped"
            )
    if c["is_floor"] > c["is_cap"]:
        yield (
            f"train.is_floor={c['is_floor']:g} must not exceed train.is_cap={c['is_cap']:g}: they "
            "are the bounds of the importance weight"
        )
    if loss == "vespo" and c["is_level"] == "sequence":
        yield (
            "train.is_level=sequence contradicts train.loss=vespo, which multiplies the weights of "
            "a row's tokens: leave it out"
        )
    if loss in ("gspo", "gmpo", "vespo") and c["second_moment"] is not None:
        yield (
            f"train.second_moment leaves out single tokens, but train.loss={loss} takes or leaves "
            "a row as a whole: set train.rejection_k2 instead, which bounds the mean over a row"
        )
    if loss in ("gspo", "gmpo") and c["is_level"] == "token" and c["is_mode"] == "mask":
        yield (
            f"train.is_level=token masks single tokens, but train.loss={loss} takes or leaves a "
            "row as a whole: set train.is_level=sequence, or train.is_mode=truncate"
        )
    if c["kl_estimator"] is not None and not c["kl_coef"]:
        yield (
            f"train.kl_estimator={c['kl_estimator']} has no effect while train.kl_coef is 0: set "
            "train.kl_coef (0.001 is usual), or leave train.kl_estimator out"
        )
    if c["teacher_kind"] is not None and not c["teacher_coef"]:
        yield (
            f"train.teacher_kind={c['teacher_kind']} has no effect while train.teacher_coef is 0: "
            "set train.teacher and train.teacher_coef, or leave train.teacher_kind out"
        )
    if c["reward_coef"] != 1 and not c["teacher_coef"] and c["kl_estimator"] in (None, "k1"):
        yield (
            f"train.reward_coef={c['reward_coef']:g} weighs the reward beside another model's "
            "distributions, and there is none to learn from: set train.teacher and "
            "train.teacher_coef, or leave train.reward_coef out"
        )
    if c["kl_coef"] and c["kl_reward_coef"]:
        yield (
            "train.kl_coef and train.kl_reward_coef pull towards the same reference twice, by a "
            "term of the loss and by the reward: set one of them"
        )


def _in_the_batch(c: Mapping[str, Any]) -> Iterator[str]:
    estimator, mean, length = c["advantage_estimator"], c["aggregation"], c["overlong_length"]
    known = _OF_ESTIMATORS.get(estimator, _OF_ESTIMATORS["grpo"])
    if estimator == "maxrl":
        others = {"normalize_std": "none", "kl_reward_coef": 0, "overlong_length": None}
        for name, value in others.items():
            if c[name] != value:
                yield (
                    f"train.{name} contradicts train.advantage_estimator=maxrl, which divides by "
                    "the mean of rewards of 0 and above: leave it out"
                )
    if not c["reward_coef"]:
        for name, value in {"kl_reward_coef": 0, "overlong_length": None}.items():
            if c[name] != value:
                yield (
                    f"train.{name} changes the reward, which train.reward_coef=0 takes out of the "
                    "loss: leave one of them out"
                )
        if c["dynamic_sampling"] != "keep":
            yield (
                f"train.dynamic_sampling={c['dynamic_sampling']} leaves out groups by their "
                "rewards, which train.reward_coef=0 takes out of the loss: set keep, or leave it "
                "out"
            )
    if c["group_by"] == "role" and estimator == "reinforce_pp":
        yield (
            "train.group_by=role contradicts train.advantage_estimator=reinforce_pp, which "
            "compares with the whole batch and not in groups: set reinforce_pp_baseline or grpo, "
            "or leave train.group_by out"
        )
    if c["group_by"] == "role" and estimator in RETURNS_OF_TOKENS and c["kl_reward_coef"]:
        yield (
            f"train.group_by=role contradicts train.kl_reward_coef with train.advantage_estimator="
            f"{estimator}, which gives each token a divergence by its session's scale: set "
            "train.kl_coef instead, or another estimator"
        )
    if c["normalize_std"] == "group" and known["normalize_std"] != "group":
        yield (
            f"train.normalize_std=group contradicts train.advantage_estimator={estimator}: set "
            "batch or none, or train.advantage_estimator=grpo"
        )
    if c["constant_length"] is not None and mean != "constant":
        yield (
            f"train.constant_length has no effect on train.aggregation={mean}: leave it out, or "
            "set train.aggregation=constant"
        )
    for name in ("overlong_buffer", "overlong_penalty"):
        if length is None and c[name] is not None:
            yield f"train.{name} has no effect without train.overlong_length: set it, too"
    if length is not None and c["overlong_buffer"] > length:
        yield (
            f"train.overlong_buffer={c['overlong_buffer']} must not exceed "
            f"train.overlong_length={length}: the penalty begins that many tokens below it"
        )
