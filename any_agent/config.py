"""One configuration tree. Source of every setting: command line > environment > YAML > default.

A setting's name is its dotted path (``train.lr``). In the environment it is
``ANY_AGENT_TRAIN__LR``, on the command line ``train.lr=1e-3``. Unknown names are refused with the
nearest known one.
"""

from __future__ import annotations

import difflib
import getpass
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.types import StringConstraints

from any_agent.errors import ConfigError
from any_agent.frozen_models import ModelList, check_model_list, secrets_of
from any_agent.frozen_models import names as frozen_names
from any_agent.keys import KEY_PREFIXES

ENV_PREFIX = "ANY_AGENT_"
SECRET_VARIABLES = (f"{ENV_PREFIX}SERVER__ADMIN_KEY",)
"""Settings that go from process to process by the environment, never by a file."""
MAX_REWARD_WEIGHT = 1000.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


def _user() -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", getpass.getuser()) or "user"
    return name if name[0].isalnum() else f"u{name}"


def _split(text: str) -> list[str]:
    return [part.strip(" '\"") for part in text.strip("[] ").split(",") if part.strip()]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(_Section):
    path: str = ""
    """The policy: a local folder or a hub name in Hugging Face's layout."""
    name: str = "policy"
    """What `/v1/models` calls it."""
    renderer: str = "auto"
    """What turns messages into ids. auto: the tokenizer's own chat template; or one of PyPI's
    `renderers`, by name."""
    enable_thinking: bool | None = None
    """Whether the template opens a thinking block; None: the family's default."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """Which earlier thinking later turns still see; only `all` continues every turn exactly."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The engine's precision. Training keeps float32 masters."""
    policy_names: tuple[str, ...] = ()
    """What calls may name the policy, beside `model.name`, where `model.unknown_model=reject`."""
    unknown_model: Literal["policy", "reject"] = "policy"
    """What a call gets that names neither the policy nor a frozen model: the policy, because agents
    hard-code names; or 404 `model_not_found`."""

    @field_validator("policy_names", mode="before")
    @classmethod
    def _listed(cls, names: object) -> object:
        """On a command line they are separated by commas."""
        return _split(names) if isinstance(names, str) else names

    @field_validator("path")
    @classmethod
    def _without_tilde(cls, path: str) -> str:
        return os.path.expanduser(path)


class ServerConfig(_Section):
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """0 picks a free one."""
    ranks: int = Field(2, ge=1, le=1000)
    """Data-parallel ranks: an engine and a proxy each."""
    public_url: str | None = None
    """The URL that agents reach, if it is not http://host:port."""
    admin_key: SecretStr | None = None
    """Good for every route. Without one, and without a key of scope admin from
    `any-agent keys create`, only loopback may be bound, and whoever reaches it needs no key."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Larger request bodies get 413."""
    max_inflight_calls: int = Field(1024, ge=1)
    """Model calls under way at once on each rank; further ones get 429. Where the engine says how
    many it samples at once, no more than twice as many are taken, or `rollout.max_concurrent` if
    that is more: the others would only wait longer."""
    tenant_open_sessions: int | None = Field(None, ge=1)
    """Sessions that one tenant may have open at once, unless its key says otherwise; None: any
    number. So many of its groups may lack members, too, for whom slots are kept. This and the next
    two are for the whole service: each rank enforces its share, rounded up. Beyond them 429
    `quota_exceeded`."""
    tenant_requests_per_second: float | None = Field(None, gt=0)
    """Requests with one tenant's keys or its sessions' keys; up to five seconds' worth may come at
    once."""
    tenant_tokens_per_second: float | None = Field(None, gt=0)
    """Prompt and output tokens of one tenant's calls, charged when a call has ended."""
    rank_wait: float = Field(45.0, ge=0)
    """Seconds that a request waits at the router for a rank that restarts, before it gets 503."""
    retry_grace: float = Field(10.0, ge=0)
    """Seconds for which a model call goes on without its client, if that one's SDK marks its
    retries: a retry takes up the call. Without such a mark it ends at once."""
    drain_timeout: float = Field(20.0, ge=0)
    """Seconds that requests under way have for their end after SIGTERM."""
    client_timeout: float = Field(60.0, gt=0)
    """Seconds after which a client that takes no byte of its answer is cut off."""

    @field_validator("admin_key")
    @classmethod
    def _usable_key(cls, key: SecretStr | None) -> SecretStr | None:
        text = key.get_secret_value() if key is not None else None
        if text is not None and (
            not re.fullmatch(r"[!-~]{8,256}", text) or text.startswith(KEY_PREFIXES)
        ):
            raise ValueError(
                "the admin key must be 8 to 256 printable characters without spaces, and must "
                f"not begin with {', '.join(KEY_PREFIXES)}; `openssl rand -hex 24` makes one"
            )
        return key


