"""Parameters that no row has, and switches of the chat template at the top level."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from any_agent.completions.params.unknown_fields import MAX_UNKNOWN
from any_agent.errors import InvalidRequest, UnsupportedParameter
from tests.support.completions.params import BODIES, parse
from tests.support.errors import fails_with

CHATS: tuple[str, ...] = ("chat", "responses", "messages")
REFUSE = {"unknown": "refuse"}


def switched(*known: str, **more: Any) -> dict[str, Any]:
    return {"known_settings": frozenset(known), **more}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("api", BODIES)
def test_one_is_recorded_and_changes_nothing(api: str, mode: str) -> None:
    call = parse(mode, api=api, beam_width=7, empty=None)
    plain = parse(mode, api=api)
    assert (call.recorded, call.ignored) == ({"beam_width": 7}, ("beam_width",))
    assert (call.gconfig, call.messages, call.template_kwargs, call.untrainable) == (
        (plain.gconfig, plain.messages, plain.template_kwargs, plain.untrainable)
    )
    with fails_with(UnsupportedParameter, param="beam_width"):
        parse(mode, api=api, told=REFUSE, beam_width=7)
    with fails_with(UnsupportedParameter, param="empty"):
        parse(mode, api=api, told=REFUSE, empty=None)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("a b\r\nx-any-agent-session: 1", "a_b__x-any-agent-session__1"),
        ("x" * 64, "x" * 64),
        ("", "_"),
        ("\ud800é", "__"),
    ],
)
def test_names_are_made_plain(name: str, plain: str) -> None:
    call = parse(**{name: 1})
    assert (call.ignored, call.recorded) == ((plain,), {plain: 1})
    with pytest.raises(UnsupportedParameter):
        parse(**{"x" * 65: 1})


def test_the_number_of_unknown_parameters_is_bounded() -> None:
    many = {f"p{k}": k for k in range(MAX_UNKNOWN)}
    assert parse(**many).recorded == many
    with fails_with(InvalidRequest, "32", param="one_more"):
        parse(**many, one_more=1)


@pytest.mark.parametrize("value", ["x" * 20_000, "\ud800", 2**70, {"a": ["x" * 20_000]}])
def test_what_is_too_large_or_no_json_is_only_named(value: Any) -> None:
    call = parse(odd=value, plain=1)
    assert (call.recorded, call.ignored) == ({"plain": 1}, ("odd", "plain"))
    both = parse(one="x" * 9000, two="y" * 9000)
    assert (list(both.recorded), both.ignored) == (["one"], ("one", "two"))


@pytest.mark.parametrize(
    "given",
    [
        {"api_key": "abc"},
        {"litellm_params": {"apiKey": "abc"}},
        {"extra_headers": {"x": "abc"}},
        {"hf_token": "abc"},
        {"note": "it is sk-abc"},
        {"password": "abc"},
        {"api_base": "http://u:abc@host"},
    ],
    ids=str,
)
def test_keys_are_not_kept(given: dict[str, Any]) -> None:
    call = parse(**given)
    assert call.ignored == tuple(given)
    assert b"abc" not in orjson.dumps(call.recorded)


@pytest.mark.parametrize("told", [{}, REFUSE])
@pytest.mark.parametrize(
    ("api", "name"),
    [
        ("chat", "max_output_tokens"),
        ("completions", "tools"),
        ("responses", "messages"),
        ("responses", "logprobs"),
        ("messages", "n"),
        ("messages", "audio"),
    ],
)
def test_what_means_something_at_another_route_is_refused(
    api: str, name: str, told: dict[str, Any]
) -> None:
    with fails_with(UnsupportedParameter, param=name):
        parse(api=api, told=told, **{name: 2})


@pytest.mark.parametrize(
    ("api", "name", "value"),
    [
        ("chat", "echo", False),
        ("chat", "best_of", 1),
        ("chat", "background", False),
        ("chat", "mcp_servers", []),
        ("completions", "tools", []),
        ("completions", "documents", []),
        ("responses", "n", 1),
        ("responses", "logprobs", False),
        ("messages", "frequency_penalty", 0.0),
        ("messages", "stop", []),
    ],
)
def test_a_value_that_asks_for_nothing_is_recorded(api: str, name: str, value: Any) -> None:
    call = parse(api=api, **{name: value})
    assert (call.recorded, call.ignored) == ({name: value}, ())
    assert call.gconfig == parse(api=api).gconfig
    with fails_with(UnsupportedParameter, param=name):
        parse(api=api, told=REFUSE, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("echo", 0), ("best_of", True), ("best_of", 2)])
def test_a_value_of_another_type_asks_for_something(name: str, value: Any) -> None:
    with fails_with(UnsupportedParameter, param=name):
        parse(**{name: value})


# -- the template's own -------------------------------------------------------------------------


@pytest.mark.parametrize("api", CHATS)
@pytest.mark.parametrize("on", [True, False])
def test_a_switch_is_as_in_template_kwargs(api: str, on: bool) -> None:
    told = switched("enable_thinking")
    inside = parse(api=api, told=told, chat_template_kwargs={"enable_thinking": on})
    assert parse(api=api, told=told, enable_thinking=on) == inside
    both = {"enable_thinking": on, "chat_template_kwargs": {"enable_thinking": on}}
    assert parse(api=api, told=told, **both) == inside
    assert inside.template_kwargs == {"enable_thinking": on}
    both["chat_template_kwargs"] = {"enable_thinking": not on}
    with fails_with(InvalidRequest, param="enable_thinking"):
        parse(api=api, told=told, **both)


@pytest.mark.parametrize("api", CHATS)
def test_a_switch_that_the_template_lacks_is_ignored_and_named(api: str) -> None:
    call = parse(api=api, enable_thinking=False)
    assert (call.template_kwargs, call.ignored) == ({}, ("enable_thinking",))
    assert call.recorded == {"enable_thinking": False}
    with fails_with(UnsupportedParameter, param="enable_thinking"):
        parse(api=api, told=REFUSE, enable_thinking=False)


@pytest.mark.parametrize("api", CHATS)
def test_whatever_the_template_reads_may_stand_at_the_top(api: str) -> None:
    told = switched("enable_thinking", "clear_thinking")
    call = parse(api=api, told=told, clear_thinking=False, enable_thinking=None)
    assert (call.template_kwargs, call.ignored) == ({"clear_thinking": False}, ())
    kwargs = {"clear_thinking": 0}
    with fails_with(InvalidRequest, "chat_template_kwargs.clear_thinking"):
        parse(api=api, told=told, clear_thinking=False, chat_template_kwargs=kwargs)


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(
    ("value", "on"),
    [
        (True, True),
        (False, False),
        ({"type": "enabled", "budget_tokens": 100}, True),
        ({"type": "disabled"}, False),
        ({"type": "auto"}, None),
    ],
)
def test_thinking_has_several_forms(switch: str, value: Any, on: bool | None) -> None:
    call = parse(told=switched(switch), thinking=value)
    assert call.template_kwargs == ({} if on is None else {switch: on})
    assert call.recorded.get("thinking") == (value if isinstance(value, dict) else None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"thinking": 1},
        {"thinking": {}},
        {"thinking": {"type": "loud"}},
        {"thinking": {"type": "enabled", "note": "x" * 20_000}},
        {"enable_thinking": "no"},
        {"enable_thinking": {"type": "enabled"}},
        {"enable_thinking": True, "thinking": False},
    ],
)
def test_switches_of_no_valid_form_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(told=switched("enable_thinking"), **wrong)
    assert raised.value.param in wrong


def test_thinking_and_a_switch_must_agree() -> None:
    told = switched("enable_thinking")
    on: Any = {"thinking": {"type": "enabled"}}
    assert parse(api="messages", told=told, **on, enable_thinking=True).template_kwargs == {
        "enable_thinking": True
    }
    with fails_with(InvalidRequest, "enable_thinking"):
        parse(api="messages", told=told, **on, enable_thinking=False)
