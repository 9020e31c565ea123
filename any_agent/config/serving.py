"""Settings of serving: the model, its engine, the public address, and frozen models."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from any_agent.config.base import LocalPath, Name, Section, Texts
from any_agent.config.model_list import ModelList, check_model_list
from any_agent.keys import KEY_PREFIXES

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "rediss+cluster")
"""Schemes of the URLs that `server.journal` takes."""
_REASONS: Mapping[str, str] = {
    "--model-path --model": "model.path is served, and the newest weights after a restart",
    "--tokenizer-path": "stop strings are matched with the model's own tokenizer",
    "--weight-version": "the run counts its versions",
    "--host": "only its proxy and the trainer may reach an engine",
    "--port": "the service finds a free port",
    "--dtype": "set model.dtype",
    "--context-length": "set engine.context_length",
    "--max-running-requests": "set engine.max_running_requests",
    "--max-queued-requests": "set engine.max_queued_requests",
    "--device": "set engine.device",
    "--log-level": "set log_level",
    "--tp-size --tensor-parallel-size": "set engine.gpus",
    "--pp-size --pipeline-parallel-size": (
        "set engine.gpus: all of them compute each layer together"
    ),
    "--dp-size --data-parallel-size": "set server.ranks: each has an engine",
    "--base-gpu-id --gpu-id-step": "the service assigns the GPUs, by CUDA_VISIBLE_DEVICES",
    "--nnodes --node-rank --dist-init-addr": (
        "an engine is on one machine; set server.ranks for more engines"
    ),
    "--api-key --admin-api-key": (
        "the service gives its engines a key of its own, in a file that only its owner reads"
    ),
    "--tokenizer-worker-num": "an SGLang with several of them takes no key",
    "--grpc-port --grpc-mode --smg-grpc-mode": "gRPC would need no key",
    "--skip-tokenizer-init": "without its tokenizer an engine finds no stop strings",
    "--config": "a file could set any of the options that the service sets",
}
_OURS = {option: why for options, why in _REASONS.items() for option in options.split()}


def _option_words(value: object) -> object:
    """Return a command line's words from a list, a text, or a mapping of options to values.

    ``{"mem-fraction-static": 0.8, "enable-metrics": True}`` becomes ``--mem-fraction-static 0.8
    --enable-metrics``; False and None are left out. Any other value is returned unchanged.
    """
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith(("[", "{")):
            return tuple(shlex.split(text))
        value = yaml.safe_load(text)
    if isinstance(value, Mapping):
        return tuple(_words_of(value))
    if isinstance(value, Sequence):
        return tuple(str(word) for word in value)
    return value


def _words_of(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if value is None or value is False:
            continue
        yield f"--{str(name).lstrip('-').replace('_', '-')}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def _require_free(words: tuple[str, ...]) -> tuple[str, ...]:
    """Raise ValueError for an option that the service sets itself, or an abbreviation of one."""
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        ours = name if name in _OURS else next((o for o in _OURS if o.startswith(name)), None)
        if ours is not None:
            raise ValueError(f"{name} cannot be given to the engine: {_OURS[ours]}")
    return words


def _numbers_as_texts(variables: object) -> object:
    """Convert numbers to texts: YAML reads `1` as a number."""
    if not isinstance(variables, Mapping):
        return variables
    return {k: str(v) if isinstance(v, int | float) else v for k, v in variables.items()}


EngineOptions = Annotated[
    tuple[str, ...], BeforeValidator(_option_words), AfterValidator(_require_free)
]
Variables = Annotated[dict[str, str], BeforeValidator(_numbers_as_texts)]


class ModelConfig(Section):
    path: LocalPath = ""
    """The policy: a local folder or a hub name in Hugging Face's layout."""
    name: str = "policy"
    """The policy's name in `/v1/models`."""
    renderer: str = "auto"
    """The renderer that turns messages into ids. auto: the tokenizer's own chat template; or one of
    PyPI's `renderers`, by name."""
    enable_thinking: bool | None = None
    """Let the template open a thinking block; None: the family's default."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """The earlier thinking that later turns still see; only `all` continues every turn exactly."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The engine's precision. Training keeps float32 masters."""
    policy_names: Texts = ()
    """Further names of the policy in calls, beside `model.name`, with
    `model.unknown_model=reject`. Those of the entries with `model: any-agent/policy` in
    `litellm.config` are added."""
    unknown_model: Literal["policy", "reject"] = "policy"
    """The answer to a call that names neither the policy nor a frozen model: the policy's, because
    agents hard-code names; or 404 `model_not_found`, by default where `litellm.config` has an entry
    of the policy."""


