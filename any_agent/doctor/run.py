"""``any-agent doctor``: read its arguments, and check the laws of the subject that they name."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from any_agent.auth.access import run_dir_of
from any_agent.auth.engine_key import key_of_engines
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.chat.load import RendererMismatch
from any_agent.config import LOOPBACK, Config, load_config
from any_agent.doctor.engine import engine_laws
from any_agent.doctor.rendering import LAW as RENDERING
from any_agent.doctor.service import service_laws
from any_agent.doctor.startup_check import chat_laws, template_kwargs
from any_agent.doctor.verdict import Verdict, as_json, as_text, broken
from any_agent.engine.sglang.probe import probe_engine
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.keys import operator_key
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import SILENT_AFTER, Registry

_SETTING = re.compile(r"-*[a-z_]+(\.[a-z_]+)*=")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(slots=True)
class Subject:
    """The model, the engines and the service to check."""

    config: Config
    run: RunDir | None = None
    """The trial's folder, if a trial is named and was started."""
    engines: dict[str, str | None] = field(default_factory=dict)
    """The engines' URLs and keys."""
    url: str | None = None
    key: str | None = None
    quick: bool = False


def run(arguments: argparse.Namespace) -> int:
    """Check, print the report, and return 1 if a law is broken. Raises ConfigError."""
    subject = _subject(arguments)
    # Foreign libraries warn about failures that the table explains better.
    logging.disable(logging.WARNING)
    try:
        names, verdicts = asyncio.run(_check(subject))
    finally:
        logging.disable(logging.NOTSET)
    # Clients quote complete URLs in their errors.
    verdicts = [replace(v, seen=_without_passwords(v.seen)) for v in verdicts]
    print((as_json if arguments.json else as_text)(names, verdicts))
    sys.stdout.flush()
    return 1 if broken(verdicts) else 0


def _subject(arguments: argparse.Namespace) -> Subject:
    models = [text for text in arguments.overrides if not _SETTING.match(text)]
    settings = [text for text in arguments.overrides if _SETTING.match(text)]
    if len(models) > 1:
        raise ConfigError(f"give one model at a time, not {models[0]!r} and {models[1]!r}")
    settings += [f"model.path={model}" for model in models]
    trial = {"experiment": arguments.experiment, "trial": arguments.trial}
    short = trial | {"model.renderer": arguments.renderer}
    settings += [f"{name}={value}" for name, value in short.items() if value is not None]
    named = (arguments.config, *trial.values())
    of_trial = not models or any(name is not None for name in named)
    config = _config(arguments, settings, of_trial=of_trial)
    path = config.model.path
    if path and not Path(path).is_dir() and not _HUB_NAME.fullmatch(path):
        raise ConfigError(f"model path {path!r} is neither a folder nor a name on the hub")
    run = run_dir_of(config) if of_trial else None
    run = run if run is not None and run.path.is_dir() else None
    known = _engines_of(run) if run else []
    engines = list(arguments.engine or config.engine.urls or known)
    for url in (*engines, *filter(None, [arguments.url])):
        _check_url(url)
    if not (config.model.path or engines or arguments.url):
        if run is None and (arguments.experiment or arguments.trial):
            raise ConfigError(f"there is no such run: {run_dir_of(config).path} does not exist")
        raise ConfigError(
            "nothing to check: give a model's folder, --engine URL, --url URL, or the "
            "--experiment and --trial of a run"
        )
    if arguments.quick and not config.model.path:
        raise ConfigError("--quick checks a model's chat format: give the model's folder")
    key, _ = operator_key(arguments.key)
    # A run's key is for its own engines: another address may be anybody's.
    own = key_of_engines(config) if any(url in known for url in engines) else None
    keys = {url: own if url in known else config.engine.secret_key for url in engines}
    return Subject(config, run, keys, arguments.url, key, arguments.quick)


