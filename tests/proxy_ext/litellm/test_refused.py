"""LiteLLM configurations that cannot be used, and a start that policy calls do not wait for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from any_agent.config import Config, load_config
from any_agent.config.litellm import (
    LiteLLMConfig,
    check_litellm_config,
    database_url,
    litellm_secrets,
    may_have_keys,
)
from any_agent.errors import ConfigError
from proxy_ext.litellm_app import is_outage
from tests.proxy_ext.test_process import run
from tests.support import litellm
from tests.support.errors import fails_with
from tests.support.frozen import refused
from tests.support.ports import own_port
from tests.support.proxy import HELLO
from tests.support.real_parts import in_a_thread, process, proxy_process, write_config
from tests.support.scripted_engine import ScriptedEngine

POLICY = frozenset(("policy", "actor"))
DATABASE = "postgresql://127.0.0.1:1/litellm"


def model(name: str, **params: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": "openai/gpt-4o", **params}}


def policy_named(name: object) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": "any-agent/policy"}}


def test_a_file_that_cannot_be_used_or_contradicts_the_service_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "litellm.yaml"
    rows: list[tuple[dict[str, Any] | str | None, str]] = [
        (None, "No such file"),
        ("- a list", "mapping"),
        ("a: [", "YAML"),
        ({"model_list": [model("actor")]}, "actor is a name"),
        ({"router_settings": {"model_group_alias": {"actor": "x"}}}, "actor is a name"),
        ({"litellm_settings": {"fallbacks": [{"x": ["policy"]}]}}, "policy is a name"),
        ({"litellm_settings": {"default_fallbacks": ["policy"]}}, "policy is a name"),
        ({"general_settings": {"custom_auth": "mine.auth"}}, "general_settings.custom_auth"),
        ({"general_settings": {"master_key": "sk-another-key"}}, "ANY_AGENT_SERVER__ADMIN_KEY"),
        ({"general_settings": {"master_key": "os.environ/K"}}, "ANY_AGENT_SERVER__ADMIN_KEY"),
        *(({"model_list": [policy_named(name)]}, "model_name") for name in ("", "learn*", 7)),
    ]
    for data, said in rows:
        if isinstance(data, dict):
            litellm.write_litellm(tmp_path, data)
        elif data is not None:
            path.write_text(data)
        with fails_with(ConfigError, said) as error:
            check_litellm_config(str(path), POLICY, "sk-admin", {"K": "sk-of-the-environment"})
        assert "sk-another-key" not in str(error.value) and "sk-of" not in str(error.value)
    litellm.write_litellm(tmp_path, {"general_settings": {"master_key": "os.environ/K"}})
    check_litellm_config(str(path), POLICY, "sk-admin", {"K": "sk-admin"})


REFUSED = """\
model_list:
  - model_name: learner
    litellm_params:
      model: any-agent/policy
      {more}
router_settings:
  model_group_alias: {{"{alias}": x}}
general_settings:
  {general}: true
