"""Supervised fine-tuning on recorded or written conversations: ``python -m trainer.sft``.

`any-agent sft` describes its options. Every line of the data is a row of token ids, as ``any-agent
export --style concat`` writes it, or a conversation (``messages``, ``tools``), of which each
assistant message after another one is one row: its prompt is context, its own tokens are trained
on. A message with ``"weight": 0`` is context alone.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.cli.sft import add_sft_arguments
from any_agent.config import Config, TrainConfig, load_config
from any_agent.data.json_lines import read_json_lines
from any_agent.errors import AnyAgentError, ConfigError, DatasetError
from any_agent.runtime.atomic_files import atomic_folder
from any_agent.runtime.command_line import CommandParser, guarded, overrides_of, parse
from trainer.adapter_files import FOLDER, save_adapter
from trainer.from_config import learning_rate, policy_config, require_warm_up, seed_all
from trainer.loss import LossConfig, LossInputs, LossStats, register_loss
from trainer.policy import Policy
from trainer.rows import Row, count_trained, written_row
from trainer.updates import StepConfig
from trainer.weight_folders import save_pretrained, tokenizer_of

SETTINGS = (
    "lr lr_schedule warmup_steps min_lr_ratio betas weight_decay grad_clip seed device dtype "
    "compile threads processes offload_optimizer gradient_checkpointing packing micro_batch_tokens "
    "max_row_tokens lora"
)
"""The settings of `train` that mean something here."""
_WHOLE_SESSION = "interactions"
_OTHER_WEIGHTS = {"loss", "train", "train_on_turn", "trainable"}
"""Names under which other programs' data say which messages are trained on."""


@dataclass(frozen=True, slots=True)
class Example:
    """One line of the data: its rows, the task that it is an answer to, and its reward."""

    rows: list[Row]
    task: str | None
    reward: float | None


@register_loss("sft")
def likelihood_loss(
    logprobs: Tensor,
    inputs: LossInputs,
    *,
    total_tokens: int,
    config: LossConfig,
    entropies: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, LossStats]:
    """Return ``-sum(log pi) / N``: the negative log-likelihood per trained token, in nats."""
    loss = -logprobs.sum() / total_tokens
    entropy = float("nan") if entropies is None else float(entropies.sum())
    stats = LossStats(tokens=logprobs.numel(), loss=float(loss.detach()), entropy=entropy)
    return loss, stats


# -- the data --------------------------------------------------------------------------------------


def read_examples(path: str, chat: ChatFormat, vocab_size: int) -> list[Example]:
    """Read JSON lines from a file or, for `-`, from standard input.

    Raises DatasetError, with file and line, for a line that cannot be trained on.
    """
    examples = []
    for line in read_json_lines(path):
        try:
            examples.append(_example(line, chat, vocab_size))
        except AnyAgentError as error:
            raise DatasetError(f"{line.where}: {error.message}") from None
    return examples


def _example(item: Mapping[str, Any], chat: ChatFormat, vocab_size: int) -> Example:
    if _WHOLE_SESSION in item:
        raise DatasetError("it is a whole session: export with --style concat or --style messages")
    if "input_ids" in item:
        rows = [_token_row(item, vocab_size)]
    elif "messages" in item:
        rows = list(_message_rows(item["messages"], item.get("tools"), chat))
    else:
        raise DatasetError("it has neither input_ids and loss_mask nor messages")
    reward = item.get("rewards", item.get("reward"))
    if reward is not None and not (type(reward) in (int, float) and abs(reward) < math.inf):
        raise DatasetError(f"its reward is {reward!r:.80}, which is no finite number")
    return Example(rows, _task_of(item), reward)


def _task_of(item: Mapping[str, Any]) -> str | None:
    for name in ("group_id", "task_id"):
        value = item.get(name)
        if value is None or value == "":
            continue
        if type(value) not in (int, str):
            raise DatasetError(f"its {name} is {value!r:.80}: give a text or a whole number")
        return str(value)
    return None


