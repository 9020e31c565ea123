"""Frozen models beside the policy: LiteLLM's `model_list`, as an operator writes it.

The list names providers' keys (`os.environ/NAME`, as in LiteLLM's own configuration) and never
holds them, so no key gets into a run's folder or its logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from any_agent.errors import ConfigError

ModelList: TypeAlias = tuple[dict[str, Any], ...]

REFERENCE = "os.environ/"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_ENTRY = {"model_name", "litellm_params", "model_info"}
_SECRET = re.compile(
    r"(?:key|key_?id|secret|password|passphrase|credentials?|token|auth|authorization|cookie)$"
)
_PRICES = re.compile(r"(?:^|_)cost(?:_|$)")
_NOT_HERE = {
    **dict.fromkeys(
        ("num_retries", "max_retries", "fallbacks", "context_window_fallbacks"),
        "a call is sent once, to the model that it names: its client retries",
    ),
    **dict.fromkeys(
        ("rpm", "tpm", "max_parallel_requests"),
        "frozen.max_calls, frozen.session_usd and frozen.tenant_usd bound what is used",
    ),
    "litellm_credential_name": "name the key itself, as os.environ/NAME",
    "stream": "the client of a call chooses it",
}
_AMBIENT = {
    "aws_": ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_BEARER_TOKEN_BEDROCK"),
    "vertex_": (),
}
"""The variables that hold the host's credentials, by the prefix of a cloud's parameters."""
_MIN_SECRET = 6
"""The fewest characters of a secret that is removed from logs; shorter texts are too common."""


def check_model_list(value: object) -> ModelList:
    """Return the list; ValueError names the first entry that is wrong, and the reason."""
    if value is None or value == "":
        return ()
    if not isinstance(value, list | tuple):
        raise ValueError("must be LiteLLM's list of mappings with model_name and litellm_params")
    return tuple(_checked(entry, f"entry {k}") for k, entry in enumerate(value))


def names(model_list: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the models, each once, in order."""
    return list(dict.fromkeys(entry["model_name"] for entry in model_list))


def resolved(model_list: ModelList, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Replace references by their values; ConfigError for variables that are not set."""
    missing = sorted(name for name in _references(model_list) if not environ.get(name))
    if missing:
        raise ConfigError(
            f"frozen.model_list refers to {', '.join(missing)}, which the environment does not "
            "hold: set it where the service is started"
        )
    return [_resolved(entry, environ) for entry in model_list]


def secrets_of(model_list: ModelList, environ: Mapping[str, str]) -> list[str]:
    """Return the values that the list refers to, or that sign a cloud's calls, for redaction."""
    return referenced_secrets(model_list, environ)


def referenced_secrets(data: object, environ: Mapping[str, str]) -> list[str]:
    """Return the values of the variables that data refers to, or that sign a cloud's calls."""
    names = _references(data)
    keys = {name.rpartition(".")[2] for name, _ in _leaves(data, "")}
    for prefix, variables in _AMBIENT.items():
        if any(key.startswith(prefix) for key in keys):
            names.update(variables)
    found = {environ.get(name, "") for name in names}
    return sorted(value for value in found if len(value) >= _MIN_SECRET)


def passwords_of(url: str) -> list[str]:
    """Return the password in a URL as it is written and as it is meant, for redaction."""
    parts = urlsplit(url)
    found = [parts.password or "", *parse_qs(parts.query).get("password", [])]
    return [text for text in {*found, *map(unquote, found)} if text]


def written_secrets(data: object) -> list[str]:
    """Return the values in plain data whose names say that they are secrets."""
    values = (str(value) for name, value in _leaves(data, "") if _is_secret(name, value))
    return sorted(value for value in set(values) if len(value) >= _MIN_SECRET)


def _checked(entry: object, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a mapping with model_name and litellm_params")
    name, params = entry.get("model_name"), entry.get("litellm_params")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}: model_name must have at most 128 letters, digits and . _ : / @ -, and begin "
            "with a letter or a digit; patterns such as openai/* are not supported"
        )
    where = f"{where} ({name})"
    if unknown := sorted(map(str, entry.keys() - _ENTRY)):
        raise ValueError(
            f"{where}: unknown key {unknown[0]}; known keys are {', '.join(sorted(_ENTRY))}"
        )
    if not isinstance(params, Mapping) or not isinstance(params.get("model"), str):
        raise ValueError(f"{where}: litellm_params needs a model, e.g. openai/gpt-4o-mini")
    info = entry.get("model_info") or {}
    if not isinstance(info, Mapping):
        raise ValueError(f"{where}: model_info must be a mapping")
    for key, why in _NOT_HERE.items():
        if key in params:
            raise ValueError(f"{where}: remove litellm_params.{key}: {why}")
    _check_secrets(where, params)
    _check_base(where, params)
    _check_key(where, params)
    return {
        "model_name": name,
        "litellm_params": _with_prices(where, params),
        "model_info": _with_prices(where, info),
    }