class SamplingConfig(_Section):
    """How train sessions are sampled, whatever the agent asks for."""

    temperature: float = Field(1.0, gt=0, le=10)
    """Of every sampled token; the trainer divides by the same."""
    top_p: float = 1.0
    """Off (1); anything else is refused."""
    top_k: int = -1
    """Off (-1 or 0); anything else is refused."""
    max_new_tokens: int = Field(4096, ge=1)
    """The most tokens of one answer; an agent may ask for fewer."""

    @model_validator(mode="after")
    def _untruncated(self) -> Self:
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            raise ValueError(
                "sampling.top_p and sampling.top_k must be off (1.0 and -1) for training: a "
                "truncated distribution makes the recorded log-probabilities wrong"
            )
        return self


class EngineConfig(_Section):
    urls: tuple[str, ...] = ()
    """Engines that already run (SGLang's native HTTP contract), one per rank. Empty: start embedded
    ones."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine runs; auto takes a GPU if there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    max_running_requests: int = Field(32, ge=1)
    """Calls that the embedded engine samples at once."""
    max_queued_requests: int = Field(1024, ge=1)
    """Calls that may wait in the embedded engine; further ones are refused."""
    context_length: int | None = Field(None, ge=16)
    """None: the model's own limit."""
    update_mode: Literal["resume", "in_place"] = "resume"
    """What a weight update does to calls under way: recompute them (exact) or keep their cache."""
    update_wait: float = Field(120.0, gt=0)
    """Seconds that a call waits for a weight update, or for an engine that died, before it gets
    503."""
    load_timeout: float = Field(600.0, gt=0, le=1500)
    """Seconds that the engine may take to load new weights."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds without a byte from the engine after which a call fails."""

    @field_validator("urls", mode="before")
    @classmethod
    def _listed(cls, urls: object) -> object:
        """On a command line they are separated by commas."""
        return _split(urls) if isinstance(urls, str) else urls


