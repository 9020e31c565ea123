"""The loading of settings: command line > environment > YAML > default.

A setting's name is its dotted path (``train.lr``). In the environment it is
``ANY_AGENT_TRAIN__LR``, on the command line ``train.lr=1e-3``. An error about an unknown name
suggests the nearest known one. AReaL's names (:mod:`any_agent.config.foreign_settings`) are
accepted where they mean the same. In a file, ``${model.path}`` is the value of that setting.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, overload

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from any_agent.config import foreign_settings as elsewhere
from any_agent.config.litellm import policy_names_in, read_litellm_config
from any_agent.config.schema import Config
from any_agent.errors import ConfigError
from any_agent.runtime.import_string import import_by_setting

ENV_PREFIX = "ANY_AGENT_"
SECRETS = ("server.admin_key", "server.journal", "engine.key")
SECRET_VARIABLES = tuple(ENV_PREFIX + name.upper().replace(".", "__") for name in SECRETS)
"""Variables of the settings that pass from process to process by the environment only."""
ADMIN_KEY_VARIABLE, JOURNAL_VARIABLE, ENGINE_KEY_VARIABLE = SECRET_VARIABLES

_WHOLE = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env:")
_LIKENESS = 0.6

AnyConfig = TypeVar("AnyConfig", bound=Config)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of every setting."""
    for name, info in model.model_fields.items():
        kind: Any = info.annotation
        # A section that may be null is one of these.
        kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type)]
        section = next((one for one in kinds if issubclass(one, BaseModel)), None)
        if section is not None:
            yield from _fields(section, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def known_keys(model: type[BaseModel] = Config) -> Iterator[str]:
    """Yield the dotted name of every setting."""
    return (name for name, _ in _fields(model))


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(known_keys(model))


@cache
def _texts(model: type[BaseModel]) -> frozenset[str]:
    texts = {str, Path, SecretStr}
    return frozenset(
        name
        for name, kind in _fields(model)
        if get_origin(kind) is not dict and {kind, *get_args(kind)} & texts
    )


@overload
def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config: ...


@overload
def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    kind: type[AnyConfig],
) -> AnyConfig: ...


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    kind: type[Config] = Config,
) -> Config:
    """Merge YAML, environment and ``key=value`` overrides into settings of the class ``kind``.

    Raises ConfigError that names the file and the key, and says what to do.
    """
    own = partial(_is_own, kind)
    environ = os.environ if environ is None else environ
    changes: dict[str, Any] = {}
    for source in (_from_environ(environ, kind), _from_overrides(overrides, kind)):
        given: dict[str, tuple[str, Any]] = {}
        for name, value in source:
            key = elsewhere.ours(name, value, own)
            if key is not None:
                elsewhere.once(given, key, name, value)
                # A later setting must come after a section that an earlier one names.
                changes.pop(key, None)
                changes[key] = value

    def changed(name: str) -> tuple[bool, Any]:
        key = elsewhere.ALIASES.get(name, name) if not own(name) else name
        return key in changes, changes.get(key)

    data = {} if path is None else read_yaml(Path(path), changed)
    elsewhere.translate(data, own)
    for key, value in changes.items():
        if "${" in str(value) and key not in SECRETS:
            _refuse_reference(str(value), key)
        elsewhere.put(data, key, value)
    elsewhere.settle(data, own)
    return _validated(data, path, kind)


def settings_of(settings: Mapping[str, Any]) -> Config:
    """Return the settings in a mapping as a file's; ConfigError as :func:`load_config` raises."""
    data, own = deepcopy(dict(settings)), partial(_is_own, Config)
    elsewhere.translate(data, own)
    elsewhere.settle(data, own)
    return _validated(data, None, Config)


def _validated(
    data: Mapping[str, Any], path: str | Path | None, kind: type[AnyConfig]
) -> AnyConfig:
    try:
        config = kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, path, kind)) from None
    return _with_policy_entries(config)


def _with_policy_entries(config: AnyConfig) -> AnyConfig:
    """Return the settings with the names that LiteLLM's configuration gives the policy.

    Then other names are refused, unless `model.unknown_model` says otherwise. A configuration that
    cannot be read is refused where the service starts.
    """
    names: list[str] = []
    if config.litellm.config is not None:
        with suppress(ConfigError):
            names = policy_names_in(read_litellm_config(config.litellm.config))
    if not names:
        return config
    model = config.model
    known = tuple(dict.fromkeys([*model.policy_names, *names]))
    update: dict[str, Any] = {"policy_names": known}
    if "unknown_model" not in model.model_fields_set:
        update["unknown_model"] = "reject"
    return config.model_copy(update={"model": model.model_copy(update=update)})


def secret_variables(config: Config) -> dict[str, str]:
    """Return the variables that pass the secrets of these settings to another process."""
    keys = (config.server.admin_key, config.server.journal, config.engine.key)
    named = zip(SECRET_VARIABLES, keys, strict=True)
    return {name: key.get_secret_value() for name, key in named if key is not None}


