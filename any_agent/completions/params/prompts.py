"""The prompts of a legacy completion: texts or token ids."""

from __future__ import annotations

from typing import Any

from any_agent.completions.params.call import TextInput
from any_agent.completions.params.parameter import MAX_CHOICES, MAX_PROMPT_IDS
from any_agent.errors import ContextLengthExceeded, InvalidRequest


def prompts_of(value: Any) -> tuple[TextInput, ...]:
    """Each of the prompts, of which OpenAI's API has four forms."""
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list) or not value:
        raise _wrong()
    if isinstance(value[0], int):
        return (_ids(value),)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(
            f"there are {len(value)} prompts, and there may be {MAX_CHOICES} in one request",
            param="prompt",
        )
    return tuple(_text(each) if isinstance(each, str) else _ids(each) for each in value)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "prompt has a lone surrogate: send valid Unicode", param="prompt"
        ) from None
    if not text:
        raise InvalidRequest("prompt is empty: an answer needs a token to follow", param="prompt")
    return text


def _ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise _wrong()
    if len(ids) > MAX_PROMPT_IDS:
        raise ContextLengthExceeded(
            f"a prompt has {len(ids)} token ids: no context is so long", param="prompt"
        )
    # Quick, because there may be a million; and bool is another type.
    if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= 2**31:
        raise InvalidRequest("prompt has an id that is no token's", param="prompt")
    return tuple(ids)


def _wrong() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, "
        "none of them empty",
        param="prompt",
    )
