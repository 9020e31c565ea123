"""What a trainer relies on in SGLang's native API: log-probabilities, and weights that change.

Everything is judged by a fresh forward pass, never by a status. A test class that inherits
:class:`UpdatesContract` provides the fixtures ``url``, of an engine with the first of ``models`` as
version 0, and ``models``, two folders of one shape; and how far the engine's numbers may be off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.engine import SGLangEngine
from any_agent.engine.model_fingerprint import ModelFingerprint, shape_of
from any_agent.errors import ConfigError
from tests.support.engine.sglang_contract import IDS, body, call
from tests.support.errors import fails_with
from tests.support.true_logprobs import TrueModel

PREFIX = IDS * 40
"""Long enough to be worth caching."""


async def load(url: str, model: Path, version: int, *, flush: bool = True) -> None:
    """By the folder; the engine says that it has done it."""
    if flush:
        # SGLang may be at the last step of what has ended already, and would not forget its cache.
        assert (await call(url, "/flush_cache?timeout=30", {}))[0] == 200
    update = {"model_path": str(model), "weight_version": str(version), "flush_cache": flush}
    status, answer = await call(url, "/update_weights_from_disk", update)
    assert status == 200 and answer["success"], answer


def furthest(
    model: TrueModel, prompt: Sequence[int], meta: dict[str, Any], part: slice, temperature: float
) -> float:
    """How far an answer's log-probabilities are off from a forward pass, at most, in a part."""
    entries = meta["output_token_logprobs"]
    ids = [entry[1] for entry in entries]
    table = model.logprobs(prompt, ids, {"temperature": temperature})[part]
    true = table.gather(-1, torch.tensor(ids[part])[:, None])[:, 0]
    told = torch.tensor([entry[0] for entry in entries[part]])
    return float((told - true).abs().max())


class UpdatesContract:
    rounding = 1e-3
    """Nats that a log-probability may be off."""

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    async def test_logprobs_equal_those_of_a_forward_pass(
        self, url: str, models: list[Path], temperature: float
    ) -> None:
        for prompt in (IDS, PREFIX):
            ask = body(temperature=temperature, max_new_tokens=30) | {"input_ids": prompt}
            _, answer = await call(url, "/generate", ask)
            off = furthest(
                TrueModel(models[0]), prompt, answer["meta_info"], slice(None), temperature
            )
            assert off <= self.rounding

    async def test_a_cached_prefix_is_not_shared_between_salts(
        self, url: str, models: list[Path]
    ) -> None:
        """As versions need it that share an engine's cache: nobody meets another salt's prefix."""
        ask = body(max_new_tokens=20) | {"input_ids": PREFIX}
        await call(url, "/generate", ask | {"cache_salt": "old"})
        await load(url, models[1], 1, flush=False)
        _, answer = await call(url, "/generate", ask | {"cache_salt": "new"})
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == 0
        assert furthest(TrueModel(models[1]), PREFIX, meta, slice(None), 1.0) <= self.rounding

    async def test_an_engine_with_another_model_is_refused(
        self, url: str, models: list[Path]
    ) -> None:
        shape = shape_of(str(models[0]))
        size = shape.vocab_size
        assert size is not None
        wrong = [
            ModelFingerprint(size - 1),
            ModelFingerprint(size + 1),
            ModelFingerprint(size, "llama"),
        ]
        for one in (shape, *wrong):
            client = SGLangEngine(url, decode=lambda _: "", shape=one)
            try:
                if one is shape:
                    await client.require_model()
                else:
                    with fails_with(ConfigError, url):
                        await client.require_model()
            finally:
                await client.close()
