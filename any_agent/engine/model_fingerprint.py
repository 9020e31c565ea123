"""The vocabulary and the architecture that distinguish models without their weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from any_agent.errors import ConfigError, InvalidRequest
from any_agent.types import ModelRequest


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Values from a model's `config.json`; None for those that it lacks."""

    vocab_size: int | None = None
    """Rows of the embedding: one more than the highest token id."""
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None

    def require_same(self, info: dict[str, Any], url: str) -> None:
        """Raise ConfigError unless an engine's `/model_info` may be this model's."""
        for name, mine in (("model_type", self.model_type), ("vocab_size", self.vocab_size)):
            theirs = info.get(name)
            if mine is not None and theirs is not None and theirs != mine:
                raise other_model(url, f"its {name} is {theirs}, not {mine}")
        theirs = info.get("architectures")
        if self.architectures and theirs and not set(theirs) & set(self.architectures):
            raise other_model(url, f"it is a {theirs[0]}, not a {self.architectures[0]}")

    def require_known(self, request: ModelRequest) -> None:
        """Raise InvalidRequest for an id without an embedding: one of them ends a whole SGLang."""
        if self.vocab_size is None:
            return
        g = request.gconfig
        given = {"input_ids": request.input_ids, "stop_token_ids": g.stop_token_ids}
        for name, ids in {**given, "logit_bias": [t for t, _ in g.logit_bias or ()]}.items():
            if not len(ids):
                continue
            array = np.asarray(ids)
            for found in (int(array.min()), int(array.max())):
                if not 0 <= found < self.vocab_size:
                    raise InvalidRequest(
                        f"the token id {found} is not one of the model's {self.vocab_size}",
                        param=name,
                    )


def shape_of(path: str) -> ModelFingerprint:
    """Return a model's fingerprint by its folder or hub name; empty without a local copy."""
    config = Path(path).expanduser() / "config.json"
    if not config.is_file():
        found = _cached(path)
        if found is None:
            return ModelFingerprint()
        config = found
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        text = values.get("text_config") or values
        vocabulary = text.get("vocab_size", values.get("vocab_size"))
        architectures = values.get("architectures")
        return ModelFingerprint(
            int(vocabulary) if vocabulary is not None else None,
            values.get("model_type"),
            tuple(architectures) if architectures else None,
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{config} cannot be read as a model's settings: {error}") from None


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a valid hub name
        return None
    return Path(found) if isinstance(found, str) else None


def other_model(url: str, why: str) -> ConfigError:
    return ConfigError(
        f"the engine at {url} serves another model than the run's ({why}): start it with the "
        "run's model, or give its own URL in engine.urls"
    )
