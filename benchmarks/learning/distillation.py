"""Draw learning curves of students that learn from a reward, from a teacher, and from both.

``python benchmarks/learning/distillation.py curves.png [--task TASK] [--seeds N]``. The task is one
sum, whose teacher is a model of another seed that the reward alone has trained, or three sums whose
reward comes only if all are right, with a teacher that was shown right answers. Everything runs in
this process: sampling is a loop over the policy's own passes, and advantages, loss and steps are
the trainer's. As in a run, a group that teaches nothing is replaced by another.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.config import TrainConfig, load_config
from any_agent.types import SampledSession
from benchmarks.learning import retry_math, three_sums, warm_models
from benchmarks.learning.curves import picture, summary
from trainer.batch import ZeroVarianceGroups, training_batch
from trainer.from_config import loss_config, policy_config
from trainer.parallel.trainer_group import load_frozen
from trainer.policy import Policy
from trainer.weight_folders import save_pretrained

TASKS: dict[str, Any] = {"retry_math": retry_math, "three_sums": three_sums}
STEPS = {"retry_math": 16, "three_sums": 32}
RATES = {"retry_math": "8e-4", "three_sums": "2e-3"}
EVERY = 2
GROUPS, GROUP_SIZE = 8, 8
NEW_TOKENS = 8
EVALS = 8
"""Answers to each held-out item."""
TEACHER_SEED, TEACHER_STEPS = 1000, 48
SHARES = (0.9, 0.95)
"""The shares of the teacher's accuracy whose first evaluations are printed."""
SETTINGS = ("train.betas=[0.9, 0.95]", "train.device=cpu")
STUDENTS: dict[str, tuple[str, ...]] = {
    "the reward alone": (),
    "the teacher alone": ("train.teacher_coef=1", "train.reward_coef=0"),
    "both": ("train.teacher_coef=1",),
}