def load_resolved(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings that another process has resolved, and import their plugins.

    Only the file counts, and the environment for secrets, which the file lacks.
    """
    environ = os.environ if environ is None else environ
    secrets = {name: environ[name] for name in SECRET_VARIABLES if environ.get(name)}
    config = load_config(path, environ=secrets)
    import_plugins(config)
    return config


def import_plugins(config: Config) -> None:
    """Import the modules of `plugins`, once in a process; ConfigError, with the reason, if one
    cannot be imported."""
    for name in config.plugins:
        import_by_setting(name, f"plugins={name}")


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper()


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: YAML keeps the last one, in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"lines {lines[key.value]} and {line}"
                raise yaml.YAMLError(f"{key.value} stands twice, in {where}: remove one")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(
    path: Path, changed: Callable[[str], tuple[bool, Any]] = lambda _: (False, None)
) -> dict[str, Any]:
    """Return a file's settings; ConfigError if it cannot be read, or is no mapping.

    ``changed``: see `_resolve_references`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    try:
        data = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(data).__name__}")
    # Make a copy in which no object occurs twice, as YAML's anchors and aliases would.
    data = _resolve_references(data, path, changed)
    # A section whose lines are all commented out reads as null.
    return {key: value for key, value in data.items() if value is not None}


def _from_environ(environ: Mapping[str, str], kind: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    flat = {key.replace(".", "_"): key for key in known_keys(kind) if "." in key}
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            # A name without a section may be a variable of another tool.
            if "." in key or key in kind.model_fields or elsewhere.is_taken(key):
                yield key, _value(key, value, kind)
            elif key in flat:
                raise ConfigError(f"{name} is no setting: did you mean {_variable(flat[key])}?")


def _from_overrides(overrides: Sequence[str], kind: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep:
            raise ConfigError(f"{item!r} is not of the form key=value, e.g. train.lr=1e-3")
        key = key.strip().lstrip("-+")
        yield key, _value(key, value, kind)


def _is_own(kind: type[BaseModel], name: str) -> bool:
    """Return whether the class has this setting, or one that contains it."""
    known = _names(kind)
    parts = name.split(".")
    return any(".".join(parts[: k + 1]) in known for k in range(len(parts)))


def _value(key: str, text: str, kind: type[BaseModel]) -> Any:
    """Parse a setting's text; names and keys stay texts, also `007` and `on`."""
    key = key if _is_own(kind, key) else elsewhere.ALIASES.get(key, key)
    return text if key in _texts(kind) and text not in ("", "null") else _scalar(text)


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


def _alike(key: str, other: str) -> bool:
    """Return whether the last parts of two names are alike; equal sections do not count."""
    last, known = (name.rpartition(".")[2] for name in (key, other))
    return difflib.SequenceMatcher(None, last, known).ratio() >= _LIKENESS


def explain(error: ValidationError, path: str | Path | None, kind: type[BaseModel]) -> str:
    """Return what is wrong with settings of the class ``kind``, each with what to do."""
    source = f" (from {path}, the environment or the command line)" if path else ""
    lines = [f"the configuration is wrong{source}:"]
    keys = list(known_keys(kind))
    sections = sorted({key.partition(".")[0] for key in keys if "." in key})
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            moved = elsewhere.suggest_setting(key, item["input"])
            if moved:
                lines += moved
                continue
            known = sections if isinstance(item["input"], dict) else keys
            near = [k for k in difflib.get_close_matches(key, known, n=5) if _alike(key, k)]
            if not near:
                near = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
            hint = f"did you mean {near[0]}?" if near else "see `any-agent config` for all keys"
            lines.append(f"  unknown key {key}: {hint}")
        else:
            lines.append(
                f"  {key + ': ' if key else ''}{item['msg'].removeprefix('Value error, ')}"
            )
    return "\n".join(lines)


def _resolve_references(
    data: Mapping[str, Any], source: Path, changed: Callable[[str], tuple[bool, Any]]
) -> dict[str, Any]:
    """Return a file's settings with the value of ``b`` of ``a`` for each whole ``${a.b}``.

    ``source`` names the file; ``changed`` returns whether the environment or the command line gives
    a setting, and its value, which then counts. Raises ConfigError for names that the file lacks,
    circles, and other uses of ``${``.
    """

    def resolved(value: Any, key: str, trail: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            # Copied, so that an object that is named twice does not occur twice.
            return {k: resolved(one, f"{key}.{k}", trail) for k, one in value.items()}
        if isinstance(value, list):
            return [resolved(one, key, trail) for one in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _WHOLE.fullmatch(value)
        if match is None:
            _refuse_reference(value, key)
        name = match[1]
        if name in trail:
            raise ConfigError(
                f"{key}: {' -> '.join((*trail, name))} is a circle in {source}: write the value"
            )
        given, other = changed(name)
        if given:
            return other
        return resolved(named(name, key), name, (*trail, name))

    def named(name: str, key: str) -> Any:
        value: Any = data
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ConfigError(f"{key}: ${{{name}}} names nothing in {source}: write the value")
            value = value[part]
        return value

    return {k: resolved(one, str(k), ()) for k, one in data.items()}


def _refuse_reference(value: str, key: str) -> NoReturn:
    """Raise ConfigError for a text with ``${`` that is not resolved; the text is not shown."""
    if _ENVIRONMENT.search(value):
        raise ConfigError(
            f"{key}: ${{oc.env:...}} is not resolved: set it by the environment {_variable(key)}"
        )
    raise ConfigError(
        f"{key}: only a complete value ${{section.name}} in a file is resolved: write the value"
    )
