"""``any-agent doctor``: what is to be examined, and the laws that it is asked about."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from any_agent.auth.access import run_dir_of
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.chat.load import RendererMismatch
from any_agent.config import LOOPBACK, Config, load_config
from any_agent.doctor.engine import engine_laws
from any_agent.doctor.report import as_json, as_text
from any_agent.doctor.service import service_laws
from any_agent.doctor.startup_check import chat_laws, template_kwargs
from any_agent.doctor.verdict import Check, Verdict, broken
from any_agent.engine.sglang.probe import probe_engine
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import SILENT_AFTER, Registry

_SETTING = re.compile(r"-*[a-z_]+(\.[a-z_]+)*=")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_KEYS = ("ANY_AGENT_KEY", "ANY_AGENT_SERVER__ADMIN_KEY")


@dataclass(slots=True)
class Subject:
    """What is examined."""

    config: Config
    run: RunDir | None = None
    """The trial's folder, if a trial is meant and was started."""
    engines: list[str] = field(default_factory=list)
    url: str | None = None
    key: str | None = None
    quick: bool = False


def run(arguments: argparse.Namespace) -> int:
    """Examine, print, and say by the exit code whether a law is broken. Raises ConfigError."""
    subject = _subject(arguments)
    # Foreign libraries warn on standard error about what the table says better.
    logging.disable(logging.WARNING)
    try:
        told, verdicts = asyncio.run(_examine(subject))
        # What clients say of a URL, they say of all of it.
        verdicts = [replace(verdict, seen=_shown(verdict.seen)) for verdict in verdicts]
    finally:
        logging.disable(logging.NOTSET)
    print((as_json if arguments.json else as_text)(told, verdicts))
    sys.stdout.flush()
    return 1 if broken(verdicts) else 0


def _subject(arguments: argparse.Namespace) -> Subject:
    models = [text for text in arguments.overrides if not _SETTING.match(text)]
    settings = [text for text in arguments.overrides if _SETTING.match(text)]
    if len(models) > 1:
        raise ConfigError(f"one model at a time: {models[0]!r}, or {models[1]!r}?")
    settings += [f"model.path={model}" for model in models]
    for name in ("experiment", "trial"):
        if (value := getattr(arguments, name)) is not None:
            settings.append(f"{name}={value}")
    if arguments.renderer is not None:
        settings.append(f"model.renderer={arguments.renderer}")
    named = (arguments.config, arguments.experiment, arguments.trial)
    of_trial = not models or any(name is not None for name in named)
    config = _config(arguments, settings, of_trial=of_trial)
    _check_model(config.model.path)
    run = run_dir_of(config) if of_trial else None
    run = run if run is not None and run.path.is_dir() else None
    engines = list(arguments.engine or config.engine.urls or (_serving(run) if run else ()))
    for url in (*engines, *filter(None, [arguments.url])):
        _check_url(url)
    if not (config.model.path or engines or arguments.url):
        if run is None and (arguments.experiment or arguments.trial):
            raise ConfigError(f"there is no such run: {run_dir_of(config).path} does not exist")
        raise ConfigError(
            "nothing to examine: give a model's folder, --engine URL, --url URL, or the "
            "--experiment and --trial of a run"
        )
    if arguments.quick and not config.model.path:
        raise ConfigError("--quick examines a model's chat format: give its folder")
    key = arguments.key or next(filter(None, map(os.environ.get, _KEYS)), None)
    return Subject(config, run, engines, arguments.url, key, arguments.quick)


def _config(arguments: argparse.Namespace, settings: list[str], *, of_trial: bool) -> Config:
    """The given settings; without a model those of the trial, too."""
    if not of_trial:
        return load_config(arguments.config, settings)
    from any_agent.launcher.trial import resolve_config

    # It may serve others, for which its admin key would be missing here.
    return resolve_config(arguments.config, [*settings, f"server.host={LOOPBACK[0]}"])


def _check_model(path: str) -> None:
    if path and not _is_folder(path) and not _HUB_NAME.fullmatch(path):
        raise ConfigError(f"model path {path!r} is neither a folder nor a name on the hub")


def _check_url(url: str) -> None:
    if not re.match(r"https?://[^/]", url):
        raise ConfigError(f"{_shown(url)!r} is no URL: it begins with http:// or https://")
    try:
        urlsplit(url).port  # noqa: B018 - it is read only then
    except ValueError as error:
        raise ConfigError(f"{_shown(url)!r} is no URL: {error}") from None


def _shown(text: str) -> str:
    """Without the passwords that may stand in its URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


async def _examine(subject: Subject) -> tuple[dict[str, str], list[Verdict]]:
    told: dict[str, str] = {}
    verdicts: list[Verdict] = []
    if not subject.config.model.path and subject.engines:
        subject.config = await _with_engines_model(subject.config, subject.engines[0])
    model = subject.config.model
    known: ChatFormat | None = None
    if model.path:
        told["model"] = model.path
        chat = _load(subject.config)
        if isinstance(chat, Verdict):
            verdicts.append(chat)
        else:
            told["renderer"] = chat.name
            verdicts += await chat_laws(
                chat, template_kwargs(subject.config), named=model.renderer != "auto"
            )
            known = chat
    published = _published(subject)
    if subject.url is not None:
        told["service"] = _shown(subject.url)
        run, found = await service_laws(subject.url, subject.key)
        verdicts += found
        published = run.version if run is not None else published
    if not subject.quick:
        for number, url in enumerate(subject.engines):
            told[f"engine {number}" if len(subject.engines) > 1 else "engine"] = _shown(url)
            found = await engine_laws(
                url, subject.config, known, run=subject.run, published=published
            )
            verdicts += _named(found, url if len(subject.engines) > 1 else None)
    return told, verdicts


async def _with_engines_model(config: Config, url: str) -> Config:
    """The model that the engine says it serves, if its folder is here."""
    async with probe_engine(url, lambda _: "") as asker:
        with suppress(AnyAgentError):
            path = (await asker.model_info()).get("model_path")
            if isinstance(path, str) and _is_folder(path):
                model = config.model.model_copy(update={"path": path})
                return config.model_copy(update={"model": model})
    return config


def _serving(run: RunDir) -> list[str]:
    """The engines of a trial's ranks that are alive."""
    registry = Registry(run.registry)
    registry.refresh()
    urls = []
    for entry in registry.entries():
        with suppress(OSError):
            written = (run.registry / f"{entry.name}.json").stat().st_mtime
            if entry.engine_url is not None and time.time() - written < SILENT_AFTER:
                urls.append(entry.engine_url)
    return sorted(urls)


def _named(verdicts: list[Verdict], url: str | None) -> list[Verdict]:
    """Of one engine of several, which one."""
    if url is None:
        return verdicts
    place = _shown(url).partition("://")[2]
    return [replace(verdict, case=f"{verdict.case} ({place})") for verdict in verdicts]


def _published(subject: Subject) -> int | None:
    """The newest version that the trial has weights of; None where there is no trial."""
    from any_agent.launcher.trial import newest_weights

    if subject.run is None:
        return None
    weights = newest_weights(subject.config)
    return weights.version if weights is not None else 0


def _load(config: Config) -> ChatFormat | Verdict:
    """The chat format, or that it is not the template's. Raises ConfigError."""
    model = config.model
    try:
        return load_chat_format(
            model.path,
            renderer=model.renderer,
            enable_thinking=model.enable_thinking,
            thinking_retention=model.thinking_retention,
        )
    except RendererMismatch as error:
        return Check("rendering").failed(
            "template",
            error.message,
            "set model.renderer to this model's family, or to default for its own template",
        )
