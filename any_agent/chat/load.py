"""Loading of chat formats: find a model's tokenizer and renderer, and check that they agree."""

from __future__ import annotations

import json
import logging
import re
from functools import cache, lru_cache, wraps
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from any_agent.chat.bridge import TemplateRenderer
from any_agent.chat.bridge_probes import CONTINUATION_EXAMPLES
from any_agent.chat.families import BY_MODEL_TYPE, BY_NAME
from any_agent.chat.format import ChatFormat
from any_agent.chat.format_probes import SYSTEM, TOOLS, USER
from any_agent.chat.prompt_renderer import LibraryRenderer, PromptRenderer
from any_agent.chat.template import ChatTemplate
from any_agent.chat.tool_visibility import tool_visibility
from any_agent.errors import ConfigError

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_NO_PATH = "(a tokenizer without a path)"
_Location: TypeAlias = Literal["folder", "hub", "cache"]
"""The place of a model's small files: its folder, the Hugging Face hub, or the local cache of
files fetched from the hub before."""


class RendererMismatch(ConfigError):
    """The configured renderer writes another prompt than the model's own template."""


def load_chat_format(
    model: str | PathLike[str] | Any,
    *,
    renderer: str = "auto",
    enable_thinking: bool | None = False,
    thinking_retention: str = "all",
) -> ChatFormat:
    """Load the chat format of a model folder, of a name on the Hugging Face hub, or of a tokenizer.

    The other files of a tokenizer of transformers are read from where it came from, if they are on
    this machine. ``auto`` writes with the tokenizer's own chat template, and knows the family by
    name where PyPI's ``renderers`` agrees with it; without a template it writes with the family's
    renderer. Any other ``renderer`` is one of these, by name, and writes itself; ``default``
    is the template of no known family. ``enable_thinking`` None leaves it to the template.
    ``thinking_retention``: ``all`` keeps earlier reasoning in the context, so that every turn
    continues exactly; ``tool_cycle`` ends the exact continuation at a new user message, as the
    Qwen3 template would; ``template`` ends it wherever the template takes reasoning out.

    Raises:
        ConfigError: no such path, no tokenizer, no template, or one that cannot be rendered.
    """
    if thinking_retention not in ("all", "tool_cycle", "template"):
        raise ConfigError(
            f"thinking_retention is {thinking_retention!r}: use all, tool_cycle or template"
        )
    by_path = isinstance(model, str | PathLike)
    path = str(model if by_path else getattr(model, "name_or_path", "") or _NO_PATH)
    location: _Location = "hub" if by_path else "cache"
    if Path(path).is_dir():
        location = "folder"
    tokenizer = _load_tokenizer(path) if by_path else model
    loaded = _LoadedModel(path, tokenizer, enable_thinking, thinking_retention)
    return _make_format(loaded, location, renderer)


def chat_format_for(
    tokenizer: ChatFormat | str | PathLike[str] | Any,
    *,
    renderer: str = "auto",
    enable_thinking: bool | None = None,
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all",
) -> ChatFormat:
    """Return a cached chat format; loading one takes a second.

    ``tokenizer`` is a tokenizer of transformers, or the path or hub name of one; a chat format is
    returned as it is. Settings and errors are those of :func:`load_chat_format`.
    """
    if isinstance(tokenizer, ChatFormat):
        return tokenizer
    settings = (renderer, enable_thinking, thinking_retention)
    if isinstance(tokenizer, str | PathLike):
        return _cached_format(str(tokenizer), None, *settings)
    template = getattr(tokenizer, "chat_template", None)
    # A template may be set on it later; some models have several, by name.
    key = template if isinstance(template, str | None) else repr(template)
    return _cached_format(tokenizer, key, *settings)


@lru_cache(maxsize=8)
def _cached_format(
    tokenizer: Any, template: str | None, renderer: str, thinking: bool | None, retention: str
) -> ChatFormat:
    """Load by path or tokenizer; ``template`` is a part of the cache's key only."""
    return load_chat_format(
        tokenizer, renderer=renderer, enable_thinking=thinking, thinking_retention=retention
    )


