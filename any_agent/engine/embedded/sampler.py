"""The sampler: it draws one token per row, each row with its own parameters and perhaps a seed.

A row's logits are first changed as in SGLang: the additive penalties, which count the output's
tokens and never the prompt's, the repetition penalty, the grammar, the biases, the temperature. The
log-probabilities are those of the changed distribution, over all tokens that the grammar allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from any_agent.engine.embedded.grammar import GrammarState
from any_agent.types import GenerationHyperparameters

BOUND_ABOVE = 1e-4
"""A token counts as decided by its grammar where what the grammar forbade has more of the
probability. Below it, masked and plain log-probabilities differ by 1e-4 nats at most, which is
the most by which an engine and a trainer may differ in float32."""
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, and its logprobs are at temperature 1, as in SGLang."""


class LogitsProcessor:
    """The penalties, grammar and biases of one request; its state grows with the output."""

    def __init__(
        self, config: GenerationHyperparameters, grammar: GrammarState | None = None
    ) -> None:
        c = self._config = config
        self.grammar = grammar
        penalties = c.frequency_penalty, c.presence_penalty, c.repetition_penalty
        self._penalised = penalties != (0, 0, 1)
        self._counts: dict[int, int] = {}
        self._scale = _scale(c)
        self.bound = False
        """True if the grammar decides the next token, in part at least."""

    @property
    def changes_logits(self) -> bool:
        """False for nearly all requests, which need no processor."""
        return self._penalised or bool(self._config.logit_bias) or self.grammar is not None

    def push(self, token: int) -> None:
        """Add the output's next token."""
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.grammar is not None:
            self.grammar.push(token)

    def apply(self, logits: Tensor) -> None:
        """Change the next token's ``logits`` [vocabulary], float32, in place."""
        if self._counts:
            self._penalise(logits)
        if self.grammar is not None:
            forbidden = torch.from_numpy(self.grammar.forbidden()[: len(logits)])
            forbidden = forbidden.to(logits.device)
            lost = torch.softmax(logits / self._scale, dim=-1)[forbidden].sum()
            # `not`, because a comparison with NaN is false.
            self.bound = not bool(lost <= BOUND_ABOVE)
            logits.masked_fill_(forbidden, float("-inf"))
        if self._config.logit_bias:
            tokens, biases = zip(*self._config.logit_bias, strict=True)
            logits[list(tokens)] += torch.tensor(biases, device=logits.device)

    def _penalise(self, logits: Tensor) -> None:
        c, device = self._config, logits.device
        tokens = torch.tensor(list(self._counts), device=device)
        counts = torch.tensor(list(self._counts.values()), device=device, dtype=torch.float32)
        values = logits[tokens] - c.frequency_penalty * counts - c.presence_penalty
        factor = c.repetition_penalty
        logits[tokens] = torch.where(values < 0, values * factor, values / factor)


class SampleDraw(NamedTuple):
    """One token per row."""

    ids: list[int]
    logprobs: list[float]
    tops: dict[int, list[tuple[int, float]]]
    """The likeliest ids and their log-probabilities, best first, of the rows that want them."""


