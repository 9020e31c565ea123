"""Settings of what serves: the model, its engine, the public address, models beside the policy."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, SecretStr, field_validator, model_validator

from any_agent.config.base import Section, listed
from any_agent.config.model_list import ModelList, check_model_list
from any_agent.keys import KEY_PREFIXES

_OURS: Mapping[str, str] = {
    "--model-path": "model.path is served, and the newest weights after a restart",
    "--model": "model.path is served, and the newest weights after a restart",
    "--tokenizer-path": "texts are only matched with stop strings: it must be the model's own",
    "--weight-version": "the run counts its versions",
    "--host": "an engine listens where only its proxy and the trainer reach it",
    "--port": "the service finds a free one",
    "--dtype": "set model.dtype",
    "--context-length": "set engine.context_length",
    "--max-running-requests": "set engine.max_running_requests",
    "--max-queued-requests": "set engine.max_queued_requests",
    "--device": "set engine.device",
    "--log-level": "set log_level",
    "--tp-size": "set engine.gpus",
    "--tensor-parallel-size": "set engine.gpus",
    "--pp-size": "set engine.gpus: all of them compute each layer together",
    "--pipeline-parallel-size": "set engine.gpus: all of them compute each layer together",
    "--dp-size": "set server.ranks: each has an engine",
    "--data-parallel-size": "set server.ranks: each has an engine",
    "--base-gpu-id": "the service deals out the GPUs, by CUDA_VISIBLE_DEVICES",
    "--gpu-id-step": "the service deals out the GPUs, by CUDA_VISIBLE_DEVICES",
    "--nnodes": "an engine is on one machine; set server.ranks for more engines",
    "--node-rank": "an engine is on one machine; set server.ranks for more engines",
    "--dist-init-addr": "an engine is on one machine; set server.ranks for more engines",
    "--api-key": "others could read it in the list of processes; engines are private without",
    "--admin-api-key": "others could read it in the list of processes; engines are private without",
    "--skip-tokenizer-init": "without its tokenizer an engine finds no stop strings",
    "--config": "a file could set any of the options that the service sets",
}


def option_words(value: object) -> object:
    """A command line's words from a list, a text, or a mapping of options to their values.

    ``{"mem-fraction-static": 0.8, "enable-metrics": True}`` becomes ``--mem-fraction-static 0.8
    --enable-metrics``; what is False or None is left out. Anything else is returned as it is.
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


def require_free_options(words: Sequence[str]) -> None:
    """ValueError for an option that the service sets itself, with what to set instead.

    Also for the beginning of its name, which an engine takes for the whole.
    """
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        ours = name if name in _OURS else next((o for o in _OURS if o.startswith(name)), None)
        if ours is not None:
            raise ValueError(f"{name} cannot be given to the engine: {_OURS[ours]}")


class ModelConfig(Section):
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
        return listed(names)

    @field_validator("path")
    @classmethod
    def _without_tilde(cls, path: str) -> str:
        return os.path.expanduser(path)


class ServerConfig(Section):
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
    journal_dir: Path | None = None
    """Where the record of sessions lies: a folder on a disk of this machine, as SQLite's locks do
    not hold on network file systems. null: in the run's folder."""
    drain_timeout: float = Field(20.0, ge=0)
    """Seconds that requests under way have for their end after SIGTERM."""
    unknown_parameters: Literal["record", "refuse"] = "record"
    """What a model call gets that has a parameter which nobody here knows: it is recorded without
    effect and named by the answer's `x-any-agent-ignored`; or the call is a 400 that names it."""
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


class SamplingConfig(Section):
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


class EngineConfig(Section):
    kind: str = "embedded"
    """The engine that the service starts for each rank: `embedded`, its own, which needs nothing
    else, or `sglang`. With `engine.urls` also `package.module.opener`, a kind of engine of your
    own."""
    urls: tuple[str, ...] = ()
    """Engines that already run (SGLang's native HTTP contract), one per rank, on private addresses.
    Empty: start some."""
    python: str | None = None
    """The interpreter of the environment that SGLang is installed in, one of its own. None: the
    service's."""
    arguments: tuple[str, ...] = ()
    """Further options of SGLang's server: a list of words, one text, or a mapping of options to
    values. Those that the service sets itself are refused."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables for the engine's processes, beside those that the service was started with. They
    are written to the run's folder: no secrets."""
    gpus: int = Field(1, ge=1, le=64)
    """GPUs of each SGLang, which share its layers (tensor parallelism)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; auto takes a GPU if there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    max_running_requests: int = Field(32, ge=1)
    """Calls that an engine samples at once."""
    max_queued_requests: int = Field(1024, ge=1)
    """Calls that may wait in an engine; further ones are refused."""
    context_length: int | None = Field(None, ge=16)
    """None: the model's own limit."""
    update_mode: Literal["resume", "in_place"] = "resume"
    """What a weight update does to calls under way: recompute them (exact) or keep their cache."""
    update_wait: float = Field(120.0, gt=0)
    """Seconds that a call waits for a weight update, or for an engine that died, before it gets
    503."""
    weight_sync: Literal["auto", "disk", "distributed", "tensor"] = "auto"
    """How new weights reach the engines: by a folder that they read; by a process group (NCCL
    between GPUs, gloo else); or as tensors, which on a GPU that trainer and engine share are copied
    within it. auto: by the folder without GPUs, as tensors where trainer and engines share GPUs of
    one machine, else by a process group."""
    load_timeout: float = Field(600.0, gt=0, le=1500)
    """Seconds that the engine may take to load new weights."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds without a byte from the engine after which a call fails."""

    @field_validator("urls", mode="before")
    @classmethod
    def _listed(cls, urls: object) -> object:
        return listed(urls)

    @field_validator("arguments", mode="before")
    @classmethod
    def _words(cls, arguments: object) -> object:
        return option_words(arguments)

    @field_validator("arguments")
    @classmethod
    def _free(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        require_free_options(arguments)
        return arguments

    @field_validator("environment", mode="before")
    @classmethod
    def _texts(cls, variables: object) -> object:
        """As YAML has it, `1` is a number."""
        if not isinstance(variables, Mapping):
            return variables
        return {k: str(v) if isinstance(v, int | float) else v for k, v in variables.items()}

    @model_validator(mode="after")
    def _startable(self) -> Self:
        if self.kind not in ("embedded", "sglang") and not self.urls:
            raise ValueError(
                f"engine.kind={self.kind}: the service starts embedded or sglang; for engines of "
                "another kind set engine.urls"
            )
        return self

    @model_validator(mode="after")
    def _for_sglang_alone(self) -> Self:
        if self.kind != "sglang":
            set_here = [n for n in ("python", "arguments", "gpus") if n in self.model_fields_set]
            chosen = [n for n in set_here if getattr(self, n) != type(self).model_fields[n].default]
            if chosen:
                raise ValueError(
                    f"engine.{chosen[0]} is for SGLang; set engine.kind=sglang, or leave it out"
                )
        return self


class FrozenConfig(Section):
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