def _check_key(where: str, params: Mapping[str, Any]) -> None:
    """Require a key: LiteLLM would take one from the environment, which no log is redacted of."""
    named = any(params.get(name) for name in ("api_key", "api_base", "base_url"))
    if not named and not any(str(key).startswith(tuple(_AMBIENT)) for key in params):
        raise ValueError(
            f"{where}: litellm_params names no key: write api_key: {REFERENCE}NAME, the variable "
            "that holds the provider's key (or api_base for a server that needs none; or aws_... "
            "or vertex_... to use the host's credentials)"
        )


def _with_prices(where: str, values: Mapping[Any, Any]) -> dict[str, Any]:
    out = {str(key): value for key, value in values.items()}
    for key in ("input_cost_per_token", "output_cost_per_token"):
        if out.get(key) is None:
            continue
        try:
            # YAML reads 1e-6 as text.
            price = float(out[key])
        except (TypeError, ValueError):
            price = -1.0
        if isinstance(out[key], bool) or not 0 <= price < 1e3:
            raise ValueError(f"{where}: {key} must be the price of one token in USD, 0 or more")
        out[key] = price
    return out


def _check_base(where: str, params: Mapping[str, Any]) -> None:
    for name in ("api_base", "base_url"):
        base = params.get(name)
        if base is None:
            continue
        if not isinstance(base, str):
            raise ValueError(f"{where}: {name} must be a URL")
        try:
            parts = urlsplit(base)
        except ValueError:
            raise ValueError(f"{where}: {name} must be a URL") from None
        if "@" in parts.netloc:
            raise ValueError(f"{where}: {name} must hold no password; use api_key: os.environ/NAME")
        if parts.query:
            # Some providers accept a key there.
            raise ValueError(f"{where}: {name} must have no query; use api_key: os.environ/NAME")


def _check_secrets(where: str, params: Mapping[str, Any]) -> None:
    for name, value in _leaves(params, "litellm_params"):
        if isinstance(value, str) and value.startswith(REFERENCE):
            if not _VARIABLE.fullmatch(value.removeprefix(REFERENCE)):
                raise ValueError(f"{where}: {name} must name a variable of the environment")
        elif _is_secret(name, value):
            # The value is left out: a configuration's errors are shown and logged.
            raise ValueError(
                f"{where}: {name} must not be written in a file: write {REFERENCE}NAME, and set "
                "NAME in the environment of the service"
            )


def _is_secret(name: str, value: object) -> bool:
    """Return whether a value with this dotted name is a secret itself, not a reference to one."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return False
    if str(value).startswith(REFERENCE):
        return False
    last = name.rpartition(".")[2].lower().replace("-", "_")
    secret = _SECRET.search(last) and not _PRICES.search(last)
    return bool(secret) or str(value).startswith("sk-")


def _references(data: object) -> set[str]:
    values = (value for _, value in _leaves(data, ""))
    found = (v for v in values if isinstance(v, str) and v.startswith(REFERENCE))
    return {value.removeprefix(REFERENCE) for value in found}


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of everything in a mapping or a list."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _leaves(below, name)
    else:
        yield name, value


def _resolved(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, str) and value.startswith(REFERENCE):
        return environ[value.removeprefix(REFERENCE)]
    if isinstance(value, Mapping):
        return {key: _resolved(below, environ) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(below, environ) for below in value]
    return value
