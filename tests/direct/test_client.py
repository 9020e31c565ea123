"""What a direct client is made of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from any_agent import EngineOpenAI, workflow_context
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.errors import ConfigError
from any_agent.types import GenerationHyperparameters
from tests.direct.conftest import Make
from tests.support.direct import HELLO, MODEL
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine


async def test_a_tokenizer_a_path_and_a_chat_format_render_the_same_prompt(
    make: Make, engine: ScriptedEngine, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_dir))
    for given in (tokenizer, str(tiny_model_dir), tiny_model_dir):
        client = make(tokenizer=given, enable_thinking=False)
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
        # A workflow makes one for each episode: it must cost nothing.
        again = make(tokenizer=given, enable_thinking=False)
        assert again.chat_format is client.chat_format
    own = make()
    await own.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    prompts = [request["input_ids"] for request in engine.requests]
    assert prompts == [prompts[0]] * 4
    tokenizer.chat_template = tokenizer.chat_template.replace("user", "user")
    other = make(tokenizer=tokenizer, enable_thinking=True)
    assert other.chat_format is not make(tokenizer=tokenizer).chat_format


def test_a_tokenizer_without_a_folder_renders_the_same(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """What else is known of the model lies nowhere: its template and its end are enough."""
    folder = tmp_path / "moved"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    beside = load_chat_format(tokenizer)
    shutil.rmtree(folder)
    alone = load_chat_format(tokenizer)
    tokenizer.name_or_path = ""
    nowhere = load_chat_format(tokenizer)
    prompt = beside.render(HELLO, None)
    for chat in (alone, nowhere):
        assert chat.render(HELLO, None) == prompt
        # Those of generation_config.json are not known then.
        assert chat.stop_token_ids
        assert set(chat.stop_token_ids) <= set(beside.stop_token_ids)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"sampling": GenerationHyperparameters(top_p=0.9)}, ConfigError, "truncated_sampling"),
        ({"sampling": GenerationHyperparameters(temperature=0)}, ConfigError, "temperature"),
        ({"session_id": "no spaces"}, ConfigError, "session_id"),
        ({"tokenizer": "/no/such/folder"}, ConfigError, "does not exist"),
        ({"thinking_retention": "some", "tokenizer": object()}, ConfigError, "thinking_retention"),
        ({"base_url": "http://127.0.0.1:1"}, TypeError, "base_url"),
        ({"http_client": object()}, TypeError, "http_client"),
    ],
)
def test_settings_that_cannot_be_trained_with_are_refused(
    make: Make, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with fails_with(error, says):
        make(**settings)


def test_the_context_must_be_known(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat.tokenizer, "model_max_length", 10**30)
    engine: Any = object()
    with fails_with(ConfigError, "context_length"):
        EngineOpenAI(engine, chat)
    EngineOpenAI(engine, chat, context_length=64)
    monkeypatch.setattr(chat.tokenizer, "model_max_length", 64)
    EngineOpenAI(engine, chat)


async def test_a_call_fails_while_the_context_length_is_unknown_and_works_later(
    make: Make, engine: ScriptedEngine
) -> None:
    client = make(max_retries=0)
    await engine.die()
    with fails_with(openai.InternalServerError, status_code=503):
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    await engine.revive()
    await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)


async def test_the_environment_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    client = make()
    await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert len(client.interactions) == 1


async def test_in_a_workflow_it_samples_as_the_run_does(make: Make, engine: ScriptedEngine) -> None:
    run = GenerationHyperparameters(temperature=0.5, max_new_tokens=7)
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0.2}
    with workflow_context.use(workflow_context.WorkflowContext(sampling=run)):
        client = make()
        own = make(sampling=run.new(temperature=0.8))
    with workflow_context.use(workflow_context.WorkflowContext(sampling=run, is_eval=True)):
        evaluated = make()
        trained = make(mode="train")
    # What a client is was said when it was made.
    for one in (client, own, evaluated, trained):
        await one.chat.completions.create(**asked)
    sampled = [request["sampling_params"] for request in engine.requests]
    assert [s["temperature"] for s in sampled] == [0.5, 0.8, 0.2, 0.5]
    assert [s["max_new_tokens"] for s in sampled] == [7, 7, 7, 7]