class Course:
    """One model's training on a task."""

    def __init__(self, task: str, model: Path, seed: int, *settings: str) -> None:
        given = [*SETTINGS, f"train.lr={RATES[task]}", f"train.seed={seed}", *settings]
        self.config: TrainConfig = load_config(None, given, environ={}).train
        self.task = TASKS[task]
        self.policy = Policy.load(model, policy_config(self.config))
        if self.config.teacher:
            load_frozen(self.policy, "teacher", self.config.teacher)
        self.sampled = 0
        """Sessions, those of replaced groups among them."""
        self._chat: ChatFormat = load_chat_format(str(model), renderer="default")
        self._end = int(self.policy.model.config.eos_token_id)
        self._random = torch.Generator().manual_seed(seed)
        self._zero_variance = ZeroVarianceGroups(self.config)
        self._items = self._shuffled(seed)

    def train(self, steps: int, *, every: int | None = None) -> list[float]:
        """Make steps; return the accuracies before the first one and after every few."""
        found = [] if every is None else [self.accuracy()]
        for step in range(steps):
            groups: list[list[SampledSession]] = []
            while missing := GROUPS - len(groups):
                fresh = self._groups(missing)
                groups += [g for g in fresh if not self._zero_variance.reject_reason(g)]
            batch = training_batch(groups, self.config, step=step, eta=0, step_of_version={0: step})
            self.policy.train(batch.rows, None, loss_config(self.config))
            if every is not None and (step + 1) % every == 0:
                found.append(self.accuracy())
        return found

    def accuracy(self) -> float:
        """Return the share of right answers to held-out items."""
        items = [item for item in self.task.items("valid") for _ in range(EVALS)]
        return statistics.fmean(reward for _, reward in self._answers(items))

    def _shuffled(self, seed: int) -> Iterator[dict[str, Any]]:
        for epoch in count():
            items = self.task.items("train")
            random.Random(f"{seed}-{epoch}").shuffle(items)
            yield from items

    def _groups(self, wanted: int) -> list[list[SampledSession]]:
        """Return so many new groups."""
        items = [next(self._items) for _ in range(wanted)]
        answers = self._answers([item for item in items for _ in range(GROUP_SIZE)])
        self.sampled += len(answers)
        sessions = [
            SampledSession(f"s{k}", f"g{k // GROUP_SIZE}", [row | _reward(reward)], [1.0])
            for k, (row, reward) in enumerate(answers)
        ]
        return [sessions[k : k + GROUP_SIZE] for k in range(0, len(sessions), GROUP_SIZE)]

    @torch.no_grad()
    def _answers(self, items: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
        """Return the row of an answer to each item, sampled at temperature 1, and its reward."""
        prompts = [self._chat.render(item["messages"], None) for item in items]
        ids, logprobs = [list(prompt) for prompt in prompts], [[0.0] * len(p) for p in prompts]
        for _ in range(NEW_TOKENS):
            going = [k for k, one in enumerate(ids) if one[-1] != self._end or one == prompts[k]]
            if not going:
                break
            rows = [torch.tensor(ids[k]) for k in going]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            # Right padding and causal attention: no token sees it.
            logits = self.policy.model(input_ids=padded, use_cache=False).logits
            last = logits[torch.arange(len(going)), torch.tensor([len(ids[k]) - 1 for k in going])]
            table = last.log_softmax(-1)
            drawn = torch.multinomial(table.exp(), 1, generator=self._random)
            for k, token, logprob in zip(going, drawn, table.gather(-1, drawn), strict=True):
                ids[k].append(int(token))
                logprobs[k].append(float(logprob))
        out = []
        for item, prompt, one, of_tokens in zip(items, prompts, ids, logprobs, strict=True):
            said = self._chat.tokenizer.decode(one[len(prompt) :], skip_special_tokens=True)
            right = self.task.is_right(said, item["answer"])
            out.append((_row(len(prompt), one, of_tokens), float(right)))
        return out


def _row(prompt: int, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    trained = np.arange(len(ids)) >= prompt
    return {
        "input_ids": np.array(ids, np.int32),
        "loss_mask": trained.astype(np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "versions": np.where(trained, 0, -1).astype(np.int32),
        "attention_mask": np.ones(len(ids), bool),
    }


def _reward(reward: float) -> dict[str, Any]:
    return {"rewards": np.float32(reward)}


def teacher_of(task: str, folder: Path) -> float:
    """Make the teacher in the folder, and return its accuracy."""
    teacher = folder / "teacher"
    if task == "three_sums":
        warm_models.make_model(task, teacher, TEACHER_SEED, slips=False)
        return Course(task, teacher, TEACHER_SEED).accuracy()
    start = warm_models.make_model(task, folder / "start", TEACHER_SEED)
    course = Course(task, start, TEACHER_SEED)
    course.train(TEACHER_STEPS)
    save_pretrained(course.policy, start, teacher)
    return course.accuracy()


def first_step(rewards: Sequence[float], least: float) -> int | None:
    """Return the step of the first evaluation with this accuracy; None without one."""
    return next((EVERY * k for k, reward in enumerate(rewards) if reward >= least), None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curves of students with a teacher.")
    parser.add_argument("png", type=Path)
    parser.add_argument("--task", choices=sorted(TASKS), default="three_sums")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[float]]] = {name: [] for name in STUDENTS}
    with tempfile.TemporaryDirectory(prefix="any-agent-distillation-") as root:
        accuracy = teacher_of(arguments.task, Path(root))
        print(f"teacher {accuracy:.3f}", flush=True)
        for seed in range(arguments.seeds):
            model = warm_models.make_model(arguments.task, Path(root, f"model-{seed}"), seed)
            for name, more in STUDENTS.items():
                given = (*more, f"train.teacher={root}/teacher") if more else ()
                course = Course(arguments.task, model, seed, *given)
                curves[name].append(course.train(STEPS[arguments.task], every=EVERY))
                told = " ".join(f"{each:.3f}" for each in curves[name][-1])
                print(f"seed {seed} {name:<18} {told}  ({course.sampled} sessions)", flush=True)
    for name, runs in curves.items():
        print(summary(name, runs, last=3))
        print("    mean", *(f"{statistics.fmean(at):.3f}" for at in zip(*runs, strict=True)))
        for share in SHARES:
            steps = [first_step(rewards, share * accuracy) for rewards in runs]
            print(f"    {share:.0%} of the teacher's accuracy at steps {steps}")
    picture(
        curves,
        every=EVERY,
        first=0,
        title=f"{arguments.task}: from the reward, and from a teacher of {accuracy:.0%}",
        reward="accuracy on held-out items",
    ).savefig(arguments.png)


if __name__ == "__main__":
    main()
