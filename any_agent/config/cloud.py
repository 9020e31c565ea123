"""Settings of a service for many accounts, which starts a run for each of their trainings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, SecretStr, ValidationError, model_validator

from any_agent.config.base import Name, Section
from any_agent.config.load import (
    ADMIN_KEY_VARIABLE,
    explain,
    known_keys,
    read_yaml,
    settings_of,
)
from any_agent.config.serving import ServerConfig
from any_agent.errors import ConfigError, InvalidRequest

_OURS = (
    *("root", "user", "experiment", "trial", "server.host", "server.port", "server.public_url"),
    *("server.lane_tag", "server.ui", "server.admin_key", "server.drain_timeout"),
)
"""Settings of a run that follow from its account, its name and the cloud."""
_KEPT = ("server.journal", "server.journal_dir")
"""Settings by which a run's sessions would lie where its removal does not find them."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{0,64}")
"""Texts that an account may give: no module, no path, no reference."""


class CloudServer(Section):
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(8080, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    public_url: str | None = None
    """The service's URL for agents, if it is not http://host:port."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """The largest request body; larger ones get 413."""
    client_timeout: float = Field(60.0, gt=0)
    """Seconds after which a client that neither reads its answer nor sends its body is given up."""
    body_timeout: float = Field(120.0, gt=0)
    """Seconds in which a request's body must arrive."""

    def of_run(self) -> ServerConfig:
        """Return these bounds as a run's router takes them."""
        names = ("max_body_bytes", "client_timeout", "body_timeout")
        return ServerConfig(**{name: getattr(self, name) for name in names})


class CloudDefault(Section):
    """The run that an account's first call makes, if the account has none."""

    model: Name
    """One of `models`."""
    preset: Name
    """One of `presets`."""
    experiment: Name = "default"
    """The run's experiment."""


Limit: TypeAlias = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False, strict=True)] | None


