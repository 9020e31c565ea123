"""``any-agent eval --model``: one kept version of a trial is served, and it is just that one."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from any_agent.config import Config, load_config
from any_agent.demo.models.tiny import save_tiny_model
from any_agent.inference import RemoteSGLangEngine
from any_agent.launcher.trial import trial_dir
from tests.support.e2e.serving import run_cli
from trainer.checkpoint import save_checkpoint
from trainer.policy import Policy

QUESTIONS = ["count from 3", "tell me more", "why?"]
AGENT = """
import openai

class Same:
    async def run(self, data, **extra_kwargs):
        client = openai.AsyncOpenAI(
            base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]
        )
        answer = await client.chat.completions.create(
            model="any", messages=data["messages"], temperature=0, max_tokens=12
        )
        return float(answer.choices[0].message.content == data["answer"])
"""


def test_an_evaluation_uses_the_version_that_was_asked_for(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = [f"root={tmp_path / 'runs'}", "user=me", "experiment=exp", "trial=one"]
    settings += [f"model.path={tiny_model_dir}", "model.enable_thinking=false"]
    config = load_config(None, [*settings, "server.ranks=1"], environ={})
    run = trial_dir(config)
    run.create()
    (run.path / "config.yaml").write_text(yaml.safe_dump(config.dump()))
    other = save_tiny_model(tmp_path / "other", seed=40)
    for model, step, version in ((tiny_model_dir, 20, 21), (other, 40, 42)):
        policy = Policy.load(model)
        policy.steps = step
        save_checkpoint(run.checkpoints, policy, tiny_model_dir, {"version": version})
    asked, latest = (answers(run.checkpoints / f"step-000000{step}") for step in (20, 40))
    assert asked != latest
    lines = [
        {"messages": messages(question), "answer": answer}
        for question, answer in zip(QUESTIONS, asked, strict=True)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "same_agent.py").write_text(AGENT)
    # While somebody else serves the trial, say.
    with run.lock():
        before = sorted(run.path.rglob("*"))
        done = run_cli(
            *("eval", "--agent", "same_agent.Same", "--data", "items.jsonl", "-n", "2"),
            *("--model", "exp/one@21", "--json", "-", *settings[:2]),
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["model"], figures["versions"]) == ("exp/one@21", [21])
    assert [one["rewards"] for one in figures["by_item"]] == [[1.0, 1.0]] * 3
    assert figures["failed"] == {}
    assert sorted(run.path.rglob("*")) == before, "nothing of it is in the trial's folder"


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def answers(model: Path) -> list[object]:
    """What a model's likeliest tokens say."""
    config = Config.model_validate({"model": {"enable_thinking": False}})
    with RemoteSGLangEngine(config).initialize(model=model) as local:
        return [
            local.chat(messages(question), temperature=0.0, max_new_tokens=12)["content"]
            for question in QUESTIONS
        ]