def load_hf_tokenizer(path: str) -> Any:
    """Load the tokenizer of a local model folder, or of a name on the Hugging Face hub.

    It pads with its end-of-sequence token where the model names no other. Its
    ``apply_chat_template`` returns the list of token ids, as a request takes it and ``decode``
    reads it; ``return_dict=True`` gives transformers' mapping with a mask beside them. Raises
    ConfigError where there is no tokenizer.
    """
    tokenizer = _load_tokenizer(path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.__class__ = _with_lists(tokenizer.__class__)
    return tokenizer


@cache
def _with_lists(base: Any) -> Any:
    """Return a tokenizer class whose ``apply_chat_template`` returns lists by default.

    The class has its base's name, which transformers writes into a saved tokenizer's files.
    """

    @wraps(base.apply_chat_template)
    def apply_chat_template(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.apply_chat_template(self, *args, **{"return_dict": False} | kwargs)

    def reduce(self: Any, _: Any) -> tuple[Any, ...]:
        # No module has this class, so a copy is made of its base, here and in other processes.
        return _blank, (base,), self.__getstate__()

    methods = {"apply_chat_template": apply_chat_template, "__reduce_ex__": reduce}
    named = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), methods | named)


def _blank(base: Any) -> Any:
    """Return a tokenizer of such a class, without its state."""
    made = _with_lists(base)
    return made.__new__(made)


def _make_format(model: _LoadedModel, location: _Location, renderer: str) -> ChatFormat:
    model_path, tokenizer = model.path, model.tokenizer
    if renderer == "auto":
        name, library = model.known_family(_family(tokenizer, model_path, location))
    else:
        name, library = renderer, model.renderer(renderer)
        if difference := model.difference(library):
            raise RendererMismatch(
                f"{model_path}: renderer {name} {difference}. Set the renderer of this "
                "model's family, or renderer: default for its own template"
            )
    family = BY_NAME.get(name)
    vocab = tokenizer.get_vocab()
    named = [vocab[token] for token in (family.stops if family else ()) if token in vocab]
    stops = [*named, *library.get_stop_token_ids(), *_generation_stops(model_path, location)]
    prompts: PromptRenderer
    if model.template is not None and (renderer == "auto" or name == "default"):
        prompts = TemplateRenderer(
            model.template,
            tuple(dict.fromkeys(stops)),
            retention=model.retention,
            may_think=model.enable_thinking is not False,
        )
    else:
        prompts = LibraryRenderer(tokenizer, library, stops)
    chat = ChatFormat(
        tokenizer, library, stops, prompts, name=name, keeps_thinking=model.retention == "all"
    )
    _ = chat.nameless_roles  # Now, and not amid the first call.
    visibility = tool_visibility(chat)
    if not visibility.tools:
        log.info(
            "%s: the chat template shows no tools; requests with tools are %s",
            model_path,
            "accepted, and calls are parsed" if visibility.calls else "refused",
        )
    for n, (case, roles) in enumerate(CONTINUATION_EXAMPLES.items()):
        if refusal := prompts.check_continuation(**roles).refusal:
            # Without the first no conversation is continued; the others not every template has.
            level = logging.INFO if n else logging.WARNING
            log.log(level, "%s: no exact continuation for %s: %s", model_path, case, refusal)
    return chat


