"""The root of all settings."""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from any_agent.config.base import Name, Section, Texts
from any_agent.config.cluster import ClusterConfig
from any_agent.config.litellm import LiteLLMConfig, check_litellm_config, litellm_secrets
from any_agent.config.model_list import names as frozen_names
from any_agent.config.model_list import passwords_of, secrets_of
from any_agent.config.serving import (
    EngineConfig,
    FrozenConfig,
    ModelConfig,
    SamplingConfig,
    ServerConfig,
    TracingConfig,
)
from any_agent.config.sessions import SessionConfig
from any_agent.config.training import (
    DatasetConfig,
    EvalConfig,
    RolloutConfig,
    TrackingConfig,
    TrainConfig,
)


def _user() -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", getpass.getuser()) or "user"
    return name if name[0].isalnum() else f"u{name}"


class Config(Section):
    """Every setting of a run; :func:`load_config` makes it."""

    experiment: Name = "my-exp"
    """The experiment's name; with `trial` it names the run's folder."""
    trial: Name = "trial-1"
    """One run of the experiment; another start of the trial continues it."""
    user: Name = Field(default_factory=_user)
    """The user's name in the run's folder; by default the operating system's user."""
    root: Path = Path("runs")
    """The folder of all runs; a run's files lie in `<root>/<user>/<experiment>/<trial>`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe level that is written to the run's `logs` folder."""
    log_format: Literal["text", "json"] = "text"
    """The form of these logs: lines of text, or one JSON object on each line."""
    plugins: Texts = ()
    """Modules, by dotted names, that each process of the service and the trainer imports when it
    starts. They register what is yours: APIs, engines, advantage estimators and losses."""
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()  # type: ignore[call-arg]
    sampling: SamplingConfig = SamplingConfig()  # type: ignore[call-arg]
    engine: EngineConfig = EngineConfig()  # type: ignore[call-arg]
    sessions: SessionConfig = SessionConfig()  # type: ignore[call-arg]
    rollout: RolloutConfig = RolloutConfig()  # type: ignore[call-arg]
    train: TrainConfig = TrainConfig()  # type: ignore[call-arg]
    train_dataset: DatasetConfig = DatasetConfig()  # type: ignore[call-arg]
    valid_dataset: DatasetConfig = DatasetConfig()  # type: ignore[call-arg]
    eval: EvalConfig = EvalConfig()  # type: ignore[call-arg]
    tracking: TrackingConfig = TrackingConfig()  # type: ignore[call-arg]
    tracing: TracingConfig = TracingConfig()
    frozen: FrozenConfig = FrozenConfig()  # type: ignore[call-arg]
    litellm: LiteLLMConfig = LiteLLMConfig()  # type: ignore[call-arg]
    cluster: ClusterConfig = ClusterConfig()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _an_engine_per_rank(self) -> Self:
        urls = self.engine.urls
        if urls and len(urls) != self.server.ranks:
            raise ValueError(
                f"engine.urls names {len(urls)} engines, so set server.ranks={len(urls)} (it is "
                f"{self.server.ranks}): each rank needs its own engine"
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        for name in ("group_size", "implicit_group_size"):
            size = getattr(self.sessions, name) or 1
            if size > self.rollout.batch_size or size > self.rollout.max_concurrent:
                raise ValueError(
                    f"sessions.{name}={size} must not exceed rollout.batch_size="
                    f"{self.rollout.batch_size} or rollout.max_concurrent="
                    f"{self.rollout.max_concurrent}: such a group could never be admitted"
                )
        return self

    @model_validator(mode="after")
    def _steps_suffice(self) -> Self:
        c = self.train
        if c.warmup_steps and c.warmup_steps >= c.steps:
            raise ValueError(
                f"train.warmup_steps={c.warmup_steps} must be below train.steps={c.steps}: the "
                "learning rate would never reach train.lr"
            )
        if c.minibatches > self.rollout.batch_size:
            raise ValueError(
                f"train.minibatches={c.minibatches} must not exceed rollout.batch_size="
                f"{self.rollout.batch_size}: each needs a session at least"
            )
        if c.overlong_length is not None and c.overlong_buffer is not None:
            begins, longest = c.overlong_length - c.overlong_buffer, self.sampling.max_new_tokens
            if begins >= longest:
                raise ValueError(
                    f"train.overlong_length={c.overlong_length} has no effect: its penalty begins "
                    f"at {begins} tokens, and no output exceeds sampling.max_new_tokens={longest}; "
                    "lower the one, or raise the other"
                )
        return self

    @model_validator(mode="after")
    def _rows_have_one_output(self) -> Self:
        by_role, masks = self.train.group_by == "role", self.train.mask_truncated
        if self.rollout.agent.export_style == "concat" and (by_role or masks):
            name = "train.group_by=role" if by_role else "train.mask_truncated=true"
            raise ValueError(
                f"{name} contradicts rollout.agent.export_style=concat, whose rows have several "
                "outputs, of any role, cut off or not: set individual, or leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _items_can_rest(self) -> Self:
        if self.rollout.sampling == "uniform":
            return self
        c = self.train
        for name, value, wanted in (
            ("train.dynamic_sampling", c.dynamic_sampling, c.dynamic_sampling == "refill"),
            ("train.advantage_estimator", c.advantage_estimator, c.compares_in_groups),
            ("rollout.deterministic", "true", not self.rollout.deterministic),
        ):
            if not wanted:
                raise ValueError(
                    f"rollout.sampling=learnable lets the items rest whose groups are left out, as "
                    f"they come: {name}={value} contradicts it; leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _one_model_a_name(self) -> Self:
        policy = {self.model.name, *self.model.policy_names}
        adapters = self.engine.adapters.keys()
        taken = policy | set(frozen_names(self.frozen.model_list))
        if own := sorted(adapters & taken):
            raise ValueError(
                f"{own[0]} is an adapter in engine.adapters and a name of the policy (model.name, "
                "model.policy_names) or of a model in frozen.model_list: give it another name"
            )
        both = next((name for name in frozen_names(self.frozen.model_list) if name in policy), None)
        if both is not None:
            raise ValueError(
                f"{both} is a name of the policy (model.name, model.policy_names) and of a model "
                "in frozen.model_list: give one of them another name"
            )
        return self

    @model_validator(mode="after")
    def _one_list_of_models(self) -> Self:
        if self.litellm.config is not None and self.frozen.model_list:
            raise ValueError(
                "litellm.config and frozen.model_list are both set: move the models of the second "
                "to the model_list of the first"
            )
        return self

    @model_validator(mode="after")
    def _adapters_without_litellm(self) -> Self:
        if self.engine.adapters and self.litellm.config is not None:
            raise ValueError(
                "engine.adapters and litellm.config are both set: LiteLLM's keys, guardrails and "
                "lists know the policy by its own names only; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _content_to_trace(self) -> Self:
        if self.tracing.content and not self.sessions.store_content:
            raise ValueError(
                "tracing.content sends the texts that sessions.store_content=false does not keep: "
                "set one of them otherwise"
            )
        return self

    def require_litellm(self) -> None:
        """Raise ConfigError for a LiteLLM configuration that contradicts these settings."""
        path, key = self.litellm.config, self.server.admin_key
        if path is not None:
            names = frozenset((self.model.name, *self.model.policy_names))
            admin = None if key is None else key.get_secret_value()
            check_litellm_config(path, names, admin, os.environ)

    def base(self) -> Config:
        """Return the settings without a subclass's fields, as other processes know them."""
        return Config.model_validate({name: getattr(self, name) for name in Config.model_fields})

    def dump(self) -> dict[str, Any]:
        """Return plain data for files and logs, without secrets and without a subclass's fields."""
        secret = {"server": {"admin_key", "journal"}, "engine": {"key"}}
        data = self.model_dump(mode="json", exclude=secret)
        return {key: value for key, value in data.items() if key in Config.model_fields}

    def secrets(self) -> list[str]:
        """Return the secrets, which must appear in no log."""
        keys = (self.server.admin_key, self.engine.key)
        own = [key.get_secret_value() for key in keys if key is not None]
        if self.server.journal is not None:
            own += passwords_of(self.server.journal.get_secret_value())
        own += secrets_of(self.frozen.model_list, os.environ)
        return own + litellm_secrets(self.litellm.config, os.environ)
