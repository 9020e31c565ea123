"""Losses by name. Those of the field differ in the surrogate of a token's policy gradient alone:

``L = (1/N) sum_t u_t * (w_t * s_t + kl_coef * kl_t - entropy_coef * H_t + teacher_coef * D_t)``

with s the surrogate, ``w = stop_grad(pi_prox / mu)`` the importance weight, truncated or masked,
for the differences between the behaviour policy mu and the proximal policy (decoupled PPO, arXiv
2110.00641), kl an estimate of the divergence from a reference, H the entropy, D the divergence of
the whole distribution from a teacher's, and u the token's factor by `train.aggregation`. The
surrogates are in :mod:`trainer.surrogates`; :func:`teacher_term` is added to any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from any_agent.config.presets import constants_of
from any_agent.errors import ConfigError
from any_agent.runtime.import_string import NamedRegistry

_LOG_RATIO_LIMIT = 20.0
"""The bound of a log ratio in the mismatch gauge, so that one token cannot make it infinite."""
_OF_THE_LOSS: Any = None


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The loss by its registered or dotted name, and its constants.

    :class:`any_agent.config.TrainConfig` describes them under the same names. Those that are not
    given are the loss's own.
    """

    name: str = "grpo"
    eps_low: float = _OF_THE_LOSS
    eps_high: float = _OF_THE_LOSS
    dual_clip: float | None = None
    is_cap: float = 5.0
    is_floor: float = 0.0
    is_mode: Literal["truncate", "mask"] = "truncate"
    is_level: Literal["token", "sequence"] = _OF_THE_LOSS
    off_policy_threshold: float | None = None
    rejection_k1: float | None = None
    rejection_k2: float | None = None
    rejection_k3: float | None = None
    second_moment: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    entropy_coef: float = 0.0
    top_entropy: float = 1.0
    teacher_coef: float = 0.0
    teacher_kind: Literal["reverse", "forward"] = "reverse"
    tau_pos: float = _OF_THE_LOSS
    tau_neg: float = _OF_THE_LOSS
    k_pos: float = _OF_THE_LOSS
    lambda_pos: float = _OF_THE_LOSS
    k_neg: float = _OF_THE_LOSS
    lambda_neg: float = _OF_THE_LOSS

    def __post_init__(self) -> None:
        for constant, value in constants_of(self.name).items():
            if getattr(self, constant) is _OF_THE_LOSS:
                object.__setattr__(self, constant, value)
        if not 0 <= self.eps_low <= 1 or self.eps_high < 0:
            raise ConfigError("eps_low must lie in [0, 1] and eps_high must not be negative")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.eps_high:
            raise ConfigError("dual_clip must be above 1 + eps_high")
        if self.is_cap <= 0 or not 0 <= self.is_floor <= self.is_cap:
            raise ConfigError("is_cap must be positive, and is_floor lie in [0, is_cap]")
        if min(self.kl_coef, self.entropy_coef, self.teacher_coef) < 0:
            raise ConfigError("kl_coef, entropy_coef and teacher_coef must not be negative")
        if any(bound is not None and bound <= 0 for bound in self.rejections):
            raise ConfigError("rejection_k1, rejection_k2 and rejection_k3 must be positive")
        if self.second_moment is not None and self.second_moment <= 0:
            raise ConfigError("second_moment must be positive")
        if not 0 < self.top_entropy <= 1:
            raise ConfigError("top_entropy must be above 0, and 1 at most")
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ConfigError("tau_pos and tau_neg must be positive")
        if min(self.k_pos, self.k_neg) < 0 or min(self.lambda_pos, self.lambda_neg) <= 0:
            raise ConfigError(
                "k_pos and k_neg must not be negative, lambda_pos and lambda_neg must be positive"
            )

    @property
    def rejections(self) -> tuple[float | None, float | None, float | None]:
        """The bounds of a row's divergence, by k1, k2 and k3."""
        return self.rejection_k1, self.rejection_k2, self.rejection_k3


def needs_rejections(config: LossConfig) -> bool:
    """Return whether a row's tokens need its ``rejected``."""
    return any(bound is not None for bound in config.rejections)


