"""An operator's own LiteLLM configuration. LiteLLM's loader reads it, on each rank; here it is read
for what contradicts the service, and for the secrets that no log may show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from any_agent.config.base import LocalPath, Section, Texts
from any_agent.config.model_list import REFERENCE, referenced_secrets, written_secrets
from any_agent.errors import ConfigError

POLICY = "any-agent/policy"
"""The `model` of an entry that gives the policy a name among LiteLLM's models."""
_FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")
_OURS = {
    "custom_auth": "any-agent judges the keys",
    "enable_jwt_auth": "any-agent judges the keys",
    "enable_oauth2_auth": "any-agent judges the keys",
}
"""Names of `general_settings` that would decide who may call what."""


class LiteLLMConfig(Section):
    """LiteLLM's own configuration, if there is one: its models, callbacks and limits."""

    config: LocalPath | None = None
    """LiteLLM's `config.yaml`. Calls that name one of its models go through LiteLLM's whole app,
    and its other routes are served by scope; None: only `frozen.model_list`."""
    policy_input_cost_per_token: float = Field(0.0, ge=0)
    """USD that LiteLLM's callbacks are told, and its virtual keys charged, for a token of a prompt
    of the policy."""
    policy_output_cost_per_token: float = Field(0.0, ge=0)
    """USD that they are told, and charged, for a token that the policy samples."""
    policy_guardrails: Texts = ()
    """Guardrails of LiteLLM's configuration, by name, that judge the policy's calls, too:
    `pre_call` and `during_call` ones before tokens are sampled, where they may refuse and never
    rewrite; `post_call` ones after that, whose refusal keeps an answer out of training."""
    policy_vetoes: Texts = ()
    """Guardrails among `policy_guardrails` whose refusal of an answer vetoes its whole session, if
    it is for training: it ends as `rejected`."""
    max_waiting_events: int = Field(4096, ge=1)
    """The policy's calls and rewards that wait, on each rank, for LiteLLM's callbacks; further ones
    are not told to them, and counted by `any_agent_litellm_events_total`."""

    @model_validator(mode="after")
    def _vetoes_are_guardrails(self) -> Self:
        if others := set(self.policy_vetoes) - set(self.policy_guardrails):
            raise ValueError(
                f"policy_vetoes names {', '.join(sorted(others))}: add it to policy_guardrails, or "
                "leave it out"
            )
        return self


class _Placed(str):
    """A text of a file, with its line."""

    line: int


class _Loader(yaml.SafeLoader):
    """Loads texts with their lines."""

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if type(value) is str:
            value = _Placed(value)
            value.line = node.start_mark.line + 1
        return value


def _at(path: str, text: object) -> str:
    """Return the file, with the line of a text if it was read from there."""
    return f"{path}:{text.line}" if isinstance(text, _Placed) else path


def read_litellm_config(path: str) -> dict[str, Any]:
    """Return the file as data; ConfigError if it cannot be read."""
    try:
        data = yaml.load(Path(path).read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"litellm.config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"litellm.config: {path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"litellm.config: {path} must be a mapping with a model_list")
    return data


def litellm_secrets(path: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the secrets that the file holds, or that it refers to, for redaction."""
    if path is None:
        return []
    data = read_litellm_config(path)
    url = database_url(data, environ)
    return referenced_secrets(data, environ) + written_secrets(data) + ([url] if url else [])


def master_key(data: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return LiteLLM's master key as its loader finds it; None without one."""
    key = _section(data, "general_settings").get("master_key")
    if isinstance(key, str) and key.startswith(REFERENCE):
        return environ.get(key.removeprefix(REFERENCE)) or None
    return str(key) if key else environ.get("LITELLM_MASTER_KEY") or None


def database_url(data: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return the URL of LiteLLM's database, as its command line finds it; None without one."""
    url = _section(data, "general_settings").get("database_url")
    if isinstance(url, str) and url.startswith(REFERENCE):
        url = environ.get(url.removeprefix(REFERENCE))
    return str(url) if url else environ.get("DATABASE_URL") or None


def may_have_keys(data: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether LiteLLM may have virtual keys; included files are not read here."""
    return "include" in data or database_url(data, environ) is not None


def has_callbacks(data: Mapping[str, Any]) -> bool:
    """Return whether a configuration may name callbacks; included files are not read here."""
    settings = _section(data, "litellm_settings")
    return "include" in data or any(
        settings.get(name) for name in ("callbacks", "success_callback")
    )


def check_litellm_config(
    path: str, policy: frozenset[str], admin_key: str | None, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError for what contradicts the service; LiteLLM's own loader checks the rest.

    ``policy``: the names of the policy.
    """
    data = read_litellm_config(path)
    _check_policy_entries(data, path)
    require_other_names(names_in(data), policy, path)
    general = _section(data, "general_settings")
    if given := next((name for name in general if name in _OURS and general[name]), None):
        where = _at(path, given)
        raise ConfigError(f"{where}: remove general_settings.{given}: {_OURS[given]}")
    own = master_key(data, environ)
    if own is not None and own != admin_key:
        where = _at(path, next((name for name in general if name == "master_key"), None))
        raise ConfigError(
            f"{where}: its master key (general_settings.master_key or LITELLM_MASTER_KEY) must be "
            "the service's admin key: set ANY_AGENT_SERVER__ADMIN_KEY to it"
        )


def require_other_names(names: Iterator[str], policy: frozenset[str], path: str) -> None:
    """Raise ConfigError if one of LiteLLM's names is the policy's."""
    if both := next((name for name in names if name in policy), None):
        raise ConfigError(
            f"{_at(path, both)}: {both} is a name of the policy (model.name, model.policy_names, "
            f"an entry with model: {POLICY}) and of a model: give one of them another name"
        )


def policy_names_in(data: Mapping[str, Any]) -> list[str]:
    """Return the names that entries with `model: any-agent/policy` give the policy."""
    return [str(entry.get("model_name")) for entry in _entries(data) if _is_policy(entry)]


def _check_policy_entries(data: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for an entry of the policy that says more than a name."""
    for entry in filter(_is_policy, _entries(data)):
        name, params = entry.get("model_name"), entry["litellm_params"]
        where = _at(path, params["model"])
        if not isinstance(name, str) or not name or "*" in name:
            raise ConfigError(f"{where}: an entry of {POLICY} needs a model_name without *")
        if more := next((key for key in params if key != "model"), None):
            raise ConfigError(
                f"{_at(path, more)}: remove litellm_params.{more} of {name}: the service's own "
                "settings are the policy's (sampling, litellm.policy_input_cost_per_token, ...)"
            )


def _entries(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = data.get("model_list")
    listed = entries if isinstance(entries, list) else []
    return [entry for entry in listed if isinstance(entry, Mapping)]


def _is_policy(entry: Mapping[str, Any]) -> bool:
    return _section(entry, "litellm_params").get("model") == POLICY


def names_in(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of LiteLLM's own models, aliases and fallbacks."""
    for entry in _entries(data):
        if not _is_policy(entry):
            yield _text(entry.get("model_name"))
    router, settings = _section(data, "router_settings"), _section(data, "litellm_settings")
    yield from map(_text, _section(router, "model_group_alias"))
    for section in (router, settings):
        yield from map(_text, section.get("default_fallbacks") or ())
        for kind in _FALLBACKS:
            for each in section.get(kind) or ():
                if isinstance(each, Mapping):
                    for names in each.values():
                        yield from (n for n in names or () if isinstance(n, str))


def _text(value: object) -> str:
    """Return a name as it was read, with its line; YAML may have taken it for another type."""
    return value if isinstance(value, str) else str(value)


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}
