"""Workflows of the references: direct client, hand-written workflows, executors, the context."""

from __future__ import annotations

import asyncio
import textwrap
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from torch.utils.data import DataLoader

import any_agent
from any_agent import (
    EngineOpenAI,
    GenerationHyperparameters,
    GRPOConfig,
    InteractionWithTokenLogpReward,
    ModelResponse,
    OpenAIProxyClient,
    OpenAIProxyWorkflow,
    RemoteSGLangEngine,
    RolloutWorkflow,
    concat_padded_tensors,
    load_expr_config,
    load_hf_tokenizer,
    stats_tracker,
    workflow_context,
)
from any_agent.workflow import resolve_workflow
from tests.documents import text
from tests.documents.running import running
from tests.documents.service import Service

ASK = [{"role": "user", "content": "What is 1 + 2?"}]
ITEM = {"messages": ASK, "prompt": ASK[0]["content"], "answer": "3"}


def compute_reward(response: ChatCompletion, answer: str) -> float:
    return float(answer in (response.choices[0].message.content or ""))


class Answers:
    """Asks once; a reward of 1 for an answer that has the right number in it."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"], http_client=extra_kwargs["http_client"]
        )
        answer = await client.chat.completions.create(model="default", messages=data["messages"])
        return compute_reward(answer, data["answer"])


GIVEN: dict[str, Any] = {
    "AsyncOpenAI": AsyncOpenAI,
    "RolloutWorkflow": RolloutWorkflow,
    "compute_reward": compute_reward,
}


@pytest.fixture(scope="module")
def tokenizer(taught_model: Path) -> Any:
    return load_hf_tokenizer(str(taught_model))


@pytest.fixture(scope="module")
def config(service: Service) -> GRPOConfig:
    given = [f"model.path={service.model}", f"engine.urls=[{','.join(service.engines)}]"]
    given += [f"engine.key={service.engine_key}"]
    given += ["rollout.batch_size=4", "sessions.group_size=4", "sampling.max_new_tokens=16"]
    return load_expr_config(given, GRPOConfig)[0]


@pytest.fixture(scope="module")
def rollout(service: Service, config: GRPOConfig) -> Iterator[RemoteSGLangEngine]:
    """The setup code that the text leaves to the reader, on the service's two engines."""
    engine = RemoteSGLangEngine(config.rollout)
    engine.initialize(urls=service.engines, key=service.engine_key, tokenizer=str(service.model))
    yield engine
    engine.close()


def is_exact(batch: dict[str, torch.Tensor], rows: int) -> None:
    """The shapes of the reference's table; outputs alone are trained on and have versions."""
    assert batch["input_ids"].shape[0] == rows
    trained = batch["loss_mask"].bool()
    assert trained.any(1).all()
    assert (batch["logprobs"][~trained] == 0).all()
    assert (batch["versions"][~trained & batch["attention_mask"]] == -1).all()
    assert (batch["versions"][trained] >= 0).all()
    assert batch["rewards"].shape == (rows,)