"""


def test_a_refused_entry_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "litellm.yaml"
    for given, line, said in (
        ({"more": "temperature: 0"}, 5, "litellm_params.temperature"),
        ({"alias": "learner"}, 7, "learner"),
        ({"general": "custom_auth"}, 9, "general_settings.custom_auth"),
        ({"general": "master_key"}, 9, "ANY_AGENT_SERVER__ADMIN_KEY"),
    ):
        path.write_text(REFUSED.format(**{"more": "", "alias": "other", "general": "x", **given}))
        with fails_with(ConfigError, f"{path}:{line}: ", said):
            check_litellm_config(str(path), POLICY | {"learner"}, "sk-admin", {})


def test_an_entry_of_the_policy_names_it_and_other_names_are_refused(tmp_path: Path) -> None:
    models = [model("planner"), policy_named("learner")]
    path = litellm.write_litellm(tmp_path, {"model_list": models})
    given = [f"litellm.config={path}", "model.policy_names=[actor]"]
    config = load_config(None, given, environ={})
    assert config.model.policy_names == ("actor", "learner")
    assert config.model.unknown_model == "reject"
    kept = load_config(None, [*given, "model.unknown_model=policy"], environ={})
    assert kept.model.unknown_model == "policy"
    without = litellm.write_litellm(tmp_path, {"model_list": [model("planner")]})
    config = load_config(None, [f"litellm.config={without}"], environ={})
    assert config.model.policy_names == () and config.model.unknown_model == "policy"


def test_a_database_is_found_where_litellm_looks_for_it() -> None:
    url = "postgresql://ann:secret@127.0.0.1/litellm"
    named = {"general_settings": {"database_url": url}}
    referred = {"general_settings": {"database_url": "os.environ/URL"}}
    assert database_url(named, {}) == database_url(referred, {"URL": url}) == url
    assert database_url({}, {"DATABASE_URL": url}) == url
    assert database_url(referred, {}) is None
    assert may_have_keys(named, {}) and may_have_keys({"include": ["more.yaml"]}, {})
    assert not may_have_keys({"general_settings": {}}, {})


def test_secrets_of_litellm_are_known_for_redaction(tmp_path: Path) -> None:
    written = model("a", api_key="sk-written-in-the-file", input_cost_per_token=0.5)
    data = {"model_list": [written, model("b", api_key="os.environ/KEY_OF_B")]}
    path = litellm.write_litellm(tmp_path, data)
    found = litellm_secrets(str(path), {"KEY_OF_B": "of-the-environment"})
    assert set(found) == {"sk-written-in-the-file", "of-the-environment"}


def test_settings_that_contradict_each_other_are_refused() -> None:
    params = {"model": "openai/x", "api_key": "os.environ/K"}
    entry = {"model_name": "judge", "litellm_params": params}
    both = {"litellm": {"config": "x.yaml"}, "frozen": {"model_list": [entry]}}
    with fails_with(ValueError, "litellm.config", "frozen.model_list"):
        Config.model_validate(both)
    with fails_with(ValueError, "policy_vetoes", "policy_guardrails"):
        LiteLLMConfig(policy_guardrails=("a",), policy_vetoes=("a", "b"))


def test_only_failures_that_may_pass_count_as_an_outage() -> None:
    assert is_outage(ConnectionRefusedError())
    wrapped = RuntimeError("database")
    wrapped.__cause__ = TimeoutError()
    assert is_outage(wrapped)
    assert not is_outage(ImportError("no module named nothing"))
    assert not is_outage(FileNotFoundError("callbacks.py"))


def start(tmp_path: Path, model_dir: Path, data: dict[str, Any], **more: Any) -> Path:
    path = litellm.write_litellm(tmp_path, data)
    own = {"ranks": 1, "admin_key": litellm.ADMIN}
    return write_config(tmp_path, model_dir, litellm={"config": str(path), **more}, server=own)


@pytest.mark.service
@pytest.mark.parametrize(
    ("data", "own", "said"),
    [
        ({"litellm_settings": {"callbacks": "nowhere.handler"}}, {}, "nowhere"),
        ({"model_list": [{"litellm_params": {"model": "openai/x"}}]}, {}, "model_name"),
        ({"general_settings": {"database_url": DATABASE}}, {}, "Unable to find Prisma binaries"),
        ({"model_list": []}, {"policy_guardrails": ["nobody"]}, "policy_guardrails names nobody"),
    ],
    ids=["no such callback", "a model without a name", "no database's client", "no such guardrail"],
)
async def test_a_rank_ends_with_litellms_words(
    tmp_path: Path,
    tiny_model_dir: Path,
    engine: ScriptedEngine,
    data: dict[str, Any],
    own: dict[str, Any],
    said: str,
) -> None:
    config, log = start(tmp_path, tiny_model_dir, data, **own), tmp_path / "proxy.log"
    arguments = ["--config", str(config), "--engine-url", engine.url, "--port", str(own_port())]
    with process(log, "proxy_ext", *arguments) as child:
        assert await asyncio.to_thread(child.wait, 240) == 2
    text = log.read_text()
    assert said in text
    if not own:
        assert f"LiteLLM refuses {tmp_path / 'litellm.yaml'}" in text
        assert "Traceback" not in text.split("LiteLLM refuses")[1]


@pytest.mark.service
def test_a_rank_refuses_a_contradicting_litellm_file_and_names_the_conflict(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = start(tmp_path, tiny_model_dir, {"model_list": [model("policy")]})
    ended = run(config, "--port", "0")
    assert ended.returncode == 2 and "policy is a name" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.service
async def test_policy_calls_do_not_wait_for_litellm_to_start(
    tmp_path: Path, tiny_model_dir: Path, engine: ScriptedEngine
) -> None:
    data = {"model_list": [model("planner", api_key="k")], "include": ["more.yaml"]}
    (tmp_path / "more.yaml").write_text("{}")
    config = start(tmp_path, tiny_model_dir, data)
    rank = in_a_thread(proxy_process(config, engine.url, own_port()))
    async with rank as (_, url), litellm.client(url) as http:
        assert (await http.get("/readyz")).json()["litellm"] == "LiteLLM is starting"
        virtual = {"Authorization": "Bearer sk-virtual"}
        opening = "/rl/v1/start_session"
        early = await http.post(opening, json={"mode": "eval"}, headers=virtual)
        refused(early, 503, "litellm_unavailable")
        key = await litellm.session(http)
        body = {"model": "policy", "messages": HELLO, "max_tokens": 2}
        answered = 0
        while "litellm" in (await http.get("/readyz")).json():
            response = await http.post("/v1/chat/completions", json=body, headers=key)
            assert response.status_code == 200, response.text
            answered += 1
        assert answered > 10
        late = await http.post(opening, json={"mode": "eval"}, headers=virtual)
        refused(late, 401, "invalid_api_key")
