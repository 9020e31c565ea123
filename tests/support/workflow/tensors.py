"""Episodes' results as workflows return them."""

from __future__ import annotations

from typing import Any

import torch

from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    id_array,
    logprob_array,
)


def tensors(*rows: list[int], reward: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Rows of token ids, whose first two are the prompt; ``changes`` replace fields, None drops."""
    longest = max(map(len, rows))

    def spread(value: float, padding: float, prompt: float, dtype: torch.dtype) -> torch.Tensor:
        lines = [
            [prompt] * 2 + [value] * (len(row) - 2) + [padding] * (longest - len(row))
            for row in rows
        ]
        return torch.tensor(lines, dtype=dtype)

    ids = [row + [0] * (longest - len(row)) for row in rows]
    fields: dict[str, Any] = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "attention_mask": spread(1, 0, 1, torch.bool),
        "loss_mask": spread(1, 0, 0, torch.int32),
        "logprobs": spread(-0.5, 0, 0, torch.float32),
        "versions": spread(3, -1, -1, torch.int32),
        "rewards": torch.full((len(rows),), reward, dtype=torch.float32),
    }
    return {k: v for k, v in (fields | changes).items() if v is not None}


def interaction(
    id: str, prompt: list[int], output: list[int], *, parent: str | None = None, **fields: Any
) -> Interaction:
    fields.setdefault("gconfig", GenerationHyperparameters(temperature=0.7))
    return Interaction(
        id=id,
        session_id="s",
        parent_id=parent,
        prompt_delta_ids=id_array(prompt),
        output_ids=id_array(output),
        output_logprobs=logprob_array([-0.5] * len(output)),
        output_versions=id_array([3] * len(output)),
        message_delta=[{"role": "user", "content": f"to {id}"}],
        output_message={"role": "assistant", "content": f"from {id}"},
        finish_reason="stop",
        continuation=Continuation.EXACT if parent else Continuation.ROOT,
        **fields,
    )
