"""The documents' agents learn: ``python -m tests.documents.learning [--seed N]``.

MyAgent and MySyncAgent are trained by a script as the guide's, the session example against a
running service, on small sums by a tiny model that is right in a third of them. What is changed in
their code beside import names: the rewards that the session example gives, which are constants in
the text, are 1 for the right answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from pathlib import Path
from statistics import mean

from tests.documents import text
from tests.documents.service import PYTHON, ROOT, run_command
from tests.e2e.learning.runs import prepare, rewards_of, settings_of
from tests.support.e2e.serving import serve

REWARD = """
def compute_reward(response, answer):
    return float((response.choices[0].message.content or "").strip() == answer)
"""
SCRIPT = """
import sys
from any_agent import GRPOConfig, get_custom_dataset, load_expr_config
from trainer import PPOTrainer

if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    dataset = get_custom_dataset(dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=dataset) as trainer:
        trainer.train(workflow=config.workflow)
"""
JUDGE = """
import json
tasks = [json.loads(line) for line in open("train.jsonl")]
answers = {task["messages"][0]["content"]: task["answer"] for task in tasks}
dataset = list(answers)
judged = {}

def right(prompt, completion):
    said = completion["choices"][0]["message"]["content"]
    return float(said.strip() == answers[prompt])
"""
NO_EVALUATION = {"eval__every": 0, "eval__at_start": "false"}


def in_trainer(folder: Path, seed: int, workflow: str, *more: str) -> list[float]:
    """Train an agent of the reference on a dataset; the reward of each step."""
    agents = "from openai import AsyncOpenAI\n" + text.cut(0, 105, 124) + text.cut(0, 199, 215)
    (folder / "my_module.py").write_text(text.renamed(agents) + REWARD, encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    given = settings_of(folder, "retry_math", seed, trial=workflow, **NO_EVALUATION)
    given += [f"workflow=my_module.{workflow}", *more]
    run_command([PYTHON, "train.py", *given], folder)
    (metrics,) = (folder / "runs").glob(f"*/learning/{workflow}/metrics.jsonl")
    return rewards_of(metrics)


def in_sessions(folder: Path, seed: int) -> list[float]:
    """Train on the session example, several of which run at once, as users would."""
    code = text.renamed(text.cut(4, 50, 95))
    changed = code.replace('"reward": 0.5', '"reward": right(prompt, completion_data)')
    changed = changed.replace('"final_reward": 1.0', '"final_reward": 0.0')
    assert changed != code
    changed = changed.replace("range(5)", "range(100)")
    given = settings_of(folder, "retry_math", seed, trial="sessions", **NO_EVALUATION)
    given = [one for one in given if "dataset" not in one]
    with serve(*given, cwd=folder) as served:
        url = "http://192.168.1.100:8080"
        (folder / "agent.py").write_text(JUDGE + changed.replace(url, served.url))

        def work() -> None:
            # Training ends before the epochs do: then sessions are refused.
            try:
                run_command([PYTHON, "agent.py"], folder)
            except AssertionError as error:
                assert "run_finished" in str(error) or "RunFinished" in str(error), error

        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (metrics,) = (folder / "runs").glob("*/learning/sessions/metrics.jsonl")
    return rewards_of(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the documents' agents.")
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory(prefix="documents-") as made:
        folder = Path(made)
        prepare(folder, "retry_math", seed)
        assert json.loads((folder / "train.jsonl").read_text().splitlines()[0])["answer"]
        runs = {
            "MyAgent": lambda: in_trainer(folder, seed, "MyAgent"),
            "MySyncAgent": lambda: in_trainer(
                folder, seed, "MySyncAgent", "rollout.openai.mode=subproc"
            ),
            "session example": lambda: in_sessions(folder, seed),
        }
        print(f"{'agent':16} first two  last two steps   (from {ROOT.name}'s documents)")
        for name, run in runs.items():
            rewards = run()
            first, last = mean(rewards[:2]), mean(rewards[-2:])
            print(f"{name:16} {first:9.3f} {last:9.3f}   {len(rewards)} steps", flush=True)
            assert last > first + 0.1, rewards


if __name__ == "__main__":
    main()
