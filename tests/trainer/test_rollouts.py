"""The parts that a trainer's workflows are run with."""

from __future__ import annotations

from pathlib import Path

from any_agent.config import load_config
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from trainer.from_config import _dump_tokenizer


def test_dumped_episodes_are_decoded_by_the_tokenizer_of_the_settings(tiny_model_dir: Path) -> None:
    models = object()

    def decoder(*settings: str) -> object:
        return _dump_tokenizer(load_config(None, settings, {}), models)

    dumps, named = "rollout.dump_to_file=true", f"rollout.tokenizer_path={tiny_model_dir}"
    assert decoder() is decoder(dumps) is decoder(named) is models
    other = decoder(dumps, named)
    assert other is not models and other.decode([1])  # type: ignore[attr-defined]
    with fails_with(ConfigError, "nowhere"):
        decoder(dumps, "rollout.tokenizer_path=/nowhere")
