"""The list of frozen models as an operator writes it: checked early, its keys never in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from any_agent.config import Config, load_config
from any_agent.config.model_list import check_model_list, resolved, secrets_of
from any_agent.errors import ConfigError
from tests.support.errors import fails_with

SECRET = "sk-provider-4711"
GOOD: dict[str, Any] = {
    "model_name": "judge",
    "litellm_params": {"model": "openai/gpt-4o-mini", "api_key": "os.environ/JUDGE_KEY"},
}


def config(*entries: object, more: tuple[str, ...] = ()) -> Config:
    return load_config(None, [f"frozen.model_list={json.dumps(entries)}", *more], {})


def params(**fields: Any) -> dict[str, Any]:
    return {"model_name": "judge", "litellm_params": {"model": "openai/x", **fields}}


def test_a_list_may_be_given_or_emptied_at_a_command_line() -> None:
    made = config(GOOD, {**GOOD, "model_name": "other"})
    assert [entry["model_name"] for entry in made.frozen.model_list] == ["judge", "other"]
    assert load_config(None, ["frozen.model_list="], {}).frozen.model_list == ()
    # Prices are as YAML reads them.
    (entry,) = check_model_list([{**GOOD, "model_info": {"input_cost_per_token": "1e-6"}}])
    assert entry["model_info"]["input_cost_per_token"] == 1e-6


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("gpt-4o", "entry 0"),
        ({}, "128 letters"),
        ({"model_name": "openai/*", "litellm_params": {}}, "openai/*"),
        ({"model_name": "judge"}, "entry 0 (judge): litellm_params"),
        ({**GOOD, "modle_info": {}}, "modle_info"),
        ({**GOOD, "model_info": 1}, "model_info"),
        (params(api_key=SECRET), "litellm_params.api_key"),
        (params(aws_secret_access_key="abcdef"), "aws_secret_access_key"),
        (params(extra_headers={"Authorization": "Bearer x"}), "Authorization"),
        (params(extra_headers={"X-Other": SECRET}), "X-Other"),
        (params(api_key="os.environ/A-B"), "api_key"),
        (params(api_base="http://user:pass@host/v1"), "password"),
        (params(api_base=1), "api_base"),
        (params(api_base="http://[h/v1"), "api_base"),
        (params(api_base=f"https://h/v1?k={SECRET}"), "query"),
        (params(base_url=f"https://h/v1?k={SECRET}"), "base_url"),
        (params(), "api_key: os.environ/NAME"),
        (params(api_key=""), "api_key: os.environ/NAME"),
        (params(api_key=1234567), "litellm_params.api_key"),
        (params(num_retries=3), "num_retries"),
        (params(fallbacks=["policy"]), "fallbacks"),
        (params(rpm=3), "frozen.max_calls"),
        (params(api_key="os.environ/A", input_cost_per_token="cheap"), "input_cost_per_token"),
        (params(api_key="os.environ/A", output_cost_per_token=-1), "output_cost_per_token"),
        (params(api_key="os.environ/A", output_cost_per_token=True), "output_cost_per_token"),
    ],
)
def test_a_wrong_entry_is_refused_by_name_without_its_secret(entry: object, says: str) -> None:
    with fails_with(ConfigError, says) as raised:
        config(entry)
    assert SECRET not in str(raised.value) and "pass@" not in str(raised.value)


@pytest.mark.parametrize("where", ["extra_headers", "default_headers", "extra_body"])
def test_a_header_that_is_a_secret_is_refused(where: str) -> None:
    names = ("apikey", "apiKey", "X-Auth", "x-api-token", "AccessToken", "app_secret", "Api-Key")
    for name in names:
        with fails_with(ConfigError, name) as raised:
            config(params(api_base="http://h/v1", **{where: {name: "abcdef"}}))
        assert "abcdef" not in str(raised.value)
        good = {name: "os.environ/A", "X-Title": "abcdef", "temperature": 1, "stream": True}
        assert config(params(api_base="http://h/v1", **{where: good}))


def test_only_a_hosts_own_key_counts_as_a_secret() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "aws-secret", "OPENAI_API_KEY": "openai-secret"}
    entries = check_model_list([params(aws_region_name="eu-west-1")])
    assert secrets_of(entries, environ) == ["aws-secret"]
    entries = check_model_list([params(vertex_project="p"), params(api_base="http://h/v1")])
    assert secrets_of(entries, environ) == []


def test_two_models_of_one_name_are_refused() -> None:
    for more in ((), ("model.name=policy", "model.policy_names=a,judge")):
        name = "judge" if more else "policy"
        with fails_with(ConfigError, name):
            config({**GOOD, "model_name": name}, more=more)


def test_keys_of_frozen_models_come_from_the_environment() -> None:
    headers, tags = {"x": "os.environ/B"}, ["os.environ/C"]
    entries = check_model_list([params(api_key="os.environ/A", extra_headers=headers, tags=tags)])
    environ = {"A": "secret-a", "B": "secret-b", "C": "short"}
    (entry,) = resolved(entries, environ)
    given = {"api_key": "secret-a", "extra_headers": {"x": "secret-b"}, "tags": ["short"]}
    assert entry["litellm_params"].items() >= given.items()
    # Too short to be cut out of every log.
    assert secrets_of(entries, environ) == ["secret-a", "secret-b"]
    with fails_with(ConfigError, "A, C"):
        resolved(entries, {"B": "secret-b"})


def test_keys_of_frozen_models_are_secrets_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    made = config(GOOD)
    assert made.secrets() == [SECRET]
    assert SECRET not in json.dumps(made.dump())
