"""Log-probabilities of given tokens by a forward pass of a model's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PART = 1024  # tokens that run at once


class Forward:
    """A model in float32; loading it may raise any error."""

    def __init__(self, folder: Path | str, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.folder = folder
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", use_safetensors=True
        )
        self._model = model.to(device).eval()

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().weight.shape[0])

    async def logprobs(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float
    ) -> list[float]:
        """Return log-softmax(logits / T) of each output token, over its whole context."""
        wanted: list[float | None] = [None] * len(prompt)
        wanted += [temperature] * len(output)
        return await asyncio.to_thread(self.token_logprobs, [*prompt, *output], wanted)

    def token_logprobs(
        self, ids: Sequence[int], temperatures: Sequence[float | None]
    ) -> list[float]:
        """Return log-softmax(logits / T) of the tokens that have a T, over their whole context.

        The first token has none. A long sequence runs in parts, so that memory has the logits of
        one part, and of the wanted tokens alone.
        """
        import torch

        if temperatures[0] is not None:
            raise ValueError("the first token has no context")
        values: list[float] = []
        state = None
        in_parts = len(ids) > PART
        tokens = torch.tensor([list(ids)], device=self._model.device)
        with torch.inference_mode():
            for start in range(0, len(ids) - 1, PART):
                end = min(start + PART, len(ids) - 1)
                # The logits at a position are those of the next token.
                places = [k for k in range(start, end) if temperatures[k + 1] is not None]
                out = self._model(
                    input_ids=tokens[:, start:end],
                    past_key_values=state,
                    use_cache=in_parts,
                    logits_to_keep=torch.tensor([k - start for k in places] or [0]),
                )
                state = out.past_key_values if in_parts else None
                if places:
                    scale = torch.tensor([temperatures[k + 1] for k in places])
                    logits = out.logits[0].float() / scale.to(tokens.device)[:, None]
                    chosen = tokens[0, [k + 1 for k in places], None]
                    values += torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].tolist()
        return values
