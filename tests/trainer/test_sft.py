"""Supervised fine-tuning: which tokens are trained on, by which loss, and what is refused."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.cli.main import main
from any_agent.cli.sft import add_sft_arguments
from any_agent.data import get_custom_dataset
from any_agent.errors import AnyAgentError, ConfigError, DatasetError
from tests.support.errors import fails_with
from tests.support.true_logprobs import TrueModel
from trainer.rows import Row
from trainer.sft import SETTINGS as SFT_SETTINGS
from trainer.sft import chosen, read_examples, run
from trainer.sft import main as train

USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
MORE = {"role": "user", "content": "And 3 + 3?"}
LAST = {"role": "assistant", "content": "6"}
SETTINGS = ("train.lr=0.01", "train.device=cpu", "train.micro_batch_tokens=128")
VOCABULARY = 300
ROW = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


@pytest.fixture(scope="module")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(tiny_model_dir)


def write(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def tune(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_sft_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


def nats(model: Path, ids: list[int], mask: list[int]) -> float:
    """The mean negative log-likelihood of a row's trained tokens, by a fresh forward pass."""
    table = TrueModel(model).logprobs(ids[:1], ids[1:], {"temperature": 1.0})
    own = table.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return -float((own * torch.tensor(mask[1:])).sum()) / sum(mask)


def test_every_answer_is_a_row_that_ends_its_turn(chat: ChatFormat, tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"messages": [USER, ANSWER, MORE, LAST]})
    (example,) = read_examples(str(data), chat, chat.vocab_size)
    assert len(example.rows) == 2
    for row, (end, answer) in zip(example.rows, ((1, ANSWER), (3, LAST)), strict=True):
        ids, trained = row["input_ids"].tolist(), row["loss_mask"].bool()
        prompt = ids[: int(trained.nonzero()[0, 0])]
        if end == 1:
            assert prompt == chat.render([USER], None)
        else:
            # As the service continues a conversation: all earlier tokens stay.
            first = example.rows[0]["input_ids"].tolist()
            assert prompt[: len(first)] == first
            assert MORE["content"] in chat.decode(prompt[len(first) :])
        assert trained.nonzero()[:, 0].tolist() == list(range(len(prompt), len(ids)))
        assert ids[-1] in chat.stop_token_ids
        assert chat.decode(ids[len(prompt) : -1]) == answer["content"]


def trained_texts(chat: ChatFormat, rows: list[Row]) -> list[str]:
    return [chat.decode(row["input_ids"][row["loss_mask"].bool()].tolist()[:-1]) for row in rows]


def test_answers_of_weight_0_and_an_assistant_that_opens_are_context(
    chat: ChatFormat, tmp_path: Path
) -> None:
    talk = [USER, ANSWER, MORE, LAST]
    off = [USER, ANSWER | {"weight": 0}, MORE | {"weight": 0}, LAST | {"weight": 1}]
    greeting = {"role": "assistant", "content": "Hello"}
    lines = [{"messages": messages} for messages in (talk, off, [greeting, *talk])]
    whole, half, opened = read_examples(
        str(write(tmp_path / "data", *lines)), chat, chat.vocab_size
    )
    for example in (whole, opened):
        assert trained_texts(chat, example.rows) == [ANSWER["content"], LAST["content"]]
    (row,) = half.rows
    assert row["input_ids"].tolist() == whole.rows[1]["input_ids"].tolist()
    assert row["loss_mask"].tolist() == whole.rows[1]["loss_mask"].tolist()
    prompt = chat.render([greeting, USER], None)
    assert opened.rows[0]["input_ids"].tolist()[: len(prompt)] == prompt


def test_fine_tuning_makes_the_trained_tokens_likelier_each_time_alike(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, mask = [3, 17, 40, 41, 42, 43], [0, 0, 1, 1, 0, 1]
    data = write(tmp_path / "data", {"input_ids": ids, "loss_mask": mask})
    out = tmp_path / "out"
    command = ("--data", data, "--model", tiny_model_dir, "--out", out, "--epochs", 5, *SETTINGS)
    assert tune(*command) == 0
    printed = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in printed.splitlines()[1:6]]
    assert losses[0] == pytest.approx(nats(tiny_model_dir, ids, mask), abs=1e-4)
    assert losses == sorted(losses, reverse=True)
    assert nats(out, ids, mask) < losses[-1]
    # The same command gives the same weights.
    assert tune(*command[:5], tmp_path / "again", *command[6:]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]


