"""The laws of a chat format, which need no engine: for the doctor and each proxy's start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.config import Config
from any_agent.doctor.continuation import continuation
from any_agent.doctor.parsing import parsing
from any_agent.doctor.reference_template import OWN_ADVICE, ReferenceTemplate
from any_agent.doctor.rendering import rendering
from any_agent.doctor.verdict import Check, Verdict, broken
from any_agent.errors import ConfigError

log = logging.getLogger(__name__)


async def chat_laws(
    chat: ChatFormat, template_kwargs: Mapping[str, Any], *, named: bool = False
) -> list[Verdict]:
    """Every case of rendering, continuation and parsing; a second at most.

    ``named``: somebody chose the renderer, and answers for it where no template is there.
    """
    template = ReferenceTemplate(chat, template_kwargs)
    if not template.exists:
        return _without_template(chat, named=named)
    out: list[Verdict] = []
    for name, verdicts in (
        ("rendering", rendering(chat, template)),
        ("continuation", continuation(chat, template)),
        ("parsing", parsing(chat, template)),
    ):
        try:
            out += [verdict async for verdict in verdicts]
        except Exception as error:
            # Renderers and templates are foreign code: what they do to us they do to agents.
            log.debug("%s broke off", name, exc_info=True)
            seen = f"the check broke off: {type(error).__name__}: {error}"
            do = "see what any-agent doctor says of the model with model.renderer=default"
            out.append(Check(name).failed("all", seen, OWN_ADVICE if template.is_own else do))
    return out


def _without_template(chat: ChatFormat, *, named: bool) -> list[Verdict]:
    nothing = "the tokenizer has no chat template"
    if named:
        laws = (Check("rendering"), Check("continuation"), Check("parsing"))
        return [law.unchecked("all", f"{nothing} to compare with") for law in laws]
    return [
        Check("rendering").failed(
            "template",
            f"{nothing}: that renderer {chat.name} is this model's is a guess",
            "give it one (chat_template.jinja), or name the model's renderer "
            f"(model.renderer={chat.name})",
        )
    ]


def template_kwargs(config: Config) -> dict[str, Any]:
    """What a run gives its model's template."""
    thinking = config.model.enable_thinking
    return {} if thinking is None else {"enable_thinking": thinking}


async def require_passing(chat: ChatFormat, config: Config, *, training: bool) -> None:
    """ConfigError if a law is broken that training depends on; without training a warning."""
    named = config.model.renderer != "auto"
    failures = broken(await chat_laws(chat, template_kwargs(config), named=named))
    if not failures:
        return
    lines = [f"  {v.law}, {v.case}: {v.seen}\n    to do: {v.do}" for v in failures]
    said = "\n".join(
        [
            f"the chat format of {config.model.path} (renderer {chat.name}) breaks its laws:",
            *dict.fromkeys(lines),
            f"`any-agent doctor {config.model.path} model.renderer={config.model.renderer}` "
            "shows all of them",
        ]
    )
    if training:
        raise ConfigError(f"nothing exact can be trained: {said}")
    log.warning("it is served, but could not be trained exactly: %s", said)