class SessionConfig(_Section):
    ttl: float = Field(3600.0, gt=0)
    """Seconds that a session may stay open, whatever happens."""
    idle_timeout: float = Field(1800.0, gt=0)
    """Seconds without a call, a reward or a heartbeat after which an open session expires. A call
    under way counts, however long it takes."""
    max_wait: float = Field(300.0, ge=0)
    """The most seconds that `start_session` may wait for a slot."""
    max_waiting: int = Field(4096, ge=1)
    """Opens that may wait at once; further ones get 429."""
    group_size: int = Field(8, ge=1)
    """Sessions of one task that share a baseline, unless the open says otherwise."""
    group_timeout: float = Field(1800.0, gt=0)
    """Seconds after which a group closes with the sessions that it has."""
    min_group_size: int = Field(2, ge=1)
    """A group that closes with fewer finalized sessions is rejected: a baseline needs some. No
    group needs more than the size that it was opened with."""
    max_open: int = Field(20_000, ge=1)
    """Sessions that each rank keeps open at once, those that wait for a reward included; further
    opens get 429."""
    hot_bytes: int = Field(128 * 2**20, ge=0)
    """About how many bytes of what live sessions recorded each rank keeps in memory. What nobody
    has wanted for longest is in the journal alone, and read again when somebody does."""
    require_reward: bool = True
    """Refuse to finalize a train session that no reward was given to."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """What rewards by name weigh, e.g. `{correct: 1, format: 0.2}`; other names are refused then.
    Empty: any name will do, and weighs 1."""
    reward_deadline: float = Field(3600.0, gt=0)
    """The most seconds, and the default, that `finalize` with `await_reward` waits for rewards."""
    late_reward: Literal["reject", "zero", "grade"] = "reject"
    """What becomes of a session that no reward came for by its deadline: never trained on, given 0,
    or given what `sessions.grader` says."""
    store_content: bool = True
    """Keep what is said in sessions. If not, messages, tools and recorded parameters are dropped
    when a call is answered, in memory and before anything is written; token ids, log-probabilities,
    rewards and the caller's metadata stay, so that sessions go on exactly and can be trained on."""
    grader: str = ""
    """For `late_reward: grade` and `sessions.implicit`: `module.function`, which takes a session as
    a dictionary and returns a number or several by name. It runs in a process of its own."""
    grader_timeout: float = Field(60.0, gt=0)
    """Seconds that one grade may take; then its process is killed, and the session rejected."""
    implicit: bool = False
    """Open sessions for model calls that name none and come with a tenant's key (or, where no key
    is needed, with any): each conversation becomes one, which `sessions.grader` rewards."""
    implicit_idle_timeout: float = Field(300.0, gt=0)
    """Seconds without a call after which such a session is over, and graded: more than its agent
    ever takes between two calls."""
    implicit_wait: float = Field(60.0, ge=0)
    """Seconds that the first call of a conversation waits for a slot before it gets 429; no more
    than `sessions.max_wait`."""
    implicit_group_size: int | None = Field(None, ge=1)
    """Conversations that begin alike and share a baseline; None: `sessions.group_size`. 1 where no
    task is tried twice."""

    @field_validator("reward_weights")
    @classmethod
    def _usable_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not re.fullmatch(NAME_PATTERN, name):
                raise ValueError(f"{name!r} is no name for a reward")
            if not abs(weight) <= MAX_REWARD_WEIGHT:
                raise ValueError(f"the weight of {name} must lie within +-{MAX_REWARD_WEIGHT:g}")
        return weights

    @model_validator(mode="after")
    def _grader_for_grades(self) -> Self:
        named = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", self.grader)
        if self.grader and not named:
            raise ValueError("sessions.grader must be module.function")
        if self.late_reward == "grade" and not self.store_content:
            raise ValueError("sessions.late_reward=grade needs sessions.store_content=true")
        if self.late_reward == "grade" and not self.grader:
            raise ValueError("sessions.late_reward=grade needs sessions.grader=module.function")
        if self.implicit and not (self.grader and self.store_content):
            raise ValueError(
                "sessions.implicit=true needs sessions.grader=module.function and "
                "sessions.store_content=true: nobody else rewards such sessions"
            )
        return self

    keep_hours: float = Field(24.0, ge=0)
    """Hours after its end that a session's content stays in the journal; what no checkpoint needs
    then goes into a compressed file of the run's `archive` folder. `any-agent export` reads both.
    """


class RolloutConfig(_Section):
    batch_size: int = Field(64, ge=1)
    """Sessions in one training step."""
    max_concurrent: int = Field(64, ge=1)
    """Train sessions open at once."""
    eta: int = Field(2, ge=0)
    """Optimizer steps that a token may be older than the step that trains on it."""
    deterministic: bool = False
    """Derive session ids and sampling seeds from `train.seed` and each session's place in its group
    (without a group: in the order of opening), and sort batches, so that the same agents give the
    same run bit for bit: with `rollout.eta=0`, `engine.max_running_requests=1`, and agents that
    open the same groups for each step, of interchangeable members, as any of them may come first.
    """
    lease_ttl: float = Field(600.0, gt=0)
    """Seconds after which trajectories of a silent trainer are handed out again."""