def _token_row(item: Mapping[str, Any], vocab_size: int) -> Row:
    ids, mask = item["input_ids"], item.get("loss_mask")
    if not isinstance(mask, list) or not isinstance(ids, list) or len(mask) != len(ids):
        raise DatasetError("input_ids and loss_mask must be lists of the same length")
    if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
        raise DatasetError(f"input_ids must be whole numbers from 0 to {vocab_size - 1}")
    if any(m not in (0, 1) for m in mask) or not any(mask[1:]) or mask[0]:
        raise DatasetError("loss_mask must be 1 on some tokens, 0 on the first and on all others")
    return written_row(ids, mask, advantage=1.0)


def _message_rows(messages: Any, tools: Any, chat: ChatFormat) -> Iterator[Row]:
    """Yield a row for each assistant message, which continues the one before as calls would."""
    if not isinstance(messages, list):
        raise DatasetError("messages is not a list")
    answers = [
        k
        for k, message in enumerate(messages)
        if k and isinstance(message, dict) and message.get("role") == "assistant"
    ]
    if not answers:
        raise DatasetError("messages have no assistant message after another message")
    trained = _trained(messages, answers)
    if not trained:
        raise DatasetError('each answer in messages has "weight": 0: none is to be trained on')
    prompt: list[int] = []
    output: list[int] = []
    for before, k in zip([None, *answers], answers, strict=False):
        rendered = chat.render(messages[:k], tools)
        more = None
        if before is not None:
            more = chat.bridge(
                output,
                messages[before + 1 : k],
                tools,
                answer=messages[before],
                prompt_tail=prompt,
                past=messages[:before],
            )
        prompt = rendered if more is None else [*prompt, *output, *more]
        output = chat.answer_ids(messages[: k + 1], tools, rendered)
        if k in trained:
            mask = [0] * len(prompt) + [1] * len(output)
            yield written_row([*prompt, *output], mask, advantage=1.0)


def _trained(messages: Sequence[Any], answers: Sequence[int]) -> list[int]:
    """Return those answers whose `weight` is not 0, as in OpenAI's format for fine-tuning."""
    trained = []
    for k, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if other := _OTHER_WEIGHTS & fields.keys():
            raise DatasetError(
                f"messages[{k}] has the field {min(other)}: mark an answer that is not trained on "
                'by "weight": 0'
            )
        weight = fields.get("weight")
        if weight not in (None, 0, 1):
            raise DatasetError(f"messages[{k}].weight is {weight!r:.80}: it must be 0 or 1")
        if k in answers and weight != 0:
            trained.append(k)
        elif weight:
            raise DatasetError(
                f"messages[{k}].weight is 1: only an assistant message after another message can "
                "be trained on"
            )
    return trained


def chosen(
    examples: Sequence[Example], *, min_reward: float | None, best: int | None
) -> list[Example]:
    """Return the examples with at least this reward, and of each task the ``best`` ones.

    Raises DatasetError if rewards are needed and missing.
    """
    if (min_reward is not None or best is not None) and any(e.reward is None for e in examples):
        raise DatasetError("--min-reward and --best need a reward in every line")
    if min_reward is not None:
        examples = [e for e in examples if e.reward is not None and e.reward >= min_reward]
    if best is None:
        return list(examples)
    tasks: dict[Any, list[Example]] = defaultdict(list)
    for k, example in enumerate(examples):
        tasks[example.task if example.task is not None else k].append(example)
    # Sorting is stable: of equal rewards the first lines are taken.
    return [
        example
        for group in tasks.values()
        for example in sorted(group, key=lambda e: -(e.reward or 0.0))[:best]
    ]