class _LoadedModel:
    """One tokenizer with its template, if it has one, and the renderers that fit it."""

    def __init__(
        self, path: str, tokenizer: Any, enable_thinking: bool | None, retention: str
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.retention = retention
        settings = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        has = bool(getattr(tokenizer, "chat_template", None))
        self.template = ChatTemplate(tokenizer, settings) if has else None
        if self.template is not None:
            self._require_syntax(self.template)

    def _require_syntax(self, template: ChatTemplate) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            _ = template.known_settings
        except TemplateSyntaxError as e:
            raise ConfigError(
                f"the chat template of {self.path} is no valid Jinja: line {e.lineno}: {e.message}"
            ) from None
        except Exception as e:
            raise ConfigError(f"the chat template of {self.path} cannot be read: {e}") from e

    def known_family(self, name: str) -> tuple[str, Any]:
        """Return the family's name and renderer if they match the template, else the default."""
        family = BY_NAME.get(name)
        vocab = self.tokenizer.get_vocab()
        if name == "default" or (family and any(t not in vocab for t in family.stops[:1])):
            return "default", self._default()
        try:
            library = self.renderer(name)
        except ConfigError as e:
            if self.template is None:
                raise
            # The renderer may need a vocabulary that is not here; the template is.
            log.info("%s: %s; its chat template is used", self.path, e)
            return name, self._default()
        difference = self.difference(library)
        if difference is None:
            return name, library
        log.warning("%s: renderer %s: %s; using the chat template", self.path, name, difference)
        return "default", self._default()

    def _default(self) -> Any:
        library = self.renderer("default")
        if difference := self.difference(library):
            raise ConfigError(f"{self.path}: renderer default {difference}")
        return library

    def renderer(self, name: str) -> Any:
        if name == "default" and self.template is None:
            raise ConfigError(
                f"{self.path}: the tokenizer has no chat template: give it one "
                "(chat_template.jinja), or name this model's renderer (model.renderer)"
            )
        return _make(self.tokenizer, name, self.enable_thinking, self.retention)

    def difference(self, renderer: Any) -> str | None:
        """Return what is wrong with a first turn by this renderer; None if nothing is."""
        template = self.template
        if template is None:
            return None
        is_template = renderer.config.name == "default"
        if "date_string" in template.known_settings:
            # Both would write today's date, or one of them a fixed date.
            date = getattr(renderer.config, "date_string", None)
            template = template.with_settings({**template.settings, "date_string": date})
        rendered = 0
        # Not every template takes a system message, or tools; the ones it takes must agree.
        for messages in ([SYSTEM, USER], [USER]):
            for tools in (None, TOOLS):
                try:
                    text = template.text(messages, tools, generation=True)
                except Exception as e:
                    failure = f"{type(e).__name__}: {e}"
                    continue
                rendered += 1
                try:
                    ids = (
                        template.encode(text)
                        if is_template
                        else renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
                    )
                except Exception as e:
                    return f"cannot render a probe that the chat template can: {e}"
                if list(ids) != list(self.tokenizer.encode(text, add_special_tokens=False)):
                    return "does not render a first turn as the model's own chat template does"
        return None if rendered else f"meets a chat template that cannot be rendered: {failure}"


def _load_tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    local = Path(model_path).is_dir()
    if not local and not _HUB_NAME.fullmatch(model_path):
        raise ConfigError(f"model path {model_path!r} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_path, local_files_only=local, trust_remote_code=False
        )
    except Exception as e:
        where = "has no tokenizer that loads" if local else "is no directory, nor a loadable model"
        raise ConfigError(f"model path {model_path!r} {where}: {e}") from e
    if not getattr(tokenizer, "is_fast", True):
        log.warning("%s has a slow tokenizer; rendering will take long", model_path)
    return tokenizer


def _family(tokenizer: Any, model_path: str, location: _Location) -> str:
    from renderers.base import MODEL_RENDERER_MAP

    by_name = MODEL_RENDERER_MAP.get(model_path) or MODEL_RENDERER_MAP.get(
        str(getattr(tokenizer, "name_or_path", ""))
    )
    if by_name is not None:
        return str(by_name)
    model_type = _read_config(model_path, "config.json", location).get("model_type")
    name = BY_MODEL_TYPE.get(str(model_type), "default")
    if name == "deepseek-v3" and "<think>" in str(getattr(tokenizer, "chat_template", "")):
        # R1 has V3's model type, but its template opens the reasoning itself.
        return "deepseek-r1"
    return name


def _make(tokenizer: Any, name: str, enable_thinking: bool | None, thinking_retention: str) -> Any:
    from renderers import config_from_name, create_renderer

    try:
        base = config_from_name(name)
    except ValueError as e:
        known = re.findall(r"'([\w.-]+)'", str(e).partition("Known:")[2])
        names = ", ".join(name for name in known if name != "auto") or "default"
        raise ConfigError(f"there is no renderer {name!r}: use auto, or one of {names}") from e
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


def _generation_stops(model_path: str, location: _Location) -> list[int]:
    """Return the end tokens of generation_config.json, where a model lists more than one."""
    eos = _read_config(model_path, "generation_config.json", location).get("eos_token_id")
    values = eos if isinstance(eos, list) else [eos]
    return [i for i in values if isinstance(i, int)]


def _read_config(model_path: str, name: str, location: _Location) -> dict[str, Any]:
    path: str | Path | None = None
    if location == "folder":
        path = Path(model_path) / name
    elif _HUB_NAME.fullmatch(model_path):
        from transformers.utils import cached_file

        path = cached_file(
            model_path,
            name,
            local_files_only=location == "cache",
            _raise_exceptions_for_missing_entries=False,
        )
    try:
        value = json.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
