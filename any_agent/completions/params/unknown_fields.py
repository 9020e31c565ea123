"""Parameters without a row, which are recorded or refused, and settings of the chat template.

The settings come as `chat_template_kwargs`, and as switches at the top level.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from any_agent.chat.template_kwargs import SWITCHES
from any_agent.completions.params.parameter import MAX_NOTE_BYTES, Parameter, UnknownParameters
from any_agent.completions.params.schema_check import fits, json_text, shown
from any_agent.completions.params.table import PARAMETERS
from any_agent.errors import InvalidRequest, UnsupportedParameter

MAX_UNKNOWN = 32
_MAX_NAME = 64
_UNPLAIN = re.compile(r"[^A-Za-z0-9._-]")
_SECRET = re.compile(
    r"(api|access|private|session).?key|secret|passw|auth|credential|bearer|cookie|header|"
    r"api_base|base_url|"
    r"(^|[^a-z])(token(?!s)|sk-)",
    re.I,
)
_MEANT = frozenset(row.name for row in PARAMETERS if row.kind != "harmless")
"""Parameters that shape, or would shape, an answer of some API: another API refuses them."""
_NEUTRAL: dict[str, list[Any]] = {
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0],
    "functions": [[]],
    "include": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "min_p": [0],
    "n": [1],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "stop": [[]],
    "stop_sequences": [[]],
    "stop_token_ids": [[]],
    "tools": [[]],
    "top_logprobs": [0],
}
"""Values by which such a parameter asks for nothing, as clients send them by default."""
for _row in PARAMETERS:
    if _row.kind == "refused":
        _NEUTRAL.setdefault(_row.name, []).extend(_row.schema.get("enum", ()))


@dataclass(slots=True)
class UnknownFields:
    """The fields of a body that have no row in its API's table."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields that the model's chat template reads."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """The other fields by plain names, without secrets and what is too large."""
    ignored: list[str] = field(default_factory=list)
    """The plain names of all fields without effect."""

    def ignore(self, name: str, value: Any) -> None:
        """Record a field without effect; InvalidRequest for more than ``MAX_UNKNOWN``."""
        if len(self.ignored) >= MAX_UNKNOWN:
            raise InvalidRequest(
                f"the body has more than {MAX_UNKNOWN} unknown parameters: leave them out",
                param=shown(name)[1:-1],
            )
        plain = _UNPLAIN.sub("_", name) or "_"
        if plain in self.ignored:
            return
        self.ignored.append(plain)
        try:
            text = json_text({**self.recorded, plain: value}, plain, longest=MAX_NOTE_BYTES)
        except InvalidRequest:
            return
        # A key that was sent by mistake must not be recorded.
        if not _SECRET.search(text):
            self.recorded[plain] = value


def rest_of(
    given: Mapping[str, Any],
    table: Mapping[str, Parameter],
    known_settings: Set[str],
    unknown: UnknownParameters,
) -> UnknownFields:
    """Sort the fields without a row.

    Raises UnsupportedParameter for a name that means something in another API, with a value that
    asks for it, or is longer than 64 characters, and for any name where unknown ones are refused;
    InvalidRequest for too many.
    """
    rest = UnknownFields()
    for name, value in given.items():
        if name in known_settings:
            rest.settings[name] = value
        elif unknown != "refuse" and fits(value, {"enum": _NEUTRAL.get(name, [])}):
            rest.recorded[name] = value
        elif unknown == "refuse" or name in _MEANT or len(name) > _MAX_NAME:
            raise _unknown(name, table)
        elif value is not None:
            rest.ignore(name, value)
    return rest


def _unknown(name: Any, table: Mapping[str, Parameter]) -> UnsupportedParameter:
    near = difflib.get_close_matches(str(name)[:64], table, n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not near and name in _MEANT:
        hint = " here: another API has it, where it changes the answer; leave it out"
    return UnsupportedParameter(
        f"unknown parameter {shown(str(name))}{hint}", param=shown(str(name))[1:-1]
    )


_KWARGS = "chat_template_kwargs"
_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


def template_kwargs_of(
    body: Mapping[str, Any],
    rest: UnknownFields,
    known_settings: Set[str],
    unknown: UnknownParameters,
) -> dict[str, Any]:
    """Return the settings of the template, from both forms of giving them.

    A switch that the template lacks is noted in ``rest`` as ignored, or refused. Raises
    InvalidRequest for forms that contradict each other, UnsupportedParameter.
    """
    kwargs = dict(body.get(_KWARGS) or {})
    by_switch = {name: (name, value) for name, value in rest.settings.items() if value is not None}
    for name in SWITCHES:
        given = body.get(name)
        value = _on(name, given)
        if isinstance(given, dict):
            json_text(given, name, longest=MAX_NOTE_BYTES)
            rest.recorded[name] = given
        if value is None:
            continue
        # Either name is meant for the one switch that a template has.
        switch = next((each for each in (name, *SWITCHES) if each in known_settings), None)
        if switch is not None:
            before = by_switch.setdefault(switch, (name, value))
            _require_same(name, value, *before)
        elif unknown == "refuse":
            raise UnsupportedParameter(
                f"{name} is unknown to this model's chat template: leave it out", param=name
            )
        else:
            rest.ignore(name, given)
    for setting, (name, value) in by_switch.items():
        if kwargs.get(setting) is not None:
            _require_same(name, value, f"{_KWARGS}.{setting}", kwargs[setting])
        kwargs[setting] = value
    return kwargs


def _on(name: str, value: Any) -> bool | None:
    """True or False if it switches thinking on or off; None if it leaves that to the run."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, dict) or name != "thinking":
        raise InvalidRequest(f"{name} must be true or false", param=name)
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(
            'thinking must be true, false or {"type": "enabled"} or the like', param=name
        )
    if kind not in _TYPES:
        raise UnsupportedParameter(
            f"thinking.type {shown(kind)} is not supported: it may be {', '.join(_TYPES)}",
            param=name,
        )
    return _TYPES[kind]


def _require_same(name: str, value: Any, other: str, than: Any) -> None:
    if type(value) is not type(than) or value != than:
        raise InvalidRequest(f"{name} and {other} contradict each other: leave one out", param=name)