def _config(arguments: argparse.Namespace, settings: list[str], *, of_trial: bool) -> Config:
    """Load the given settings; without a model also those of the trial."""
    if not of_trial:
        return load_config(arguments.config, settings)
    from any_agent.launcher.trial import resolve_config

    # The run may listen on other addresses, for which the settings here lack its admin key.
    return resolve_config(arguments.config, [*settings, f"server.host={LOOPBACK[0]}"])


def _check_url(url: str) -> None:
    shown = _without_passwords(url)
    if not re.match(r"https?://[^/]", url):
        raise ConfigError(f"{shown!r} is no URL: a URL begins with http:// or https://")
    try:
        urlsplit(url).port  # noqa: B018 - reading the port checks it
    except ValueError as error:
        raise ConfigError(f"{shown!r} is no URL: {error}") from None


def _without_passwords(text: str) -> str:
    """Return the text with the passwords in its URLs removed."""
    return re.sub(r"//[^/@\s]*@", "//", text)


async def _check(subject: Subject) -> tuple[dict[str, str], list[Verdict]]:
    """Return the names of the checked parts, and the verdicts."""
    names: dict[str, str] = {}
    verdicts: list[Verdict] = []
    if not subject.config.model.path and subject.engines:
        url, key = next(iter(subject.engines.items()))
        subject.config = await _with_model_of(url, key, subject.config)
    model = subject.config.model
    known: ChatFormat | None = None
    if model.path:
        names["model"] = model.path
        chat = _load(subject.config)
        if isinstance(chat, Verdict):
            verdicts.append(chat)
        else:
            names["renderer"] = chat.name
            verdicts += await chat_laws(
                chat, template_kwargs(subject.config), named=model.renderer != "auto"
            )
            known = chat
    published = _published(subject)
    if subject.url is not None:
        names["service"] = _without_passwords(subject.url)
        run, found = await service_laws(subject.url, subject.key)
        verdicts += found
        published = run.version if run is not None else published
    if subject.quick:
        return names, verdicts
    several = len(subject.engines) > 1
    for number, (url, key) in enumerate(subject.engines.items()):
        shown = _without_passwords(url)
        names[f"engine {number}" if several else "engine"] = shown
        found = await engine_laws(
            url, subject.config, known, key=key, run=subject.run, published=published
        )
        if several:
            place = shown.partition("://")[2]
            found = [replace(verdict, case=f"{verdict.case} ({place})") for verdict in found]
        verdicts += found
    return names, verdicts


async def _with_model_of(url: str, key: str | None, config: Config) -> Config:
    """Set the model that the engine reports, if its folder is on this machine."""
    async with probe_engine(url, key=key) as engine:
        with suppress(AnyAgentError):
            path = (await engine.info()).get("model_path")
            if isinstance(path, str) and await asyncio.to_thread(Path(path).is_dir):
                model = config.model.model_copy(update={"path": path})
                return config.model_copy(update={"model": model})
    return config


def _engines_of(run: RunDir) -> list[str]:
    """Return the engines of a trial's live ranks."""
    registry = Registry(run.registry)
    registry.refresh()
    urls = []
    for entry in registry.entries():
        with suppress(OSError):
            written = (run.registry / f"{entry.name}.json").stat().st_mtime
            if entry.engine_url is not None and time.time() - written < SILENT_AFTER:
                urls.append(entry.engine_url)
    return sorted(urls)


def _published(subject: Subject) -> int | None:
    """Return the newest version of the trial's weights, or None without a trial."""
    from any_agent.launcher.trial import newest_weights

    if subject.run is None:
        return None
    weights = newest_weights(subject.config)
    return weights.version if weights is not None else 0


def _load(config: Config) -> ChatFormat | Verdict:
    """Return the chat format, or a failure if it is not the template's. Raises ConfigError."""
    model = config.model
    try:
        return load_chat_format(
            model.path,
            renderer=model.renderer,
            enable_thinking=model.enable_thinking,
            thinking_retention=model.thinking_retention,
        )
    except RendererMismatch as error:
        advice = "set model.renderer to this model's family, or to default for its own template"
        return RENDERING.failed("template", error.message, advice)