class BatchSampler:
    """The sampling parameters of a batch as tensors; made anew when the batch's rows change.

    ``tops`` has the number of likeliest tokens that each row wants.
    """

    def __init__(
        self,
        configs: Sequence[GenerationHyperparameters],
        device: torch.device,
        processors: Sequence[LogitsProcessor | None] = (),
        tops: Sequence[int] = (),
    ) -> None:
        self._processors = [
            (row, processor) for row, processor in enumerate(processors) if processor is not None
        ]
        self._tops = [(row, top) for row, top in enumerate(tops) if top]
        greedy = [c.temperature < GREEDY_BELOW for c in configs]
        scale = [_scale(c) for c in configs]
        cut = [not g and _cuts(c) for g, c in zip(greedy, configs, strict=True)]
        self._scaled = any(s != 1.0 for s in scale)
        self._any_greedy, self._all_greedy = any(greedy), all(greedy)
        self._seeds = [
            (row, c.seed)
            for row, (c, g) in enumerate(zip(configs, greedy, strict=True))
            if c.seed is not None and not g
        ]
        self._own = torch.Generator(device=device) if self._seeds else None
        self._cut = any(cut)
        self._temperature = torch.tensor(scale, device=device)[:, None]
        self._random = torch.tensor([[0.0 if g else 1.0] for g in greedy], device=device)
        if self._cut:
            self._top_p = torch.tensor([c.top_p for c in configs], device=device)[:, None]
            top_k = [c.top_k if c.top_k > 0 else 1 << 30 for c in configs]
            self._top_k = torch.tensor(top_k, device=device)[:, None]
            min_p = torch.tensor([c.min_p for c in configs], device=device)[:, None]
            self._log_min_p = min_p.log() if (min_p > 0).any() else None

    @property
    def seeded(self) -> bool:
        """True if any row draws by a seed of its own."""
        return bool(self._seeds)

    def sample(
        self, logits: Tensor, generator: torch.Generator, positions: Sequence[int] = ()
    ) -> SampleDraw:
        """Draw from ``logits`` [batch, vocabulary].

        ``positions`` has the drawn tokens' positions in their sequences; ``seeded`` rows need it.
        The log-probabilities are log-softmax(logits / T) in float32, of the changed logits, not
        renormalised by top_p, top_k or min_p. A row with NaN gives a NaN logprob. ``logits`` may
        be changed.
        """
        logits = logits.float()
        for row, processor in self._processors:
            processor.apply(logits[row])
        if self._scaled:
            logits = logits / self._temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        scores = self._truncated(logprobs) if self._cut else logprobs
        if not self._all_greedy:
            # The argmax of logprobs + Gumbel noise is a draw from softmax.
            noise = torch.empty_like(scores).exponential_(generator=generator)
            self._reseed(noise, positions)
            noise = noise.clamp_min_(1e-30).log_()
            scores = scores - (noise * self._random if self._any_greedy else noise)
        ids = scores.argmax(dim=-1, keepdim=True)
        picked = logprobs.gather(-1, ids)
        tops = {row: _likeliest(logprobs[row], top) for row, top in self._tops}
        return SampleDraw(ids.squeeze(-1).tolist(), picked.squeeze(-1).tolist(), tops)

    def _reseed(self, noise: Tensor, positions: Sequence[int]) -> None:
        """Draw the noise of seeded rows anew, each by its seed and position alone."""
        for row, seed in self._seeds:
            assert self._own is not None
            self._own.manual_seed(_mixed(seed, positions[row]))
            noise[row].exponential_(generator=self._own)

    def _truncated(self, logprobs: Tensor) -> Tensor:
        """Set -inf outside top_k, outside the smallest set that reaches top_p, and below min_p.

        At least one token stays.
        """
        ordered, order = logprobs.sort(dim=-1, descending=True)
        probs = ordered.exp()
        before = probs.cumsum(dim=-1) - probs
        ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
        outside = (before > self._top_p) | (ranks >= self._top_k)
        outside[:, 0] = False
        # cumsum's rounding must not cut the tail of rows without top_p.
        outside &= (self._top_p < 1) | (ranks >= self._top_k)
        if self._log_min_p is not None:
            outside |= ordered < ordered[:, :1] + self._log_min_p
        return logprobs.masked_fill(outside.scatter(-1, order, outside), float("-inf"))


def _scale(config: GenerationHyperparameters) -> float:
    """Return the temperature that log-probabilities are of: 1 for a greedy request."""
    return 1.0 if config.temperature < GREEDY_BELOW else config.temperature


def _cuts(config: GenerationHyperparameters) -> bool:
    return config.top_p < 1 or config.top_k > 0 or config.min_p > 0


def _likeliest(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    values, ids = logprobs.topk(count)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _mixed(seed: int, position: int) -> int:
    """Return 63 bits, about half of which change when one bit of seed or position changes."""
    key = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
