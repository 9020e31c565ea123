"""After the warm-up the model answers in form, and is right less than half of the time."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import renderers
import torch

from any_agent.chat import chat_format_for
from any_agent.demo.models.teach import Author, Row, noisy_row, warm_up
from any_agent.demo.models.tiny import make_tokenizer, save_tiny_model
from any_agent.demo.task import RETRY, items, messages


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def author(tokenizer: Any) -> Author:
    return Author(chat_format_for(tokenizer, enable_thinking=False))


def noisy_rows(author: Author, noise: float) -> list[Row]:
    rng = Random(0)
    return [noisy_row(author, i, noise, rng) for i in rng.choices(items(held_out=False), k=20)]


def render(tokenizer: Any, talk: list[dict[str, str]], prompt: bool) -> list[int]:
    config = renderers.Qwen3RendererConfig(enable_thinking=False, thinking_retention="all")
    renderer = renderers.create_renderer(tokenizer, config)
    return list(renderer.render_ids(talk, add_generation_prompt=prompt))


def test_a_row_is_what_the_renderer_makes_of_its_conversation(tokenizer: Any) -> None:
    by_prompt = {i.prompt: i for i in items(held_out=False)}
    for row in noisy_rows(author(tokenizer), 1.0):
        text = tokenizer.decode(row.ids)
        prompt = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        answers = tokenizer.decode([t for t in row.labels if t >= 0]).split("<|im_end|>")[:-1]
        talk = messages(by_prompt[prompt])
        if len(answers) == 2:
            talk += [
                {"role": "assistant", "content": answers[0]},
                {"role": "user", "content": RETRY},
            ]
        end = tokenizer.encode(f"{answers[-1]}<|im_end|>", add_special_tokens=False)
        assert row.ids == render(tokenizer, talk, True) + end
        assert all(label in (-100, t) for label, t in zip(row.labels, row.ids, strict=True))


def test_without_noise_every_label_is_right(tokenizer: Any) -> None:
    for row in noisy_rows(author(tokenizer), 0.0):
        asked = [c for c in tokenizer.decode(row.ids).split("assistant")[0] if c.isdigit()]
        assert tokenizer.decode([t for t in row.labels if t >= 0]) == f"{asked[0]}<|im_end|>"


@pytest.mark.service
def test_form_is_learned_and_content_is_mostly_wrong(tmp_path: Path) -> None:
    """`make learn` looks at other seeds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        warm_up(save_tiny_model(tmp_path / "m", seed=0), seed=0)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        form, right = held_out_chances(model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    assert model.dtype == torch.float32
    assert form >= 0.95
    assert 0.15 <= right <= 0.5


def held_out_chances(model: Any, tokenizer: Any) -> tuple[float, float]:
    """Mean probability of any digit, and of the right digit, each with the turn's end after it."""
    digits = [tokenizer.encode(str(d), add_special_tokens=False)[0] for d in range(10)]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    form = right = 0.0
    split = items(held_out=True)
    for item in split:
        ids = render(tokenizer, messages(item), True)
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, d] for d in digits])).logits.softmax(-1)
        chances = logits[0, -2, digits] * logits[:, -1, end]
        form += float(chances.sum())
        right += float(chances[int(item.answer)])
    return form / len(split), right / len(split)
