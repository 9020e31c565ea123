"""TRL's GRPOTrainer on sums: ``python -m benchmarks.learning.trl_training FOLDER --seed N``.

It trains the model that ``runs.prepare`` left in the folder, with the settings that any-agent's run
of the same task has, and prints the rewards of the validation set, before the first step and after
every ``--every`` steps, as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learning.retry_math import is_right

GROUP_SIZE = 8
BATCH_SIZE = 64
NEW_TOKENS = 4
_EVALS = 4
"""Answers to each item of the validation set."""


class Validation(TrainerCallback):
    """Samples answers to the validation set, as the model is at some steps."""

    def __init__(self, model: Any, tokenizer: Any, items: list[dict[str, Any]], every: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._answers = [item["answer"] for item in items for _ in range(_EVALS)]
        self._prompts = [_prompt(tokenizer, item) for item in items for _ in range(_EVALS)]
        self._every = every
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step % self._every == 0:
            self.sample()

    def sample(self) -> None:
        asked = self._tokenizer(
            self._prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.no_grad():
            out = self._model.generate(
                **asked, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS
            )
        texts = self._tokenizer.batch_decode(
            out[:, asked["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right = [is_right(text, answer) for text, answer in zip(texts, self._answers, strict=True)]
        self.rewards.append(sum(right) / len(right))


def _prompt(tokenizer: Any, item: dict[str, Any]) -> str:
    text: str = tokenizer.apply_chat_template(
        item["messages"], tokenize=False, add_generation_prompt=True
    )
    return text


def _reward(completions: list[Any], answer: list[str], **more: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(is_right(text, right)) for text, right in zip(texts, answer, strict=True)]


def train(folder: Path, seed: int, steps: int, every: int, lr: float) -> list[float]:
    """Return the validation set's rewards."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    splits = {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "valid")
    }
    asked = [{"prompt": one["messages"], "answer": one["answer"]} for one in splits["train"]]
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            seed=seed,
            use_cpu=True,
            bf16=False,
            learning_rate=lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            per_device_train_batch_size=BATCH_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=NEW_TOKENS,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            max_steps=steps,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_reward,
            args=settings,
            train_dataset=Dataset.from_list(asked),
            processing_class=tokenizer,
        )
        validation = Validation(trainer.model, tokenizer, splits["valid"], every)
        trainer.add_callback(validation)
        validation.sample()
        trainer.train()
    return validation.rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="Train sums by TRL.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()
    rewards = train(
        arguments.folder, arguments.seed, arguments.steps, arguments.every, arguments.lr
    )
    print(json.dumps(rewards))


if __name__ == "__main__":
    main()