class TrainConfig(_Section):
    steps: int = Field(100, ge=0)
    """Optimizer steps; then train sessions are refused and inference goes on."""
    seed: int = 0
    """Of the trainer's random numbers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto takes a GPU if there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads of the trainer."""
    preset: Literal["grpo"] = "grpo"
    """The algorithm, by name."""
    discount: float = Field(1.0, ge=0, le=1)
    """How much of a later turn's reward an earlier turn gets, per turn."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr.GRPO."""
    eps_low: float = Field(0.2, ge=0)
    """The probability ratio is clipped below 1 - eps_low."""
    eps_high: float = Field(0.28, ge=0)
    """The probability ratio is clipped above 1 + eps_high."""
    is_cap: float = Field(5.0, gt=0)
    """C: the cap of the weight pi_prox / mu."""
    kl_coef: Literal[0] = 0
    """No KL term to a reference yet; only 0 is accepted."""
    lr: float = Field(1e-6, gt=0)
    """AdamW's learning rate, constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    grad_clip: float = Field(1.0, gt=0)
    """The norm that a larger gradient is scaled down to."""
    micro_batch_tokens: int = Field(16_384, ge=16)
    """Padded tokens in one forward pass."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; the last step is always kept. A restarted trainer makes the steps
    since the last one again, and the ranks keep the sessions of all of them in memory until it
    has."""
    keep_checkpoints: int = Field(3, ge=1)
    """Checkpoints kept on disk."""
    keep_weights: int = Field(2, ge=1)
    """Published weight versions kept on disk."""


class FrozenConfig(_Section):
    """Models beside the policy, which are never trained: judges, other providers' models."""

    model_list: tuple[dict[str, Any], ...] = ()
    """As LiteLLM has it: `model_name`, `litellm_params`, `model_info`; keys only as
    `os.environ/NAME`."""
    session_usd: float | None = Field(None, ge=0)
    """What one session's calls of frozen models may cost; beyond it 402 `spend_cap_exceeded`. None:
    any amount. Without `tenant_usd` it is also what one tenant's calls without a session may, in
    this trial, over all ranks."""
    tenant_usd: float | None = Field(None, ge=0)
    """What one tenant's may cost in this trial, over all ranks: each enforces its share. Whoever is
    no tenant counts as one."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one call may take, a stream to its end; then it has failed with 504
    `provider_timeout`."""
    max_calls: int = Field(64, ge=1)
    """Calls under way at once on each rank; further ones get 429."""

    @field_validator("model_list", mode="before")
    @classmethod
    def _usable(cls, value: object) -> ModelList:
        return check_model_list(value)