def needs_sequence_weight(config: LossConfig) -> bool:
    """Return whether a row's tokens need its ``sequence_log_weight``."""
    return config.is_level == "sequence" or config.off_policy_threshold is not None


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The given tensors of n trained tokens: float, shape [n], without gradient, nats.

    A scalar of a row is the same for all of its tokens. No loss sees a row whole: with shared
    prefixes the tokens of a row may lie in several passes.
    """

    behaviour: Tensor
    """log mu, as recorded."""
    advantages: Tensor
    proximal: Tensor | None = None
    """log pi_prox: the policy before the first optimizer step on the batch. None: the current
    one."""
    reference: Tensor | None = None
    """log pi_ref; given if and only if ``kl_coef`` is positive."""
    token_weights: Tensor | None = None
    """u, a scalar of each row. None: 1, the mean over all tokens."""
    sequence_log_ratio: Tensor | None = None
    """The mean over the row's trained tokens of log pi_theta - log pi_prox at the beginning of this
    optimizer step. None: 0, on the first step."""
    sequence_log_weight: Tensor | None = None
    """The mean over the row's trained tokens of log pi_prox - log mu."""
    rejected: Tensor | None = None
    """1 for the tokens of rows that are beyond a bound of their divergence, :func:`is_rejected`,
    0 for the others."""
    outlier: Tensor | None = None
    """1 for the tokens that the bound of the minibatch's second moment leaves out at the beginning
    of this optimizer step, 0 for the others."""
    sequence_clipped_ratio: Tensor | None = None
    """The mean over the row's trained tokens of :func:`clipped_log_ratio`, at the beginning of this
    optimizer step. None: 0, on the first step."""
    high_entropy: Tensor | None = None
    """1 for the tokens that have a surrogate, 0 for the others. None: all have one."""
    fresh: Tensor | None = None
    """1 for the tokens that the weights of this step sampled, 0 for older ones. None: unknown."""
    sequence_product: Tensor | None = None
    """The product over the row's trained tokens of pi_theta / pi_prox, at the beginning of this
    optimizer step, and the importance weight w; e**20 at most."""

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> LossInputs:
        """Return the inputs of a pass's items: rows call the behaviour ``logprobs``."""
        names = (f.name for f in fields(cls) if f.name in inputs and f.name != "behaviour")
        return cls(inputs["logprobs"], **{name: inputs[name] for name in names})


@dataclass(slots=True)
class LossStats:
    """Sums over trained tokens, so that micro-batches and ranks add up exactly.

    :meth:`means` gives the means. ``entropy`` is nan where the loss was given none; ``kl`` is 0
    without a reference. The policy fills the counts of the passes' tokens.
    """

    tokens: int = 0
    tokens_computed: int = 0
    """Tokens that went through the model, padding included."""
    tokens_in_rows: int = 0
    """Tokens of the rows: those that went through it if each row was computed alone."""
    loss: float = 0.0
    """The loss, already divided by N: the parts of one batch add up to its loss."""
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    weight: float = 0.0
    is_capped: float = 0.0
    """Tokens whose importance weight is truncated."""
    is_masked: float = 0.0
    """Tokens that their importance weight takes out of the policy gradient."""
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    """The largest difference of a token's log-probabilities in engine and trainer, not a sum."""
    fresh: float = 0.0
    """Tokens that the weights of this step sampled."""
    mismatch_fresh: float = 0.0
    """The sum of their mismatches. The others were sampled by earlier weights, so they differ
    however well engine and trainer agree."""
    entropy: float = 0.0
    kl: float = 0.0
    teacher_kl: float = 0.0
    """The divergence from the teacher, over the whole vocabulary; 0 without one."""

    def __add__(self, other: LossStats) -> LossStats:
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return LossStats(*(max(a, b) if n == "mismatch_max" else a + b for n, a, b in pairs))

    def means(self) -> dict[str, float]:
        """Return the loss, counts and the maximum as they are, everything else per trained token.

        ``mismatch`` is ``E[r - log r - 1]``, r = pi_prox / mu: how far the engine's
        log-probabilities are from the trainer's (an estimate of their KL divergence, nats).
        ``mismatch_fresh`` is the same mean over the fresh tokens, and missing without any.
        """
        n = max(self.tokens, 1)
        counts = ("tokens", "tokens_computed", "tokens_in_rows", "loss", "mismatch_max")
        means = {name: float(getattr(self, name)) for name in counts}
        if self.fresh:
            means["mismatch_fresh"] = self.mismatch_fresh / self.fresh
        rest = (f.name for f in fields(self) if f.name not in (*counts, "fresh", "mismatch_fresh"))
        return means | {name: getattr(self, name) / n for name in rest}


