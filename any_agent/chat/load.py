"""Finding a model's tokenizer and renderer, and proving that they agree."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from any_agent.chat.format import ChatFormat
from any_agent.errors import ConfigError
from any_agent.types import Message, Tool

log = logging.getLogger(__name__)

_BY_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "kimi_k2": "kimi-k2",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PROBE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Sum 1 and 2, né?"},
]
_PROBE_TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def load_chat_format(
    model_path: str,
    *,
    renderer: str = "auto",
    enable_thinking: bool | None = False,
    thinking_retention: str = "all",
    trust_remote_code: bool = False,
) -> ChatFormat:
    """The chat format of a local model directory, or of a name on the Hugging Face hub.

    ``renderer`` names one of PyPI's ``renderers``; ``auto`` takes the tokenizer's own family
    where that renders a probe exactly as the tokenizer's template does, else the template.
    ``enable_thinking`` None leaves it to the template. ``thinking_retention``: ``all`` keeps
    earlier reasoning in the context, so that every turn continues exactly; ``tool_cycle`` ends
    the exact continuation at a new user message, as the Qwen3 template would; ``template``
    leaves it to the family.

    Raises:
        ConfigError: no such path, no tokenizer, no template, or one that cannot be rendered.
    """
    if thinking_retention not in ("all", "tool_cycle", "template"):
        raise ConfigError(
            f"thinking_retention is {thinking_retention!r}: use all, tool_cycle or template"
        )
    local = Path(model_path).is_dir()
    tokenizer = _load_tokenizer(model_path, local=local, trust_remote_code=trust_remote_code)
    name = _family(tokenizer, model_path, local=local) if renderer == "auto" else renderer
    made = _make(tokenizer, name, enable_thinking, thinking_retention)
    difference = _difference(tokenizer, made, enable_thinking)
    if difference and renderer == "auto" and name != "default":
        log.warning("%s: renderer %s: %s; using the chat template", model_path, name, difference)
        made = _make(tokenizer, "default", enable_thinking, thinking_retention)
        difference = _difference(tokenizer, made, enable_thinking)
    if difference:
        raise ConfigError(
            f"{model_path}: renderer {made.config.name} {difference}. Set the renderer of this "
            "model's family, or renderer: default for its own template"
        )
    stops = [*made.get_stop_token_ids(), *_generation_stops(model_path, local=local)]
    keep_thinking = thinking_retention == "all"
    return ChatFormat(tokenizer, made, stops, keep_thinking=keep_thinking)


def _load_tokenizer(model_path: str, *, local: bool, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if not local and not _HUB_NAME.fullmatch(model_path):
        raise ConfigError(f"model path {model_path!r} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_path, local_files_only=local, trust_remote_code=trust_remote_code
        )
    except Exception as e:
        where = "has no tokenizer that loads" if local else "is no directory, nor a loadable model"
        raise ConfigError(f"model path {model_path!r} {where}: {e}") from e
    if not getattr(tokenizer, "is_fast", True):
        log.warning("%s has a slow tokenizer; rendering will take long", model_path)
    return tokenizer


def _family(tokenizer: Any, model_path: str, *, local: bool) -> str:
    from renderers.base import MODEL_RENDERER_MAP

    by_name = MODEL_RENDERER_MAP.get(model_path) or MODEL_RENDERER_MAP.get(
        str(getattr(tokenizer, "name_or_path", ""))
    )
    if by_name is not None:
        return str(by_name)
    model_type = _read_config(model_path, "config.json", local=local).get("model_type")
    return _BY_MODEL_TYPE.get(str(model_type), "default")


def _make(tokenizer: Any, name: str, enable_thinking: bool | None, thinking_retention: str) -> Any:
    from renderers import config_from_name, create_renderer

    try:
        base = config_from_name(name)
    except ValueError as e:
        raise ConfigError(f"there is no renderer {name!r}: use auto, or {e}") from e
    fields: dict[str, Any] = {}
    if enable_thinking is not None and (
        name == "default" or "enable_thinking" in type(base).model_fields
    ):
        fields["enable_thinking"] = enable_thinking
    if name != "default" and thinking_retention != "template":
        fields["thinking_retention"] = thinking_retention
    try:
        return create_renderer(tokenizer, type(base)(**fields))
    except Exception as e:
        raise ConfigError(f"renderer {name} does not fit this tokenizer: {e}") from e


def _difference(tokenizer: Any, renderer: Any, enable_thinking: bool | None) -> str | None:
    """What is wrong with a first turn rendered by this renderer; None if nothing is."""
    is_template = renderer.config.name == "default"
    if not getattr(tokenizer, "chat_template", None):
        return "needs a chat template and the tokenizer has none" if is_template else None
    rendered = 0
    # Not every template takes a system message, or tools; the ones it takes must agree.
    for messages in (_PROBE, _PROBE[1:]):
        for tools in (None, _PROBE_TOOLS):
            kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
            try:
                own = tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    **kwargs,
                )
            except Exception as e:
                failure = f"{type(e).__name__}: {e}"
                continue
            rendered += 1
            try:
                ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            except Exception as e:
                return f"cannot render a probe that the chat template can: {e}"
            if list(ids) != list(own):
                return "does not render a first turn as the model's own chat template does"
    return None if rendered else f"meets a chat template that cannot be rendered: {failure}"


def _generation_stops(model_path: str, *, local: bool) -> list[int]:
    """The end tokens of generation_config.json, where a model keeps more than one."""
    eos = _read_config(model_path, "generation_config.json", local=local).get("eos_token_id")
    values = eos if isinstance(eos, list) else [eos]
    return [i for i in values if isinstance(i, int)]


def _read_config(model_path: str, name: str, *, local: bool) -> dict[str, Any]:
    if local:
        path: str | None = str(Path(model_path) / name)
    else:
        from transformers.utils import cached_file

        path = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
    try:
        value = json.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
