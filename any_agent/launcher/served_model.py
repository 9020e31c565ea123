"""What the engines of a run serve, and whose tokenizer the proxies use."""

from __future__ import annotations

from pathlib import Path

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.launcher.trial import TrialWeights, latest_weights, newest_weights


class ServedModel:
    """The model as it is now; ``fixed``: these weights for good, whatever is published."""

    def __init__(self, config: Config, fixed: TrialWeights | None) -> None:
        self._config = config
        self._fixed = fixed

    def require(self, *, trains: bool) -> None:
        """ConfigError if there is nothing to serve, or to begin training with."""
        saved = latest_weights if trains else newest_weights
        if self._fixed is None and saved(self._config) is None:
            check_model(self._config.model.path)

    def weights(self) -> tuple[str, int]:
        """What an engine that starts now serves, and its version."""
        found = self._fixed or newest_weights(self._config)
        return (str(found.path), found.version) if found else (self._config.model.path, 0)

    def tokenizer(self) -> str:
        """The model's own folder, which stays; for a model that is gone, what the engines load."""
        try:
            check_model(self._config.model.path)
        except ConfigError:
            return self.weights()[0]
        return self._config.model.path


def check_model(path: str) -> None:
    """ConfigError for a model that cannot be there; hub names are left to the engine."""
    if not path:
        raise ConfigError(
            "no model is configured: set model.path to a local folder or a hub name, e.g. "
            "model.path=Qwen/Qwen3-0.6B"
        )
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") != 1
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigError(f"model.path={path} is no model folder: it has no config.json")
