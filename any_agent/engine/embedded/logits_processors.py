"""What bends one row's logits before a token is drawn: penalties, a grammar, biases.

As in SGLang: the penalties count the output's tokens and never the prompt's; the additive ones come
before the repetition penalty, then the grammar, then the biases, then the temperature. The
log-probabilities are of the bent distribution, over all tokens that the grammar allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from any_agent.engine.embedded.grammar import GrammarCompiler, GrammarState
from any_agent.types import GenerationHyperparameters


def make_logits_processor(
    config: GenerationHyperparameters, grammars: GrammarCompiler
) -> LogitsProcessor | None:
    """None for nearly every request. Raises InvalidRequest for what is no grammar."""
    penalised = (
        config.frequency_penalty != 0
        or config.presence_penalty != 0
        or config.repetition_penalty != 1
    )
    if not (penalised or config.logit_bias or config.grammar is not None):
        return None
    grammar = None if config.grammar is None else grammars.compile(config.grammar)
    return LogitsProcessor(config, grammar, penalised=penalised)


class LogitsProcessor:
    """One request's; grows with its output."""

    def __init__(
        self,
        config: GenerationHyperparameters,
        grammar: GrammarState | None = None,
        *,
        penalised: bool = True,
    ) -> None:
        self._config = config
        self.grammar = grammar
        self._penalised = penalised
        self._counts: dict[int, int] = {}

    def push(self, token: int) -> None:
        """The output goes on with this token."""
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.grammar is not None:
            self.grammar.push(token)

    def apply(self, logits: Tensor) -> None:
        """Bend the next token's ``logits`` [vocabulary], float32, in place."""
        if self._counts:
            self._penalise(logits)
        if self.grammar is not None:
            forbidden = torch.from_numpy(self.grammar.forbidden()[: len(logits)])
            logits.masked_fill_(forbidden.to(logits.device), float("-inf"))
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
