"""The weights that an engine says it serves, and a fresh forward pass of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from any_agent.rundir.layout import RunDir, weights_folder

_MAX_BYTES = 4 << 30
"""Of weights: a forward pass of more takes a CPU minutes."""


@dataclass(frozen=True, slots=True)
class WeightsLocation:
    """The folder of a version's weights, or why there is none to compute with."""

    folder: Path | None
    why: str = ""


def find_weights(
    path: str, run: RunDir | None, version: int, engine_says: object
) -> WeightsLocation:
    """Published by the run, else the model's own (version 0), else where the engine has its."""
    published = weights_folder(run.weights, version) if run is not None else None
    if published is not None and published.is_dir():
        return _usable(published)
    if version == 0 and path:
        if not Path(path).is_dir():
            return WeightsLocation(None, f"no weights: {path} is a name on the hub, give a folder")
        return _usable(Path(path))
    if isinstance(engine_says, str) and Path(engine_says).is_dir():
        return _usable(Path(engine_says))
    return WeightsLocation(None, f"no weights: those of version {version} are not here")


def _usable(folder: Path) -> WeightsLocation:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    if not sizes:
        return WeightsLocation(None, f"no weights: {folder} holds no safetensors")
    if sum(sizes) > _MAX_BYTES:
        return WeightsLocation(
            None, f"too large: {sum(sizes) / 2**30:.0f} GiB of weights in {folder}"
        )
    return WeightsLocation(folder)


class Forward:
    """A model on the CPU in float32. Raises what loading it raises."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.folder = folder
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", use_safetensors=True
        ).eval()

    async def logprobs(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float
    ) -> list[float]:
        """log-softmax(logits / T) of each output token, over its whole context."""
        return await asyncio.to_thread(self._compute, [*prompt], [*output], temperature)

    def _compute(self, prompt: list[int], output: list[int], temperature: float) -> list[float]:
        import torch

        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits
            scaled = logits[0, len(prompt) - 1 : -1].float() / temperature
            chosen = torch.log_softmax(scaled, -1).gather(1, torch.tensor(output)[:, None])
        values: list[float] = chosen[:, 0].tolist()
        return values
