"""The guide: agents of OpenAI's Agents SDK and of CAMEL-AI, training scripts, command lines."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environment import python_with
from tests.documents import text
from tests.documents.service import PYTHON, ROOT, Service, run_command, run_script

TASKS = [
    {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
    for a in range(5)
    for b in range(5)
]


def settings(model: Path, folder: Path, **more: object) -> list[str]:
    """Two small steps on a service of the script's own."""
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps(task) + "\n" for task in TASKS), encoding="utf-8")
    given = {
        "model.path": model,
        "model.enable_thinking": "false",
        "server.port": 0,
        "server.ranks": 2,
        "root": folder / "runs",
        "train_dataset.path": data,
        "sampling.max_new_tokens": 64,
        "sessions.group_size": 4,
        "rollout.batch_size": 8,
        "train.steps": 2,
        "train.lr": 1e-4,
    } | more
    return [f"{name}={value}" for name, value in given.items()]


def steps(folder: Path) -> list[dict[str, Any]]:
    (metrics,) = (folder / "runs").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "step" in line and "eval" not in line]


def math_agent(folder: Path) -> Path:
    """`my_agent.py` of the guide, and the interpreter that has what it imports."""
    (folder / "my_agent.py").write_text(text.renamed(text.cut(1, 70, 119)), encoding="utf-8")
    return python_with("math-agent")


@pytest.mark.block(1, 70, 119)
@pytest.mark.block(1, 161, 163, changes="model, data and sizes on the command line")
def test_the_guides_command(taught_model: Path, tmp_path: Path) -> None:
    python = math_agent(tmp_path)
    os.symlink(ROOT / "examples", tmp_path / "examples")
    command = text.cut(1, 161, 163).replace("\\\n", " ").split()
    assert command[0] == "python3"
    given = [*command[1:], *settings(taught_model, tmp_path)]
    said = run_command([str(python), *given], tmp_path)
    assert [step["step"] for step in steps(tmp_path)] == [1, 2], said


@pytest.mark.block(1, 127, 153, changes="model, data and sizes on the command line")
def test_the_guides_script(code: str, taught_model: Path, tmp_path: Path) -> None:
    python = math_agent(tmp_path)
    given = settings(taught_model, tmp_path, **{"train.steps": 1, "server.ranks": 1})
    said = run_script(python, code, tmp_path, *given, name="train.py")
    assert [step["step"] for step in steps(tmp_path)] == [1], said


@pytest.mark.block(2, 161, 167, changes="indentation; MyWorkflow of the block before")
@pytest.mark.block(2, 87, 101)
def test_a_workflow_is_given_to_the_trainer(taught_model: Path, tmp_path: Path) -> None:
    from tests.documents.workflows_live import whole_workflow

    (tmp_path / "my_workflow.py").write_text(whole_workflow(), encoding="utf-8")
    call = text.cut(2, 161, 167).partition("Workflows can")[0].replace("\n", " ")
    code = f"""\
import sys
from any_agent import GRPOConfig, get_custom_dataset, load_expr_config, load_hf_tokenizer
from trainer import PPOTrainer

if __name__ == "__main__":
    from my_workflow import MyWorkflow

    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=dataset) as trainer:
        {call}
"""
    more = {"train.steps": 1, "server.ranks": 1, "sampling.max_new_tokens": 8}
    more |= {"experiment": "my_exp", "trial": "trial1", "rollout.dump_to_file": "true"}
    more |= {"rollout.fileroot": tmp_path / "FILEROOT"}
    said = run_script(PYTHON, code, tmp_path, *settings(taught_model, tmp_path, **more))
    assert [step["step"] for step in steps(tmp_path)] == [1], said
    # Each item's file lies where the text says, for version 0, with the fields that it shows.
    shown = json.loads(text.cut(2, 91, 101).partition("}")[0] + "}")
    files = list((tmp_path / "FILEROOT" / "my_exp" / "trial1" / "rollout" / "0").glob("*.jsonl"))
    assert files, said
    for file in files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert [line.keys() for line in lines] == [shown.keys()] * len(lines)