def test_an_adapter_is_tuned_and_written_beside_the_model_that_has_it(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 0, 1]}
    data, out = write(tmp_path / "data", row), tmp_path / "out"
    lora = ("train.lora.rank=4", "train.lora.target_modules=q_proj,v_proj,down_proj")
    # Settings may stand between options.
    begin = ("--data", data, *lora, "--model", tiny_model_dir, *SETTINGS)
    train([str(one) for one in (*begin, "--out", out, "--epochs", 3, "--batch", 1)])
    assert capsys.readouterr().out.splitlines()[-2] == f"adapter   {out / 'adapter'}"
    ids, mask = row["input_ids"], row["loss_mask"]
    assert nats(out, ids, mask) < 0.9 * nats(tiny_model_dir, ids, mask)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="auto")
    by_peft = PeftModel.from_pretrained(base, out / "adapter").merge_and_unload().state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        torch.testing.assert_close(by_peft[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


def test_the_held_out_lines_are_measured_and_not_trained_on(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"messages": [USER, {"role": "assistant", "content": f"{n}"}]} for n in range(10)]
    data, out = write(tmp_path / "data", *lines), tmp_path / "out"
    options = ("--holdout", 0.3, "--batch", 4)
    tune("--data", data, "--model", tiny_model_dir, "--out", out, *options, *SETTINGS)
    printed = capsys.readouterr().out
    assert "7 examples" in printed and "3 held out" in printed
    found = re.search(r"held out  ([\d.]+) nats a token before, ([\d.]+) after", printed)
    assert found is not None
    before, after = map(float, found.groups())
    assert after < before


@pytest.mark.parametrize("key", ["task_id", "group_id"])
def test_the_best_answers_of_each_task_are_chosen_by_reward(
    key: str, chat: ChatFormat, tmp_path: Path
) -> None:
    """Rows that are given as tokens stay as they are; tasks may have numbers."""
    rewards = {"a": [0.1, 0.9, 0.5], 0: [0.2, 0.2], 1: [0.5]}
    lines = [ROW | {key: t, "rewards": r} for t, of in rewards.items() for r in of]
    lines.append(ROW | {"group_id": "", "task_id": None, "reward": 0.25})
    examples = read_examples(str(write(tmp_path / "data", *lines)), chat, VOCABULARY)
    for example in examples:
        (row,) = example.rows
        assert {name: row[name].tolist() for name in ROW} == ROW
    assert [e.task for e in examples] == ["a", "a", "a", "0", "0", "1", None]
    best = chosen(examples, min_reward=None, best=1)
    assert [(e.task, e.reward) for e in best] == [("a", 0.9), ("0", 0.2), ("1", 0.5), (None, 0.25)]
    two = chosen(examples, min_reward=None, best=2)
    assert [e.reward for e in two] == [0.9, 0.5, 0.2, 0.2, 0.5, 0.25]
    assert [e.reward for e in chosen(examples, min_reward=0.6, best=1)] == [0.9]
    assert chosen(examples, min_reward=None, best=None) == examples


@pytest.mark.parametrize("line", [b"[1]", b"\xff\xfe{}", b"[" * 100_000, b'{"input_ids": [5', b"7"])
def test_files_are_read_as_those_of_datasets(line: bytes, chat: ChatFormat, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    good = b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n\n"
    data.write_bytes(good)
    (example,) = read_examples(str(data), chat, VOCABULARY)
    assert example.rows[0]["input_ids"].tolist() == ROW["input_ids"]
    data.write_bytes(good + line)
    with fails_with(DatasetError, "line 3 ") as by_sft:
        read_examples(str(data), chat, VOCABULARY)
    with pytest.raises(DatasetError) as by_datasets:
        get_custom_dataset(path=data)
    assert by_sft.value.message == by_datasets.value.message


@pytest.mark.parametrize(
    "line, error",
    [
        ({}, "neither input_ids and loss_mask nor messages"),
        ({"interactions": [], "input_ids": []}, "export with --style"),
        (ROW | {"loss_mask": [0, 1]}, "of the same length"),
        (ROW | {"loss_mask": None}, "of the same length"),
        (ROW | {"loss_mask": [1, 1, 0]}, "0 on the first"),
        (ROW | {"loss_mask": [0, 0, 0]}, "1 on some tokens"),
        (ROW | {"loss_mask": [0, 2, 1]}, "1 on some tokens"),
        (ROW | {"input_ids": [5, VOCABULARY, 7]}, f"from 0 to {VOCABULARY - 1}"),
        (ROW | {"input_ids": [5, -1, 7]}, "from 0"),
        (ROW | {"input_ids": [5, True, 7]}, "whole numbers"),
        (ROW | {"reward": "high"}, "reward"),
        (ROW | {"reward": float("nan")}, "reward"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [ANSWER]}, "no assistant message"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": 4}]}, "messages"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, '"weight": 0'),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "messages[1].weight is 0.5"),
        ({"messages": [USER | {"weight": 1}, ANSWER]}, "messages[0].weight is 1"),
        ({"messages": [ANSWER | {"weight": 1}, USER, LAST]}, "messages[0].weight is 1"),
        *(
            ({"messages": [USER, ANSWER | {name: False}]}, name)
            for name in ("loss", "train", "trainable", "train_on_turn")
        ),
        (ROW | {"task_id": 1.5}, "task_id is 1.5"),
        (ROW | {"group_id": True, "task_id": "a"}, "group_id is True"),
    ],
)
def test_a_line_that_cannot_be_trained_on_is_refused_with_its_number(
    line: Any, error: str, chat: ChatFormat, tmp_path: Path
) -> None:
    data = write(tmp_path / "data", ROW, line)
    with fails_with(DatasetError, "line 2: ", error):
        read_examples(str(data), chat, VOCABULARY)


def test_wrong_files_and_settings_are_refused_before_anything_is_written(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    data, there = write(tmp_path / "data", ROW), tmp_path / "there"
    there.mkdir()
    (there / "file").touch()
    new = tmp_path / "new"
    begin: tuple[Any, ...] = ("--model", tiny_model_dir, "--out", new)
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("--data", data, "--out", new), "--model"),
        (("--data", data, "--model", tiny_model_dir, "--out", there), there),
        (("--data", tmp_path / "none", *begin), "No such file"),
        (("--data", write(tmp_path / "empty"), *begin), "no line"),
        (("--data", data, *begin, "--best", 1), "--best"),
        (("--data", data, *begin, "train.processes=2"), "train.processes"),
        (("--data", data, *begin, "train.max_row_tokens=16", "--holdout", 0.9), "no line is left"),
    ]
    for arguments, error in cases:
        with fails_with(AnyAgentError, error) as refused:
            tune(*arguments)
        assert isinstance(refused.value, ConfigError | DatasetError)
        assert not new.exists()


@pytest.mark.parametrize(
    "setting",
    [
        *("kl_coef=0.1", "minibatches=2", "epochs_per_batch=2", "entropy_coef=0.1", "steps=100"),
        *("epochs=2", "preset=dapo", "loss=cispo", "is_cap=2", "checkpoint_every=1"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(
    setting: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, new = write(tmp_path / "data", ROW), tmp_path / "new"
    given = ("--data", data, "--model", tiny_model_dir, "--out", new, *SETTINGS)
    name, _, value = setting.partition("=")
    refused = f"train.{name}. "
    with fails_with(ConfigError, refused):
        tune(*given, f"train.{setting}")
    (tmp_path / "config.yaml").write_text(f"train: {{{name}: {value}}}\n")
    with fails_with(ConfigError, refused):
        tune(*given, "--config", tmp_path / "config.yaml")
    monkeypatch.setenv(f"ANY_AGENT_TRAIN__{name.upper()}", value)
    with fails_with(ConfigError, refused):
        tune(*given)
    if name == "kl_coef":  # all of them are named
        with fails_with(ConfigError, "train.kl_coef, train.reference_model"):
            tune(*given, f"train.reference_model={tiny_model_dir}")
    assert not new.exists()


def test_the_help_lists_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sft", "--help"])
    listed = capsys.readouterr().out
    assert {name for name in SFT_SETTINGS.split() if not re.search(rf"\b{name}\b", listed)} == {
        # It uses one process: only train.processes=1 is accepted.
        "processes"
    }


def test_an_answer_that_calls_a_tool_is_trained_on_as_the_template_writes_it(
    chat: ChatFormat, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    arguments = '{"a": 2, "b": 2}'
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    line = {"messages": [USER, asked, result, ANSWER], "tools": [tool]}
    (example,) = read_examples(str(write(tmp_path / "data", line)), chat, chat.vocab_size)
    first, last = example.rows
    ids, own = first["input_ids"].tolist(), int(first["loss_mask"].sum())
    parsed = chat.parse(ids[-own:], prompt_ids=ids[:-own], tools=[tool]).to_message()
    (found,) = parsed["tool_calls"]
    assert found["function"]["name"] == "add"
    assert json.loads(found["function"]["arguments"]) == json.loads(arguments)
    assert last["input_ids"].tolist()[: len(ids)] == ids


@pytest.mark.service
def test_the_command_reads_standard_input(tiny_model_dir: Path, tmp_path: Path) -> None:
    command = ("-m", "any_agent.cli", "sft", "--data", "-", "--model", str(tiny_model_dir))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, *command, "--out", str(out), *SETTINGS],
        input=json.dumps(ROW) + "\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"model     {out}"
    assert load_chat_format(out).render([USER], None)
    assert (out / "model.safetensors").stat().st_size > 1000