class ServerConfig(Section):
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    ranks: int = Field(2, ge=1, le=1000)
    """Data-parallel ranks, each with an engine and a proxy."""
    public_url: str | None = None
    """The service's URL for agents, if it is not http://host:port."""
    lane_tag: str | None = Field(None, pattern="^[0-9a-f]{8}$")
    """Eight hexadecimal digits with which the lanes in this run's session keys begin, so that a
    service of several runs at one URL, `any-agent cloud`, reads the run in a key. null: none."""
    admin_key: SecretStr | None = None
    """A key for every route. Without it, and without a key of scope admin from
    `any-agent keys create`, the service listens on loopback only, and no client needs a key."""
    ui: bool = True
    """Serve the dashboard at `/ui`. With false the path is LiteLLM's own, where there is
    `litellm.config`, else 404."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """The largest request body, of a compressed one decoded; larger ones get 413."""
    max_inflight_calls: int = Field(1024, ge=1)
    """Model calls that run at once on each rank; further ones get 429. If the engine reports how
    many it samples at once, the limit is twice that number, or `rollout.max_concurrent` if that is
    more: further calls would only wait longer. One session, or the sessions of one tenant, get half
    of them while others call, and all while nobody else does."""
    tenant_open_sessions: int | None = Field(None, ge=1)
    """Sessions that one tenant may have open at once, unless its key sets another limit; None: any
    number. This and the next two limits are for the whole service. With `server.journal` they are
    counted once for all ranks; without it, or while its Redis does not answer, each rank enforces
    its share, rounded up. Beyond them a request gets 429 `quota_exceeded`. Of each rank's groups,
    as many as that share may lack members, for which slots are reserved."""
    tenant_requests_per_second: float | None = Field(None, gt=0)
    """Requests with one tenant's keys or its sessions' keys; a burst may be as large as five
    seconds' worth."""
    tenant_tokens_per_second: float | None = Field(None, gt=0)
    """Prompt and output tokens of one tenant's calls, charged when a call has ended."""
    rank_wait: float = Field(45.0, ge=0)
    """Seconds that a request waits at the router for a rank that restarts, before it gets 503."""
    retry_grace: float = Field(10.0, ge=0)
    """Seconds for which a model call goes on without its client, if the client's SDK marks its
    retries: a retry resumes the call. Without such a mark the call ends at once."""
    journal_dir: Path | None = None
    """The folder of the record of sessions, on a disk of this machine, because SQLite's locks do
    not work on network file systems. null: in the run's folder."""
    journal: SecretStr | None = None
    """URL of a Redis that gets each commit of the journals before it is acknowledged, so that
    another machine can carry on a rank whose own is lost: redis://, rediss:// (TLS), unix://,
    redis+sentinel://HOST:PORT,HOST:PORT/MASTER, redis+cluster://. All machines must share the run's
    folder. null: the journals are on the ranks' machines only."""
    journal_durability: Literal["always", "everysec"] = "always"
    """The least that Redis must promise: `always`, the disk before the acknowledgement, or
    `everysec`, where its machine's crash may lose a second."""
    journal_replicas: int = Field(0, ge=0)
    """Redis replicas that must have a commit before it is acknowledged."""
    journal_lease: float = Field(5.0, ge=1)
    """Seconds without a sign of a rank's process after which another may carry on the rank, with
    `server.journal`."""
    drain_timeout: float = Field(20.0, ge=0)
    """Seconds that running requests have to end after SIGTERM."""
    unknown_parameters: Literal["record", "refuse"] = "record"
    """The treatment of unknown parameters of a model call: they are recorded without effect and
    named in the answer's header `x-any-agent-ignored`; or the call gets a 400 that names them."""
    client_timeout: float = Field(60.0, gt=0)
    """Seconds after which a client that reads no byte of its answer, or sends no byte of its
    request's body, is given up."""
    body_timeout: float = Field(120.0, gt=0)
    """Seconds in which the whole of a request's body must arrive, at the router and at a rank;
    later it gets 400 `body_timeout`."""

    @field_validator("journal", mode="before")
    @classmethod
    def _empty_means_none(cls, url: object) -> object:
        # A variable that is passed on from an environment without it.
        return None if url == "" else url

    @field_validator("journal")
    @classmethod
    def _usable_journal(cls, url: SecretStr | None) -> SecretStr | None:
        scheme = urlsplit(url.get_secret_value()).scheme if url is not None else ""
        if url is not None and scheme not in REDIS_SCHEMES:
            known = ", ".join(f"{each}://" for each in REDIS_SCHEMES)
            raise ValueError(f"the journal's log can be at {known}, not at {scheme or 'this'}")
        if url is not None and scheme != "unix":
            netloc = urlsplit(url.get_secret_value()).netloc
            if not netloc or "@" in urlsplit(url.get_secret_value()).path:
                raise ValueError(
                    "the URL has no host: write / ? # @ in a password as %2F %3F %23 %40"
                )
        return url

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