class Budget(Section):
    """Limits of what an account uses in a period, by the numbers of its bill. null: no limit."""

    per: Literal["total", "month", "day"] = "month"
    """The period, of UTC: a calendar month, a day, or all time (`total`)."""
    calls: Limit = None
    """Model calls."""
    sessions: Limit = None
    """Sessions that are opened."""
    prompt_tokens: Limit = None
    """Tokens of prompts."""
    sampled_tokens: Limit = None
    """Tokens of answers."""
    steps: Limit = None
    """Training steps; at this one and the next three limits the account's runs stop."""
    trained_tokens: Limit = None
    """Tokens that steps train on."""
    place_seconds: Limit = None
    """Seconds that runs have places."""
    gpu_seconds: Limit = None
    """The same times the GPUs of the place."""

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by their names."""
        return self.model_dump(exclude={"per"}, exclude_none=True)


class CloudConfig(Section):
    """Every setting of `any-agent cloud`; :func:`load_cloud` makes it."""

    root: Path = Path("runs")
    """The folder of all runs: an account's files lie in `<root>/<account>/<experiment>/<trial>`."""
    server: CloudServer = CloudServer()  # type: ignore[call-arg]
    admin_key: SecretStr
    """The operator's key; from the environment only."""
    models: dict[Name, dict[str, Any]] = Field(min_length=1)
    """By name, the settings of a run that trains this model, at least `model.path`."""
    presets: dict[Name, dict[str, Any]] = Field(min_length=1)
    """By name, more settings of a run, which count before those of its model."""
    default: CloudDefault | None = None
    """null: a call of an account without a run gets 404 `no_run`."""
    settable: dict[str, float | None] = Field(
        {
            "train.preset": None,
            "train.steps": None,
            "train.lr": None,
            "train.warmup_steps": None,
            "train.discount": None,
            "train.checkpoint_every": None,
            "rollout.batch_size": 4096,
            "rollout.sampling": None,
            "sampling.temperature": None,
            "sampling.max_new_tokens": 32768,
            "sessions.group_size": 256,
            "sessions.ttl": 86400,
        }
    )
    """Settings that an account may give its run, by dotted names, each with the largest number
    that it may have (null: any). Texts are plain names: none brings a file, a module or an address
    into a run."""
    places: int = Field(1, ge=1, le=1000)
    """Runs at once on this machine. Others wait for a place."""
    runs_per_account: int = Field(20, ge=1)
    """Runs that one account may have; a further one gets 429 `quota_exceeded`."""
    budget: Budget | None = None
    """The budget of each account that has none of its own. null: none."""
    idle_after: float = Field(600.0, gt=0)
    """Seconds without a request after which a run is stopped, where it is started again by the next
    one."""
    quiet_after: float = Field(30.0, gt=0)
    """The same while another run waits for a place."""
    turn: float = Field(900.0, gt=0)
    """Seconds that a run keeps its place while another one waits, however many requests it gets."""
    hold: float = Field(45.0, ge=0, le=100)
    """Seconds that a request waits for a run that starts, before it gets 503 with `Retry-After`."""
    start_timeout: float = Field(600.0, gt=0)
    """Seconds that a run has until it is ready."""
    stop_timeout: float = Field(300.0, ge=1)
    """Seconds that a run has when it is stopped, half of them for its trainer's step and
    checkpoint; later it is killed, which loses nothing that was acknowledged. Let it be more than
    twice the longest step."""

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        known = set(known_keys())
        for name in self.settable:
            if name not in known:
                raise ValueError(f"settable names {name}, which is no setting of a run")
            if name in _OURS:
                raise ValueError(f"settable names {name}, which the cloud sets itself")
        if self.default is not None:
            for kind, have in (("model", self.models), ("preset", self.presets)):
                name = getattr(self.default, kind)
                if name not in have:
                    raise ValueError(f"default.{kind}={name} is none of {', '.join(have)}")
        return self

    def run_settings(
        self, model: str, preset: str, given: Mapping[str, Any], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the settings of a run, in sections; ``own`` are those that follow from its name.

        InvalidRequest for an unknown model or preset, and for a setting that is not settable.
        """
        for kind, name, have in (("model", model, self.models), ("preset", preset, self.presets)):
            if name not in have:
                raise InvalidRequest(
                    f"there is no {kind} {name[:80]!r}; there are {', '.join(sorted(have))}",
                    code=f"unknown_{kind}",
                    param=kind,
                )
        for key, value in given.items():
            self._require_settable(key, value)
        out: dict[str, Any] = {}
        for part in (self.models[model], self.presets[preset], given, own):
            _merge(out, part)
        return out

    def _require_settable(self, key: str, value: Any) -> None:
        problem = ""
        if key not in self.settable:
            problem = f"cannot be set for a run; {', '.join(sorted(self.settable))} can"
        elif isinstance(value, str):
            if not _PLAIN.fullmatch(value):
                problem = "takes a plain name, such as grpo"
        elif value is not None and not isinstance(value, bool | int | float):
            problem = "takes a number, true, false or a plain name"
        elif value is not None and (most := self.settable[key]) is not None and value > most:
            problem = f"may be {most:g} at most here"
        if problem:
            raise InvalidRequest(f"{key[:80]!r} {problem}", code="not_settable", param="settings")


def _merge(into: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Put settings, by dotted names or in sections, over those that are there."""
    for key, value in part.items():
        first, _, rest = key.partition(".")
        if rest or isinstance(value, Mapping):
            below = into.get(first)
            section = into[first] = dict(below) if isinstance(below, Mapping) else {}
            _merge(section, {rest: value} if rest else value)
        else:
            into[key] = value


def load_cloud(path: str | Path, environ: Mapping[str, str] | None = None) -> CloudConfig:
    """Read a cloud's settings from YAML and its admin key from the environment.

    Each model is checked with each preset. Raises ConfigError that names the file and the key.
    """
    environ = os.environ if environ is None else environ
    data = read_yaml(Path(path))
    if "admin_key" in data:
        raise ConfigError(f"{path} must not hold admin_key: set {ADMIN_KEY_VARIABLE}")
    if not environ.get(ADMIN_KEY_VARIABLE):
        raise ConfigError(
            f"any-agent cloud needs the operator's key: export {ADMIN_KEY_VARIABLE}=$(openssl rand "
            "-hex 24)"
        )
    try:
        key = environ[ADMIN_KEY_VARIABLE]
        ServerConfig.model_validate({"admin_key": key})
        cloud = CloudConfig.model_validate(data | {"admin_key": key})
    except ValidationError as error:
        raise ConfigError(explain(error, path, CloudConfig)) from None
    for model in cloud.models:
        for preset in cloud.presets:
            try:
                settings = settings_of(cloud.run_settings(model, preset, {}, {}))
                if settings.server.journal is not None or settings.server.journal_dir is not None:
                    raise ConfigError(f"remove {' and '.join(_KEPT)}: a run lies in its folder")
            except ConfigError as error:
                message = f"{path}: the model {model} with the preset {preset}: {error.message}"
                raise ConfigError(message) from None
    return cloud