# -- the training ----------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Train by the arguments of `any-agent sft`, and write the model."""
    config = _config(arguments)
    out = Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists: name a new folder")
    chat = load_chat_format(
        config.model.path,
        renderer=config.model.renderer,
        enable_thinking=config.model.enable_thinking,
        thinking_retention=config.model.thinking_retention,
    )
    seed_all(config.train.seed)
    tokenizer = tokenizer_of(config.model.path)
    policy = Policy.load(config.model.path, policy_config(config.train))
    vocab_size = policy.model.get_input_embeddings().weight.shape[0]
    examples = [e for path in arguments.data for e in read_examples(path, chat, vocab_size)]
    if not examples:
        raise DatasetError("there is no line in the data")
    examples = _short_enough(
        chosen(examples, min_reward=arguments.min_reward, best=arguments.best),
        min(filter(None, (config.train.max_row_tokens, policy.runner.context)), default=None),
    )
    order = random.Random(config.train.seed)
    order.shuffle(examples)
    held = round(arguments.holdout * len(examples))
    held_out, trained = examples[:held], examples[held:]
    if not trained:
        raise DatasetError("no line is left to train on")
    print(
        f"data      {len(trained)} examples, "
        f"{count_trained(_rows(trained))} tokens trained on, {held} held out"
    )
    steps = arguments.epochs * -(-len(trained) // arguments.batch)
    require_warm_up(config.train, steps)
    budget, unseen = config.train.micro_batch_tokens, _rows(held_out)
    before = _loss_of(policy, unseen, budget) if unseen else None
    for epoch in range(1, arguments.epochs + 1):
        starts = range(0, len(trained), arguments.batch)
        parts = [_rows(trained[start : start + arguments.batch]) for start in starts]
        _epoch(policy, config.train, f"epoch {epoch}", parts, steps)
        with atomic_folder(out, replace=True) as folder:
            save_pretrained(policy, tokenizer, folder)
            if policy.config.lora is not None:
                save_adapter(policy, folder / FOLDER)
        order.shuffle(trained)
    if before is not None:
        after = _loss_of(policy, unseen, budget)
        print(f"held out  {before:.4f} nats a token before, {after:.4f} after")
    if policy.config.lora is not None:
        print(f"adapter   {out / FOLDER}")
    print(f"model     {out}")
    return 0


def _rows(examples: Sequence[Example]) -> list[Row]:
    return [row for example in examples for row in example.rows]


def _config(arguments: argparse.Namespace) -> Config:
    settings = [*overrides_of(arguments)]
    if arguments.model is not None:
        settings.append(f"model.path={arguments.model}")
    # Neither a warm-up nor the steps are judged here, as the data decide on the number of steps.
    read = load_config(arguments.config, [*settings, "train.warmup_steps=0"]).train
    if others := read.model_fields_set.difference(SETTINGS.split()):
        names = ", ".join(f"train.{name}" for name in sorted(others))
        raise ConfigError(
            f"no meaning in any-agent sft: {names}. It trains by likelihood alone, and --epochs "
            "and --batch make its steps: leave these settings out"
        )
    config = load_config(arguments.config, [*settings, "train.steps=1000000000"])
    if not config.model.path:
        raise ConfigError("no model is named: give --model DIR")
    if config.train.processes > 1:
        raise ConfigError("any-agent sft uses one process: leave train.processes out")
    return config


def _short_enough(examples: Sequence[Example], most: int | None) -> list[Example]:
    if most is None:
        return list(examples)
    kept = [e for e in examples if max(row["input_ids"].shape[0] for row in e.rows) <= most]
    if left_out := len(examples) - len(kept):
        print(f"data      {left_out} examples are left out: a row has more than {most} tokens")
    return kept


def _epoch(
    policy: Policy, config: TrainConfig, name: str, parts: Sequence[Sequence[Row]], steps: int
) -> None:
    """Make an optimizer step on each of these parts; ``steps`` is the number of the run's."""
    for rows in parts:
        settings = StepConfig(lr=learning_rate(config, policy.steps + 1, steps))
        result = policy.train(rows, config.micro_batch_tokens, LossConfig("sft"), settings)
        print(
            f"step {policy.steps:<4} {name}, {len(rows)} rows, "
            f"{result.stats.tokens} tokens, loss {result.stats.loss:.4f}, "
            f"gradient {result.grad_norm:.3g}, rate {result.learning_rate:.3g}",
            flush=True,
        )


def _loss_of(policy: Policy, rows: Sequence[Row], budget: int | None) -> float:
    """Return the mean negative log-likelihood of a trained token."""
    sums = [float(one.sum()) for one in policy.runner.row_logprobs(rows, budget)]
    return -sum(sums) / count_trained(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="any-agent sft")
    add_sft_arguments(parser)
    arguments = parse(parser, argv)
    return guarded(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
