"""The laws over one recorded session: what was exported against what was said and heard."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from any_agent.record import InteractionTree
from any_agent.types import Continuation, Interaction, Message
from tests.support.laws.checks import check_continuation, check_parsing, value_of
from tests.support.laws.service import TEMPERATURE, Lab, Talk

TOLERANCE = 1e-4


async def check_session(lab: Lab, talk: Talk, *, each: int = 1) -> InteractionTree:
    """Every law over a finished session; the tree, for what else a test wants to know.

    What a continuation adds is compared with the template for ``each`` so-manieth interaction: it
    writes the whole conversation every time.
    """
    recorded = await lab.proxy.recorded(talk.id)
    tree = InteractionTree.from_interactions(recorded)
    exported = (await lab.proxy.export(talk.id, style="individual"))[talk.id]
    assert set(talk.delivered) <= {node.id for node in tree}
    for number, node in enumerate(tree):
        check_ids(lab, tree, node)
        check_row(tree, node, exported[node.id])
        if lab.engine.model is not None:
            check_logprobs(lab, tree, node)
        if node.id in talk.delivered:
            asked, given = talk.asked[node.id], talk.delivered[node.id]
            check_parsing(lab.fam, tree, node, asked.tools, tuple(asked.stop))
            assert heard(given) == heard(node.output_message)
            assert given.finish == node.finish_reason
            if node.continuation is Continuation.EXACT and number % each == 0:
                check_continuation(lab.fam, tree, node, list(asked.messages), asked.tools)
    return tree


def heard(message: Message) -> dict[str, Any]:
    """A message's fields that say something; arguments as values, as some APIs have them.

    A call has one id in all APIs, but for how Anthropic's begin.
    """
    out = {k: v for k, v in message.items() if v and k not in ("role", "index")}
    if "tool_calls" in out:
        out["tool_calls"] = [
            (
                call["id"].replace("toolu_", "call_", 1),
                call["function"]["name"],
                value_of(call["function"]["arguments"]),
            )
            for call in out["tool_calls"]
        ]
    return out


def check_ids(lab: Lab, tree: InteractionTree, node: Interaction) -> None:
    """What the engine was sent first is the prompt; what it was sent later begins with it."""
    prompt = tree.prompt_ids(node.id).tolist()
    whole = prompt + node.output_ids.tolist()
    attempts = (r for r in lab.engine.requests if r["rid"].partition("-")[2] == f"{node.id};")
    sent = [attempt["input_ids"] for attempt in attempts]
    assert sent and sent[0] == prompt
    for resumed in sent[1:]:
        assert len(prompt) <= len(resumed) <= len(whole) and resumed == whole[: len(resumed)]


def check_row(tree: InteractionTree, node: Interaction, row: dict[str, Any]) -> None:
    """One version and logprob per sampled token and none elsewhere; the loss on these alone."""
    prompt = tree.prompt_ids(node.id).tolist()
    before, said = len(prompt), len(node.output_ids)
    assert row["input_ids"] == prompt + node.output_ids.tolist()
    trained = node.trainable and not passed_over(tree, node)
    assert row["loss_mask"] == [0] * before + [int(trained)] * said
    assert not any(row["logprobs"][:before]) and set(row["versions"][:before]) <= {-1}
    assert row["logprobs"][before:] == node.output_logprobs.tolist()
    assert row["versions"][before:] == node.output_versions.tolist()
    assert all(row["attention_mask"])


def passed_over(tree: InteractionTree, node: Interaction) -> bool:
    """A choice that nobody went on from, while another of its call was gone on from."""
    call, _, _ = node.id.rpartition(".")
    siblings = [n for n in tree if call and n.id.rpartition(".")[0] == call]
    return not tree.children(node.id) and any(tree.children(n.id) for n in siblings)


def check_logprobs(lab: Lab, tree: InteractionTree, node: Interaction) -> None:
    """Each token's is that of a fresh pass, over its whole context, of its version's weights."""
    prompt = tree.prompt_ids(node.id)
    ids = torch.tensor(np.concatenate([prompt, node.output_ids])[None].astype(np.int64))
    for version in np.unique(node.output_versions):
        with torch.inference_mode():
            logits = _model(lab.weights[int(version)])(ids).logits[0].double()
        fresh = torch.log_softmax(logits / TEMPERATURE, -1)[len(prompt) - 1 : -1]
        fresh = fresh.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
        mine = node.output_versions == version
        gap = np.abs(fresh[mine] - node.output_logprobs[mine])
        assert gap.max(initial=0) < TOLERANCE, (node.id, version, gap.max())


@cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