class Loss(Protocol):
    """A loss function; :meth:`PolicyLoss.__call__` describes its arguments and results."""

    def __call__(
        self,
        logprobs: Tensor,
        inputs: LossInputs,
        *,
        total_tokens: int,
        config: LossConfig,
        entropies: Tensor | None = None,
        place: Callable[[int], str] = ...,
    ) -> tuple[Tensor, LossStats]: ...


LOSSES: NamedRegistry[Loss] = NamedRegistry(
    "loss",
    "train.loss",
    **{
        name: f"trainer.surrogates.{name}"
        for name in ("grpo", "gspo", "gmpo", "dppo", "cispo", "sapo", "vespo", "reinforce")
    },
)


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Decorate a loss, so that `train.loss` can name it in this process."""
    return lambda loss: LOSSES.register(name, loss)


class Surrogate(NamedTuple):
    """A loss's policy term of each token [n], with gradient, and the effect of its clip."""

    loss: Tensor
    ratio: Tensor
    """pi_theta / pi_prox, of the token or its row."""
    low: Tensor | None = None
    """bool: tokens whose ratio is clipped from below."""
    high: Tensor | None = None


SurrogateFunction: TypeAlias = Callable[[Tensor, Tensor, LossInputs, LossConfig], Surrogate]
"""A function of log pi_theta [n], log pi_prox [n], the inputs and the constants."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss by its surrogate: with importance weights, KL term, entropy bonus and statistics."""

    surrogate: SurrogateFunction
    sequence_ratio: bool = False
    """The surrogate uses ``sequence_log_ratio``."""
    clipped_ratio: bool = False
    """The surrogate uses ``sequence_clipped_ratio``."""
    sequence_product: bool = False
    """The surrogate uses ``sequence_product``, which has the importance weights in it."""

    def __call__(
        self,
        logprobs: Tensor,
        inputs: LossInputs,
        *,
        total_tokens: int,
        config: LossConfig,
        entropies: Tensor | None = None,
        place: Callable[[int], str] = "trained token {}".format,
    ) -> tuple[Tensor, LossStats]:
        """Return the loss's share of these tokens, a scalar to call ``backward`` on, and
        statistics.

        ``logprobs`` is log pi_theta, float, shape [n], with gradient; so are ``entropies`` where
        ``entropy_coef`` is positive. ``total_tokens`` is N, the trained tokens of **all**
        micro-batches and ranks: the shares must be summed, over ranks too.

        Raises ValueError for shapes that do not match and inputs that the constants need,
        FloatingPointError with the token's ``place`` where an input, or the loss of a token, is not
        finite.
        """
        if total_tokens < max(1, logprobs.numel()):
            raise ValueError(f"N = {total_tokens} is less than the {logprobs.numel()} tokens given")
        _require_inputs(logprobs, inputs, config, entropies, place)
        proximal = logprobs.detach() if inputs.proximal is None else inputs.proximal
        term = self.surrogate(logprobs, proximal, inputs, config)
        require_finite("ratio", term.ratio, place)
        weight, beyond = importance_weight(proximal, inputs, config)
        left_behind = off_policy(inputs, config)
        for gone in (inputs.rejected, inputs.outlier):
            if gone is not None:
                left_behind = left_behind | (gone > 0)
        factor = torch.ones_like(weight) if self.sequence_product else weight
        per_token = factor.masked_fill(left_behind, 0.0) * term.loss
        if inputs.high_entropy is not None:
            per_token = per_token * inputs.high_entropy
        kl = None
        if inputs.reference is not None:
            kl = kl_term(logprobs, inputs.reference, config.kl_estimator)
            if config.kl_estimator == "k3_unbiased":
                kl = kl * torch.exp(logprobs - proximal)
            per_token = per_token + config.kl_coef * kl
        if config.entropy_coef and entropies is not None:
            per_token = per_token - config.entropy_coef * entropies
        if inputs.token_weights is not None:
            per_token = per_token * inputs.token_weights
        require_finite("loss", per_token, place)
        loss = per_token.sum() / total_tokens

        with torch.no_grad():
            masked = left_behind | beyond if config.is_mode == "mask" else left_behind
            log_r = proximal - inputs.behaviour
            bounded = log_r.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
            mismatch = torch.exp(bounded) - bounded - 1
            fresh = torch.zeros_like(mismatch) if inputs.fresh is None else inputs.fresh
            stats = LossStats(
                tokens=logprobs.numel(),
                loss=float(loss.detach()),
                ratio=float(term.ratio.sum()),
                clipped_low=0.0 if term.low is None else float(term.low.sum()),
                clipped_high=0.0 if term.high is None else float(term.high.sum()),
                weight=float(weight.masked_fill(left_behind, 0.0).sum()),
                is_capped=float((beyond & ~masked).sum()),
                is_masked=float(masked.sum()),
                mismatch=float(mismatch.sum()),
                mismatch_max=float(log_r.abs().max()) if logprobs.numel() else 0.0,
                fresh=float(fresh.sum()),
                mismatch_fresh=float((fresh * mismatch).sum()),
                entropy=float("nan") if entropies is None else float(entropies.sum()),
                kl=0.0 if kl is None else float(kl.detach().sum()),
            )
        return loss, stats


