"""Drawing one token per row, each row with its own temperature, top_p, top_k and perhaps seed."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from any_agent.types import GenerationHyperparameters

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, and its logprobs are at temperature 1, as in SGLang."""


class BatchSampler:
    """The sampling parameters of a batch as tensors; made anew when the batch's rows change."""

    def __init__(self, configs: Sequence[GenerationHyperparameters], device: torch.device) -> None:
        greedy = [c.temperature < GREEDY_BELOW for c in configs]
        scale = [1.0 if g else c.temperature for g, c in zip(greedy, configs, strict=True)]
        cut = [not g and (c.top_p < 1 or c.top_k > 0) for g, c in zip(greedy, configs, strict=True)]
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

    @property
    def seeded(self) -> bool:
        """Whether any row draws by a seed of its own."""
        return bool(self._seeds)

    def sample(
        self, logits: Tensor, generator: torch.Generator, positions: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Draw from ``logits`` [batch, vocabulary].

        ``positions`` are the drawn tokens' in their sequences; needed where rows are ``seeded``.
        Returns ids and log-softmax(logits / T) of them in float32, not renormalised by the cut.
        A row with NaN gives a NaN logprob.
        """
        logits = logits.float()
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
        return ids.squeeze(-1).tolist(), picked.squeeze(-1).tolist()

    def _reseed(self, noise: Tensor, positions: Sequence[int]) -> None:
        """Draw the noise of seeded rows anew, each by its seed and position alone."""
        for row, seed in self._seeds:
            assert self._own is not None
            self._own.manual_seed(_mixed(seed, positions[row]))
            noise[row].exponential_(generator=self._own)

    def _truncated(self, logprobs: Tensor) -> Tensor:
        """-inf outside top_k, and outside the smallest set that reaches top_p; one token stays."""
        ordered, order = logprobs.sort(dim=-1, descending=True)
        probs = ordered.exp()
        before = probs.cumsum(dim=-1) - probs
        ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
        outside = (before > self._top_p) | (ranks >= self._top_k)
        outside[:, 0] = False
        # cumsum's rounding must not cut the tail of rows without top_p.
        outside &= (self._top_p < 1) | (ranks >= self._top_k)
        return logprobs.masked_fill(outside.scatter(-1, order, outside), float("-inf"))


def _mixed(seed: int, position: int) -> int:
    """63 bits that differ in about half when seed or position differ in one."""
    key = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
