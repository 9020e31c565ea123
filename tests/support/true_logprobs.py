"""A tiny model that says what its log-probabilities of chosen tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from any_agent.engine.embedded.generate_schema import parse_generate
from any_agent.engine.embedded.sampler import LogitsProcessor


class TrueModel:
    """The causal model of a folder, for :class:`tests.support.scripted_engine.ScriptedEngine`.

    One may serve several engines, as long as none of them loads other weights.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        # More threads than one hinder each other at this size.
        torch.set_num_threads(1)
        self.folder = folder
        self.generation = 0
        """Grows with every load: what was computed under an earlier one is of other weights."""
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def load(self, folder: Path) -> None:
        """Other weights of the same shape. InvalidRequest if they are not, and nothing changes."""
        from any_agent.engine.embedded.weight_loading import apply_weights, read_weights

        apply_weights(self._model, read_weights(self._model, folder))
        self.generation += 1

    def logprobs(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        params: Mapping[str, Any],
        *,
        scaled: bool = True,
    ) -> Tensor:
        """log-softmax(logits / T) at each position of ``output``, [n, vocabulary], by one pass.

        Temperature 0 is taken as 1, as by SGLang; penalties and biases bend, grammars do not.
        """
        asked = {k: v for k, v in params.items() if k not in ("json_schema", "regex")}
        body = {"input_ids": [0], "sampling_params": asked}
        bend = LogitsProcessor(parse_generate(body).request.gconfig)

        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits
            logits = logits[0, len(prompt) - 1 : -1].float()
            for row, token in zip(logits, output, strict=True):
                bend.apply(row)
                bend.push(token)
            temperature = params.get("temperature", 1.0)
            if scaled and temperature >= 1e-5:
                logits = logits / temperature
            return torch.log_softmax(logits, -1)
