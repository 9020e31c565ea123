"""The laws of a chat format, which the doctor and the start of each proxy check."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.config import Config
from any_agent.doctor import continuation, parsing, rendering
from any_agent.doctor.reference_template import ReferenceTemplate
from any_agent.doctor.verdict import Verdict, broken
from any_agent.errors import ConfigError

log = logging.getLogger(__name__)


async def chat_laws(
    chat: ChatFormat, template_kwargs: Mapping[str, Any], *, named: bool = False
) -> list[Verdict]:
    """Check every case of rendering, continuation and parsing, in a second at most.

    ``named``: the renderer was chosen by name, so it is accepted where there is no template.
    """
    template = ReferenceTemplate(chat, template_kwargs)
    if not template.exists:
        return _without_template(chat, named=named)
    out: list[Verdict] = []
    for law, verdicts in (
        (rendering.LAW, rendering.rendering(chat, template)),
        (continuation.LAW, continuation.continuation(chat, template)),
        (parsing.LAW, parsing.parsing(chat, template)),
    ):
        try:
            out += [verdict async for verdict in verdicts]
        except Exception as error:
            # Renderers and templates are foreign code, and may fail agents in the same way.
            log.debug("the check of %s broke off", law.name, exc_info=True)
            seen = f"the check broke off: {type(error).__name__}: {error}"
            do = "run any-agent doctor for this model with model.renderer=default"
            out.append(law.failed("all", seen, template.advice(do)))
    return out


def _without_template(chat: ChatFormat, *, named: bool) -> list[Verdict]:
    missing = "the tokenizer has no chat template"
    if named:
        laws = (rendering.LAW, continuation.LAW, parsing.LAW)
        return [law.unchecked("all", f"{missing} to compare with") for law in laws]
    return [
        rendering.LAW.failed(
            "template",
            f"{missing}, so the renderer {chat.name} is only a guess",
            "give it one (chat_template.jinja), or name the model's renderer "
            f"(model.renderer={chat.name})",
        )
    ]


def template_kwargs(config: Config) -> dict[str, Any]:
    """Return the arguments that a run passes to its model's template."""
    thinking = config.model.enable_thinking
    return {} if thinking is None else {"enable_thinking": thinking}


async def require_passing(chat: ChatFormat, config: Config, *, training: bool) -> None:
    """Raise ConfigError if a law is broken; log a warning instead without training."""
    named = config.model.renderer != "auto"
    failures = broken(await chat_laws(chat, template_kwargs(config), named=named))
    if not failures:
        return
    lines = [f"  {v.law}, {v.case}: {v.seen}\n    to do: {v.do}" for v in failures]
    report = "\n".join(
        [
            f"the chat format of {config.model.path} (renderer {chat.name}) breaks its laws:",
            *dict.fromkeys(lines),
            f"`any-agent doctor {config.model.path} model.renderer={config.model.renderer}` "
            "shows all verdicts",
        ]
    )
    if training:
        raise ConfigError(f"nothing exact can be trained: {report}")
    log.warning("the model is served, but could not be trained exactly: %s", report)