@pytest.mark.block(0, 105, 124, changes="AsyncOpenAI and compute_reward given")
async def test_the_references_agent_runs_in_groups(
    code: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = await running(code, GIVEN)
    workflow = resolve_workflow(found["MyAgent"](), None, 4, service.url)
    episode = await workflow.arun_episode(None, ITEM)
    await workflow_context.close_clients()
    assert len(episode) == 4
    assert {one.reward for one in episode.values()} <= {0.0, 1.0}


@pytest.mark.block(0, 132, 150, changes="RolloutWorkflow and compute_reward given")
async def test_the_references_direct_workflow_is_exact(
    code: str, rollout: RemoteSGLangEngine, tokenizer: Any
) -> None:
    found = await running(code, GIVEN)
    workflow = found["MyWorkflow"]()
    workflow.tokenizer = tokenizer
    (interaction,) = (await workflow.arun_episode(rollout, ITEM)).values()
    tensors = interaction.to_tensor_dict()
    is_exact(
        {name: values.reshape(1, -1) for name, values in tensors.items()}
        | {"rewards": tensors["rewards"]},
        1,
    )


@pytest.mark.block(0, 160, 162)
@pytest.mark.block(0, 178, 181)
@pytest.mark.block(2, 83, 86, changes="indentation; the tokenizer's folder")
@pytest.mark.block(2, 109, 110, changes="indentation")
def test_the_references_settings_are_read(taught_model: Path, tmp_path: Path) -> None:
    def read(code: str) -> GRPOConfig:
        file = tmp_path / "my.yaml"
        file.write_text(code)
        return load_expr_config(["--config", str(file)], GRPOConfig)[0]

    assert read(text.cut(0, 160, 162)).rollout.agent.mode == "inline"
    agent = read(text.cut(0, 178, 181)).rollout.agent
    assert (agent.mode, agent.max_workers) == ("subproc", 4)

    head, *keys = (
        text.cut(2, 83, 86).replace("decodingTrajectories are saved to:", "decoding").splitlines()
    )
    dumps = read("\n".join([head, *textwrap.indent("\n".join(keys), "  ").splitlines()])).rollout
    assert (dumps.dump_to_file, str(dumps.fileroot), str(dumps.tokenizer_path)) == (
        True,
        "/path/to/logs",
        "model/tokenizer",
    )
    head, key = text.cut(2, 109, 110).splitlines()
    assert read(f"{head}\n  {key.partition('When')[0]}").sessions.group_size == 4


@pytest.mark.block(0, 199, 215, changes="compute_reward given")
async def test_the_references_blocking_agent_runs_in_a_process(
    code: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = "\n\nfrom tests.documents.workflows_live import compute_reward\n"
    (tmp_path / "my_sync_agent.py").write_text(code + reward)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    workflow = OpenAIProxyWorkflow(
        agent=__import__("my_sync_agent").MySyncAgent(), proxy_addr=service.url, mode="subproc"
    )
    (interaction,) = (await workflow.arun_episode(None, ITEM)).values()
    await workflow_context.close_clients()
    assert interaction.reward in (0.0, 1.0)


@pytest.mark.block(0, 422, 429)
async def test_the_interactions_fields(code: str) -> None:
    given = {
        "dataclass": dataclass,
        "ModelResponse": ModelResponse,
        "ChatCompletion": ChatCompletion,
    }
    code = f"from __future__ import annotations\n{code}"
    theirs = (await running(code, given))["InteractionWithTokenLogpReward"]
    values: dict[str, Any] = {field.name: None for field in fields(theirs)}
    values |= {"messages": ASK, "reward": 0.5}
    theirs(**values)
    ours = InteractionWithTokenLogpReward(**values)
    assert {name: getattr(ours, name) for name in values} == values


@pytest.mark.block(0, 458, 459)
@pytest.mark.block(0, 478, 480)
@pytest.mark.block(1, 391, 392)
async def test_the_references_direct_client_discounts_rewards(
    rollout: RemoteSGLangEngine, tokenizer: Any
) -> None:
    names = await running(
        text.cut(1, 391, 392),
        {"ArealOpenAI": EngineOpenAI, "engine": rollout, "tokenizer": tokenizer},
    )
    client = names["client"]
    first = await client.chat.completions.create(model="default", messages=ASK)
    talk = [*ASK, first.choices[0].message.model_dump(exclude_none=True), *ASK]
    second = await client.chat.completions.create(model="default", messages=talk)
    names["completion_id"] = first.id
    names = await running(text.cut(0, 458, 459) + text.cut(0, 478, 480), names)
    rewards = {id: one.reward for id, one in names["interactions"].items()}
    assert rewards == {first.id: pytest.approx(0.5 + 0.9), second.id: 1.0}


@pytest.mark.block(
    0, 517, 540, changes="OpenAIProxyClient(...) gets its arguments; the rest inherited"
)
async def test_the_proxy_workflows_excerpt(code: str, service: Service) -> None:
    code = code.replace(
        "OpenAIProxyClient(...)", "OpenAIProxyClient(http_session, proxy_addr, 'task')"
    )
    found = await running(
        "import asyncio\n" + code.replace("(RolloutWorkflow)", "(Ours)"),
        {"Ours": OpenAIProxyWorkflow, "OpenAIProxyClient": OpenAIProxyClient}
        | {"http_session": await workflow_context.get_aiohttp_session(), "proxy_addr": service.url},
    )
    workflow = found["OpenAIProxyWorkflow"](agent=Answers(), proxy_addr=service.url)
    (interaction,) = (await workflow.arun_episode(None, ITEM)).values()
    await workflow_context.close_clients()
    assert interaction.reward in (0.0, 1.0)


@pytest.mark.block(0, 600, 605)
async def test_the_references_names_can_be_imported(code: str) -> None:
    found = await running(code, {})
    assert found["ArealOpenAI"] is any_agent.EngineOpenAI


def nested(code: str, levels: dict[str, int]) -> str:
    """The code with the indentation that the text has lost: of each line that begins so, from
    there on."""
    lines, level = [], 0
    for line in code.splitlines():
        level = next((n for begin, n in levels.items() if line.startswith(begin)), level)
        lines.append("    " * level + line)
    return "\n".join(lines) + "\n"


@pytest.mark.block(2, 15, 22, changes="indentation")
async def test_the_references_interface_has_our_abstract_methods(code: str) -> None:
    code = code.partition("...|")[0] + "..."
    levels = {"from ": 0, "class ": 0, "@": 1, "async": 1, "self": 2, ")": 1, '"""': 2, "...": 2}
    given = {"ABC": ABC, "abstractmethod": abstractmethod}
    found = await running("from __future__ import annotations\n" + nested(code, levels), given)
    ours = any_agent.RolloutWorkflow
    assert ours.__abstractmethods__ == found["RolloutWorkflow"].__abstractmethods__


@pytest.mark.block(2, 61, 68, changes="inside arun_episode")
async def test_the_example_of_a_returned_value(code: str, rollout: RemoteSGLangEngine) -> None:
    body = textwrap.indent(code.partition("}Inside")[0] + "}", "        ")
    head = "class Example(RolloutWorkflow):\n    async def arun_episode(self, engine, data):\n"
    found = await running(head + body, GIVEN | {"torch": torch})
    (batch,) = rollout.rollout_batch([ITEM], workflow=found["Example"]())
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.block(2, 70, 81, changes="indentation, inside a workflow")
async def test_the_references_context_names_task_and_scope(
    code: str, rollout: RemoteSGLangEngine
) -> None:
    code = code.partition("When InferenceEngineConfig")[0]
    head, body = code.split("async def", 1)
    levels = {
        "async": 1,
        "# ": 2,
        "# Use": 3,
        "...": 3,
        "ctx": 2,
        "if": 2,
        "task_id": 2,
        "scope": 2,
    }
    inside = nested(f"async def{body}", levels).replace(
        "scope =", "self.seen = ctx.is_eval, task_id,"
    )
    found = await running(f"{head}class Example(RolloutWorkflow):\n{inside}", GIVEN)
    workflow = found["Example"]()
    number = rollout.submit(data=ITEM, workflow=workflow)
    assert await asyncio.to_thread(rollout.wait, 1, timeout=300) == [None]
    assert workflow.seen == (False, number, "rollout")


MY_WORKFLOW_LEVELS = {
    "from": 0, "class": 0, "def": 1, "self.": 2, "async": 1, "# ": 2, "input_ids =": 2, "req": 2,
    "rid": 3, "input_ids=": 3, "gconfig": 3, "tokenizer=": 3, ")": 2, "resp": 2, "reward": 2,
    "if": 2, "return None": 3, "return self": 2,
}  # fmt: skip


LEFT_OUT = """
    def compute_reward(self, response, data):
        return float(data["answer"] in self.tokenizer.decode(response.output_tokens))

    def build_tensor_dict(self, response, reward):
        rest, own = [0] * response.input_len, [1] * response.output_len
        ids = response.input_tokens + response.output_tokens
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([rest + own]),
            "logprobs": torch.tensor([[0.0] * len(rest) + response.output_logprobs]),
            "versions": torch.tensor([[-1] * len(rest) + response.output_versions]),
            "rewards": torch.tensor([reward]),
        }
"""


def whole_workflow() -> str:
    """A module with MyWorkflow of the text, and the two methods that it leaves to the reader."""
    code = text.renamed(text.cut(2, 139, 160)).partition("- Register")[0]
    head = "import uuid\nimport torch\nfrom any_agent import ModelRequest\n"
    # Datasets of the tests have messages, too.
    code = code.replace('data["prompt"]', 'data["messages"][0]["content"]')
    return head + nested(code, MY_WORKFLOW_LEVELS) + LEFT_OUT


async def my_workflow() -> Any:
    return (await running(whole_workflow(), {}))["MyWorkflow"]


@pytest.mark.block(2, 139, 160, changes="indentation; compute_reward and build_tensor_dict given")
@pytest.mark.block(2, 103, 108, changes="workflow_kwargs")
async def test_my_workflow_in_groups(
    rollout: RemoteSGLangEngine, tokenizer: Any, config: GRPOConfig
) -> None:
    submit = text.cut(2, 103, 108).partition("Or via")[0].replace("{...}", "kwargs")
    kwargs = {"tokenizer": tokenizer, "gconfig": config.gconfig}
    given = {"engine": rollout, "sample": ITEM, "MyWorkflow": await my_workflow(), "kwargs": kwargs}
    await running(submit, given)
    (batch,) = await asyncio.to_thread(rollout.wait, 1, timeout=300)
    is_exact(batch, 4)


@pytest.mark.block(2, 121, 138, changes="indentation; the helpers that it calls given")
async def test_the_grouped_workflows_excerpt(
    code: str, rollout: RemoteSGLangEngine, tokenizer: Any, config: GRPOConfig
) -> None:
    code = code.partition("To create")[0]
    levels = {
        "class": 0, "async": 1, "# ": 2, "results": 2, "*[": 3, "for _": 4, ")": 2, "valid": 2,
        "if not": 2, "return None": 3, "if all": 2, "return merge": 3, "else": 2,
        "return concat": 3,
    }  # fmt: skip
    found = await running(
        nested(code, levels),
        GIVEN
        | {"asyncio": asyncio, "concat_padded_tensors": concat_padded_tensors}
        | {"all_interaction_dicts": lambda _: False, "merge_dicts": None},
    )
    workflow = found["GroupedRolloutWorkflow"].__new__(found["GroupedRolloutWorkflow"])
    workflow.workflow = (await my_workflow())(tokenizer=tokenizer, gconfig=config.gconfig)
    workflow.group_size = 4
    batch = await workflow.arun_episode(rollout, ITEM)
    is_exact(batch, 4)


MULTI_TURN = (*((42, 55), (64, 72), (102, 111)), *((74, 86), (114, 126), (170, 175), (177, 187)))
"""The lines of MultiTurnWorkflow, in the order that the text's comments say."""


def multi_turn() -> str:
    """The whole class; a counter that the text renames half-way has its later name."""
    lines = text.document(3).splitlines()
    body = [line for first, last in MULTI_TURN for line in lines[first - 1 : last]]
    whole = "\n".join([lines[40], *body]) + "\n"
    return whole.replace("turn_index", "t")


def loader(default: bool) -> DataLoader[Any]:
    """Torch's, with its own collation, or with that which AReaL's scripts give it."""
    items = [{"messages": ASK, "answer": answer} for answer in ("3", "4")]
    if default:
        return DataLoader(items, batch_size=2)  # type: ignore[arg-type]
    return DataLoader(items, batch_size=2, collate_fn=lambda x: x)  # type: ignore[arg-type]


@pytest.mark.block(3, 41, 55)
@pytest.mark.block(3, 61, 87, changes="put together; turn_index is called t")
@pytest.mark.block(3, 97, 126, changes="put together")
@pytest.mark.block(3, 161, 187, changes="put together")
@pytest.mark.block(3, 197, 222, changes="setup code given")
@pytest.mark.parametrize("default", [False, True], ids=["items", "collated"])
@pytest.mark.parametrize("eta", [0, 2])
def test_the_multi_turn_workflow(
    default: bool, eta: int, service: Service, tokenizer: Any, config: GRPOConfig
) -> None:
    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize(urls=service.engines, key=service.engine_key, tokenizer=str(service.model))
    names: dict[str, Any] = {
        **{name: getattr(any_agent, name) for name in ("LLMRequest", "RolloutWorkflow")},
        "GenerationHyperparameters": GenerationHyperparameters,
        "PreTrainedTokenizerFast": object,
        "InferenceEngine": object,
        "concat_padded_tensors": concat_padded_tensors,
        "gsm8k_reward_fn": any_agent.gsm8k_reward_fn,
        "stats_tracker": stats_tracker,
        "torch": torch,
        "uuid": uuid,
        "rollout": rollout,
        "tokenizer": tokenizer,
        "train_dataloader": loader(default),
        "max_steps": 2,
        "batches": [],
    }
    given = config.model_dump() | {"rollout": config.rollout.model_dump() | {"eta": eta}}
    names["config"] = GRPOConfig.model_validate(given)
    assert names["config"].async_training is (eta > 0)
    training = text.cut(3, 197, 222).replace(
        "# ... continue with training loop ...", "batches.append(batch)"
    )
    exec(multi_turn() + training, names)
    names["main"]([])
    rollout.close()
    assert len(names["batches"]) == 2
    for batch in names["batches"]:
        is_exact(concat_padded_tensors(batch), sum(len(one["rewards"]) for one in batch))


@pytest.mark.block(3, 15, 24)
async def test_the_interface_of_the_guide(code: str) -> None:
    await running("from __future__ import annotations\n" + code, {})


@pytest.mark.block(3, 132, 153)
async def test_the_signature_of_reward_functions(code: str) -> None:
    found = await running("from typing import List\n" + code, {})
    kwargs = {"prompt": "", "completions": "#### 3", "prompt_ids": [], "completion_ids": []}
    assert found["reward_fn"](**kwargs, answer="#### 3") is None, "the text gives no body"
    assert any_agent.gsm8k_reward_fn(**kwargs, answer="#### 3") == 1.0