class SamplingConfig(Section):
    """The sampling of train sessions; it overrides the agent's parameters."""

    temperature: float = Field(1.0, gt=0, le=10)
    """The temperature of every sampled token; the trainer divides by the same."""
    top_p: float = 1.0
    """Must be off (1); other values are refused."""
    top_k: int = -1
    """Must be off (-1 or 0); other values are refused."""
    max_new_tokens: int = Field(4096, ge=1)
    """The most tokens of one answer; an agent may request fewer."""

    @model_validator(mode="after")
    def _untruncated(self) -> Self:
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            raise ValueError(
                "sampling.top_p and sampling.top_k must be off (1.0 and -1) for training: a "
                "truncated distribution makes the recorded log-probabilities wrong"
            )
        return self


class EngineConfig(Section):
    kind: str = "embedded"
    """The engine that the service starts for each rank: `embedded`, its own, which needs nothing
    else, or `sglang`. With `engine.urls` also `package.module.opener`, for an engine of your
    own."""
    urls: Texts = ()
    """URLs of running engines (SGLang's native HTTP contract), one per rank, on private addresses.
    Empty: the service starts engines. A URL that ends in `/adapters/NAME` is an adapter of an
    embedded engine that several runs share, for `train.lora`."""
    key: SecretStr | None = None
    """The key that the engines of `engine.urls` require, sent as `Authorization: Bearer`; SGLang
    gets it by its option `--api-key`. Engines that the service starts have a key of the run."""
    python: str | None = None
    """The interpreter of SGLang's own environment. None: the service's interpreter."""
    arguments: EngineOptions = ()
    """Further options of SGLang's server: a list of words, one text, or a mapping of options to
    values. Options that the service sets itself are refused."""
    environment: Variables = Field(default_factory=dict)
    """Variables for the engine's processes, in addition to the service's own. They are written to
    the run's folder, so they must not be secrets."""
    gpus: int = Field(1, ge=1, le=64)
    """GPUs of each SGLang, which share its layers (tensor parallelism)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the engine; auto takes a GPU if there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    max_running_requests: int = Field(32, ge=1)
    """Calls that an engine samples at once."""
    max_queued_requests: int = Field(1024, ge=1)
    """Calls that may wait in an engine; further ones are refused."""
    context_length: int | None = Field(None, ge=16)
    """The most tokens of prompt and output together. None: the model's own limit."""
    adapters: dict[Name, LocalPath] = Field(default_factory=dict)
    """LoRA adapters beside the model, each a name and the folder that peft, or `train.lora`, wrote.
    A call whose `model` is the name samples from the model with that adapter. For embedded engines
    that the service starts, without training."""
    update_mode: Literal["resume", "in_place"] = "resume"
    """The effect of a weight update on running calls: recompute their cache (exact) or keep it."""
    update_wait: float = Field(120.0, gt=0)
    """Seconds that a call waits for a weight update, or for an engine that died, before it gets
    503."""
    weight_sync: Literal["auto", "disk", "distributed", "tensor"] = "auto"
    """The transport of new weights to the engines: a folder that they read; a process group (NCCL
    between GPUs, gloo otherwise); or tensors, which are copied within a GPU that trainer and engine
    share. auto: the folder without GPUs, tensors if trainer and engines share GPUs of one machine,
    otherwise a process group."""
    hung_after: float = Field(30.0, ge=5)
    """Seconds without an answer of the engine's HTTP process after which it hangs: an engine that
    the service started is restarted, and running calls wait for it as for a dead one. New sessions
    go to another rank, and `/readyz` tells it, after about 4 seconds."""
    load_timeout: float = Field(600.0, gt=0, le=1500)
    """Seconds that the engine may take to load new weights."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds without a byte from the engine after which a call fails."""

    @field_validator("key")
    @classmethod
    def _sendable_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not re.fullmatch(r"[!-~]+", key.get_secret_value()):
            raise ValueError("engine.key must be printable ASCII characters without spaces")
        return key

    @property
    def secret_key(self) -> str | None:
        """The text of :attr:`key`."""
        return None if self.key is None else self.key.get_secret_value()

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.kind not in ("embedded", "sglang") and not self.urls:
            raise ValueError(
                f"engine.kind={self.kind}: the service starts only embedded or sglang engines; for "
                "another kind set engine.urls"
            )
        if self.kind != "sglang":
            set_here = [n for n in ("python", "arguments", "gpus") if n in self.model_fields_set]
            chosen = [n for n in set_here if getattr(self, n) != type(self).model_fields[n].default]
            if chosen:
                raise ValueError(
                    f"engine.{chosen[0]} is for SGLang; set engine.kind=sglang, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _serves_adapters(self) -> Self:
        if self.adapters and (self.kind != "embedded" or self.urls):
            other = "engine.urls" if self.urls else f"engine.kind={self.kind}"
            raise ValueError(
                f"engine.adapters are for embedded engines that the service starts, and {other} is "
                "set: leave one of them out, or serve each adapter merged with its model"
            )
        return self


class FrozenConfig(Section):
    """Models beside the policy, which are never trained: judges, other providers' models."""

    model_list: Annotated[ModelList, BeforeValidator(check_model_list)] = ()
    """LiteLLM's list of `model_name`, `litellm_params` and `model_info`; keys only as
    `os.environ/NAME`."""
    session_usd: float | None = Field(None, ge=0)
    """The most that one session's calls of frozen models may cost, in USD; further calls get 402
    `spend_cap_exceeded`. None: no limit. Without `tenant_usd` it also limits one tenant's calls
    without a session, in this trial, over all ranks."""
    tenant_usd: float | None = Field(None, ge=0)
    """The most that one tenant's calls may cost in this trial, over all ranks: each rank enforces
    its share. All callers that are not tenants count as one."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one call, or one stream, may take before it fails with 504
    `provider_timeout`."""
    max_calls: int = Field(64, ge=1)
    """Calls that run at once on each rank, those of LiteLLM's other inference routes included;
    further ones get 429."""


class TracingConfig(Section):
    """OpenTelemetry traces: a session is a trace, its model calls are spans."""

    endpoint: str | None = None
    """The URL that takes spans by OTLP over HTTP, such as `http://collector:4318/v1/traces`; its
    headers are those of the variable `OTEL_EXPORTER_OTLP_HEADERS`. null: there are no traces."""
    content: bool = False
    """Put the messages of the calls into their spans, too."""

    @field_validator("endpoint")
    @classmethod
    def _a_public_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://unused")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("give an http or https URL, such as http://collector:4318/v1/traces")
        if "@" in parts.netloc:
            raise ValueError(
                "a password in a URL is shown in logs: give it by the variable "
                "OTEL_EXPORTER_OTLP_HEADERS=Authorization=..."
            )
        return url
