"""A stored model served for a single use, such as an evaluation.

It writes nothing into the trial's folder, so the trial may be trained or served meanwhile.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic import SecretStr

from any_agent.config import LOOPBACK, Config, load_config
from any_agent.errors import ConfigError, NotFound
from any_agent.launcher.node import Node, NodeOptions
from any_agent.launcher.trial import TrialWeights, find_trial, find_weights

_RUN = re.compile(r"([^/@\s]+)/([^/@\s]+?)(?:@(\d{1,9}))?")
_NEEDED = ("torch", "transformers", "litellm")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A model to serve, with its settings."""

    config: Config
    weights: TrialWeights
    name: str
    """`experiment/trial@version`, or the model's path."""


def find_kept(model: str, overrides: Sequence[str] = ()) -> StoredCheckpoint:
    """Find the model of ``experiment/trial``, ``experiment/trial@version`` or a folder.

    Without a version it is the latest checkpoint; version 0 is the initial model. ``overrides`` are
    settings, ``root`` and ``user`` among them. Raises ConfigError, which lists what exists.
    """
    if (Path(model).expanduser() / "config.json").is_file():
        return _model_folder(str(Path(model).expanduser()), overrides)
    match = _RUN.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"the model {model!r} is neither experiment/trial, experiment/trial@version, nor a "
            "folder with a config.json"
        )
    experiment, trial, version = match.groups()
    names = [*overrides, f"experiment={experiment}", f"trial={trial}"]
    try:
        config = load_config(find_trial(load_config(None, names)), names)
        weights = find_weights(config, version=None if version is None else int(version))
    except NotFound as error:
        raise ConfigError(error.message) from None
    return StoredCheckpoint(config, weights, f"{experiment}/{trial}@{weights.version}")


@contextmanager
def served(
    kept: StoredCheckpoint, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[Node, str]]:
    """Serve a model inside the block; yield the node and the only key that opens it.

    Its records are written to ``folder``. Call the node's ``check`` regularly, in this thread.
    Raises ConfigError and StartupError.
    """
    if kept.config.engine.urls:
        raise ConfigError(
            f"{kept.name} uses running engines (engine.urls), which have weights of their own: "
            "evaluate the running service by its --url, or set engine.urls=[] to load the "
            "checkpoint here"
        )
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving {kept.name} needs {', '.join(missing)}: pip install "
            '"any-agent-rl[serve]", or give the --url of a service that runs elsewhere'
        )
    key = secrets.token_urlsafe(32)
    own = {"host": LOOPBACK[0], "port": 0, "public_url": None, "admin_key": SecretStr(key)}
    server = kept.config.server.model_copy(update=own)
    config = kept.config.model_copy(update={"root": folder, "server": server})
    options = NodeOptions(train=False, weights=kept.weights, say=say)
    with Node(config, options) as node:
        yield node, key


def _model_folder(path: str, overrides: Sequence[str]) -> StoredCheckpoint:
    config = load_config(None, [*overrides, f"model.path={path}"])
    # Records of another model must not be mistaken for this model's.
    digest = hashlib.blake2b(str(Path(path).resolve()).encode(), digest_size=4).hexdigest()
    label = _NOT_IN_NAMES.sub("-", Path(path).resolve().name).strip("._-")[:40]
    named = config.model_copy(update={"experiment": "models", "trial": f"{label or 'm'}-{digest}"})
    return StoredCheckpoint(named, TrialWeights(Path(path), 0), path)