class Config(_Section):
    """Every setting of a run; made by :func:`load_config`."""

    experiment: Name = "my-exp"
    """With `trial`, the name that a run's files are kept under."""
    trial: Name = "trial-1"
    """One run of the experiment; starting it again goes on with it."""
    user: Name = Field(default_factory=_user)
    """Default: the user of the operating system."""
    root: Path = Path("runs")
    """Everything a run keeps lies under `<root>/<user>/<experiment>/<trial>`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the files in the run's `logs` folder."""
    log_format: Literal["text", "json"] = "text"
    """Of the same files: lines for people, or one JSON object each."""
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()  # type: ignore[call-arg]
    sampling: SamplingConfig = SamplingConfig()  # type: ignore[call-arg]
    engine: EngineConfig = EngineConfig()  # type: ignore[call-arg]
    sessions: SessionConfig = SessionConfig()  # type: ignore[call-arg]
    rollout: RolloutConfig = RolloutConfig()  # type: ignore[call-arg]
    train: TrainConfig = TrainConfig()  # type: ignore[call-arg]
    frozen: FrozenConfig = FrozenConfig()  # type: ignore[call-arg]

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
    def _one_model_a_name(self) -> Self:
        policy = {self.model.name, *self.model.policy_names}
        both = next((name for name in frozen_names(self.frozen.model_list) if name in policy), None)
        if both is not None:
            raise ValueError(
                f"{both} is a name of the policy (model.name, model.policy_names) and of a model "
                "in frozen.model_list: give one of them another name"
            )
        return self

    def dump(self) -> dict[str, Any]:
        """Plain data with every secret left out, fit for a file or a log."""
        data = self.model_dump(mode="json", exclude={"server": {"admin_key"}})
        return data

    def secrets(self) -> list[str]:
        """What must appear in no log."""
        key = self.server.admin_key
        own = [key.get_secret_value()] if key is not None else []
        return own + secrets_of(self.frozen.model_list, os.environ)


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted setting name."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _text_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _text_keys(kind, f"{prefix}{name}.")
        elif get_origin(kind) is not dict and {kind, *get_args(kind)} & {str, Path, SecretStr}:
            yield prefix + name


_TEXT_KEYS = frozenset(_text_keys(Config))
_FLAT_KEYS = {key.replace(".", "_"): key for key in known_keys() if "." in key}


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge YAML, environment and ``key=value`` overrides.

    Raises ConfigError naming the file, the key and what to do.
    """
    data: dict[str, Any] = {}
    if path is not None:
        _merge(data, _read_yaml(Path(path)))
    for key, value in _from_environ(os.environ if environ is None else environ):
        _assign(data, key, value)
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep:
            raise ConfigError(f"{item!r} is not of the form key=value, e.g. train.lr=1e-3")
        key = key.strip().lstrip("-")
        _assign(data, key, _value(key, value))
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None


def load_resolved(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Settings that another process has resolved: the file alone, and secrets, which it lacks."""
    environ = os.environ if environ is None else environ
    secrets = {name: environ[name] for name in SECRET_VARIABLES if environ.get(name)}
    return load_config(path, environ=secrets)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(data).__name__}")
    # A section whose lines are all commented out reads as null.
    return {key: value for key, value in data.items() if value is not None}


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            # A lone word is a tool's own switch unless it names a setting: the root's are few.
            if "." in key or key in Config.model_fields:
                yield key, _value(key, value)
            elif key in _FLAT_KEYS:
                right = ENV_PREFIX + _FLAT_KEYS[key].replace(".", "__").upper()
                raise ConfigError(f"{name} is no setting: did you mean {right}?")


def _value(key: str, text: str) -> Any:
    """What a setting's text means; names and keys are taken as they are, also `007` and `on`."""
    return text if key in _TEXT_KEYS and text not in ("", "null") else _scalar(text)


def _scalar(text: str) -> Any:
    if not text.strip():
        return ""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        # YAML 1.1 reads 1e-3 as a string.
        try:
            return float(value) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value
        except ValueError:
            return value
    return value


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _assign(data: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, leaf = dotted.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{dotted}: {section} is a value, not a section")
    data[leaf] = value


def _explain(error: ValidationError, path: str | Path | None) -> str:
    source = f" (from {path}, the environment or the command line)" if path else ""
    lines = [f"the configuration is wrong{source}:"]
    keys = list(known_keys())
    sections = sorted({key.partition(".")[0] for key in keys if "." in key})
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = sections if isinstance(item["input"], dict) else keys
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            if not near:
                near = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
            hint = f"did you mean {near[0]}?" if near else "see `any-agent config` for all keys"
            lines.append(f"  unknown key {key}: {hint}")
        else:
            lines.append(
                f"  {key + ': ' if key else ''}{item['msg'].removeprefix('Value error, ')}"
            )
    return "\n".join(lines)