def needs_sequence_ratio(config: LossConfig) -> bool:
    """Return whether the loss needs ``sequence_log_ratio`` after the first step on a batch."""
    uses = bool(getattr(LOSSES.find(config.name), "sequence_ratio", False))
    return uses or config.off_policy_threshold is not None


def needs_clipped_ratio(config: LossConfig) -> bool:
    """Return whether the loss needs ``sequence_clipped_ratio`` after the first step on a batch."""
    return bool(getattr(LOSSES.find(config.name), "clipped_ratio", False))


def needs_sequence_product(config: LossConfig) -> bool:
    """Return whether the loss needs ``sequence_product``."""
    return bool(getattr(LOSSES.find(config.name), "sequence_product", False))


def importance_weight(
    proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Return w [n], and bool [n]: the tokens whose raw weight is beyond its bounds.

    The raw weight is pi_prox / mu, of each token, or the geometric mean over its row
    (``is_level``). Beyond a bound it becomes that (``truncate``), or 0 (``mask``).
    """
    log_weight = proximal - inputs.behaviour
    if config.is_level == "sequence":
        assert inputs.sequence_log_weight is not None, "inputs are checked"
        log_weight = inputs.sequence_log_weight
    raw = torch.exp(log_weight)
    beyond = (raw > config.is_cap) | (raw < config.is_floor)
    if config.is_mode == "mask":
        return raw.masked_fill(beyond, 0.0), beyond
    return raw.clamp(config.is_floor, config.is_cap), beyond


def clipped_log_ratio(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, config: LossConfig
) -> Tensor:
    """Return ``log pi_theta - log pi_prox`` [n], where the advantage is positive at most
    ``eps_high``, elsewhere at least ``-eps_low``."""
    ratio = logprobs - proximal
    low, high = ratio.clamp(min=-config.eps_low), ratio.clamp(max=config.eps_high)
    return torch.where(advantages > 0, high, low)


def off_policy(inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return bool [n]: the tokens of rows with negative advantages that the policy left behind.

    There the mean of log mu - log pi_theta over the row, an estimate of the divergence, is above
    the threshold: DeepSeek-V3.2's mask of sequences (arXiv 2512.02556, eq. 9).
    """
    if config.off_policy_threshold is None:
        return torch.zeros_like(inputs.advantages, dtype=torch.bool)
    assert inputs.sequence_log_weight is not None, "inputs are checked"
    divergence = -inputs.sequence_log_weight
    if inputs.sequence_log_ratio is not None:
        divergence = divergence - inputs.sequence_log_ratio
    return (inputs.advantages < 0) & (divergence > config.off_policy_threshold)


def is_rejected(log_ratios: Tensor, config: LossConfig) -> bool:
    """Return whether a row is beyond a bound, from log pi_prox - log mu of its trained tokens, [n].

    With d for a token's, these are the means over the row that are bounded: k1, of d, on either
    side; k2, of ``d ** 2 / 2``; k3, of ``exp(d) - 1 - d``. On tokens of mu, k3 and -k1 estimate
    KL(mu, pi_prox).

    Source: sequence-level rejection for the mismatch of engine and trainer, in the means of J.
    Schulman's estimates ("Approximating KL Divergence", 2020).
    """
    d = log_ratios.double()
    found = (d.mean().abs(), d.square().mean() / 2, (torch.expm1(d) - d).mean())
    bounds = zip(found, config.rejections, strict=True)
    return any(bound is not None and float(value) > bound for value, bound in bounds)


def kl_term(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(pi_theta, pi_ref) at each token [n]; d = log pi_theta - log pi_ref.

    ==  ==================  ===========================  =====================================
    k1  ``d``               ``grad log pi``              mean gradient 0: it only adds noise
    k2  ``d ** 2 / 2``      ``d * grad log pi``          on policy the divergence's gradient
    k3  ``e**-d + d - 1``   ``(1 - e**-d) grad log pi``  on policy that of KL(pi_ref, pi_theta)
    ==  ==================  ===========================  =====================================

    ``k3_unbiased`` is k3 here, and the loss multiplies it by pi_theta / pi_prox.

    The columns: name, value, gradient, and the mean of the gradient over tokens that pi_theta
    samples. Source: J. Schulman, "Approximating KL Divergence", 2020.
    """
    d = logprobs - reference
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.exp(-d) + d - 1


def teacher_term(
    divergences: Tensor,
    inputs: LossInputs,
    total_tokens: int,
    config: LossConfig,
    place: Callable[[int], str],
) -> Tensor:
    """Return the distillation's share of the loss, ``(1/N) sum_t u_t * teacher_coef * D_t``.

    D is the divergence of the policy's whole distribution at a token that it sampled from the
    teacher's: on-policy distillation, as GKD (arXiv 2306.13649). Raises FloatingPointError with the
    token's ``place`` where one is not finite.
    """
    require_finite("divergence from the teacher", divergences, place)
    u = 1.0 if inputs.token_weights is None else inputs.token_weights
    return config.teacher_coef / total_tokens * (u * divergences).sum()


def _require_inputs(
    logprobs: Tensor,
    inputs: LossInputs,
    config: LossConfig,
    entropies: Tensor | None,
    place: Callable[[int], str],
) -> None:
    given = {"log-probability": logprobs, "entropy": entropies if config.entropy_coef else None}
    given |= {_TITLES[f.name]: getattr(inputs, f.name) for f in fields(inputs)}
    for name, values in given.items():
        if values is not None:
            if values.shape != logprobs.shape:
                raise ValueError(f"{name}: shape {tuple(values.shape)} is not that of logprobs")
            require_finite(name, values, place)
    if (config.kl_coef > 0) is not (inputs.reference is not None):
        raise ValueError("reference log-probabilities must be given if and only if kl_coef > 0")
    if config.entropy_coef > 0 and entropies is None:
        raise ValueError("entropy_coef > 0 needs the entropies")
    for who, wanted, name in (
        ("is_level=sequence", config.is_level == "sequence", "sequence_log_weight"),
        ("off_policy_threshold", config.off_policy_threshold is not None, "sequence_log_weight"),
        ("rejection_k1, rejection_k2 or rejection_k3", needs_rejections(config), "rejected"),
        ("second_moment", config.second_moment is not None, "outlier"),
        ("top_entropy", config.top_entropy < 1, "high_entropy"),
        (f"the loss {config.name}", needs_sequence_product(config), "sequence_product"),
    ):
        if wanted and getattr(inputs, name) is None:
            raise ValueError(f"{who} needs {name} in the rows")


_TITLES = {
    **{"behaviour": "behaviour log-probability", "proximal": "proximal log-probability"},
    **{"reference": "reference log-probability", "advantages": "advantage"},
    **{"token_weights": "token's weight", "high_entropy": "choice by entropy"},
    **{"sequence_log_ratio": "row's log ratio", "sequence_log_weight": "row's log weight"},
    **{"sequence_clipped_ratio": "row's clipped ratio", "rejected": "row's rejection"},
    **{"outlier": "choice by second moment"},
    **{"sequence_product": "row's product of ratios", "fresh": "mark of fresh tokens"},
}


def require_finite(name: str, values: Tensor, place: Callable[[int], str]) -> None:
    """Raise FloatingPointError with the place of the first value that is not finite."""
    values = values.detach()
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        count = int(bad.sum())
        raise FloatingPointError(
            f"the {name} at {place(k)} is {float(values[k])} ({count} of {values.numel()} tokens)"
        )
