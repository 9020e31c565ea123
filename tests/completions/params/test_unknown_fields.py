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


@pytest.mark.parametrize("api", BODIES)
def test_an_unknown_field_is_recorded_and_changes_nothing(api: str) -> None:
    for mode in ("train", "eval"):
        call = parse(mode, api=api, beam_width=7, empty=None)
        plain = parse(mode, api=api)
        assert (call.recorded, call.ignored) == ({"beam_width": 7}, ("beam_width",))
        assert (call.gconfig, call.messages, call.template_kwargs, call.untrainable) == (
            (plain.gconfig, plain.messages, plain.template_kwargs, plain.untrainable)
        )
    for name, value in (("beam_width", 7), ("empty", None)):
        with fails_with(UnsupportedParameter, param=name):
            parse(api=api, told=REFUSE, **{name: value})


def test_names_of_unknown_fields_are_made_plain_and_bounded() -> None:
    for name, plain in (
        ("a b\r\nx-any-agent-session: 1", "a_b__x-any-agent-session__1"),
        ("x" * 64, "x" * 64),
        ("", "_"),
        ("\ud800é", "__"),
    ):
        call = parse(**{name: 1})
        assert (call.ignored, call.recorded) == ((plain,), {plain: 1})
    with pytest.raises(UnsupportedParameter):
        parse(**{"x" * 65: 1})
    many = {f"p{k}": k for k in range(MAX_UNKNOWN)}
    assert parse(**many).recorded == many
    with fails_with(InvalidRequest, "32", param="one_more"):
        parse(**many, one_more=1)


def test_an_unknown_field_that_is_too_large_or_no_json_is_only_named() -> None:
    for value in ("x" * 20_000, "\ud800", 2**70, {"a": ["x" * 20_000]}):
        call = parse(odd=value, plain=1)
        assert (call.recorded, call.ignored) == ({"plain": 1}, ("odd", "plain"))
    both = parse(one="x" * 9000, two="y" * 9000)
    assert (list(both.recorded), both.ignored) == (["one"], ("one", "two"))


def test_secrets_in_unknown_fields_are_not_kept() -> None:
    for given in (
        {"api_key": "abc"},
        {"litellm_params": {"apiKey": "abc"}},
        {"extra_headers": {"x": "abc"}},
        {"hf_token": "abc"},
        {"note": "it is sk-abc"},
        {"password": "abc"},
        {"api_base": "http://u:abc@host"},
    ):
        call = parse(**given)
        assert call.ignored == tuple(given)
        assert b"abc" not in orjson.dumps(call.recorded), given


def test_what_means_something_at_another_route_is_refused() -> None:
    for api, name in (
        ("chat", "max_output_tokens"),
        ("completions", "tools"),
        ("responses", "messages"),
        ("responses", "logprobs"),
        ("messages", "n"),
        ("messages", "audio"),
    ):
        for told in ({}, REFUSE):
            with fails_with(UnsupportedParameter, param=name):
                parse(api=api, told=told, **{name: 2})


def test_a_value_that_asks_for_nothing_is_recorded() -> None:
    for api, name, value in (
        ("chat", "echo", False),
        ("chat", "best_of", 1),
        ("chat", "mcp_servers", []),
        ("completions", "tools", []),
        ("responses", "n", 1),
        ("responses", "logprobs", False),
        ("messages", "frequency_penalty", 0.0),
        ("messages", "stop", []),
    ):
        call = parse(api=api, **{name: value})
        assert (call.recorded, call.ignored) == ({name: value}, ())
        assert call.gconfig == parse(api=api).gconfig
        with fails_with(UnsupportedParameter, param=name):
            parse(api=api, told=REFUSE, **{name: value})
    # One of another type asks for something.
    for name, value in (("echo", 0), ("best_of", True), ("best_of", 2)):
        with fails_with(UnsupportedParameter, param=name):
            parse(**{name: value})


@pytest.mark.parametrize("api", CHATS)
def test_a_switch_is_as_in_template_kwargs(api: str) -> None:
    told = switched("enable_thinking")
    for on in (True, False):
        inside = parse(api=api, told=told, chat_template_kwargs={"enable_thinking": on})
        assert parse(api=api, told=told, enable_thinking=on) == inside
        both = {"enable_thinking": on, "chat_template_kwargs": {"enable_thinking": on}}
        assert parse(api=api, told=told, **both) == inside
        assert inside.template_kwargs == {"enable_thinking": on}
        with fails_with(InvalidRequest, param="enable_thinking"):
            parse(api=api, told=told, **both | {"enable_thinking": not on})


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


def test_thinking_has_several_forms() -> None:
    for switch in ("enable_thinking", "thinking"):
        for value, on in (
            (True, True),
            (False, False),
            ({"type": "enabled", "budget_tokens": 100}, True),
            ({"type": "disabled"}, False),
            ({"type": "auto"}, None),
        ):
            call = parse(told=switched(switch), thinking=value)
            assert call.template_kwargs == ({} if on is None else {switch: on})
            assert call.recorded.get("thinking") == (value if isinstance(value, dict) else None)


def test_switches_of_no_valid_form_or_at_odds_are_refused() -> None:
    told = switched("enable_thinking")
    wrongs: list[dict[str, Any]] = [
        {"thinking": 1},
        {"thinking": {}},
        {"thinking": {"type": "loud"}},
        {"thinking": {"type": "enabled", "note": "x" * 20_000}},
        {"enable_thinking": "no"},
        {"enable_thinking": {"type": "enabled"}},
        {"enable_thinking": True, "thinking": False},
    ]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest) as raised:
            parse(told=told, **wrong)
        assert raised.value.param in wrong
    on: Any = {"api": "messages", "told": told, "thinking": {"type": "enabled"}}
    assert parse(**on, enable_thinking=True).template_kwargs == {"enable_thinking": True}
    with fails_with(InvalidRequest, "enable_thinking"):
        parse(**on, enable_thinking=False)