CAMEL = """\
import asyncio
import sys

from any_agent import GRPOConfig, RemoteSGLangEngine, load_expr_config, load_hf_tokenizer
from tests.documents.running import running


def main():
    # Functions must be found by name: reward functions run in processes of their own.
    import blocks

    model, *urls = sys.argv[1:]
    own = [f"model.path={model}", "sampling.max_new_tokens=16"]
    config, _ = load_expr_config(own, GRPOConfig)
    with RemoteSGLangEngine().initialize(urls=urls, tokenizer=model) as engine:
        given = {
            "engine": engine,
            "tokenizer": load_hf_tokenizer(model),
            "config": config,
            "data": {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "answer": "3"},
        }
        names = asyncio.run(running(blocks.CODE, given, vars(blocks)))
    tokens = [len(one.to_tensor_dict()["input_ids"]) for one in names["found"].values()]
    print("interactions", [count > 0 for count in tokens])


if __name__ == "__main__":
    main()
"""
BLOCKS = """\
import ast

CODE = {code!r}
KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
defined = [node for node in ast.parse(CODE).body if isinstance(node, KINDS)]
exec(compile(ast.Module(defined, []), "<document>", "exec"))
"""
TOKENIZER = """\
import tiktoken
import tiktoken.registry

ranks = {bytes([i]): i for i in range(256)}
table = tiktoken.Encoding("o200k_base", pat_str=".", mergeable_ranks=ranks, special_tokens={})
tiktoken.registry.ENCODINGS["o200k_base"] = table
"""
"""CAMEL counts tokens by a table that it would download."""
ELLIPSIS = "AReaLOpenAICompatibleModel(...)"
FILLED = (
    "AReaLOpenAICompatibleModel(openai_client=client, tokenizer=self.tokenizer, model_type='areal')"
)


def camel() -> Path:
    return python_with("camel-rlvr")


@pytest.mark.block(1, 178, 188, changes="the table that it counts tokens by")
def test_a_camel_agent_as_it_is(code: str, service: Service, tmp_path: Path) -> None:
    """Before it is changed it finds the service by its environment, as any client of OpenAI's."""
    import httpx

    url = f"{service.url}/rl/v1/start_session"
    opened = httpx.post(url, json={"mode": "eval"}, timeout=120).json()
    environ = {
        "OPENAI_API_BASE_URL": opened["base_url"],
        "OPENAI_BASE_URL": opened["base_url"],
        "OPENAI_API_KEY": opened["api_key"],
    }
    head = TOKENIZER + "import asyncio\nfrom tests.documents.running import running\n"
    script = f"{head}asyncio.run(running({code!r}, {{}}))\n"
    said = run_script(camel(), script, tmp_path, **environ)
    assert re.search(r"\d", said), said
    assert service.session(opened["session_id"])["interactions"] == 1


@pytest.mark.block(1, 197, 215)
@pytest.mark.block(1, 224, 233)
@pytest.mark.block(1, 243, 276, changes=f"{ELLIPSIS} gets the arguments of step 2")
@pytest.mark.block(1, 285, 312)
@pytest.mark.block(1, 334, 341)
def test_camel_agents_on_the_direct_client(service: Service, tmp_path: Path) -> None:
    parts = ((197, 215), (224, 233), (243, 276), (285, 312), (334, 341))
    code = "".join(text.renamed(text.cut(1, *lines)) for lines in parts).replace(ELLIPSIS, FILLED)
    code += "found = await workflow.arun_episode(engine, data)\n"
    (tmp_path / "blocks.py").write_text(BLOCKS.format(code=code), encoding="utf-8")
    key = {"ANY_AGENT_ENGINE__KEY": service.engine_key}
    said = run_script(camel(), CAMEL, tmp_path, str(service.model), *service.engines, **key)
    assert "interactions [True]" in said


def test_no_block_of_the_fenced_documents_is_left_out(request: pytest.FixtureRequest) -> None:
    if not text.present():
        pytest.skip("the documents are not here")
    marked = {
        mark.args[:3] for item in request.session.items for mark in item.iter_markers("block")
    }
    if len({item.path for item in request.session.items}) < 4:
        pytest.skip("only some of the files were asked for")
    wanted = {(number, *lines) for number in (1, 4) for lines in text.fences(number)}
    assert not wanted - marked
