"""A kept model served for one's own use, such as an evaluation.

Nothing of it is in the trial's folder, so the trial may be trained or served meanwhile.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic import SecretStr

from any_agent.config import LOOPBACK, Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher.node import Node, NodeOptions
from any_agent.launcher.trial import (
    TrialWeights,
    check_model,
    kept_weights,
    latest_weights,
    trial_dir,
)

_RUN = re.compile(r"([^/@\s]+)/([^/@\s]+?)(?:@(\d{1,9}))?")
_NEEDED = ("torch", "transformers", "litellm")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What is to be served, and with which settings."""

    config: Config
    weights: TrialWeights
    name: str
    """`experiment/trial@version`, or the model's path."""


def find_kept(model: str, overrides: Sequence[str] = ()) -> StoredCheckpoint:
    """The model that ``experiment/trial``, ``experiment/trial@version`` or a folder names.

    Without a version it is the latest checkpoint; 0 is the model that the trial began with.
    ``overrides`` are settings, ``root`` and ``user`` among them. Raises ConfigError, which says
    which versions there are.
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
    config = _saved_config(experiment, trial, overrides)
    name = f"{experiment}/{trial}"
    weights = _weights(config, name, None if version is None else int(version))
    return StoredCheckpoint(config, weights, f"{name}@{weights.version}")


@contextmanager
def served(
    kept: StoredCheckpoint, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[Node, str]]:
    """The service while it is needed, and the key of whoever started it, which opens it alone.

    ``folder`` is where it keeps what it records. Call the node's ``check`` now and then, in this
    thread. Raises ConfigError and StartupError.
    """
    if kept.config.engine.urls:
        raise ConfigError(
            f"{kept.name} is served by engines elsewhere (engine.urls), which have weights of "
            "their own: evaluate the running service by its --url, or set engine.urls=[] to load "
            "the checkpoint here"
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


def _saved_config(experiment: str, trial: str, overrides: Sequence[str]) -> Config:
    # Where it is is known before what it was started with.
    names = [*overrides, f"experiment={experiment}", f"trial={trial}"]
    place = trial_dir(load_config(None, names))
    place.check_format()
    saved = place.path / "config.yaml"
    if not saved.is_file():
        raise ConfigError(
            f"there is no run {experiment}/{trial} in {place.path}: set root= and user= to those "
            f"that it was trained under{_others(place.path)}"
        )
    return load_config(saved, names)


def _others(missing: Path) -> str:
    """The runs that are there, if there are any."""
    found = sorted(
        f"{path.parent.parent.name}/{path.parent.name}"
        for path in missing.parent.parent.glob("*/*/config.yaml")
    )
    more = ", ..." if len(found) > 8 else ""
    return f"; there are {', '.join(found[:8])}{more}" if found else ""


def _weights(config: Config, name: str, version: int | None) -> TrialWeights:
    there = kept_weights(config)
    if version is None:
        latest = latest_weights(config)
        if latest is not None:
            return latest
        raise ConfigError(f"{name} has no whole checkpoint yet; {_named(there, name)}")
    if version not in there:
        raise ConfigError(f"{name} has not kept version {version}; {_named(there, name)}")
    if version == 0:
        check_model(str(there[0].path))
    return there[version]


def _named(there: Mapping[int, TrialWeights], name: str) -> str:
    versions = ", ".join(f"{name}@{version}" for version in sorted(there))
    return f"there are {versions} (0 is the model that it began with)"


def _model_folder(path: str, overrides: Sequence[str]) -> StoredCheckpoint:
    config = load_config(None, [*overrides, f"model.path={path}"])
    # What is recorded of another model must not be taken for this one's.
    digest = hashlib.blake2b(str(Path(path).resolve()).encode(), digest_size=4).hexdigest()
    label = _NOT_IN_NAMES.sub("-", Path(path).resolve().name).strip("._-")[:40]
    named = config.model_copy(update={"experiment": "models", "trial": f"{label or 'm'}-{digest}"})
    return StoredCheckpoint(named, TrialWeights(Path(path), 0), path)
