"""A multi-turn workflow that samples and builds its tensors by hand, as AReaL-lite's users do."""

from __future__ import annotations

import copy
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from any_agent import (
    GenerationHyperparameters,
    LLMRequest,
    RemoteSGLangEngine,
    RolloutWorkflow,
    concat_padded_tensors,
    gsm8k_reward_fn,
    load_hf_tokenizer,
    stats_tracker,
)
from any_agent.config import RolloutConfig
from any_agent.workflow import rows_of
from tests.support.in_thread import served_in_thread
from tests.support.scripted_engine import ScriptedEngine
from tests.support.workflow.tensors import tensors

MESSAGES = [{"role": "user", "content": "What is 2 and 3?"}]
AGAIN = "That is wrong. Try again."


class TryAgain(RolloutWorkflow):
    """Asks until the answer is right; each turn's prompt is the template's, from the beginning."""

    def __init__(
        self, reward_fn: Any, gconfig: Any, tokenizer: Any, max_turns: int, turn_discount: float
    ) -> None:
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.wide = torch.float32

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        seq: list[int] = []
        logprobs: list[float] = []
        loss_mask: list[int] = []
        versions: list[int] = []
        messages = data["messages"]
        turn, reward, discount, text = 0, 0.0, 1.0, ""
        rid = uuid.uuid4().hex
        while reward == 0 and turn < self.max_turns:
            if turn > 0:
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": AGAIN},
                ]
            input_ids = self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True
            )
            req = LLMRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig.new(n_samples=1))
            resp = await engine.agenerate(req)
            text = self.tokenizer.decode(resp.output_tokens)
            reward = self.reward_fn(
                prompt=self.tokenizer.decode(input_ids),
                completions=text,
                prompt_ids=resp.input_tokens,
                completion_ids=resp.output_tokens,
                **data,
            )
            turn += 1
            discount *= self.turn_discount
            input_len = len(resp.input_tokens) - len(seq)
            seq += resp.input_tokens[-input_len:] + resp.output_tokens
            logprobs += [0.0] * input_len + resp.output_logprobs
            loss_mask += [0] * input_len + [1] * resp.output_len
            versions += [-1] * input_len + resp.output_versions
        row = {
            "input_ids": torch.tensor(seq),
            "logprobs": torch.tensor(logprobs, dtype=self.wide),
            "loss_mask": torch.tensor(loss_mask),
            "versions": torch.tensor(versions),
            "rewards": torch.tensor(float(reward * discount)),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool),
        }
        return concat_padded_tensors([{k: v.unsqueeze(0) for k, v in row.items()}])


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_hf_tokenizer(str(tiny_model_dir))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("loader", [{}, {"collate_fn": lambda items: items}], ids=["own", "list"])
def test_a_hand_written_workflow_is_collected_exact_to_the_token(
    tokenizer: Any, wide: torch.dtype, loader: dict[str, Any]
) -> None:
    """Its first answer is wrong. Over a loader of torch, and by both ways to ask for a batch."""
    scripted = ScriptedEngine(decode=tokenizer.decode)
    scripted.weight_version = "7"
    config = RolloutConfig(batch_size=1, max_concurrent=1, eta=0)  # type: ignore[call-arg]
    items = [{"messages": MESSAGES, "answer": "5"}]
    workflow = TryAgain(
        gsm8k_reward_fn,
        GenerationHyperparameters(max_new_tokens=16, stop_token_ids=(tokenizer.eos_token_id,)),
        tokenizer,
        max_turns=5,
        turn_discount=0.9,
    )
    workflow.wide = wide
    train_dataloader: Any = DataLoader(items, batch_size=1, **loader)  # type: ignore[arg-type]
    answers = [
        [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for text in ("It is 6.", "It is 5.")
    ]
    with served_in_thread(scripted, within=60), RemoteSGLangEngine(config) as rollout:
        rollout.initialize(url=scripted.url, tokenizer=tokenizer)
        for asynchronous in (False, True):
            for ids in answers:
                scripted.say(ids)
            with stats_tracker.record_timing("rollout"):
                if asynchronous:
                    (batch,) = rollout.prepare_batch(train_dataloader, workflow=workflow)
                else:
                    data = next(iter(train_dataloader))
                    (batch,) = rollout.rollout_batch(data, workflow=workflow)
            first, second = (one["input_ids"] for one in scripted.requests[-2:])
            seq = [*second, *answers[1]]
            assert second[: len(first)] == first
            assert second[len(first) : len(first) + len(answers[0])] == answers[0]
            assert batch["input_ids"].tolist() == [seq]
            trained = [0] * len(first) + [1] * len(answers[0])
            trained += [0] * (len(second) - len(trained)) + [1] * len(answers[1])
            assert batch["loss_mask"].tolist() == [trained]
            assert batch["versions"].tolist() == [[7 if t else -1 for t in trained]]
            assert (batch["logprobs"] < 0).int().tolist() == [trained]
            assert batch["rewards"].tolist() == pytest.approx([0.81])
            documented = {name: value.dtype for name, value in tensors(seq).items()}
            assert {name: value.dtype for name, value in batch.items()} == documented
            ((row, _),) = rows_of(batch, newest=7, vocab_size=380)
            assert row["input_ids"].tolist() == seq
    assert MESSAGES == [{"role": "user", "content": "What is 2 and 3?"}], "each run has its copy"


def test_the_tokenizers_template_gives_ids(tokenizer: Any, tiny_model_dir: Path) -> None:
    """Also after a trip to another process; transformers' own gives a mapping, which will do."""
    own = AutoTokenizer.from_pretrained(tiny_model_dir).apply_chat_template(MESSAGES)
    for one in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        ids = one.apply_chat_template(MESSAGES, tokenize=True)
        assert list(map(type, ids)) == [int] * len(ids)
        assert one.decode(ids) == one.apply_chat_template(MESSAGES, tokenize=False)
        whole = one.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)
        assert whole["attention_mask"] == [1] * len(ids)
        assert LLMRequest(input_ids=whole).input_ids == LLMRequest(input_ids=own).input_ids == ids
        tensor = one.apply_chat_template(MESSAGES, return_tensors="pt")
        assert LLMRequest(input_ids=tensor).input_ids == ids
