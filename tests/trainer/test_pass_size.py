"""Passes are as long as memory has room for, and the same at each start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.trainer.activations import kept
from tests.support.trainer.policies import small_policy
from trainer.model import PolicyConfig
from trainer.pass_size import CPU_TOKENS, GPU_SHARE, GPU_TOKENS, fitting, pass_tokens, token_bytes

SHAPES: dict[str, Any] = {
    "27M": Qwen3Config(
        **{"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64},
        **{"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "135M": LlamaConfig(
        **{"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536},
        **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
}
EIGHT_B = Qwen3Config(
    **{"hidden_size": 4096, "intermediate_size": 12_288, "head_dim": 128},
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
)
GPU = torch.device("cuda")


def chosen(config: Any, device: str | torch.device = "cpu", **how: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return pass_tokens(model, torch.device(device), PolicyConfig(**how))


def test_passes_on_a_cpu_have_the_length_that_was_measured_to_be_best() -> None:
    for name, tokens in (("27M", 768), ("135M", 512)):
        assert chosen(SHAPES[name]) == tokens
        assert chosen(SHAPES[name], gradient_checkpointing=True) == CPU_TOKENS[1]
    assert chosen(EIGHT_B) == CPU_TOKENS[0], "the shortest ones, for a large model"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.service
def test_the_bytes_of_a_token_are_those_that_a_pass_keeps(name: str) -> None:
    model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.float32)
    found = kept(model, 64) / 64
    assert found <= token_bytes(SHAPES[name], 4, checkpointing=False) <= 1.4 * found


def test_bytes_of_a_token_are_found_for_models_that_name_sizes_otherwise() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": [128, 256]}
    for same in (
        GPT2Config(n_embd=64, n_layer=2, n_head=4),
        SimpleNamespace(**sizes, num_attention_heads=[2, 4], head_dim=16),
        MambaConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=256),
    ):
        expected = 2.5 * 4 * (8 * 64 + 5 * 128 + 4 * 256)
        assert token_bytes(same, 4, checkpointing=False) == expected
    few, more = (
        Qwen3MoeConfig(num_experts_per_tok=n, moe_intermediate_size=512, intermediate_size=768)
        for n in (2, 4)
    )
    grown = token_bytes(more, 2, checkpointing=False) - token_bytes(few, 2, checkpointing=False)
    assert grown == (few.num_hidden_layers + 0.5) * 2 * 4 * (2048 - 1024)


def test_passes_on_a_gpu_are_as_long_as_its_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 0.0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), 10**12))
    how: dict[str, Any] = {"dtype": torch.bfloat16, "offload": True}
    need = token_bytes(EIGHT_B, 2, checkpointing=True) / GPU_SHARE
    found = []
    for tokens in (10, 1024, 1500, 1540, 5000, 8200, 16_400, 10**6):
        free = tokens * need
        found.append(chosen(EIGHT_B, GPU, gradient_checkpointing=True, **how))
    assert found == [1024, 1024, 1024, 1536, 4096, 8192, 16_384, 16_384]
    # Without checkpointing, and with the optimizer's state beside it, it holds fewer.
    free = 16_400 * need
    assert chosen(EIGHT_B, GPU, **how) == GPU_TOKENS[0]
    on_gpu = how | {"offload": False}
    assert chosen(EIGHT_B, GPU, gradient_checkpointing=True, **on_gpu) == GPU_TOKENS[0]


def test_a_little_more_or_less_memory_changes_no_pass_length() -> None:
    assert {fitting(tokens, 256, 4096) for tokens in (1024.0, 1100.5, 1535.9)} == {1024}
    assert [fitting(tokens, 256, 768) for tokens in (0, 256, 383, 384, 512, 768, 1e9)] == [
        *(256, 256, 256, 384, 512, 768, 768)
    ]


def test_a_record_holds_for_its_own_kind_of_device() -> None:
    runner = small_policy().runner
    assert runner.chosen == {"cpu": CPU_TOKENS[1]}
    runner.choose_as({"cuda": 16_384})
    assert runner.chosen == {"cpu": CPU_TOKENS[1]}
    runner.choose_as({"cpu": 300})
    assert (runner.budget(None), runner.budget(40)) == (300, 40)
